"""The engine's half of the wire: one ROUTER socket. Never runs an op and never blocks on a slow client.

Hello, Ping and Credit are answered here; everything else goes to the engine. A delta that a client has no credit for
waits and grows: deltas of one candidate merge. A client that never sends ``Credit`` has no limit.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from .protocol.errors import InvalidRequest, ProtocolError
from .protocol.messages import (
    PROTOCOL_VERSION,
    Bye,
    ClientMessage,
    Credit,
    Delta,
    Hello,
    Ping,
    Pong,
    ProtocolFault,
    RuntimeMessage,
    Welcome,
)

log = logging.getLogger(__name__)

Inbox = list[tuple[bytes, ClientMessage]]
Outbox = list[tuple[bytes, RuntimeMessage]]


class _Peer:
    __slots__ = ("credit", "heard_s", "held")

    def __init__(self, now_s: float) -> None:
        self.heard_s = now_s
        self.credit: int | None = None
        self.held: dict[tuple[str, int, int], Delta] = {}


class Router:
    """Owned by the engine's thread. ``num_faults`` counts frames that were not of the protocol."""

    def __init__(
        self,
        url: str,
        welcome: Welcome,
        *,
        context: zmq.Context[Any] | None = None,
        client_timeout_s: float = 30.0,
        max_frame_bytes: int = 32 << 20,
        server_keys: tuple[bytes, bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_faults = 0
        self._welcome = welcome
        self._client_timeout_s = client_timeout_s
        self._clock = clock
        self._peers: dict[bytes, _Peer] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
        self._socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self._socket.linger = 200
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        parts = urlsplit(url)
        if server_keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = server_keys
            self._socket.curve_server = True
        elif parts.scheme == "tcp" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            self._socket.close(0)
            raise InvalidRequest(
                f"{url}: a tcp address that others can reach needs CurveZMQ keys; bind to 127.0.0.1 or use ipc://"
            )
        self._path = Path(url.removeprefix("ipc://")) if parts.scheme == "ipc" else None
        mask = os.umask(0o177)
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise InvalidRequest(f"cannot listen at {url}: {error.strerror or error}; choose another address") from None
        finally:
            os.umask(mask)
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT) if parts.scheme == "tcp" else url

    def receive(self, timeout_s: float) -> Inbox:
        """What clients said, waiting up to ``timeout_s`` for the first word. A client's ``Bye`` is passed on."""
        inbox: Inbox = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return inbox
        now_s = self._clock()
        for _ in range(1024):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            peer = self._peers.get(client)
            if peer is None:
                peer = self._peers[client] = _Peer(now_s)
            peer.heard_s = now_s
            try:
                message = self._decoder.decode(frames[-1] if frames else b"")
            except msgspec.MsgspecError as error:
                self.num_faults += 1
                info = ProtocolError(f"a frame of {sum(map(len, frames)):,} bytes was not understood: {error}").info()
                self._write(client, [ProtocolFault(info)])
                continue
            match message:
                case Ping():
                    self._write(client, [Pong()])
                case Hello():
                    self._greet(client, message)
                case Credit(n=n):
                    peer.credit = (peer.credit or 0) + n
                    self._release(client, peer)
                case Bye():
                    self._peers.pop(client, None)
                    inbox.append((client, message))
                case _:
                    inbox.append((client, message))
        return inbox

    def silent_clients(self) -> list[bytes]:
        """Clients not heard of for too long; they are forgotten here, and the engine should drop their programs."""
        limit_s = self._clock() - self._client_timeout_s
        gone = [client for client, peer in self._peers.items() if peer.heard_s < limit_s]
        for client in gone:
            del self._peers[client]
        return gone

    def send(self, outbox: Outbox) -> None:
        """One frame per client."""
        frames: dict[bytes, list[RuntimeMessage]] = {}
        for client, message in outbox:
            peer = self._peers.get(client)
            if peer is not None and (peer.credit is not None or peer.held):
                if isinstance(message, Delta):
                    if not self._spend(peer, message):
                        continue
                else:
                    frames.setdefault(client, []).extend(self._held_of(peer, message))
            frames.setdefault(client, []).append(message)
        for client, messages in frames.items():
            self._write(client, messages)

    def close(self) -> None:
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self.num_faults += 1
            text = f"protocol version {hello.version}, but this engine speaks {PROTOCOL_VERSION}; use equal versions"
            self._write(client, [ProtocolFault(ProtocolError(text).info())])
        else:
            self._write(client, [self._welcome])

    def _spend(self, peer: _Peer, delta: Delta) -> bool:
        """Whether ``delta`` may go now; else it waits with those before it."""
        key = (delta.program, delta.op, delta.index)
        if peer.credit is not None and peer.credit > 0 and key not in peer.held:
            peer.credit -= 1
            return True
        before = peer.held.get(key)
        peer.held[key] = delta if before is None else _merged(before, delta)
        return False

    @staticmethod
    def _held_of(peer: _Peer, message: RuntimeMessage) -> list[RuntimeMessage]:
        """Deltas that must precede ``message``: what an op held back goes before its end."""
        program, op = getattr(message, "program", None), getattr(message, "op", None)
        keys = [key for key in peer.held if key[0] == program and (op is None or key[1] == op)]
        return [peer.held.pop(key) for key in keys]

    def _release(self, client: bytes, peer: _Peer) -> None:
        ready: list[RuntimeMessage] = []
        while peer.held and (peer.credit is None or peer.credit > 0):
            ready.append(peer.held.pop(next(iter(peer.held))))
            if peer.credit is not None:
                peer.credit -= 1
        if ready:
            self._write(client, ready)

    def _write(self, client: bytes, messages: list[RuntimeMessage]) -> None:
        try:
            self._socket.send_multipart([client, self._encoder.encode(messages)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the client has gone, or its buffers are full: its silence will end it
            log.debug("a frame to %s was dropped: %s", client.hex(), error)


def _merged(a: Delta, b: Delta) -> Delta:
    return msgspec.structs.replace(
        b, text=a.text + b.text, token_ids=a.token_ids + b.token_ids, logprobs=a.logprobs + b.logprobs
    )
