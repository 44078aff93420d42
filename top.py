"""``phloem top``: a server's engines and its longest programs in a terminal, from its pages for operators."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .commands.server_pages import STYLES, ServerPages, duration
from .protocol.errors import EngineLost

NUM_PROGRAMS = 8  # that are shown
_COLUMNS = ("pid", "since", "restarts", "programs", "running", "waiting", "tokens/s", "hit rate", "slots")


def show_fleet(url: str, *, api_key: str | None, every_s: float, is_once: bool, console: Console | None = None) -> int:
    """Show the fleet until Ctrl-C. Raises EngineLost where no server answers at first, or once with ``is_once``."""
    console = console or Console()
    with ServerPages(url, api_key=api_key) as pages:
        page, programs = _ask(pages)
        if is_once:
            console.print(render(page, programs=programs))
            return 0
        with Live(render(page, programs=programs), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                before = page
                try:
                    page, programs = _ask(pages)
                    shown = render(page, before, programs=programs)
                except EngineLost as error:  # it may come back
                    shown = Group(render(page, programs=programs), Text(error.message, style="red"))
                live.update(shown, refresh=True)


def _ask(pages: ServerPages) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fleet, and its longest programs."""
    page = pages.get("/fleet", holds="replicas")
    return page, longest_programs(pages.get("/engines", holds="engines"))


def longest_programs(page: Mapping[str, Any], *, count: int = NUM_PROGRAMS) -> list[dict[str, Any]]:
    """The programs with most tokens, from the page ``/engines``: their sequences' numbers, added."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for engine, told in page["engines"].items():
        for row in [] if told is None else told["batch"]["sequences"]:
            fresh = {"engine": engine, "program": row.get("program", ""), "name": row["name"], "tenant": row["tenant"]}
            fresh |= {"running": 0, "waiting": 0, "tokens": 0, "cached": 0, "generated": 0}
            sums = found.setdefault((engine, fresh["program"]), fresh)
            sums["running" if row["state"] == "running" else "waiting"] += 1
            for name in ("tokens", "cached", "generated"):
                sums[name] += row.get(name, 0)
    return sorted(found.values(), key=lambda program: -program["tokens"])[:count]


def render(
    page: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    *,
    programs: Sequence[Mapping[str, Any]] = (),
) -> RenderableType:
    """The page as a table; ``before``: an earlier page, from which rates are counted; ``programs``: the longest."""
    replicas = page["replicas"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("replica", "state"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for replica in replicas:
        table.add_row(*_cells(replica, page, before))
    num_ready = sum(replica["is_ready"] for replica in replicas)
    head = Text(f"{page['model']}: {num_ready} of {len(replicas)} replicas ready, {page['programs']:,} programs")
    if page["waiting"]:
        head.append(f", {page['waiting']:,} wait for an engine", style="yellow")
    placed = ", ".join(f"{reason} {count:,}" for reason, count in sorted(page["placements"].items())) or "none yet"
    moved = f"replayed {page['replays']:,}, rebalanced {page['rebalanced']:,}, given up {page['poisoned']:,}"
    foot = [Text(f"placed: {placed}; {moved}", style="dim")]
    for replica in replicas:
        if replica["last_error"]:
            foot.append(Text(f"replica {replica['name']}: {replica['last_error']}", style="dim"))
    return Group(head, table, *foot, *([_program_table(programs)] if programs else []))


def _program_table(programs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("engine", "program", "name", "tenant"):
        table.add_column(name, no_wrap=True)
    numbers = ("running", "waiting", "tokens", "cached", "generated")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for program in programs:
        texts = (program["engine"], program["program"][:12], program["name"], program["tenant"])
        table.add_row(*map(Text, texts), *(Text(f"{program[name]:,}") for name in numbers))
    return table


def _cells(replica: Mapping[str, Any], page: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[Text]:
    is_silent = replica["state"] == "ready" and not replica["is_ready"]
    state = "silent" if is_silent else replica["state"]
    since = f"{replica['silent_s']:.0f} s" if is_silent else duration(page["now_s"] - replica["since_s"])
    cells = [str(replica["pid"] or ""), since, str(replica["restarts"])]
    load = replica["load"]
    if load is not None:
        share = load["slots_used"] / max(load["slots_total"], 1)
        cells += [str(load[name]) for name in ("programs", "running", "waiting")]
        cells += [_rate(replica, page, before), f"{load['cache_hit_rate']:.0%}", f"{share:.0%}"]
    return [Text(replica["name"]), Text(state, style=STYLES.get(state, "dim")), *map(Text, cells)]


def _rate(replica: Mapping[str, Any], page: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Tokens a second of the same engine since ``before``."""
    for earlier in () if before is None else before["replicas"]:
        is_same = earlier["name"] == replica["name"] and earlier["epoch"] == replica["epoch"]
        if is_same and earlier["load"] is not None and before is not None:
            tokens = replica["load"]["forward_tokens"] - earlier["load"]["forward_tokens"]
            return f"{tokens / max(page['now_s'] - before['now_s'], 1e-9):,.0f}"
    return ""
