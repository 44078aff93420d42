"""A run as HTML: a self-contained page, and the short form for a notebook. Text of users and models is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path

from ...protocol.messages import TokenTrace
from .palette import ORIGINS, PHASES
from .record import LaneView, OpView, RunView, Stretch
from .style import STYLE, rgb

_NUM_OPEN = 12  # how many texts are unfolded if a run has many
_ZOOM = (
    "<label>zoom <input type=range min=1 max=40 value=1 "
    "oninput=\"this.closest('section').style.setProperty('--zoom', this.value)\"></label>"
)
_SPACES = {"\n": "↵\n", "\t": "⇥\t"}


def write_page(run: RunView, path: str | Path) -> None:
    # a lone surrogate cannot be encoded, so it becomes a character reference
    Path(path).write_text(page(run), encoding="utf-8", errors="xmlcharrefreplace")


def page(run: RunView) -> str:
    note = (
        ""
        if run.is_traced
        else "<p class=note>For tokens, origins and probabilities: <code>run(..., trace=True)</code>.</p>"
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(run.title)} · phloem</title>",
            f'<style>{STYLE}</style></head><body style="margin:0;background:#f8fafc"><main class=phloem>',
            f"<h1>{escape(run.title)}</h1>",
            _tiles(run),
            note,
            "<div class=two>",
            f"<section><h2>Operations</h2><div class='scroll graph'>{run.graph.svg()}</div></section>",
            f"<section><h2>Timeline</h2>{_timeline(run)}</section>",
            "</div>",
            f"<section><h2>Text</h2>{_legend()}{''.join(_lanes(run))}</section>",
            "</main></body></html>",
        ]
    )


def fragment(run: RunView) -> str:
    """The text and its cost, for a notebook."""
    return (
        f"<style>{STYLE}</style><div class='phloem fragment'>{_legend()}{''.join(_lanes(run))}"
        f"<p class=cost>{escape(cost_line(run))}</p></div>"
    )


def cost_line(run: RunView) -> str:
    stats = run.stats
    if "prompt_tokens" not in stats:
        return f"{len(run.ops)} operations"
    messages = stats["messages"]
    parts = [
        f"{messages} message{'' if messages == 1 else 's'}",
        f"{stats['prompt_tokens']:,} prompt tokens, {stats['cached_tokens']:,} cached",
        f"{stats['generated_tokens']:,} generated, {stats['forced_tokens']:,} forced",
    ]
    return " · ".join([*parts, _seconds(run.total_s)] if run.total_s else parts)


def _tiles(run: RunView) -> str:
    stats, tiles = run.stats, []
    if run.total_s:
        tiles.append(("from first op to last", _seconds(run.total_s)))
    names = (
        ("messages", "messages to the runtime"),
        ("forwards", "forward passes"),
        ("prompt_tokens", "prompt tokens"),
        ("cached_tokens", "of them cached"),
        ("prefilled_tokens", "of them computed"),
        ("generated_tokens", "tokens generated"),
        ("forced_tokens", "of them forced"),
        ("accepted_tokens", "of them guessed"),
    )
    tiles += [(label, f"{stats[name]:,}") for name, label in names if isinstance(stats.get(name), int)]
    return "<div class=tiles>" + "".join(f"<div><b>{value}</b>{label}</div>" for label, value in tiles) + "</div>"


# -- timeline ---------------------------------------------------------------------------------------------------------


def _timeline(run: RunView) -> str:
    ops = sorted([op for op in run.ops if op.is_timed], key=lambda op: (op.start_s, op.number))
    failed = [op for op in run.ops if op.error]
    if not ops:
        return "<p class=note>This backend reports no times.</p>" + _failures(failed)
    total = run.total_s or 1e-9
    keys = "".join(f"<span><i style='background:{rgb(color)}'></i>{name}</span>" for name, color in PHASES.items())
    ticks = "".join(f"<span style='left:{25 * i}%'>{_seconds(total * i / 4)}</span>" for i in range(5))
    rows = "".join(_timeline_row(op, total) for op in ops)
    return (
        f"<div class=legend>{keys}{_ZOOM}</div><div class='scroll timeline'><div class=row><span class=label></span>"
        f"<span class='bar ticks'>{ticks}</span><span class=counts></span></div>{rows}</div>{_failures(failed)}"
    )


def _timeline_row(op: OpView, total: float) -> str:
    at, bars = op.start_s, []
    for color, length in zip(PHASES.values(), (op.queue_s, op.prefill_s, op.decode_s), strict=True):
        if length > 0:
            bars.append(
                f"<i style='left:{_percent(at / total)};width:{_percent(length / total)};background:{rgb(color)}'></i>"
            )
        at += length
    lines = [
        f"{op.kind} {op.name}, sequence {op.seq}",
        f"began {_seconds(op.start_s)}",
        f"queued {_seconds(op.queue_s)}, prefill {_seconds(op.prefill_s)}, decode {_seconds(op.decode_s)}",
        f"prompt {op.prompt_tokens:,} tokens, {op.cached_tokens:,} cached",
    ]
    if op.kind == "gen":
        lines.append(
            f"generated {op.generated_tokens:,}: {op.decoded_tokens:,} one by one, {op.accepted_tokens:,} guessed, "
            f"{op.forced_tokens:,} forced; ended by {op.finish}"
        )
        counts = f"{op.cached_tokens:,} + {op.prompt_tokens - op.cached_tokens:,} → {op.generated_tokens:,}"
    else:
        lines += [f"{score:8.3f} {choice!r}" for choice, score in op.scores[:20]]
        counts = f"{op.cached_tokens:,} + {op.prompt_tokens - op.cached_tokens:,} → choice"
    return (
        f"<a class=row href='#op-{op.number}' title='{escape(chr(10).join(lines))}'>"
        f"<span class=label>{escape(op.name)} <small>{op.seq}</small></span><span class=bar>{''.join(bars)}</span>"
        f"<span class=counts>{counts}</span></a>"
    )


def _failures(ops: list[OpView]) -> str:
    """Each error once, with the operations that failed with it."""
    names: dict[str, list[str]] = {}
    for op in ops:
        names.setdefault(op.error, []).append(op.name)
    lines = [
        f"<p class=error>{escape(', '.join(who[:5]))}{f' and {len(who) - 5} more' if len(who) > 5 else ''}: "
        f"{escape(error)}</p>"
        for error, who in names.items()
    ]
    return f"<div class=scroll>{''.join(lines)}</div>" if lines else ""


# -- text -------------------------------------------------------------------------------------------------------------


def _legend() -> str:
    keys = "".join(f"<span><i class=o-{origin}></i>{label}</span>" for origin, (label, *_) in ORIGINS.items())
    return f"<div class=legend>{keys}</div>"


def _lanes(run: RunView) -> Iterator[str]:
    ops = {op.number: op for op in run.ops}
    shown = [lane for lane in run.lanes if lane.stretches]
    for i, lane in enumerate(shown):
        count = sum(len(stretch.tokens) for stretch in lane.stretches)
        title = f"sequence {lane.seq}" if lane.parent is None else f"sequence {lane.seq}, a fork of {lane.parent}"
        is_open = " open" if i < _NUM_OPEN or len(shown) <= 2 * _NUM_OPEN else ""
        size = f" <small>{count:,} tokens</small>" if run.is_traced else ""
        yield f"<details{is_open}><summary>{title}{size}</summary><div class=text>{_lane(lane, ops)}</div></details>"


def _lane(lane: LaneView, ops: dict[int, OpView]) -> str:
    return "".join(_stretch(stretch, ops) for stretch in lane.stretches)


def _stretch(stretch: Stretch, ops: dict[int, OpView]) -> str:
    text = "".join(_tokens(stretch.tokens))
    if stretch.op is None:
        return text
    op = ops[stretch.op]
    others = "".join(
        f"<span class=other><small>candidate {i}</small>{''.join(_tokens(tokens))}</span>"
        for i, tokens in enumerate(stretch.others, 2)
    )
    error = f"<span class=error>{escape(op.error)}</span>" if op.error else ""
    return f"<span class=op id=op-{op.number} data-name='{escape(op.name)}'>{text}{error}</span>{others}"


def _tokens(tokens: Iterable[TokenTrace]) -> Iterator[str]:
    """Prompt tokens in one span per origin; generated tokens one by one, with their alternatives."""
    for origin, group in groupby(tokens, key=lambda token: token.origin):
        known = origin if origin in ORIGINS else "generated"
        run = list(group)
        if origin in ("prompt", "cached"):
            text = "".join(token.text for token in run)
            count = f" title='{len(run)} tokens, {ORIGINS[known][0]}'" if len(run) > 1 else ""
            yield f"<i class=o-{known}{count}>{escape(text)}</i>"
            continue
        for token in run:
            yield _token(token, known)


def _token(token: TokenTrace, origin: str) -> str:
    text = "".join(_SPACES.get(c, c) for c in token.text)
    if token.logprob is None:
        return f"<i class=o-{origin}>{escape(text)}</i>"
    chance = math.exp(min(token.logprob, 0.0))
    lines = [f"{chance:.1%} {token.text!r}"]
    lines += [f"  {math.exp(value):6.1%} {other!r}" for other, value in token.top]
    red, green, blue = ORIGINS[origin][1]
    shade = f"rgba({red},{green},{blue},{0.16 + 0.6 * (1 - chance):.2f})"
    return f"<i class=o-{origin} style='background:{shade}' title='{escape(chr(10).join(lines))}'>{escape(text)}</i>"


# -- numbers and looks ------------------------------------------------------------------------------------------------


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
