"""The engine's ROUTER socket: the clients connected to it and the messages that wait for each of them.

One thread owns it. A slow client never blocks the engine: its messages wait here, and its deltas are merged.
"""

import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from ..protocol.address import ServerKeys, check_url
from ..protocol.errors import InvalidParams, LimitExceeded, PhloemError, ProtocolError
from ..protocol.frames import decode_client, decode_head, encode_runtime
from ..protocol.messages import (
    PROTOCOL_VERSION,
    Answer,
    Bye,
    ClientMessage,
    Closed,
    Credit,
    Delta,
    Done,
    Failed,
    Hello,
    Ping,
    Pong,
    ProtocolFault,
    Rejected,
    RuntimeMessage,
    TokenLogprob,
    Welcome,
)

logger = logging.getLogger(__name__)

FRAMES_PER_RECEIVE = 4096
SEND_QUEUE_FRAMES = 256  # frames ZeroMQ holds for a client before it waits here
UNREAD_SUBMITS = 16  # a client that takes nothing may send so many of the largest submits more
FRAME_BYTES = 1_000  # what the reply to the smallest frame costs
STALL_S = 5.0  # counted at most between two looks at the socket: the machine may have stood still with its clients
RETRY_S = 0.005  # how soon a client that could take no more is tried again
LINGER_MS = 1_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 15_000  # of TCP peers, answered by ZeroMQ's own thread
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether a key is admitted (RFC 27)

Inbox = list[tuple[bytes, ClientMessage]]
Outbox = list[tuple[bytes, RuntimeMessage]]


