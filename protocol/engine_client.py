"""The face that every client of engines has, whatever lies behind it: an engine, several engines, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from .messages import Embedded, Welcome
from .program_call import ProgramTransport


class EngineClient(ProgramTransport, Protocol):
    """``protocol.client.Client`` is one; it says what the methods do and raise."""

    @property
    def welcome(self) -> Welcome: ...
    def query(self, what: str, timeout_s: float = 10.0) -> Any: ...
    def embed(self, inputs: Sequence[str | list[int]], *, truncate: bool = True) -> Future[Embedded]: ...
    def score(
        self, inputs: Sequence[str | list[int]], seconds: Sequence[str] = (), *, truncate: bool = True
    ) -> Future[Embedded]: ...
    def close(self) -> None: ...
