"""A run in a terminal, through ``rich``: coloured text, also while it streams, and a table of its operations."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..program import SequenceLog
from .page import cost_line
from .palette import ORIGINS
from .record import LaneView, OpView, RunView, record_of


def render(run: RunView) -> RenderableType:
    """All texts, then the table of operations."""
    parts: list[RenderableType] = []
    shown = [lane for lane in run.lanes if lane.stretches]
    for lane in shown:
        if len(shown) > 1:
            name = f"sequence {lane.seq}" if lane.parent is None else f"sequence {lane.seq}, a fork of {lane.parent}"
            parts.append(Text(f"── {name} ──", style="dim"))
        parts.append(_text(lane))
    return Group(*parts, costs(run))


def costs(run: RunView) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("op", "seq"):
        table.add_column(header, no_wrap=True)
    for header in ("prompt", "cached", "written", "forced", "queued", "prefill", "decode"):
        table.add_column(header, justify="right", no_wrap=True)
    for op in run.ops:
        table.add_row(*_cells(op))
    return Group(table, Text(cost_line(run), style="dim"))


def _cells(op: OpView) -> tuple[Text, ...]:
    if op.error:
        return (Text(f"{op.kind} {op.name}"), Text(str(op.seq)), Text(op.error, style="red"))
    counts = [op.prompt_tokens, op.cached_tokens, op.generated_tokens, op.forced_tokens]
    times = [f"{1e3 * value:,.1f} ms" for value in (op.queue_s, op.prefill_s, op.decode_s)] if op.is_timed else [""] * 3
    cells = [f"{op.kind} {op.name}", str(op.seq), *[f"{count:,}" if count else "" for count in counts], *times]
    return tuple([Text(cell) for cell in cells])


def _text(lane: LaneView) -> Text:
    text = Text()
    for stretch in lane.stretches:
        for token in stretch.tokens:
            text.append(token.text, style=_style(token.origin))
    return text


def _style(origin: str) -> str:
    return ORIGINS.get(origin, ORIGINS["generated"])[2]


def show(sequence: SequenceLog, console: Console | None = None) -> None:
    """Print the run. A streaming run is printed as it is generated, then its forks and costs.

    Called by the body of a streaming run, it prints the run up to here.
    """
    console = console or Console()
    if sequence.program.changed is None:
        console.print(render(record_of(sequence.program)))
        return
    for text, is_given in sequence.read_as_generated():
        console.print(Text(text, style=_style("prompt" if is_given else "generated")), end="", soft_wrap=True)
    console.print()
    run = record_of(sequence.program)
    forks = [lane for lane in run.lanes if lane.seq != sequence.seq and lane.stretches]
    for lane in forks:
        console.print(Text(f"── sequence {lane.seq} ──", style="dim"))
        console.print(_text(lane))
    console.print(costs(run))
