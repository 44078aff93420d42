"""``phloem ps``: the model of a running server and its engines, once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .server_pages import STYLES, ServerPages, duration

_COLUMNS = {
    "pid": "pid",
    "up_s": "up",
    "rows": "rows",
    "queue": "queue",
    "programs": "programs",
    "cached_share": "cached",
    "used_share": "in use",
    "hit_rate": "hit rate",
    "memory_bytes": "memory",
}


def show_engines(url: str, *, api_key: str | None, as_json: bool, console: Console | None = None) -> int:
    """Print the report. Raises EngineLost where no server answers."""
    with ServerPages(url, api_key=api_key) as pages:
        found = report(pages.get("/server_info", holds="server"), pages.get("/engines", holds="engines"))
    console = console or Console()
    if as_json:
        console.out(json.dumps(found), highlight=False)
    else:
        console.print(render(found, pages.url))
    return 0


def report(info: Mapping[str, Any], page: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--json`` prints. ``rows``: sequences that run; a number that an engine does not tell is null."""
    replicas = {replica["name"]: replica for replica in page["replicas"]}
    engines = []
    for name, engine in page["engines"].items():
        replica = replicas.get(name, {})
        metrics = (engine or {}).get("metrics", {})
        slots = metrics.get("slots", {})
        total = slots.get("total") or None
        engines.append(
            {
                "engine": name,
                "state": _state(replica, is_answering=engine is not None),
                "pid": replica.get("pid") or None,
                "up_s": round(page["now_s"] - replica["since_s"], 1) if "since_s" in replica else None,
                "rows": metrics.get("running"),
                "queue": metrics.get("waiting"),
                "programs": metrics.get("programs"),
                "cached_share": None if total is None else slots.get("cached", 0) / total,
                "used_share": None if total is None else (slots.get("locked", 0) + slots.get("leased", 0)) / total,
                "hit_rate": metrics.get("cache_hit_rate"),
                "memory_bytes": metrics.get("memory_bytes") or None,
            }
        )
    server, engine_info = info["server"], info.get("engine") or {}
    return {
        "model": server["model"],
        "context_len": engine_info.get("context_len"),
        "precision": engine_info.get("precision"),
        "up_s": server["uptime_s"],
        "requests_in_flight": page["requests_in_flight"],
        "engines": engines,
    }


def _state(replica: Mapping[str, Any], *, is_answering: bool) -> str:
    state = replica.get("state", "ready")
    return "silent" if state == "ready" and not is_answering else state


def render(found: Mapping[str, Any], url: str) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("engine", "state"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS.values():
        table.add_column(name, justify="right", no_wrap=True)
    for engine in found["engines"]:
        state = Text(engine["state"], style=STYLES.get(engine["state"], "dim"))
        table.add_row(Text(engine["engine"]), state, *(_shown(name, engine[name]) for name in _COLUMNS))
    about = [f"up {duration(found['up_s'])}", f"{found['requests_in_flight']:,} requests in flight"]
    if found["context_len"]:
        about.append(f"context {found['context_len']:,} tokens, precision {found['precision']}")
    return Group(Text(f"{found['model']} at {url}: {', '.join(about)}"), table)


def _shown(name: str, value: Any) -> Text:
    if value is None:
        return Text("")
    if name == "up_s":
        return Text(duration(value))
    if name == "memory_bytes":
        return Text(f"{value / 1e6:,.0f} MB")
    return Text(f"{value:.0%}" if name.endswith(("_share", "_rate")) else str(value))
