"""Programs on their way through the engine: the client's messages brought into an event loop, in batches.

Never blocks the loop and never starts a thread: one ``call_soon_threadsafe`` carries all that has come meanwhile.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...protocol import errors
from ...protocol.client import Client
from ...protocol.messages import (
    Closed,
    Delta,
    Done,
    Failed,
    GenMeta,
    ProgramSettings,
    Rejected,
    RuntimeMessage,
    Submit,
)
from ...protocol.ops import AnyOp

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A whole program as one ``Submit``: ``gens[i]`` is the id of the Gen of prompt i."""

    ops: tuple[AnyOp, ...]
    gens: tuple[int, ...]
    settings: ProgramSettings


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of candidate ``index`` of prompt ``prompt``."""

    prompt: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class Result:
    """All candidates of prompt ``prompt``, finished."""

    prompt: int
    texts: tuple[str, ...]
    meta: GenMeta


Event = Piece | Result


class Flight:
    """One job in flight. Lives on the event loop; only ``Bridge`` feeds it.

    Ends when every Gen has its result, or with the first failure; ``close`` before that cancels it at the engine.
    """

    def __init__(self, client: Client, job: Job) -> None:
        self.program = uuid.uuid4().hex
        self.opened_s = time.perf_counter()
        self.first_text_s: float | None = None
        self._client = client
        self._prompt_of = {op: i for i, op in enumerate(job.gens)}
        self._unfinished = set(job.gens)
        self._events: list[Event] = []
        self._failure: errors.PhloemError | None = None
        self._ended_at_engine = False
        self._waiter: asyncio.Future[None] | None = None

    async def events(self) -> Sequence[Event]:
        """All that has come since the last call, waiting for something; empty at the end. Raises the failure."""
        while not self._events:
            if self._failure is not None:
                raise self._failure
            if not self._unfinished:
                return ()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    async def results(self) -> list[Result]:
        """The result of every prompt, in order."""
        found: dict[int, Result] = {}
        while events := await self.events():
            found.update((event.prompt, event) for event in events if isinstance(event, Result))
        return [found[i] for i in sorted(found)]

    def fail(self, error: errors.PhloemError) -> None:
        """End with ``error``, at the engine too."""
        self._failure = self._failure or error
        self._cancel()
        self._wake()

    def close(self) -> None:
        """Nobody reads on: whatever still runs is cancelled."""
        self._failure = self._failure or errors.Cancelled("the request has ended")
        self._cancel()

    def take(self, message: RuntimeMessage) -> None:
        """One message of this program, on the loop's thread."""
        match message:
            case Delta():
                if self.first_text_s is None:
                    self.first_text_s = time.perf_counter()
                self._events.append(Piece(self._prompt_of[message.op], message))
            case Done(op=op) if op in self._unfinished:
                if isinstance(message.meta, GenMeta):
                    self._unfinished.discard(op)
                    self._events.append(Result(self._prompt_of[op], tuple(message.value), message.meta))
                else:
                    self._failure = self._failure or errors.InternalError("a generation ended without its counts")
            case Failed() if self._unfinished and self._failure is None:
                self._failure = errors.from_info(message.error)
                if len(self._unfinished) > 1 or message.op not in self._unfinished:
                    self._cancel()  # one failure fails the request: the other prompts need not run on
            case Rejected():
                self._ended_at_engine = True
                self._failure = self._failure or errors.from_info(message.errors[0])
            case Closed():
                self._ended_at_engine = True
                if self._unfinished and self._failure is None:
                    self._failure = errors.InternalError("the program was closed before its generations ended")
            case _:
                return
        self._wake()

    def _cancel(self) -> None:
        if not self._ended_at_engine and self._unfinished:
            self._ended_at_engine = True
            self._unfinished.clear()
            try:
                self._client.cancel(self.program)
            except errors.PhloemError:  # the engine is gone, and the program with it
                logger.debug("could not cancel program %s", self.program, exc_info=True)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Carried(Protocol):
    """What a program's messages are brought to, on the event loop."""

    def take(self, message: RuntimeMessage) -> None: ...

    def fail(self, error: errors.PhloemError) -> None: ...

    def close(self) -> None: ...


class Bridge:
    """Submits jobs through ``client`` and delivers their messages on the event loop that opened them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox: deque[tuple[Carried, RuntimeMessage]] = deque()
        self._is_woken = False
        self._flights: set[Carried] = set()

    def open(self, job: Job) -> Flight:
        """Send ``job``. Raises what the client raises; what the engine refuses comes out of ``Flight.events``."""
        flight = Flight(self._client, job)
        self.carry(flight, Submit(program=flight.program, ops=list(job.ops), settings=job.settings))
        return flight

    def carry(self, flight: Carried, submit: Submit) -> None:
        """Send a program's first ``submit``, and bring its messages to ``flight.take`` on this loop."""
        loop = asyncio.get_running_loop()

        def post(message: RuntimeMessage) -> None:  # on the client's thread
            self._inbox.append((flight, message))
            if not self._is_woken:
                self._is_woken = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    self._inbox.clear()

        self._client.submit(submit, post)
        self._flights.add(flight)

    def land(self, flight: Carried) -> None:
        """The end of a flight's use, however it went."""
        self._flights.discard(flight)
        flight.close()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def close(self) -> None:
        for flight in list(self._flights):
            flight.fail(errors.EngineLost("the server is shutting down"))

    def _deliver(self) -> None:
        self._is_woken = False  # before the queue is emptied: what comes after the last popleft wakes again
        while self._inbox:
            flight, message = self._inbox.popleft()
            flight.take(message)
