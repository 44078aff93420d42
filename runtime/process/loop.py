"""The loop between socket and engine: receive, step, send.

A failed step ends every program and the loop goes on; when the loop ends, every program gets an error.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import msgspec
import zmq

from ...protocol.address import ServerKeys
from ...protocol.errors import EngineLost, InternalError, PhloemError
from ...protocol.messages import (
    Answer,
    ClientMessage,
    Closed,
    Question,
    Rejected,
    RuntimeMessage,
    Submit,
    Welcome,
)
from ..config import EngineConfig, Progress, choose_cpu_isa
from ..encoder.config import is_encoder
from ..engine_socket import EngineSocket, Inbox, Outbox
from ..parallel.lost import GangLost
from ..weights.resolve import resolve_model
from .cache_publisher import CachePublisher
from .garbage import Garbage

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05  # how late a deadline or a stop may be noticed while nothing runs
MAX_FAULTS_IN_A_ROW = 3
# How long the step's thread waits for Python's lock while a grammar's thread computes. A step takes the lock some 25
# times, each time after a kernel; with Python's 5 ms it takes 30 ms longer then.
SWITCH_S = 0.0001


class _QuickSwitches:
    """While a loop of this process is inside it, a thread gives the GIL away ``SWITCH_S`` after another thread asks.

    Loops may enter it at the same time; when the last one leaves, Python's interval is what it was before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._before_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_open:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_S)
            self._num_open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                sys.setswitchinterval(self._before_s)


_quick_switches = _QuickSwitches()


class EngineLike(Protocol):
    """The engine's methods that the loop calls, all on one thread."""

    @property
    def has_work(self) -> bool: ...
    def step(self, inbox: list[tuple[bytes, ClientMessage]]) -> list[tuple[bytes, RuntimeMessage]]: ...
    def welcome(self) -> Welcome: ...
    def drop_client(self, client_id: bytes) -> None: ...
    def fail_all(self, error: PhloemError) -> list[tuple[bytes, RuntimeMessage]]: ...
    def close(self) -> None: ...


MakeEngine = Callable[[EngineConfig, Progress | None], EngineLike]


class EngineBroken(InternalError):
    """Several steps failed in a row."""


def publisher_of(
    engine: Any, url: str, context: zmq.Context[Any], *, keys: ServerKeys | None = None
) -> CachePublisher | None:
    """A publisher of ``engine``'s cache events; None without ``url``. Call it before the engine's welcome is made."""
    if not url:
        return None
    publisher = CachePublisher(url, context=context, keys=keys)
    engine.cache_events_url = publisher.url
    return publisher


def publish_of(engine: Any, publisher: CachePublisher | None) -> Callable[[], None] | None:
    """A callable that publishes the new events, for ``serve_engine``."""
    if publisher is None:
        return None

    def publish() -> None:
        events = engine.cache_feed.take()
        if events is not None:
            publisher.publish(events)

    return publish


def serve_engine(
    engine: EngineLike,
    engine_socket: EngineSocket,
    stop: Callable[[], bool],
    *,
    publish: Callable[[], None] | None = None,
    garbage: Garbage | None = None,
) -> None:
    """Run until ``stop()``; open ops then fail as ``EngineLost``. ``publish`` is called after each step.

    A fault in a step ends every program of the engine, and the loop goes on; ``MAX_FAULTS_IN_A_ROW`` of them without
    a good step between raise ``EngineBroken``. GangLost is raised at once: no program is answered.
    """
    with _quick_switches:
        _serve(engine, engine_socket, stop, publish, garbage)
    engine_socket.send(_end_all(engine, [], EngineLost("the engine was stopped")))


def _serve(
    engine: EngineLike,
    engine_socket: EngineSocket,
    stop: Callable[[], bool],
    publish: Callable[[], None] | None,
    garbage: Garbage | None,
) -> None:
    faults = 0
    while not stop():
        inbox = engine_socket.receive(0.0 if engine.has_work else IDLE_WAIT_S)
        is_trial = bool(inbox) or engine.has_work  # an idle step does not reset the count
        try:
            outbox = engine.step(inbox)
        except GangLost:  # without an answer: a supervisor replays what waits
            raise
        except Exception as failure:
            faults += 1
            log.exception("a step failed (%d in a row)", faults)
            error = InternalError(f"a step of the engine failed: {type(failure).__name__}: {failure}")
            outbox = _end_all(engine, inbox, error)
            if faults >= MAX_FAULTS_IN_A_ROW:
                engine_socket.send(outbox)
                raise EngineBroken(f"{faults} steps in a row failed: {type(failure).__name__}: {failure}") from failure
        else:
            faults = 0 if is_trial else faults
        if outbox:
            engine_socket.send(outbox)
        if publish is not None:
            publish()
        if garbage is not None:
            garbage.after_step(is_idle=not inbox and not engine.has_work)


def _end_all(engine: EngineLike, inbox: Inbox, error: PhloemError) -> Outbox:
    """End every program, and answer the submits and queries that a failed step has read and not answered."""
    try:
        outbox = engine.fail_all(error)
    except Exception as failure:
        raise EngineBroken(f"{error.message}; then ending its programs failed: {failure}") from failure
    told = {(client, message.program) for client, message in outbox if isinstance(message, Closed | Rejected)}
    answered = {(client, message.id) for client, message in outbox if isinstance(message, Answer)}
    for client, question in inbox:
        if isinstance(question, Submit) and (client, question.program) not in told:
            outbox.append((client, Rejected(question.program, [error.info()])))
        elif isinstance(question, Question) and (client, question.id) not in answered:
            outbox.append((client, Answer(question.id, error=error.info())))
    return outbox


def run_engine(
    config: EngineConfig,
    url: str,
    *,
    keys: ServerKeys | None = None,
    has_private_events: bool = False,
    on_ready: Callable[[str], None] | None = None,
    make_engine: MakeEngine | None = None,
    progress: Progress | None = None,
) -> int:
    """Load, listen at ``url``, and serve until SIGINT or SIGTERM; 0 after a clean end. For the main thread.

    Raises what loading or listening raises. ``progress`` is called while loading takes long, ``on_ready``
    with the address and the port that was taken. A second signal ends the process at once. ``has_private_events``:
    subscribers to cache events need ``keys``, too.
    """
    engine = (make_engine or real_engine)(config, progress)
    garbage = Garbage()
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, before.get(number, signal.SIG_DFL))

    context: zmq.Context[Any] = zmq.Context()
    before: dict[int, Any] = {}
    publisher: CachePublisher | None = None
    try:
        event_keys = keys if has_private_events else None
        publisher = publisher_of(engine, config.cache_events_url, context, keys=event_keys)
        welcome = msgspec.structs.replace(engine.welcome(), cache_events_keys=event_keys is not None)
        engine_socket = EngineSocket(url, welcome, context=context, client_timeout_s=config.client_timeout_s, keys=keys)
        before.update({number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)})
        try:
            if on_ready is not None:
                on_ready(engine_socket.url)
            serve_engine(engine, engine_socket, stopping.is_set, publish=publish_of(engine, publisher), garbage=garbage)
        finally:
            engine_socket.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        engine.close()
        garbage.close()
        if publisher is not None:
            publisher.close()
        context.term()
    return 0


def real_engine(config: EngineConfig, progress: Progress | None = None) -> EngineLike:
    """The engine of a decoder or of an encoder, as the model's folder says."""
    choose_cpu_isa(config)
    if is_encoder(resolve_model(config.model)):
        from ..encoder.engine import encoder_engine

        return encoder_engine(config)
    from ..engine import ready_engine

    return ready_engine(config, progress)
