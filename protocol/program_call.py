"""One program at an engine, from its client's side: how each of its ops ends, and when the program is over.

An op has one end, whatever order messages come in:

    submit ──► sent ──Accepted──► open ──Done──────────────────────────────► done
                │                  └────Failed, Closed, a lost engine──────► failed
                └──Rejected────────────────────────────────────────────────► refused

A ``ProgramCall`` has no thread: its transport hands it messages, and it calls ``on_event`` on the transport's thread.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from .errors import Cancelled, DependencyFailed, InternalError, InvalidRequest, PhloemError, from_info
from .messages import (
    MAX_NAME,
    Accepted,
    Closed,
    Delta,
    Done,
    Failed,
    ProgramSettings,
    ProgramStats,
    Rejected,
    RuntimeMessage,
    Submit,
)
from .ops import AnyOp

logger = logging.getLogger(__name__)

MAX_ERRORS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class OpFailed:
    """Op ``op`` failed. ``partial`` is the text generated before that, one per candidate.

    The ``__cause__`` of a ``DependencyFailed`` is the program's first error.
    """

    op: int
    error: PhloemError
    partial: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """The engine took nothing of one submit: ``ops`` end here. ``error`` sums up all errors of ``rejected``."""

    ops: tuple[int, ...]
    error: PhloemError
    rejected: Rejected


ProgramEvent = Accepted | Delta | Done | OpFailed | SubmitRefused | Closed


class Receiver(Protocol):
    """Takes the messages about one program at a client, on the client's thread; ``lose``: the engine is gone."""

    @property
    def program(self) -> str: ...
    @property
    def is_over(self) -> bool: ...
    def take(self, message: RuntimeMessage) -> None: ...
    def lose(self, error: PhloemError) -> None: ...


class ProgramTransport(Protocol):
    """A client: it sends what a call submits and hands the call every message about its program."""

    def submit(self, submit: Submit, call: ProgramCall) -> None: ...
    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None: ...


