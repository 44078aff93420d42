"""The loop between socket and engine: receive, step, send. Never decides anything about programs."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from ..config import EngineConfig
from ..protocol.errors import InternalError
from ..protocol.messages import ClientMessage, RuntimeMessage, Welcome
from ..transport import Router

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05  # how late a deadline or a stop may be noticed while nothing runs
MAX_FAULTS_IN_A_ROW = 3

Outbox = list[tuple[bytes, RuntimeMessage]]


class EngineLike(Protocol):
    """What the loop needs of an engine."""

    @property
    def has_work(self) -> bool: ...
    def step(self, inbox: list[tuple[bytes, ClientMessage]]) -> Outbox: ...
    def welcome(self) -> Welcome: ...
    def drop_client(self, client_id: bytes) -> None: ...
    def fail_all(self, error: InternalError) -> Outbox: ...
    def close(self) -> None: ...


def serve_engine(engine: EngineLike, router: Router, stop: Callable[[], bool]) -> None:
    """Run until ``stop()``. A fault in a step ends every program of the engine; three in a row end the loop."""
    faults = 0
    while not stop():
        inbox = router.receive(0.0 if engine.has_work else IDLE_WAIT_S)
        for client in router.silent_clients():
            engine.drop_client(client)
        try:
            outbox = engine.step(inbox)
            faults = 0
        except Exception as error:
            faults += 1
            log.exception("a step failed")
            if faults >= MAX_FAULTS_IN_A_ROW:
                raise
            outbox = engine.fail_all(InternalError(f"the engine failed: {type(error).__name__}: {error}"))
        if outbox:
            router.send(outbox)


def run_engine(
    config: EngineConfig,
    url: str,
    *,
    on_ready: Callable[[str], None] | None = None,
    make_engine: Callable[[EngineConfig], EngineLike] | None = None,
) -> int:
    """Load, listen at ``url``, and serve until SIGINT or SIGTERM; 0 after a clean end.

    Raises what loading or listening raises. ``on_ready`` is told the address, with the port that was taken.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    if make_engine is None:
        from ..engine import Engine

        make_engine = Engine
    engine = make_engine(config)
    context: zmq.Context[Any] = zmq.Context()
    try:
        router = Router(url, engine.welcome(), context=context, client_timeout_s=config.client_timeout_s)
        try:
            if on_ready is not None:
                on_ready(router.url)
            serve_engine(engine, router, stopping.is_set)
        finally:
            router.close()
    finally:
        engine.close()
        context.term()
    return 0
