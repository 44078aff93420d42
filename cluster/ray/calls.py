"""One call of Ray Serve for each program at an engine, both ends of it, so that Serve counts what runs. Imports no Ray.

    front: a program is at an engine ──────Hold──► ProgramRouter ──► EngineReplica.hold, which waits
           it ends or leaves its engine  ──cancel the call──────────────────────► Serve counts one call less

The program itself, its tokens and its end travel on ZeroMQ; the call carries two names and delays nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from ..attempt import Attempt
from .places import EnginePlace

logger = logging.getLogger(__name__)

AFTER_S = 0.25  # between the beginning of a program at an engine and its call


class Board(Protocol):
    """Is told which engines Serve has, on the router's thread; it returns at once."""

    def show(self, places: Mapping[str, EnginePlace]) -> None: ...


class Hold:
    """The argument of a call: ``program`` runs at the engine of replica ``engine``. Empty: a call that ends at once.

    ``board`` stays in the process of the caller, where Serve runs the router, and so meets its owner.
    """

    __slots__ = ("board", "engine", "program")

    def __init__(self, program: str, engine: str, board: Board | None = None) -> None:
        self.program, self.engine, self.board = program, engine, board

    def __reduce__(self) -> tuple[type[Hold], tuple[str, str]]:
        return Hold, (self.program, self.engine)


def ranked(engine: str, replicas: Sequence[Any], name_of: Callable[[Any], str]) -> list[list[Any]]:
    """``replicas`` in the order in which a call may go to them: that of ``engine``, then all others.

    Another replica answers at once, so a call whose replica is gone does not keep the router waiting.
    """
    first = [replica for replica in replicas if name_of(replica) == engine]
    return [first, [replica for replica in replicas if name_of(replica) != engine]]


class ServeCalls:
    """An ``AttemptWatch`` that keeps one call open for each attempt. ``begin(hold)`` begins one and returns its end.

    Calls are made on a thread of their own, ``after_s`` seconds late, so that they take no processor time from the
    first token. An attempt that has ended by then has no call.
    """

    def __init__(self, begin: Callable[[Hold], Callable[[], None]], *, after_s: float = AFTER_S) -> None:
        self._begin = begin
        self._after_s = after_s
        self._queue: SimpleQueue[tuple[Attempt, float | None] | None] = SimpleQueue()  # None: it has left
        self._open: dict[Attempt, Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name="phloem-calls", daemon=True)
        self._thread.start()

    def began(self, attempt: Attempt) -> None:
        self._queue.put((attempt, time.monotonic() + self._after_s))

    def left(self, attempt: Attempt) -> None:
        self._queue.put((attempt, None))

    def close(self) -> None:
        """End all calls."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (found := self._queue.get()) is not None:
            try:
                self._change(*found)
            except Exception:  # of Ray, whose errors have no common class; the program does not depend on the call
                logger.exception("a call of Ray Serve failed; its program goes on")
        for attempt in list(self._open):
            with contextlib.suppress(Exception):
                self._change(attempt, None)

    def _change(self, attempt: Attempt, at_s: float | None) -> None:
        if at_s is not None:
            time.sleep(max(at_s - time.monotonic(), 0.0))  # those behind it in the queue are due later
            if not attempt.is_over:
                self._open[attempt] = self._begin(Hold(attempt.program, attempt.engine.name))
        elif (end := self._open.pop(attempt, None)) is not None:
            end()


class Holds:
    """The calls that are open at one replica. Lives on the replica's event loop."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Future[None], bool] = {}  # oldest first -> whether the last look has found it

    def __len__(self) -> int:
        return len(self._open)

    async def hold(self) -> None:
        """Until the call is cancelled, or ``keep`` finds that its program is gone."""
        until = asyncio.get_running_loop().create_future()
        self._open[until] = False
        try:
            await until
        finally:
            self._open.pop(until, None)

    def keep(self, num_programs: int) -> None:
        """The engine has ``num_programs``: as many calls stay open as were there at the last look, the oldest end.

        A caller that was killed has cancelled nothing; its programs ended with its line to the engine.
        """
        surplus = len(self._open) - num_programs
        for until, is_known in list(self._open.items()):
            if is_known and surplus > 0 and not until.done():
                until.set_result(None)
                surplus -= 1
            self._open[until] = True