class ProgramCall:
    """``on_event`` receives each op's end once: ``Done``, ``OpFailed``, or a ``SubmitRefused`` that lists it.

    ``Delta`` comes only for open ops; its ``index`` is the candidate's. ``Closed`` is the last event and comes once,
    with empty stats where the engine refused the program or was lost. ``on_event`` must return soon and may submit and
    cancel; what it raises is logged. ``program`` is an id of the caller's choice, otherwise a random one. ``submit``
    and ``cancel`` may be called on any thread, ``take``, ``refuse`` and ``lose`` on the transport's thread only.
    """

    __slots__ = (
        "_in_flight",
        "_is_accepted",
        "_is_cancelled",
        "_lock",
        "_on_event",
        "_open",
        "_transport",
        "error",
        "is_over",
        "program",
    )

    def __init__(
        self, transport: ProgramTransport, on_event: Callable[[ProgramEvent], None], *, program: str = ""
    ) -> None:
        if len(program) > MAX_NAME:
            message = f"the program's id has {len(program):,} characters, but may have {MAX_NAME}; choose a shorter one"
            raise InvalidRequest(message, where="program")
        self.program = program or uuid.uuid4().hex
        self.error: PhloemError | None = None  # the program's first
        self.is_over = False
        self._transport = transport
        self._on_event = on_event
        self._open: dict[int, None] = {}  # ops without an end, in the order submitted
        self._in_flight: deque[list[int]] = deque()  # ops of each submit that the engine has not answered
        self._is_accepted = False
        self._is_cancelled = False
        self._lock = threading.RLock()  # a transport may answer inside its `submit`

    def submit(self, ops: list[AnyOp], settings: ProgramSettings | None = None) -> None:
        """Send ops; ``settings`` go with the first submit.

        Raises what the transport raises, ``Cancelled`` after ``cancel()`` and ``InvalidRequest`` when the program is
        over or an op id is used twice; then none of ``ops`` has an event. What the engine refuses is an event.
        """
        ids = [op.op for op in ops]
        with self._lock:
            if self._is_cancelled:
                raise Cancelled(f"program {self.program!r} was cancelled", where="program")
            if self.is_over:
                raise InvalidRequest(f"program {self.program!r} is over; start another one", where="program")
            new = dict.fromkeys(ids)
            if len(new) < len(ids) or not self._open.keys().isdisjoint(new):
                counts = Counter(ids)
                twice = next(op for op in ids if op in self._open or counts[op] > 1)
                raise InvalidRequest(f"op id {twice} is used twice", where="ops")
            self._open.update(new)
            self._in_flight.append(ids)
            try:
                self._transport.submit(Submit(program=self.program, ops=ops, settings=settings), self)
            except BaseException:
                self._in_flight.pop()
                self._end(ids)
                raise

    def cancel(self, seq: int | None = None, op: int | None = None) -> None:
        """End the program, one sequence of it or one op. Does nothing before the first submit and after the end."""
        with self._lock:
            if self.is_over or self._is_cancelled or not (self._is_accepted or self._in_flight):
                return
            self._is_cancelled = seq is None and op is None
            self._transport.cancel(self.program, seq, op)

    # -- on the transport's thread ------------------------------------------------------------------------------------

    def take(self, message: RuntimeMessage) -> None:
        """One message of this program."""
        if type(message) is Delta:
            if message.op in self._open:
                self._emit(message)
        elif type(message) is Done:
            if message.op in self._open:
                del self._open[message.op]
                self._emit(message)
        elif type(message) is Failed:
            if message.op in self._open:
                del self._open[message.op]
                self._fail(message.op, from_info(message.error), message.partial)
        elif type(message) is Accepted:
            with self._lock:
                if self.is_over:
                    return
                if self._in_flight:
                    self._in_flight.popleft()
                self._is_accepted = True
            self._emit(message)
        elif type(message) is Rejected:
            with self._lock:
                ids = self._in_flight.popleft() if self._in_flight else []
            self._refuse(ids, message)
        elif type(message) is Closed:
            self._close(message, None)

    def refuse(self, submit: Submit, rejected: Rejected) -> None:
        """The transport found out later that ``submit`` was not taken."""
        ids = [op.op for op in submit.ops]
        with self._lock:
            if ids in self._in_flight:
                self._in_flight.remove(ids)
        self._refuse(ids, rejected)

    def lose(self, error: PhloemError) -> None:
        """The engine is gone: every open op fails with ``error``."""
        self._close(Closed(program=self.program, stats=ProgramStats()), error)

    def _refuse(self, ids: list[int], rejected: Rejected) -> None:
        if self.is_over:
            return
        with self._lock:
            ended = self._end(ids)
            self.is_over = not self._is_accepted and not self._in_flight
        error = _sum_of(rejected)
        self.error = self.error or error
        self._emit(SubmitRefused(ended, error, rejected))
        if self.is_over:
            self._emit(Closed(program=self.program, stats=ProgramStats()))

    def _close(self, closed: Closed, lost: PhloemError | None) -> None:
        """Fail the open ops: with ``lost``, or as Cancelled where the program ended before it got their submit."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            unanswered = {op for ids in self._in_flight for op in ids}
            self._in_flight.clear()
            ended = self._end(list(self._open))
        for op in ended:
            if lost is not None:
                self._fail(op, lost)
            elif op in unanswered:
                self._fail(op, Cancelled("the program had ended before this op"))
            else:
                self._fail(op, InternalError("the engine closed the program before this op ended"))
        self._emit(closed)

    def _end(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Those of ``ids`` that were open and now are not."""
        ended = tuple(op for op in ids if op in self._open)
        for op in ended:
            del self._open[op]
        return ended

    def _fail(self, op: int, error: PhloemError, partial: tuple[str, ...] = ()) -> None:
        if self.error is None:
            self.error = error
        elif isinstance(error, DependencyFailed):
            error.__cause__ = self.error
        self._emit(OpFailed(op, error, partial))

    def _emit(self, event: ProgramEvent) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the handler of program %s failed on %s", self.program, type(event).__name__)


def _sum_of(rejected: Rejected) -> PhloemError:
    """The first error, its message followed by the next ones."""
    first, *others = rejected.errors
    if not others:
        return from_info(first)
    shown = "; ".join(error.message for error in others[: MAX_ERRORS_SHOWN - 1])
    return from_info(msgspec.structs.replace(first, message=f"{first.message} (and {len(others)} more: {shown})"))
