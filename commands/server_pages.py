"""A running server's pages for operators, read over HTTP, and how their numbers are shown."""

from __future__ import annotations

from typing import Any, Self

import httpx

from ..protocol.errors import EngineLost, InvalidRequest

TIMEOUT_S = 10.0
STYLES = {
    "ready": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "draining": "yellow",
    "silent": "red",
    "failed": "red",
}


class ServerPages:
    """A context manager. ``get`` raises EngineLost where no server answers, InvalidRequest where it is not ours."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)

    def get(self, path: str, *, holds: str) -> dict[str, Any]:
        """The page at ``path``, an object that has the field ``holds``."""
        return self._ask("GET", path, holds)

    def post(self, path: str, *, holds: str) -> dict[str, Any]:
        """As ``get``, but asks for something to be done."""
        return self._ask("POST", path, holds)

    def _ask(self, method: str, path: str, holds: str) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path)
        except httpx.HTTPError as error:
            raise EngineLost(f"{self.url}: {error or type(error).__name__}; is a server running there?") from None
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{self.url!r} is not an address: {error}; give http://HOST:PORT") from None
        try:
            page = answer.json()
        except ValueError:
            page = None
        if not answer.is_success or not isinstance(page, dict) or holds not in page:
            is_explained = isinstance(page, dict) and isinstance(page.get("error"), dict) and "message" in page["error"]
            said = page["error"]["message"] if is_explained and page is not None else answer.text[:200]
            raise InvalidRequest(f"{self.url}{path} answers {answer.status_code}: {said}")
        return page

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.close()


def duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
