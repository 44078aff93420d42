"""``phloem top``: a server's replicas in a terminal, from its page ``/fleet``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .protocol.errors import EngineLost, InvalidRequest

TIMEOUT_S = 10.0
_STYLES = {"ready": "green", "starting": "yellow", "waiting": "yellow", "silent": "red", "failed": "red"}
_COLUMNS = ("pid", "since", "restarts", "programs", "running", "waiting", "tokens/s", "hit rate", "slots")


def show_fleet(url: str, *, api_key: str | None, every_s: float, is_once: bool, console: Console | None = None) -> int:
    """Show the fleet until Ctrl-C. Raises EngineLost where no server answers at first, or once with ``is_once``."""
    console = console or Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as http:
        page = _ask(http, url)
        if is_once:
            console.print(render(page))
            return 0
        with Live(render(page), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                before = page
                try:
                    page = _ask(http, url)
                    shown = render(page, before)
                except EngineLost as error:  # it may come back
                    shown = Group(render(page), Text(error.message, style="red"))
                live.update(shown, refresh=True)


def _ask(http: httpx.Client, url: str) -> dict[str, Any]:
    try:
        answer = http.get("/fleet")
    except httpx.HTTPError as error:
        raise EngineLost(f"{url}: {error or type(error).__name__}; is a server running there?") from None
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{url!r} is not an address: {error}; give http://HOST:PORT") from None
    try:
        page = answer.json()
    except ValueError:
        page = None
    if not answer.is_success or not isinstance(page, dict) or "replicas" not in page:
        said = page["error"]["message"] if isinstance(page, dict) and "error" in page else answer.text[:200]
        raise InvalidRequest(f"{url}/fleet answers {answer.status_code}: {said}")
    return page


def render(page: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> RenderableType:
    """The page as a table; ``before``: an earlier page, from which rates are counted."""
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
    foot = [Text(f"placed: {placed}; replayed {page['replays']:,}, given up {page['poisoned']:,}", style="dim")]
    for replica in replicas:
        if replica["last_error"]:
            foot.append(Text(f"replica {replica['name']}: {replica['last_error']}", style="dim"))
    return Group(head, table, *foot)


def _cells(replica: Mapping[str, Any], page: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[Text]:
    is_silent = replica["state"] == "ready" and not replica["is_ready"]
    state = "silent" if is_silent else replica["state"]
    since = f"{replica['silent_s']:.0f} s" if is_silent else _duration(page["now_s"] - replica["since_s"])
    cells = [str(replica["pid"] or ""), since, str(replica["restarts"])]
    load = replica["load"]
    if load is not None:
        share = load["slots_used"] / max(load["slots_total"], 1)
        cells += [str(load[name]) for name in ("programs", "running", "waiting")]
        cells += [_rate(replica, page, before), f"{load['cache_hit_rate']:.0%}", f"{share:.0%}"]
    return [Text(replica["name"]), Text(state, style=_STYLES.get(state, "dim")), *map(Text, cells)]


def _rate(replica: Mapping[str, Any], page: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Tokens a second of the same engine since ``before``."""
    for earlier in () if before is None else before["replicas"]:
        is_same = earlier["name"] == replica["name"] and earlier["epoch"] == replica["epoch"]
        if is_same and earlier["load"] is not None and before is not None:
            tokens = replica["load"]["forward_tokens"] - earlier["load"]["forward_tokens"]
            return f"{tokens / max(page['now_s'] - before['now_s'], 1e-9):,.0f}"
    return ""


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
