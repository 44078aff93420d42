"""One run of a program: its sequences, what is queued for the backend, and how it ends.

``Program.flush`` ships everything queued, over all sequences, at once. Never runs a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..protocol.errors import Cancelled, InvalidRequest
from ..protocol.messages import ProgramSettings
from .global_config import global_config
from .nodes import Node, SettleNode
from .sequence import Sequence
from .settling import AskingNode, Settling
from .values import Leaf, Signal, Value, current_crew, wait_any, wait_any_async

if TYPE_CHECKING:
    from ..protocol.tool_format import ToolFormat
    from .backend.base_backend import BaseBackend
    from .state import ProgramState


logger = logging.getLogger(__name__)

_NONE: Mapping[str, Any] = {}


class Session(Protocol):
    """A backend's side of one program. ``decides_custom_choices``: it is given choice rules that users wrote."""

    decides_custom_choices: bool
    eos_ids: frozenset[int] | None  # None: a backend that knows no tokens
    closed: Leaf  # resolves when the program has ended; ``meta`` is a dict of its costs

    def default_system(self) -> tuple[str, str] | None:
        """(content, text as it appears) of what the template puts first where no system message is given."""
        ...

    def role_text(self, role: str, *, is_begin: bool, messages: list[dict[str, Any]]) -> str:
        """What the beginning or end of a role adds to the text; raises for a role there is none of."""
        ...

    def tool_format(self) -> ToolFormat:
        """How tools are told to this model, and calls written by it."""
        ...

    def ship(self, nodes: list[Node], *, is_awaited: bool = False) -> None:
        """Send these. Failures come out of the leaves, not of this call."""
        ...

    def cancel(self, leaf: Leaf | None = None) -> None:
        """End one leaf, or (None) the whole program."""
        ...


