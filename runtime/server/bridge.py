"""The bridge from the client's thread to the event loop: program calls whose events are read with ``await``.

One ``call_soon_threadsafe`` carries all events that have come meanwhile.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ...protocol import errors
from ...protocol.engine_client import EngineClient
from ...protocol.messages import Closed, ProgramSettings, ProgramStats
from ...protocol.ops import AnyOp, Text
from ...protocol.program_call import ProgramCall, ProgramEvent
from ..tokenizer.tokenizer import LONG_TEXT
from .logs import log_prompt
from .tenants import sender_of_request
from .tracing import ProgramSpans, Tracer


class Bridge:
    """Makes calls through ``client`` and delivers their events on the event loop that makes them.

    A call runs for the tenant of the request whose task makes it: under the tenant's name, limits and part of the
    cache, and under the request's span. ``model_name``: the served model's, which a tenant may be kept from.
    """

    def __init__(self, client: EngineClient, model_name: str, tracer: Tracer | None = None) -> None:
        self._client = client
        self._model_name = model_name
        self._tracer = tracer
        self._inbox: deque[tuple[BridgedCall, ProgramEvent]] = deque()
        self._is_woken = False
        self._calls: set[BridgedCall] = set()
        self._is_closed = False

    async def send(self, ops: Sequence[AnyOp], settings: ProgramSettings | None, *, program: str = "") -> "BridgedCall":
        """Start a program. Raises what the client raises, and a 429 beyond a limit of the tenant's.

        The caller gives the call back with ``release``.
        """
        if self._is_closed:
            raise _closing()
        bridged = BridgedCall(self._client, program, partial(self._post, asyncio.get_running_loop()))
        if (sender := sender_of_request()) is not None:
            settings = sender.account.admit(settings, self._model_name)
        log_prompt(bridged.call.program, ops)
        spans = bridged.spans = self._spans(bridged.call.program, settings)
        try:
            await bridged.submit(ops, settings)
        except BaseException as error:
            if spans is not None:
                spans.end({}, error=type(error).__name__)
            raise
        self._calls.add(bridged)
        if self._is_closed:
            bridged.fail(_closing())
        return bridged

    def _spans(self, program: str, settings: ProgramSettings | None) -> ProgramSpans | None:
        sender = sender_of_request()
        if self._tracer is None or sender is None or sender.trace is None:
            return None
        model, name = self._model_name, ""
        if settings is not None:
            model, name = settings.adapter or model, settings.name
        return ProgramSpans(self._tracer, sender.trace, program=program, name=name, model=model)

    def release(self, call: "BridgedCall") -> None:
        self._calls.discard(call)

    @property
    def num_in_flight(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        """Fail every call, and those that come. A second call does nothing."""
        self._is_closed = True
        for call in self._calls:
            call.fail(_closing())

    def _post(self, loop: asyncio.AbstractEventLoop, call: "BridgedCall", event: ProgramEvent) -> None:
        """On the client's thread."""
        self._inbox.append((call, event))
        if not self._is_woken:
            self._is_woken = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: its readers are gone
                self._inbox.clear()

    def _deliver(self) -> None:
        self._is_woken = False  # before the queue is emptied: an event after the last popleft wakes the loop again
        while self._inbox:
            call, event = self._inbox.popleft()
            call.take(event)


def _closing() -> errors.EngineLost:
    return errors.EngineLost("the server is shutting down; try again later")


class BridgedCall:
    """One program call and its events that were not read yet. Lives on the event loop."""

    def __init__(self, client: EngineClient, program: str, post: Callable[["BridgedCall", ProgramEvent], None]) -> None:
        self.call = ProgramCall(client, partial(post, self), program=program)
        self._context_len = client.welcome.context_len
        sender = sender_of_request()
        self._account = None if sender is None else sender.account
        self._reserved = 0.0
        self.spans: ProgramSpans | None = None
        self._events: list[ProgramEvent] = []
        self._failure: errors.PhloemError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def submit(self, ops: Sequence[AnyOp], settings: ProgramSettings | None) -> None:
        """``call.submit``; of a long text on a thread, because a fleet tokenizes it to place the program.

        The tenant's tokens are reserved, and settled when the program is over.
        """
        reserved = 0.0 if self._account is None else self._account.reserve(ops, self._context_len)
        self._reserved += reserved
        if self.spans is not None:
            self.spans.submit(ops)
        send = partial(self.call.submit, list(ops), settings)
        try:
            if sum(len(op.text) for op in ops if isinstance(op, Text)) > LONG_TEXT:
                await asyncio.to_thread(send)
            else:
                send()
        except errors.PhloemError:  # the client did not send it
            self._reserved -= reserved
            if self._account is not None:
                self._account.settle(reserved, ProgramStats())
            raise

    async def events(self, *, timeout_s: float | None = None) -> Sequence[ProgramEvent]:
        """All events since the last call: at least one, or none after ``timeout_s``. Raises the error of ``fail``."""
        if not self._events and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                await (self._waiter if timeout_s is None else asyncio.wait_for(self._waiter, timeout_s))
        if not self._events and self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        return events

    def fail(self, error: errors.PhloemError) -> None:
        """Cancel the program and raise ``error`` to the reader, after the events that have come."""
        self._failure = self._failure or error
        self.call.cancel()
        self._wake()

    def take(self, event: ProgramEvent) -> None:
        if isinstance(event, Closed) and self._account is not None:
            self._account.settle(self._reserved, event.stats)
        if self.spans is not None:
            self.spans.take(event)
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
