"""An HTTP client for benchmarks. The server under test shares the processor with it, so it does little per answer.

It speaks as much of HTTP/1.1 as the answers of a model server need. It stores what arrives with its time, and takes it
apart after the answer has ended.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LIMIT_S = 600.0  # for one answer
_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """``pieces``: the body as it came, each piece with the seconds since the request was sent."""

    status: int
    pieces: list[tuple[float, bytes]]

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class LightClient:
    """Connections to one server. ``keep_alive``: they are used again."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, keep_alive: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url!r}: must be http://HOST[:PORT]")
        self._place, self._base = (parts.hostname, parts.port or 80), parts.path.rstrip("/")
        self._keep_alive = keep_alive
        fields = {"host": parts.netloc, "content-type": "application/json", **(headers or {})}
        if not keep_alive:
            fields["connection"] = "close"
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes) -> Reply:
        """Raises OSError where the server cannot be reached or closes before the answer has ended, or where that takes
        longer than ``LIMIT_S`` seconds.
        """
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode()
        start = time.perf_counter()
        connection = self._take_idle()
        if connection is None:
            host, port = self._place
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
        try:
            received = await asyncio.wait_for(connection.ask(head + body), LIMIT_S)
        except BaseException:  # an answer under way would be taken for that of the next request
            connection.close()
            raise
        if self._keep_alive and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return _reply(received, start)

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None


@dataclass(eq=False)
class _Connection(asyncio.Protocol):
    """Stores what arrives until the answer has ended."""

    is_open: bool = True
    _pieces: list[tuple[float, bytes]] = field(default_factory=list)
    _head: bytes | None = None  # the answer's, once all of it is there
    _left: int | None = None  # bytes of a body whose length is told
    _done: "asyncio.Future[None] | None" = None
    _transport: Any = None

    async def ask(self, request: bytes) -> list[tuple[float, bytes]]:
        """All that arrives for the request, each piece with its time."""
        self._pieces, self._head, self._left = [], None, None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self._pieces

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        if self._head is None:
            so_far = b"".join(piece for _, piece in self._pieces)
            head, end, rest = so_far.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = head.lower()
            length = _field(self._head, b"content-length")
            self._left = None if length is None else int(length) - len(rest)
        elif self._left is not None:
            self._left -= len(data)
        # JSON has no bare carriage return, so no event ends as the last chunk does.
        is_over = self._left == 0 if self._left is not None else self._tail().endswith(_LAST_CHUNK)
        if is_over and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        has_all = self._head is not None and self._left is None and b"chunked" not in self._head
        if has_all:  # a body that ends with its connection
            self._done.set_result(None)
        else:
            self._done.set_exception(error or ConnectionResetError("the server closed before its answer had ended"))

    def _tail(self) -> bytes:
        last = self._pieces[-1][1]
        if len(last) >= len(_LAST_CHUNK):
            return last
        return b"".join(piece for _, piece in self._pieces[-len(_LAST_CHUNK) :])


def _field(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        found, _, value = line.partition(b":")
        if found.strip() == name:
            return value.strip()
    return None


def _reply(received: list[tuple[float, bytes]], start: float) -> Reply:
    so_far, rest = b"", received
    while b"\r\n\r\n" not in so_far:
        so_far += rest[0][1]
        at, rest = rest[0][0], rest[1:]
    head, _, first = so_far.partition(b"\r\n\r\n")
    pieces = [(at - start, first), *((then - start, piece) for then, piece in rest)]
    if b"chunked" in (_field(head.lower(), b"transfer-encoding") or b""):
        pieces = list(without_chunks(pieces))
    return Reply(int(head.split(b" ", 2)[1]), [(then, piece) for then, piece in pieces if piece])


def without_chunks(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The bytes of a chunked body (RFC 9112, 7.1), cut as ``pieces`` are."""
    line, left = b"", 0  # of a chunk's length, and of what comes of it, with the line end behind it
    for then, piece in pieces:
        found = bytearray()
        while piece:
            if left:
                taken, piece = piece[:left], piece[left:]
                found += taken[: max(0, left - 2)]  # without the line end
                left -= len(taken)
                continue
            until = piece.find(b"\n")
            if until < 0:
                line, piece = line + piece, b""
                continue
            size = int((line + piece[:until]).split(b";")[0], 16)
            line, piece = b"", piece[until + 1 :]
            if not size:
                yield then, bytes(found)
                return
            left = size + 2
        yield then, bytes(found)