class Program:
    """Shared by all states of one run."""

    __slots__ = (
        "__weakref__",
        "_num_shipped",
        "_settling",
        "_ship_lock",
        "arguments",
        "backend",
        "body_task",
        "body_thread",
        "changed",
        "error",
        "inline",
        "is_awaited",
        "is_ending",
        "is_over",
        "lock",
        "log",
        "loop",
        "num_api_spec_tokens",
        "num_messages",
        "root",
        "sampling",
        "sequences",
        "session",
        "settings",
        "stream",
    )

    def __init__(
        self,
        backend: BaseBackend,
        *,
        sampling: Mapping[str, Any] = _NONE,
        stream: bool = False,
        settings: ProgramSettings | None = None,
        inline: bool = False,
        is_awaited: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        arguments: Mapping[str, Any] = _NONE,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        self.backend = backend
        self.sampling = sampling
        self.stream = stream
        self.settings = settings
        self.inline = inline
        self.is_awaited = is_awaited  # the thread that runs the body waits for the program's end
        self.arguments = arguments
        self.num_api_spec_tokens = num_api_spec_tokens  # for backends that are asked once per gen
        self.log: list[Node] = []
        self.num_messages = 0
        self.error: BaseException | None = None  # of the Python body
        self.is_over = False  # the body has ended
        self.body_thread: int | None = threading.get_ident()
        self.loop = loop  # of an async program
        self.body_task: asyncio.Task[Any] | None = None  # of an async program that streams
        self.lock = threading.Lock()
        # a sequence grew, a variable was bound, the body ended; told only while streaming
        self.changed = Signal(self.lock) if stream else None
        self._num_shipped = 0
        self._ship_lock = threading.Lock()
        self._settling: Settling | None = None  # of a program with values that Python decides
        self.sequences: list[Sequence | None] = []  # None: one that only the runtime sees
        self.is_ending = False
        self.session: Session = backend.open_session(self)  # must not hold this program: no cycle keeps it alive
        self.root = Sequence(self)

    def state_of(self, sequence: Sequence) -> ProgramState:
        """What a body holds in its hands of ``sequence``."""
        from .state import ProgramState

        return ProgramState(sequence)

    def new_seq(self, sequence: Sequence) -> int:
        self.sequences.append(sequence)
        return len(self.sequences) - 1

    def reserve_seq(self) -> int:
        """A sequence that Python appends nothing to."""
        self.sequences.append(None)
        return len(self.sequences) - 1

    def flush(self, *, is_awaited: bool = False) -> list[Leaf]:
        """Ship what can be shipped; the values that have to be known before the rest can.

        ``is_awaited``: this thread will do nothing but wait for it.
        """
        with self._ship_lock:
            end = len(self.log)
            if end == self._num_shipped and (self._settling is None or not self._settling.held):
                return []
            nodes = self.log[self._num_shipped : end]
            self._num_shipped = end
            missing: list[Leaf] = []
            if self._settling is None and any(type(node) is SettleNode for node in nodes):
                self._settling = Settling()
            if self._settling is not None:
                nodes, missing = self._settling.settle(nodes, is_ending=self.is_ending)
            if nodes:
                self.num_messages += 1
                self.session.ship(nodes, is_awaited=is_awaited and not missing)
            return missing

    def ship(self, *, is_awaited: bool = False) -> None:
        """Ship all that is queued, waiting where something has to be known first."""
        while missing := self.flush(is_awaited=is_awaited):
            if self.loop is not None:
                self._refuse_to_block(missing[0])
            wait_any(missing)

    async def ship_async(self) -> None:
        """The same from an event loop, which goes on meanwhile."""
        while missing := self.flush():
            await wait_any_async(missing)

    def end(self) -> None:
        """The body has returned: close what is open and ship the rest."""
        self._close_all()
        self.ship(is_awaited=self.is_awaited)
        self._finish_well()

    async def end_async(self) -> None:
        """``end`` of a run in an event loop."""
        self._close_all()
        await self.ship_async()
        self._finish_well()

    def _close_all(self) -> None:
        for sequence in self.sequences:
            if sequence is not None:
                sequence.close()
        self.is_ending = True

    def _finish_well(self) -> None:
        if global_config.verbosity >= 2:
            self._log_when_closed()
        self._finish()

    def _log_when_closed(self) -> None:
        closed = self.session.closed

        def log() -> None:
            pieces = [piece if isinstance(piece, str) else piece.partial_text() for piece in self.root.pieces]
            logger.info("program ended: %s", "".join(pieces))

        if closed.subscribe(closed.done, log):
            log()

    def abort(self, error: BaseException) -> None:
        """The body raised ``error``: what was sent is cancelled, what was not never will be."""
        self.error = error
        with self._ship_lock:
            unsent = self.log[self._num_shipped :]
            if self._settling is not None:
                unsent = self._settling.held + unsent
                self._settling.held = []
            self._num_shipped = len(self.log)
        gone = Cancelled(f"the program's body raised {type(error).__name__}: {error}")
        gone.__cause__ = error
        for node in unsent:
            if isinstance(node, AskingNode | SettleNode):
                node.leaf.fail(gone)
        for sequence in self.sequences:
            if sequence is not None:
                sequence.is_closed = True
        if self.num_messages:
            self.session.cancel()
        else:
            self.session.closed.resolve((), {})
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        self.tell()

    def tell(self) -> None:
        """Something changed that a streaming reader may wait for."""
        if self.changed is not None:
            self.changed.notify()

    @property
    def is_inside(self) -> bool:
        """True in the thread (or the task) that runs the body, while it runs."""
        if self.is_over or self.body_thread != threading.get_ident():
            return False
        return self.body_task is None or asyncio.current_task() is self.body_task

    def wait_body(self) -> None:
        """Until the body has ended, unless this is the body."""
        if self.changed is not None and not self.is_inside:
            self.changed.wait_for(lambda: self.is_over)

    def wait_leaves(self, leaves: Iterable[Leaf], timeout_s: float | None = None) -> None:
        """Until each leaf is done, failed ones included."""
        waiting = [leaf for leaf in leaves if not leaf.is_done]
        if not waiting:
            return
        if self.loop is not None:
            self._refuse_to_block(waiting[0])
        is_awaited = timeout_s is None and current_crew.get() is None
        while missing := self.flush(is_awaited=is_awaited):
            if not (waiting := [leaf for leaf in waiting if not leaf.is_done]):
                return
            wait_any([*missing, *waiting], timeout_s)
        for leaf in reversed(waiting):  # the last to come first: most others are then there, and this wakes once
            leaf.wait_for(leaf.done, timeout_s)

    def follow(self, steps: Generator[Any, Any, None]) -> None:
        """Run what looks at values on its way, waiting for each."""
        result: Any = None
        try:
            while True:
                wanted = steps.send(result)
                if inspect.isawaitable(wanted):
                    if inspect.iscoroutine(wanted):
                        wanted.close()
                    raise InvalidRequest(
                        "an async function was given to a program that is not async; make the program async def and "
                        "write await s.append_async(...), or give a plain function"
                    )
                self.wait_leaves(wanted)
                result = None
        except StopIteration:
            pass

    async def follow_async(self, steps: Generator[Any, Any, None]) -> None:
        """The same from an event loop."""
        result: Any = None
        try:
            while True:
                wanted = steps.send(result)
                result = None
                if inspect.isawaitable(wanted):
                    result = await wanted
                else:
                    await self.wait_leaves_async(wanted)
        except StopIteration:
            pass

    async def wait_leaves_async(self, leaves: Iterable[Leaf]) -> None:
        """The same from an event loop, which goes on meanwhile."""
        waiting = [leaf for leaf in leaves if not leaf.is_done]
        if not waiting:
            return
        while missing := self.flush():
            if not (waiting := [leaf for leaf in waiting if not leaf.is_done]):
                return
            await wait_any_async([*missing, *waiting])
        for leaf in reversed(waiting):
            await leaf.wait_for_async(leaf.done)

    async def wait_body_async(self) -> None:
        if self.changed is not None and not self.is_inside:
            await self.changed.wait_for_async(lambda: self.is_over)

    def allow_looking(self, expr: object) -> None:
        """Raises where ``expr``, which looks at values as it is appended, cannot be."""
        if self.loop is not None and self._is_in_own_loop():
            raise InvalidRequest(
                f"{expr!r} looks at what it generates, and waiting for that here would stop the event loop of this "
                "async program; write await s.append_async(...) instead of s += ..."
            )

    def _is_in_own_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def _refuse_to_block(self, leaf: Leaf) -> None:
        if not self._is_in_own_loop():
            return
        name = "..." if leaf.name is None else repr(leaf.name)
        raise InvalidRequest(
            f"the value of {name} is not there yet, and waiting for it here would stop the event loop of this async "
            f"program; write await s.get({name}) (or await s.text_async(), await s.sync_async())"
        )

    def read(self, value: Value) -> Any:
        self.wait_leaves(value.leaves())
        return value.read()
