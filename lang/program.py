"""One run of a program: its sequences, what is queued for the backend, and how it ends.

``Program.flush`` ships everything queued, over all sequences, at once. Never runs a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..runtime.protocol.errors import Cancelled, InvalidRequest
from ..runtime.protocol.messages import ProgramSettings
from .global_config import global_config
from .nodes import (
    ForkNode,
    GenNode,
    JoinNode,
    Node,
    PinNode,
    SelectNode,
    SettleNode,
    TextNode,
)
from .sequence import Sequence
from .values import Leaf, Signal, Value, current_crew

if TYPE_CHECKING:
    from .backend.base_backend import BaseBackend
    from .tools.format import ToolFormat


logger = logging.getLogger(__name__)

_NONE: Mapping[str, Any] = {}


class Session(Protocol):
    """A backend's side of one program. ``decides_custom_choices``: it is given choice rules that users wrote."""

    decides_custom_choices: bool
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
        self.sequences: list[Sequence | None] = []  # None: one that only the runtime sees
        self.is_ending = False
        self.session: Session = backend.open_session(self)  # must not hold this program: no cycle keeps it alive
        self.root = Sequence(self)

    def new_seq(self, sequence: Sequence) -> int:
        self.sequences.append(sequence)
        return len(self.sequences) - 1

    def reserve_seq(self) -> int:
        """A sequence that Python appends nothing to."""
        self.sequences.append(None)
        return len(self.sequences) - 1

    def flush(self, *, is_awaited: bool = False) -> None:
        """Ship what is queued. ``is_awaited``: this thread will do nothing but wait for it."""
        with self._ship_lock:
            end = len(self.log)
            if end == self._num_shipped:
                return
            nodes = self.log[self._num_shipped : end]
            self._num_shipped = end
            if any(type(node) is SettleNode for node in nodes):
                nodes = self._settle(nodes)
            if nodes:
                self._ship(nodes, is_awaited)

    def _ship(self, nodes: list[Node], is_awaited: bool) -> None:
        self.num_messages += 1
        self.session.ship(nodes, is_awaited=is_awaited)

    def _settle(self, nodes: list[Node]) -> list[Node]:
        """Texts that are known only here, in their places. Where one is needed that is not known, it is waited for."""
        settled: list[Node] = []
        for i, node in enumerate(nodes):
            if not isinstance(node, SettleNode):
                settled.append(node)
                continue
            leaf = node.leaf
            if not leaf.is_done:
                if not _is_computed_on(node.seq, nodes[i + 1 :]) and self.is_ending:
                    continue  # nothing is generated after it: the runtime need never see it
                if settled:
                    self._ship(settled, False)
                    settled = []
                if self.loop is not None:
                    self._refuse_to_block(leaf)
                leaf.wait_for(leaf.done)
            if leaf.error is None:
                settled.append(TextNode(node.seq, leaf.texts[0]))
        return settled

    def end(self) -> None:
        """The body has returned: close what is open and ship the rest."""
        for sequence in self.sequences:
            if sequence is not None:
                sequence.close()
        self.is_ending = True
        self.flush(is_awaited=self.is_awaited)
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
            was_sent = self._num_shipped > 0
            self._num_shipped = len(self.log)
        gone = Cancelled(f"the program's body raised {type(error).__name__}: {error}")
        gone.__cause__ = error
        for node in unsent:
            if isinstance(node, GenNode | SelectNode | PinNode):
                node.leaf.fail(gone)
        for sequence in self.sequences:
            if sequence is not None:
                sequence.is_closed = True
        if was_sent:
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
        self.flush(is_awaited=timeout_s is None and current_crew.get() is None)
        for leaf in reversed(waiting):  # the last to come first: most others are then there, and this wakes once
            leaf.wait_for(leaf.done, timeout_s)

    async def wait_leaves_async(self, leaves: Iterable[Leaf]) -> None:
        """The same from an event loop, which goes on meanwhile."""
        waiting = [leaf for leaf in leaves if not leaf.is_done]
        if not waiting:
            return
        self.flush()
        for leaf in reversed(waiting):
            await leaf.wait_for_async(leaf.done)

    async def wait_body_async(self) -> None:
        if self.changed is not None and not self.is_inside:
            await self.changed.wait_for_async(lambda: self.is_over)

    def _refuse_to_block(self, leaf: Leaf) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if running is not self.loop:
            return
        name = "..." if leaf.name is None else repr(leaf.name)
        raise InvalidRequest(
            f"the value of {name} is not there yet, and waiting for it here would stop the event loop of this async "
            f"program; write await s.get({name}) (or await s.text_async(), await s.sync_async())"
        )

    def read(self, value: Value) -> Any:
        self.wait_leaves(value.leaves())
        return value.read()


def _is_computed_on(seq: int, nodes: list[Node]) -> bool:
    """Whether the model will run on this sequence again."""
    return any(
        (node.seq == seq and isinstance(node, GenNode | SelectNode | ForkNode | PinNode))
        or (isinstance(node, JoinNode) and seq in node.children and node.mode != "gather_variable")
        for node in nodes
    )
