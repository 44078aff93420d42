"""One HTTP connection with limits of time: for a request's headers, for its body, and for a client that does not read.

    waiting for headers ──► waiting for the body ──► answering ──► waiting for headers
       headers_s               body_s                 write_s       idle_s, then headers_s

uvicorn itself limits only the time between two requests (``idle_s``).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..config import ConnectionLimits
from .faults import Fault

logger = logging.getLogger(__name__)


class LimitedConnection(H11Protocol):
    """Made by uvicorn, from a subclass of this class that ``connection_class`` gives its ``limits``."""

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wait: tuple[str, asyncio.TimerHandle] | None = None  # what the client has to send, and until when
        self._write: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        most, address = self.limits.per_address, self.client and self.client[0]
        others = (other.client for other in self.connections if isinstance(other, LimitedConnection))
        if most and sum(client is not None and client[0] == address for client in others) > most:
            message = f"{address} has {most:,} connections open, which is the limit here; close some or try again later"
            self._refuse(Fault(429, message, "rate_limit_error", code="too_many_connections"))
        else:
            self._await("headers", self.limits.headers_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()
        self._await_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered as every error is."""
        self._refuse(Fault(400, f"{msg} Send HTTP/1.1.", code="invalid_http"))

    def shutdown(self) -> None:
        """The server stops. A request that has not come whole is not waited for."""
        super().shutdown()
        is_answering = self.cycle is not None and self.cycle.response_started
        if self.conn.their_state is h11.SEND_BODY and not is_answering and not self.transport.is_closing():
            self._refuse(Fault(503, "the server is shutting down; try again later", "server_error", code="engine_lost"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_wait()
        self._stop_write()
        super().connection_lost(exc)

    # -- what the client has to send ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Look at how far the request has come."""
        if self.transport.is_closing():
            self._stop_wait()
        elif self.conn.their_state is h11.SEND_BODY:
            self._await("body", self.limits.body_s)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await("headers", self.limits.headers_s)
        else:
            self._stop_wait()

    def _await(self, what: str, limit_s: float) -> None:
        if self._wait is None or self._wait[0] != what:
            self._stop_wait()
            self._wait = what, self.loop.call_later(limit_s, self._is_late, what, limit_s)

    def _stop_wait(self) -> None:
        if self._wait is not None:
            self._wait[1].cancel()
            self._wait = None

    def _is_late(self, what: str, limit_s: float) -> None:
        self._wait = None
        has_begun = self.cycle is not None and self.cycle.response_started and what == "body"
        if has_begun or (what == "headers" and not self.conn.trailing_data[0]):
            self.transport.close()
        else:
            message = f"the request's {what} did not come within {limit_s:g} seconds; send the request again"
            self._refuse(Fault(408, message, "timeout_error", code="request_timeout"))

    def _refuse(self, fault: Fault) -> None:
        """Answer outside of any request, and close."""
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers += [(b"content-length", b"%d" % len(fault.body)), (b"x-request-id", uuid.uuid4().hex.encode())]
        events = (h11.Response(status_code=fault.status, headers=headers), h11.Data(fault.body), h11.EndOfMessage())
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # -- what the client has to read ----------------------------------------------------------------------------------

    def _await_reader(self) -> None:
        if self._write is None and (size := self.transport.get_write_buffer_size()):
            self._write = self.loop.call_later(self.limits.write_s, self._look_at_reader, size)

    def _stop_write(self) -> None:
        if self._write is not None:
            self._write.cancel()
            self._write = None

    def _look_at_reader(self, size_before: int) -> None:
        self._write = None
        if self.transport.get_write_buffer_size() < size_before:
            self._await_reader()
        else:
            logger.info("a client has read nothing for %g s and is disconnected", self.limits.write_s)
            self.transport.abort()


def connection_class(limits: ConnectionLimits) -> type[LimitedConnection]:
    """The class of connections for uvicorn's ``http=``; ``limits.idle_s`` is its ``timeout_keep_alive``."""
    return type("LimitedConnection", (LimitedConnection,), {"limits": limits})