class EngineSocket:
    """Answers ``Hello``, ``Ping``, ``Bye`` and ``Credit`` itself; everything else goes through ``receive``.

    A client has unlimited credit until its first ``Credit``; from then on it is sent as many deltas as it has credit
    for. Deltas beyond that are merged per candidate (and ``origin``) and wait for credit, at the latest for the op's
    ``Done`` or ``Failed``, which take them along. Other messages are neither held back nor dropped. A ``Bye`` in the
    inbox is a client that said goodbye, was silent for ``client_timeout_s``, is no longer connected, or sent and sent
    without taking a reply. Raises
    ``InvalidParams`` when it cannot listen at ``url``; ``self.url`` has the port that was taken.
    """

    def __init__(
        self,
        url: str,
        welcome: Welcome,
        *,
        context: zmq.Context[Any] | None = None,
        client_timeout_s: float = 30.0,
        keys: ServerKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._welcome = welcome
        self._client_timeout_s = client_timeout_s
        self._keys = keys
        self._clock = clock
        self._peers: dict[bytes, _Peer] = {}
        self._departed: list[bytes] = []  # clients whose ``Bye`` is not in an inbox yet
        self._backlog: dict[bytes, None] = {}  # clients whose frame ZeroMQ would not take yet
        self._next_check = self._looked_s = clock()
        self._ipc_path: Path | None = None  # the socket's file, removed by close()
        check_url(url, has_keys=keys is not None)
        context = context or zmq.Context.instance()
        self._gate = None if keys is None else _gate(context)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        try:
            self._configure(url)
            self._bind(url)
        except BaseException:
            self.close()
            raise
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT) if url.startswith("tcp://") else url
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._gate is not None:
            self._poller.register(self._gate, zmq.POLLIN)

    def receive(self, timeout_s: float) -> Inbox:
        """All messages that have come; waits up to ``timeout_s`` for the first one."""
        self._flush_backlog()
        if self._departed:
            timeout_s = 0.0
        elif self._backlog:
            timeout_s = min(timeout_s, RETRY_S)
        ready = dict(self._poller.poll(int(1000 * timeout_s) if timeout_s == 0 else max(1, int(1000 * timeout_s))))
        if self._gate is not None and self._gate in ready:
            self._admit()
        inbox: Inbox = [(client_id, Bye()) for client_id in self._departed]
        self._departed.clear()
        is_drained = False
        for _ in range(FRAMES_PER_RECEIVE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                is_drained = True
                break
            self._take(frames, inbox)
        now = self._clock()
        uncounted_s, self._looked_s = now - self._looked_s - STALL_S, now
        if uncounted_s > 0:
            for client in self._peers.values():
                client.heard = min(now, client.heard + uncounted_s)
        if is_drained and now >= self._next_check:  # with messages unread, a client that seems silent may not be
            self._next_check = now + min(1.0, self._client_timeout_s / 4)
            self._drop_silent(now, inbox)
        return inbox

    def send(self, outbox: Outbox) -> None:
        """Queue the messages and send what each client can take now, one frame per client."""
        touched: dict[bytes, _Peer] = {}
        for client_id, message in outbox:
            peer = self._peers.get(client_id)
            if peer is None:
                continue  # the client left meanwhile
            touched[client_id] = peer
            if isinstance(message, Delta):
                peer.add_delta(message)
            else:
                peer.add(message)
        for client_id, peer in touched.items():
            self._flush(client_id, peer)

    def close(self) -> None:
        """Send what can be sent within a second, then unbind; an ``ipc://`` file is removed."""
        for client_id, peer in list(self._peers.items()):
            self._flush(client_id, peer)
        self._socket.close(linger=LINGER_MS)
        if self._ipc_path is not None:
            self._ipc_path.unlink(missing_ok=True)
        if self._gate is not None:
            self._gate.close(linger=0)
        self._peers.clear()

    # -- the socket ---------------------------------------------------------------------------------------------------

    def _configure(self, url: str) -> None:
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone raises
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 4 * self._welcome.limits.max_submit_bytes + (1 << 20))
        if url.startswith("tcp://"):
            self._socket.setsockopt(zmq.IPV6, int("[" in url))
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        if self._keys is not None:
            set_server_keys(self._socket, self._keys)

    def _bind(self, url: str) -> None:
        if url.startswith("ipc://"):
            _check_free(Path(url.removeprefix("ipc://")))
        mask = os.umask(0o177) if url.startswith("ipc://") else None
        try:
            self._socket.bind(url.replace("tcp://localhost:", "tcp://127.0.0.1:"))  # ZeroMQ binds no names
        except zmq.ZMQError as error:
            text = f"cannot listen at {url}: {error.strerror or error}; choose another address"
            raise InvalidParams(text, where="url") from error
        finally:
            if mask is not None:
                os.umask(mask)
        self._ipc_path = Path(url.removeprefix("ipc://")) if url.startswith("ipc://") else None

    # -- in -----------------------------------------------------------------------------------------------------------

    def _take(self, frames: list[bytes], inbox: Inbox) -> None:
        client_id, body = frames[0], frames[-1]
        peer = self._peers.get(client_id)
        if peer is not None:
            peer.heard = self._clock()
            if self._is_flooding(client_id, peer, sum(map(len, frames))):
                inbox.append((client_id, Bye()))
                return
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message of {len(frames) - 1} frames; every message is one frame")
            limit = self._welcome.limits.max_submit_bytes
            if len(body) > limit:
                raise LimitExceeded(f"a frame of {len(body):,} bytes, but the limit is {limit:,}; send several")
            message = decode_client(body)
        except PhloemError as error:
            self._refuse(client_id, body if len(frames) == 2 else b"", error)
            return
        if isinstance(message, Hello):
            self._greet(client_id, message.version)
        elif peer is None:
            text = "the engine does not know this client; say Hello first (after a silence it was dropped)"
            self._refuse(client_id, b"", ProtocolError(text, where="hello"))
        else:
            match message:
                case Ping():
                    self._reply(client_id, Pong())
                case Credit(n=n):
                    peer.add_credit(n)
                    self._flush(client_id, peer)
                case Bye():
                    self._forget(client_id)
                    inbox.append((client_id, message))
                case _:
                    inbox.append((client_id, message))

    def _is_flooding(self, client_id: bytes, peer: "_Peer", size_bytes: int) -> bool:
        """Whether a client that takes no replies has sent too much; it is forgotten then."""
        if peer.stuck is None:
            return False
        peer.unread_bytes += size_bytes + FRAME_BYTES
        limit = UNREAD_SUBMITS * self._welcome.limits.max_submit_bytes
        if peer.unread_bytes <= limit:
            return False
        text = f"it has taken no reply while it sent {peer.unread_bytes:,} bytes; the limit is {limit:,}"
        logger.warning("client %s is dropped: %s", client_id.hex(), text)
        self._forget(client_id)
        return True

    def _greet(self, client_id: bytes, version: object) -> None:
        if version != PROTOCOL_VERSION:
            text = f"protocol version {version!r}, but this engine speaks {PROTOCOL_VERSION}; install equal versions"
            self._refuse(client_id, b"", ProtocolError(text, where="hello"))
            return
        if client_id not in self._peers:
            self._peers[client_id] = _Peer(heard=self._clock())
        self._reply(client_id, self._welcome)

    def _refuse(self, client_id: bytes, body: bytes, error: PhloemError) -> None:
        """Answer a frame that cannot be used: to its program or query where the frame names one."""
        head = decode_head(body)
        if head.m == "hello" and head.version != PROTOCOL_VERSION:
            self._greet(client_id, head.version)
            return
        logger.debug("client %s: %s", client_id.hex(), error)
        if head.m == "submit" and head.program is not None and client_id in self._peers:
            self._reply(client_id, Rejected(program=head.program, errors=[error.info()]))
        elif (
            head.m in ("query", "embed", "export", "fetch", "import")
            and head.id is not None
            and client_id in self._peers
        ):
            self._reply(client_id, Answer(id=head.id, error=error.info()))
        else:
            self._reply(client_id, ProtocolFault(error=error.info()))

    def _admit(self) -> None:
        """Answer ZeroMQ's question whether a client's key is admitted."""
        assert self._gate is not None and self._keys is not None
        version, request, _domain, _address, _identity, mechanism, *credentials = self._gate.recv_multipart()
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        status, text = (b"200", b"OK") if key in self._keys.clients else (b"400", b"this key is not admitted")
        self._gate.send_multipart([version, request, status, text, b"", b""])

    def _drop_silent(self, now: float, inbox: Inbox) -> None:
        for client_id, peer in list(self._peers.items()):
            silence_s = now - peer.heard
            if silence_s > self._client_timeout_s:
                logger.warning("client %s was silent for %.1f s and is dropped", client_id.hex(), silence_s)
                text = f"this client was silent for {silence_s:.1f} s, the limit is {self._client_timeout_s:g} s"
                fault = ProtocolFault(error=ProtocolError(f"{text}; its programs were cancelled", where="hello").info())
                self._forget(client_id)
                inbox.append((client_id, Bye()))
                self._reply(client_id, fault)

    def _forget(self, client_id: bytes) -> None:
        del self._peers[client_id]
        self._backlog.pop(client_id, None)

    # -- out ----------------------------------------------------------------------------------------------------------

    def _reply(self, client_id: bytes, message: RuntimeMessage) -> None:
        peer = self._peers.get(client_id)
        if peer is not None:
            peer.add(message)
            self._flush(client_id, peer)
            return
        try:  # a client that was not welcomed has no queue
            self._socket.send_multipart([client_id, encode_runtime([message])], zmq.NOBLOCK)
        except zmq.ZMQError:
            logger.debug("client %s could not be answered", client_id.hex())

    def _flush_backlog(self) -> None:
        for client_id in list(self._backlog):
            self._flush(client_id, self._peers[client_id])

    def _flush(self, client_id: bytes, peer: "_Peer") -> None:
        while True:
            frame = peer.next_frame()
            if frame is None:
                self._backlog.pop(client_id, None)
                return
            try:
                self._socket.send_multipart([client_id, frame], zmq.NOBLOCK)
                peer.unread_bytes = 0
            except zmq.Again:
                peer.stuck = frame
                self._backlog[client_id] = None
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                logger.warning("client %s is gone", client_id.hex())
                self._forget(client_id)
                self._departed.append(client_id)
                return


