"""The face that every client of engines has, whatever lies behind it: an engine, several engines, or a server."""

from __future__ import annotations

from typing import Any, Protocol

from .messages import Welcome
from .program_call import ProgramTransport


class EngineClient(ProgramTransport, Protocol):
    """``protocol.client.Client`` is one; it says what the methods do and raise."""

    @property
    def welcome(self) -> Welcome: ...
    def query(self, what: str, timeout_s: float = 10.0) -> Any: ...
    def close(self) -> None: ...
