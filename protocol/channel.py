"""A channel to an engine: one DEALER socket and the one thread that uses it.

``send`` queues a frame, ``receive`` is called with each message that comes, and ``ended`` once, at the end.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from .address import ClientKeys, check_url
from .errors import Cancelled, EngineLost, InternalError, PhloemError, ProtocolError, from_info
from .frames import decode_runtime, encode_client
from .messages import (
    PROTOCOL_VERSION,
    Bye,
    Credit,
    Delta,
    Hello,
    Ping,
    Pong,
    ProtocolFault,
    RuntimeMessage,
    Welcome,
)

logger = logging.getLogger(__name__)

DELTA_WINDOW = 1024  # deltas that may be under way before the engine merges them
HELLO_EVERY_S = 1.0  # while connecting; a Hello can be lost with a connection
MAX_FAILED_HANDSHAKES = 5  # while connecting; ZeroMQ tries again every 0.1 to 0.2 s
DEATH_GRACE_S = 0.5  # how long a closed connection waits for the process's own reason
FRAMES_PER_TURN = 256
STALL_S = 5.0  # how much longer than its wait a turn counts at most: this process or the whole machine may stand still
LINGER_MS = 500
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 15_000  # of TCP peers, answered by ZeroMQ's own thread

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # ZeroMQ does not try again
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | REFUSED
WATCHED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED


def set_client_keys(client: "zmq.Socket[bytes]", keys: ClientKeys) -> None:
    """Before ``client`` is connected."""
    client.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    client.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    client.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())


class Channel:
    """Connected when made; raises ``EngineLost`` or ``ProtocolError`` when no engine answers or it refuses the keys.

    ``receive`` and ``ended`` are called on the channel's thread, which reads nothing meanwhile: they must return soon.
    The ``error`` of ``ended(error)`` is ``Cancelled`` after ``close``.
    """

    def __init__(
        self,
        url: str,
        *,
        receive: Callable[[RuntimeMessage], None],
        ended: Callable[[PhloemError], None],
        context: zmq.Context[Any] | None = None,
        keys: ClientKeys | None = None,
        connect_timeout_s: float = 30.0,
        engine_timeout_s: float = 30.0,
        engine_alive: Callable[[], str | None] | None = None,
    ) -> None:
        check_url(url, has_keys=keys is not None)
        self.url = url
        self._receive = receive
        self._ended = ended
        self._context = context or zmq.Context.instance()
        self._keys = keys
        self._connect_timeout_s = connect_timeout_s
        self._engine_timeout_s = engine_timeout_s
        self._engine_alive = engine_alive
        self._outgoing: deque[bytes] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._welcome: Welcome | None = None
        self._refusal: PhloemError | None = None
        self._failed_handshakes = 0  # a refusal counts as all of them
        self._asked_s: float | None = None  # when the oldest unanswered ping was sent
        self._thread = threading.Thread(target=self._run, name="phloem-client", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C while connecting
            self.close()
            raise
        if self._refusal is not None:
            self._thread.join()
            raise self._refusal

    @property
    def welcome(self) -> Welcome:
        assert self._welcome is not None
        return self._welcome

    @property
    def silent_s(self) -> float:
        """Seconds since the oldest ping that the engine has not answered; 0.0 where it has answered all."""
        asked_s = self._asked_s
        return 0.0 if asked_s is None else time.monotonic() - asked_s

    def send(self, frame: bytes) -> None:
        """Queue a frame; callable on any thread, never blocks. Does nothing once the channel has ended."""
        self._outgoing.append(frame)
        self._wake()

    def close(self) -> None:
        """Say goodbye and end the thread; on the channel's own thread it ends when its callback returns."""
        self._closing.set()
        self._wake()
        if not self.is_own_thread():
            self._thread.join()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _wake(self) -> None:
        # a full pipe has woken the thread already, a closed one needs no waking
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: PhloemError
        dealer: zmq.Socket[bytes] | None = None
        monitor: zmq.Socket[bytes] | None = None
        try:
            dealer, monitor = self._open()
            error = self._converse(dealer, monitor)
        except ProtocolError as fault:
            error = fault if self._welcome is None else EngineLost(f"the engine is not understood: {fault.message}")
        except PhloemError as known:
            error = known
        except zmq.ZMQError as failure:
            error = EngineLost(f"{self.url}: {failure}")
        except Exception as bug:
            logger.exception("the client's thread failed")
            error = InternalError(f"the client's thread failed: {type(bug).__name__}: {bug}")
        linger = LINGER_MS if isinstance(error, Cancelled) and self._welcome is not None else 0
        if monitor is not None:
            assert dealer is not None
            dealer.disable_monitor()
            monitor.close(linger=0)
        if dealer is not None:
            dealer.close(linger=linger)
        self._wake_in.close()
        self._wake_out.close()
        if self._welcome is None:
            self._refusal = error
            self._ready.set()
            return
        try:
            self._ended(error)
        except Exception:
            logger.exception("the end of the channel to %s could not be reported", self.url)
        self._ready.set()  # it may have been welcomed and lost within one turn

    def _open(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.SNDHWM, 0)  # the queue to the engine is unbounded
            dealer.setsockopt(zmq.RCVHWM, 1000)
            if self._keys is not None:
                set_client_keys(dealer, self._keys)
            monitor = None
            if self.url.startswith("tcp://"):
                dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
                dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
                dealer.setsockopt(zmq.IPV6, 1)
            if not self.url.startswith("inproc://"):
                monitor = dealer.get_monitor_socket(WATCHED)
            dealer.connect(self.url)
        except BaseException:
            dealer.close(linger=0)
            raise
        return dealer, monitor

    def _converse(self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> PhloemError:
        """Send and receive until the channel ends; returns why it ended."""
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        if monitor is not None:
            poller.register(monitor, zmq.POLLIN)
        hello = encode_client(Hello(version=PROTOCOL_VERSION, client=f"python pid {os.getpid()}"))
        ping = encode_client(Ping())
        started = heard = sent = turned = time.monotonic()
        self._send(dealer, hello)
        num_deltas = 0
        while True:
            was_welcome = self._welcome is not None
            heartbeat_s = self._welcome.heartbeat_s if self._welcome is not None else HELLO_EVERY_S
            wait_s = heartbeat_s if was_welcome else min(0.1, self._connect_timeout_s)
            poller.poll(max(1, int(1000 * wait_s)))

            with contextlib.suppress(OSError):
                while self._wake_out.recv(4096):
                    pass
            # frames queued before close() are still sent, later ones are not
            is_closing = self._closing.is_set()
            while self._outgoing:
                self._send(dealer, self._outgoing.popleft())
                sent = time.monotonic()
            if is_closing:
                self._send(dealer, encode_client(Bye()))
                return Cancelled("the client was closed")

            is_cut = self._read_events(monitor)
            num_frames = 0
            while num_frames < FRAMES_PER_TURN or is_cut:
                try:
                    frames = dealer.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                num_frames += 1
                num_deltas += self._take(frames)
                if self._closing.is_set():
                    break
            now = time.monotonic()
            uncounted_s, turned = now - turned - wait_s - STALL_S, now
            if num_frames:
                heard, self._asked_s = now, None
            elif uncounted_s > 0 and self._asked_s is not None:
                heard, self._asked_s = heard + uncounted_s, self._asked_s + uncounted_s
            if num_deltas >= DELTA_WINDOW // 2:
                self._send(dealer, encode_client(Credit(n=num_deltas)))
                num_deltas = 0
            if is_cut and was_welcome:
                return EngineLost(self._death() or "the engine closed the connection")
            if not was_welcome and self._welcome is not None:
                self._send(dealer, encode_client(Credit(n=DELTA_WINDOW)))
                self._ready.set()

            if self._engine_alive is not None and not num_frames and (reason := self._engine_alive()) is not None:
                return EngineLost(reason)
            if self._welcome is None and now - started > self._connect_timeout_s:
                text = f"nothing answers at {self.url} within {self._connect_timeout_s:g} s"
                return EngineLost(f"{text}; is an engine running there?")
            if self._welcome is None and self._failed_handshakes >= MAX_FAILED_HANDSHAKES:
                return EngineLost(f"{self.url} refuses the connection; do both sides use keys, and the right ones?")
            if num_frames == 0 and self.silent_s > self._engine_timeout_s:
                return EngineLost(f"the engine has been silent for {now - heard:.1f} s")
            if now - sent >= heartbeat_s or (self._asked_s is None and now - heard >= heartbeat_s):
                self._send(dealer, ping if self._welcome is not None else hello)
                sent = now
                self._asked_s = now if self._asked_s is None else self._asked_s

    @staticmethod
    def _send(dealer: zmq.Socket[bytes], frame: bytes) -> None:
        """Never waits. A socket that has been refused has no queue to send to; the monitor's events tell of it."""
        with contextlib.suppress(zmq.Again):
            dealer.send(frame, zmq.NOBLOCK)

    def _take(self, frames: list[bytes]) -> int:
        """Pass on a frame's messages; returns the number of deltas in it."""
        num_deltas = 0
        for message in decode_runtime(frames[-1]):
            match message:
                case Pong():
                    pass
                case Welcome():
                    if self._welcome is None:
                        if message.version != PROTOCOL_VERSION:
                            text = f"the engine speaks protocol version {message.version}, this client"
                            raise ProtocolError(f"{text} {PROTOCOL_VERSION}; install equal versions", where="hello")
                        self._welcome = message
                case ProtocolFault(error=error) if self._welcome is None:
                    raise from_info(error)
                case ProtocolFault(error=error) if error.where == "hello":  # it does not know this client, or no longer
                    raise EngineLost(error.message)
                case ProtocolFault(error=error):
                    logger.warning("the engine could not read a message: %s", error.message)
                case _:
                    num_deltas += isinstance(message, Delta)
                    self._receive(message)
        return num_deltas

    def _read_events(self, monitor: zmq.Socket[bytes] | None) -> bool:
        """True when the connection is cut."""
        is_cut = False
        while monitor is not None:
            try:
                head, *_ = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event, _value = struct.unpack("=Hi", head)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_cut = is_cut and self._welcome is not None
            elif event == zmq.EVENT_DISCONNECTED:
                is_cut = True
            elif event & HANDSHAKE_FAILED:
                self._failed_handshakes += MAX_FAILED_HANDSHAKES if event & REFUSED else 1
        return is_cut

    def _death(self) -> str | None:
        """Why the engine's process ended, where ``engine_alive`` knows; waits a moment for the process to be reaped."""
        deadline = time.monotonic() + DEATH_GRACE_S
        while self._engine_alive is not None:
            reason = self._engine_alive()
            if reason is not None or time.monotonic() > deadline:
                return reason
            time.sleep(0.01)
        return None
