"""The protocols between a run of a program and its backend: a session, what it may read, and where a run goes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from ..protocol.messages import ProgramSettings
from ..protocol.tool_format import ToolFormat
from .nodes import Node
from .values import Leaf


class RunTerms(Protocol):
    """What a session reads of its run. A session keeps these values and not the run itself, so that no cycle keeps
    a finished run alive."""

    @property
    def lock(self) -> threading.Lock:
        """The lock of every leaf of the run."""
        ...

    @property
    def settings(self) -> ProgramSettings | None: ...

    @property
    def arguments(self) -> Mapping[str, Any]: ...

    @property
    def stream(self) -> bool: ...

    @property
    def inline(self) -> bool:
        """The backend is called in the thread that runs the body."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of an async program."""
        ...

    @property
    def num_api_spec_tokens(self) -> int | None: ...


class Session(Protocol):
    """A backend's side of one run."""

    decides_custom_choices: bool  # a choice rule written by a user is passed on instead of decided in Python
    eos_ids: frozenset[int] | None  # None: the backend knows no tokens
    closed: Leaf  # resolves when the run has ended; its ``meta`` is a dict of the run's costs

    def default_system(self) -> tuple[str, str] | None:
        """(content, text as it appears) of the system message that the template adds where the program gives none."""
        ...

    def role_text(self, role: str, *, is_begin: bool, messages: list[dict[str, Any]]) -> str:
        """The text that the beginning or end of a role adds; raises for a role that the template does not have."""
        ...

    def tool_format(self) -> ToolFormat:
        """The format in which this model reads tools and writes calls."""
        ...

    def ship(self, nodes: list[Node], *, is_awaited: bool = False) -> None:
        """Send ``nodes``. Their leaves report failures; this call raises none."""
        ...

    def cancel(self, leaf: Leaf | None = None) -> None:
        """Cancel one leaf, or with None the whole run."""
        ...


class Turn(Protocol):
    """Where one run goes, of several backends. A run that was not good enough has another turn, elsewhere."""

    @property
    def backend(self) -> Any: ...

    def report(self) -> dict[str, Any]:
        """What the run's ``stats()`` tell of it."""
        ...

    def next(self, state: Any) -> Turn | None:
        """After the body of ``state``: the turn that runs it again, or None where that was the last one."""
        ...

    async def next_async(self, state: Any) -> Turn | None:
        """``next`` for an event loop."""
        ...