DeltaKey = tuple[str, int]  # program, op


@dataclass(slots=True)
class _Held:
    """Merged deltas of one candidate that wait for credit."""

    texts: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    index: int
    origin: str

    def delta(self, key: DeltaKey) -> Delta:
        return Delta(
            program=key[0],
            op=key[1],
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            index=self.index,
            origin=self.origin,
        )


@dataclass(slots=True)
class _Peer:
    """One client: its credit, and the messages that wait for it.

    [stuck: a frame ZeroMQ would not take]   [waiting: messages, in order]   [held: deltas that wait for credit]
    """

    heard: float
    credit: int | None = None
    stuck: bytes | None = None
    unread_bytes: int = 0  # that the client has sent since it last took a frame
    waiting: list[RuntimeMessage] = field(default_factory=list)
    held: dict[DeltaKey, list[_Held]] = field(default_factory=dict)

    def add(self, message: RuntimeMessage) -> None:
        if isinstance(message, Done | Failed):
            self._release((message.program, message.op))  # its deltas go first, whatever the credit
        elif isinstance(message, Closed):
            for key in [key for key in self.held if key[0] == message.program]:
                self._release(key)
        self.waiting.append(message)

    def add_delta(self, delta: Delta) -> None:
        key = (delta.program, delta.op)
        if self.stuck is None and key not in self.held and (self.credit is None or self.credit > 0):
            self._spend()
            self.waiting.append(delta)
            return
        waiting = self.held.setdefault(key, [])
        last = next((held for held in reversed(waiting) if held.index == delta.index), None)
        if last is None or last.origin != delta.origin:
            last = _Held([], [], [], delta.index, delta.origin)
            waiting.append(last)
        last.texts.append(delta.text)
        last.token_ids.extend(delta.token_ids)
        last.logprobs.extend(delta.logprobs)

    def add_credit(self, n: int) -> None:
        self.credit = (self.credit or 0) + max(0, n)

    def next_frame(self) -> bytes | None:
        """The next frame to send; the caller stores it in ``stuck`` when ZeroMQ does not take it."""
        if self.stuck is not None:
            frame, self.stuck = self.stuck, None
            return frame
        while self.held and (self.credit is None or self.credit > 0):
            self._release(next(iter(self.held)), limit=self.credit)
        if not self.waiting:
            return None
        messages, self.waiting = self.waiting, []
        return encode_runtime(messages)

    def _release(self, key: DeltaKey, *, limit: int | None = None) -> None:
        held = self.held.pop(key, [])
        if limit is not None and limit < len(held):
            self.held[key] = held[limit:]
            held = held[:limit]
        for delta in held:
            self._spend()
            self.waiting.append(delta.delta(key))

    def _spend(self) -> None:
        if self.credit is not None:
            self.credit -= 1


