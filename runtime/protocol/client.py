"""The client's half of the wire: one DEALER socket, one reader thread, any number of programs.

Handlers are called on the reader's thread, so they must be quick. Never blocks a handler on another's value.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from .errors import EngineLost, PhloemError, ProtocolError, from_info
from .messages import (
    PROTOCOL_VERSION,
    Accepted,
    Answer,
    Bye,
    Cancel,
    ClientMessage,
    Closed,
    Done,
    Failed,
    Hello,
    Ping,
    Pong,
    ProgramStats,
    ProtocolFault,
    Query,
    Rejected,
    RuntimeMessage,
    Submit,
    Welcome,
)

log = logging.getLogger(__name__)

Handler = Callable[[RuntimeMessage], None]
_wake_ids = itertools.count()


class _Running:
    """A program whose end has not come: who hears of it, and the ops that still owe a final message."""

    __slots__ = ("handler", "is_accepted", "num_unanswered", "pending")

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.pending: dict[int, None] = {}
        self.num_unanswered = 0
        self.is_accepted = False


class Client:
    """Thread-safe. Raises EngineLost when nothing answers at ``url`` within ``connect_timeout_s``.

    ``engine_alive`` says why the engine is dead, or None while it lives; it is asked several times a second. A silence
    of ``engine_timeout_s`` counts as death too. On death every pending op gets ``Failed(EngineLost)`` and every program
    ``Closed``, once; nothing is retried.
    """

    def __init__(
        self,
        url: str,
        *,
        context: zmq.Context[Any] | None = None,
        connect_timeout_s: float = 30.0,
        engine_timeout_s: float = 30.0,
        engine_alive: Callable[[], str | None] | None = None,
        keys: tuple[bytes, bytes, bytes] | None = None,
    ) -> None:
        self.url = url
        self._context = context or zmq.Context.instance()
        self._engine_timeout_s = engine_timeout_s
        self._engine_alive = engine_alive
        self._lock = threading.Lock()
        self._programs: dict[str, _Running] = {}
        self._answers: dict[int, queue.SimpleQueue[Answer | PhloemError]] = {}
        self._query_ids = itertools.count(1)
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lost: PhloemError | None = None
        self._is_closed = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[RuntimeMessage])
        self._welcome: Welcome | None = None
        self._welcomed = threading.Event()

        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 200
        self._socket.sndhwm = self._socket.rcvhwm = 0
        if keys is not None:
            self._socket.curve_serverkey, self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.connect(url)
        wake_url = f"inproc://phloem-client-wake-{next(_wake_ids)}"
        self._wake_in = self._context.socket(zmq.PULL)
        self._wake_in.bind(wake_url)
        self._wake_out = self._context.socket(zmq.PUSH)
        self._wake_out.connect(wake_url)
        self._thread = threading.Thread(target=self._loop, name="phloem-client", daemon=True)
        self._thread.start()
        self._send(Hello(PROTOCOL_VERSION))
        if not self._welcomed.wait(connect_timeout_s):
            self.close()
            raise EngineLost(f"nothing answers at {url} within {connect_timeout_s:g} s; is an engine running there?")
        if self._lost is not None:
            self.close()
            raise self._lost

    @property
    def welcome(self) -> Welcome:
        assert self._welcome is not None
        return self._welcome

    # -- what callers do ----------------------------------------------------------------------------------------------

    def submit(self, message: Submit, handler: Handler | None = None) -> None:
        """Send ops. ``handler`` hears everything about the program; it is given with the program's first submit."""
        frame = self._encoder.encode(message)
        with self._lock:
            self._check_open()
            running = self._programs.get(message.program)
            if running is None:
                if handler is None:
                    raise ValueError(f"the first submit of program {message.program!r} needs a handler")
                running = self._programs[message.program] = _Running(handler)
            running.num_unanswered += 1
            for op in message.ops:
                running.pending[op.op] = None
        self._send_frame(frame)

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        with self._lock:
            if self._lost is not None or self._is_closed or program not in self._programs:
                return
        self._send(Cancel(program, seq, op))

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        """Ask the engine (see ``messages.QUERIES``). Not to be called from a handler."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("query waits for the thread that runs handlers; ask from another thread")
        box: queue.SimpleQueue[Answer | PhloemError] = queue.SimpleQueue()
        query_id = next(self._query_ids)
        with self._lock:
            self._check_open()
            self._answers[query_id] = box
        self._send(Query(query_id, what))
        try:
            answer = box.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineLost(f"the engine did not answer {what!r} within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._answers.pop(query_id, None)
        if isinstance(answer, PhloemError):
            raise answer
        if answer.error is not None:
            raise from_info(answer.error)
        return answer.value

    def close(self) -> None:
        """Say goodbye; programs that have not ended fail as lost."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._send(Bye())
        self._send_frame(b"")  # the end of the reader's loop
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _check_open(self) -> None:
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        if self._is_closed:
            raise EngineLost("this client was closed; connect again")

    def _send(self, message: ClientMessage) -> None:
        self._send_frame(self._encoder.encode(message))

    def _send_frame(self, frame: bytes) -> None:
        self._outgoing.put(frame)
        with self._lock:  # zmq sockets take one thread at a time
            if not self._wake_out.closed:
                self._wake_out.send(b"")

    # -- the reader's thread ------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        heard_s = pinged_s = time.monotonic()
        heartbeat_s = 1.0
        try:
            while True:
                ready = dict(poller.poll(200))
                if self._wake_in in ready:
                    while self._wake_in.poll(0):
                        self._wake_in.recv()
                    if not self._flush():
                        return
                now_s = time.monotonic()
                while self._socket.poll(0):
                    heard_s = now_s
                    self._take(self._socket.recv())
                if self._welcome is not None:
                    heartbeat_s = self._welcome.heartbeat_s
                if now_s - pinged_s >= heartbeat_s:
                    pinged_s = now_s
                    self._socket.send(self._encoder.encode(Ping()))
                reason = self._engine_alive() if self._engine_alive is not None else None
                if reason is None and now_s - heard_s > self._engine_timeout_s:
                    reason = f"the engine at {self.url} has been silent for {self._engine_timeout_s:g} s"
                if reason is not None and self._lost is None:
                    self._lose(EngineLost(reason))
        finally:
            self._lose(EngineLost("the client was closed"))
            with self._lock:
                self._wake_out.close(0)
            self._wake_in.close(0)
            self._socket.close()

    def _flush(self) -> bool:
        """Send what callers queued; False at the end."""
        while True:
            try:
                frame = self._outgoing.get_nowait()
            except queue.Empty:
                return True
            if not frame:
                return False
            if self._lost is None:
                self._socket.send(frame)

    def _take(self, frame: bytes) -> None:
        try:
            messages = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            log.error("a frame of %d bytes is not of the protocol: %s", len(frame), error)
            return
        for message in messages:
            match message:
                case Welcome():
                    if message.version != PROTOCOL_VERSION:
                        text = f"the engine speaks protocol {message.version}, this client {PROTOCOL_VERSION}"
                        self._lose(ProtocolError(f"{text}; install equal versions"))
                    self._welcome = message
                    self._welcomed.set()
                case Pong():
                    pass
                case Answer():
                    with self._lock:
                        box = self._answers.get(message.id)
                    if box is not None:
                        box.put(message)
                case ProtocolFault():
                    log.error("the engine did not understand: %s", message.error.message)
                    if self._welcome is None:
                        self._lose(from_info(message.error))
                case _:
                    self._deliver(message)

    def _deliver(self, message: Any) -> None:
        with self._lock:
            running = self._programs.get(message.program)
            if running is None or self._lost is not None:
                return
            match message:
                case Done() | Failed():
                    running.pending.pop(message.op, None)
                case Accepted():
                    running.num_unanswered -= 1
                    running.is_accepted = True
                case Rejected():
                    running.num_unanswered -= 1
                    for op in message.ops:
                        running.pending.pop(op, None)
                    if not running.is_accepted and not running.num_unanswered:
                        del self._programs[message.program]  # the runtime never knew it
                case Closed():
                    del self._programs[message.program]
        _call(running.handler, message)

    def _lose(self, error: PhloemError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            programs, self._programs = self._programs, {}
            answers = list(self._answers.values())
        for name, running in programs.items():
            for op in running.pending:
                _call(running.handler, Failed(name, op, error.info()))
            _call(running.handler, Closed(name, ProgramStats()))
        for box in answers:
            box.put(error)
        self._welcomed.set()


def _call(handler: Handler, message: RuntimeMessage) -> None:
    try:
        handler(message)
    except Exception:
        log.exception("a handler failed on %s", type(message).__name__)
