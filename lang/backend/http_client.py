"""A client of a runtime behind HTTP: the same programs and messages as over ZeroMQ, as JSON through ``/v1/programs``.

One event loop on one thread carries all programs. Never reconnects a program: when its stream breaks, its operations
fail once with ``EngineLost``.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ...protocol import errors
from ...protocol.messages import Rejected, RuntimeMessage, Submit, Welcome
from ...protocol.program_call import ProgramCall
from .drivers import LoopThread

logger = logging.getLogger(__name__)

SILENCE_S = 60.0  # a stream says something every 15 s, if only an empty line
_messages = msgspec.json.Decoder(RuntimeMessage)
_KIND_OF_CODE = {
    "model_not_found": "UnknownModel",
    "context_length_exceeded": "PromptTooLong",
    "invalid_grammar": "InvalidGrammar",
    "invalid_value": "InvalidParams",
    "limit_exceeded": "LimitExceeded",
    "body_too_large": "LimitExceeded",
    "unsupported": "Unsupported",
    "overloaded": "Overloaded",
    "rate_limit_exceeded": "RateLimited",
    "cancelled": "Cancelled",
    "deadline_exceeded": "DeadlineExceeded",
    "engine_lost": "EngineLost",
    "internal_error": "InternalError",
}
_QUERIES = {
    "info": ("GET", "/server_info", "engine"),
    "flush_cache": ("POST", "/flush_cache", "flushed"),
    "cache_tree": ("GET", "/cache_tree", None),
}


class NotOurs(errors.InvalidRequest):
    """A server that does not know programs."""


class _Running:
    """A program on its way. Lives on the loop; only ``HttpClient`` knows it."""

    def __init__(self, call: ProgramCall) -> None:
        self.call = call
        self.later: deque[Submit | dict[str, int]] = deque()  # what follows the first submit: submits, cancels
        self.is_sending = False  # a task works through ``later``
        self.is_known = asyncio.Event()  # the server has it, or never will

    def reject(self, submit: Submit, error: errors.PhloemError) -> None:
        self.call.refuse(submit, Rejected(self.call.program, [error.info()]))


class HttpClient:
    """The interface of ``protocol.client.Client`` over ``http://``; methods may be called on any thread.

    ``model``: which of the server's models runs the programs; None: the only one, or the first.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        verify: str | bool | None = None,
        model: str | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.url = url.rstrip("/")
        options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "params": {} if model is None else {"model": model},
            "verify": ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify is not False,
        }
        timeout = httpx.Timeout(30.0, connect=connect_timeout_s, read=SILENCE_S, pool=None)
        self._http = httpx.Client(**options, timeout=timeout)
        try:
            if model is not None:  # a server of one model does not look at the query
                self._ask("GET", f"/v1/models/{quote(model)}")
            self.welcome = msgspec.json.decode(self._ask("GET", "/v1/welcome").content, type=Welcome)
        except msgspec.MsgspecError:  # a server that answers every path
            self._http.close()
            raise NotOurs(
                f"{self.url}/v1/welcome: not what a Phloem server says; is it one of another project?"
            ) from None
        except BaseException:
            self._http.close()
            raise
        # streams have connections of their own, so that what ends them never waits for one
        self._streams = httpx.AsyncClient(**options, timeout=timeout, limits=httpx.Limits(max_connections=1000))
        self._control = httpx.AsyncClient(**options, timeout=timeout)
        self._thread = LoopThread("phloem-http")
        self._running: dict[str, _Running] = {}  # on the loop
        self._known: set[str] = set()  # programs whose first submit was sent
        self._lock = threading.Lock()
        self._is_closed = False

    # -- the client's interface ---------------------------------------------------------------------------------------

    def submit(self, submit: Submit, call: ProgramCall) -> None:
        """Send ops of ``call``, whose own ``submit`` calls this."""
        with self._lock:
            if self._is_closed:
                raise errors.EngineLost(f"{self.url}: this client was closed")
            is_first = submit.program not in self._known
            self._known.add(submit.program)
            self._thread.call(self._send, submit, call if is_first else None)

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        """End a program, a sequence of it or one op. Nothing happens when it has ended already."""
        with self._lock:
            if not self._is_closed:
                self._thread.call(self._end, program, seq, op)

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        if what not in _QUERIES:
            known = ", ".join(_QUERIES)
            raise errors.Unsupported(
                f"query {what!r} over http://: there are {known} (metrics are at {self.url}/metrics)"
            )
        method, path, field = _QUERIES[what]
        answer = self._ask(method, path, timeout_s=timeout_s).json()
        return answer if field is None else answer[field]

    def close(self) -> None:
        """End what runs; a second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._thread.stop(self._streams.aclose, self._control.aclose)
        self._http.close()

    def _ask(self, method: str, path: str, *, timeout_s: float | None = None) -> httpx.Response:
        try:
            timeout: Any = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
            response = self._http.request(method, path, timeout=timeout)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        if response.status_code in (404, 405) and b'"model_not_found"' not in response.content:
            raise NotOurs(f"{self.url}: no {path} there; is it a server of another project?")
        if response.is_error:
            raise self._error_of(response.status_code, response.content)
        return response

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _send(self, submit: Submit, call: ProgramCall | None) -> Coroutine[Any, Any, None] | None:
        if call is not None:
            running = self._running[submit.program] = _Running(call)
            return self._stream(running, submit)
        known = self._running.get(submit.program)  # None: it has ended meanwhile
        return None if known is None else self._add(known, submit)

    def _end(self, program: str, seq: int | None, op: int | None) -> Coroutine[Any, Any, None] | None:
        if (running := self._running.get(program)) is None:
            return None
        return self._add(running, {name: at for name, at in (("seq", seq), ("op", op)) if at is not None})

    def _add(self, running: _Running, item: Submit | dict[str, int]) -> Coroutine[Any, Any, None] | None:
        running.later.append(item)
        if running.is_sending:
            return None
        running.is_sending = True
        return self._go_on(running)

    async def _stream(self, running: _Running, submit: Submit) -> None:
        """A program's first submit, and all its messages."""
        body = msgspec.json.encode(submit)
        headers = {"content-type": "application/json"}
        error: errors.PhloemError = errors.EngineLost(f"{self.url}: the stream ended before the program did")
        try:
            async with self._streams.stream("POST", "/v1/programs", content=body, headers=headers) as response:
                if response.is_error:
                    await response.aread()
                    running.reject(submit, self._error_of(response.status_code, response.content))
                    return
                running.is_known.set()
                async for line in response.aiter_lines():
                    if line:
                        running.call.take(_messages.decode(line))
        except httpx.TransportError as found:
            error = self._lost(found)
        except msgspec.MsgspecError as found:
            error = errors.ProtocolError(f"{self.url}: a line was not understood: {found}")
        except asyncio.CancelledError:
            error = errors.Cancelled("the client was closed")
        finally:
            running.call.lose(error)
            running.is_known.set()
            self._running.pop(running.call.program, None)
            with self._lock:
                self._known.discard(running.call.program)

    async def _go_on(self, running: _Running) -> None:
        """Later submits and cancels of a program, in order."""
        await running.is_known.wait()
        path = f"/v1/programs/{running.call.program}"
        while running.later and not running.call.is_over:
            item = running.later.popleft()
            try:
                if isinstance(item, Submit):
                    response = await self._control.post(
                        path, content=msgspec.json.encode(item), headers={"content-type": "application/json"}
                    )
                else:
                    response = await self._control.delete(path, params=item)
            except httpx.TransportError as found:
                error: errors.PhloemError = self._lost(found)
            else:
                if not response.is_error:
                    continue
                error = self._error_of(response.status_code, response.content)
            if isinstance(item, Submit):
                running.reject(item, error)
            else:
                logger.warning("could not cancel in program %s: %s", running.call.program, error)
        running.is_sending = False

    # -- errors -------------------------------------------------------------------------------------------------------

    def _lost(self, error: Exception) -> errors.EngineLost:
        return errors.EngineLost(f"{self.url}: {error or type(error).__name__}; is a server running there?")

    def _error_of(self, status: int, body: bytes) -> errors.PhloemError:
        """What the server has said, as the error it was."""
        try:
            answer = msgspec.json.decode(body)
            if rejected := answer.get("rejected"):
                return errors.from_info(msgspec.convert(rejected, Rejected).errors[0])
            fault = answer["error"]
            kind = _KIND_OF_CODE.get(fault.get("code") or "", "InvalidRequest" if status < 500 else "PhloemError")
            return errors.from_info(errors.ErrorInfo(kind, fault["message"], fault.get("param") or ""))
        except (msgspec.MsgspecError, AttributeError, KeyError, TypeError):
            text = body[:300].decode(errors="replace")
            kind_of = errors.InvalidRequest if status < 500 else errors.PhloemError
            return kind_of(f"{self.url}: {status} {text}")