def set_server_keys(server: "zmq.Socket[bytes]", keys: ServerKeys) -> None:
    """Before ``server`` is bound. The ``EngineSocket`` of its context, which has the same keys, admits its clients."""
    server.setsockopt(zmq.CURVE_SERVER, 1)
    server.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    server.setsockopt(zmq.ZAP_DOMAIN, b"phloem")


def _gate(context: zmq.Context[Any]) -> "zmq.Socket[bytes]":
    """The socket on which ZeroMQ asks about keys; one for each context."""
    gate: zmq.Socket[bytes] = context.socket(zmq.REP)
    try:
        gate.bind(ZAP_ENDPOINT)
    except zmq.ZMQError as error:
        gate.close(linger=0)
        raise InvalidParams(
            "this ZeroMQ context already has an engine socket with keys; give another", where="keys"
        ) from error
    return gate


def _check_free(path: Path) -> None:
    """Raises where the path is in use: ZeroMQ removes any file at an ipc path before it binds."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidParams(f"cannot listen at ipc://{path}: a file lies there; choose another address", where="url")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left behind by an engine that was killed
        except OSError as error:
            raise InvalidParams(f"cannot listen at ipc://{path}: {error.strerror}", where="url") from error
    text = f"cannot listen at ipc://{path}: another engine listens there; stop it or choose another address"
    raise InvalidParams(text, where="url")
