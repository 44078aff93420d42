"""``phloem drain``: a replica of a running server is taken out of service."""

from __future__ import annotations

import time
from urllib.parse import quote

from rich.console import Console

from ..protocol.errors import EngineLost
from .server_pages import ServerPages

LOOK_S = 0.5


def drain_replica(
    url: str, replica: str, *, api_key: str | None, migrate: bool, is_waiting: bool, console: Console | None = None
) -> int:
    """Begin to drain, and wait for the end if ``is_waiting``; ending the command then does not end the drain.

    Raises EngineLost where no server answers, InvalidRequest with the server's words where it refuses.
    """
    console = console or Console()
    with ServerPages(url, api_key=api_key) as pages:
        found = pages.post(f"/fleet/drain/{quote(replica, safe='')}?migrate={str(migrate).lower()}", holds="state")
        shown = ""
        while True:
            text = f"replica {replica}: {found['state']}"
            if found.get("programs"):
                text += f", {found['programs']:,} programs run there"
            if text != shown:
                console.print(text, highlight=False)
                shown = text
            if found["state"] == "stopped" or not is_waiting:
                return 0
            time.sleep(LOOK_S)
            replicas = {one["name"]: one for one in pages.get("/fleet", holds="replicas")["replicas"]}
            if replica not in replicas:
                raise EngineLost(f"{pages.url} has no replica {replica} any more; was the server started again?")
            found = replicas[replica]
            found["programs"] = (found["load"] or {}).get("programs", 0)
