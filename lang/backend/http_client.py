"""A client of a runtime behind HTTP: the same programs and messages as over ZeroMQ, as JSON through ``/v1/programs``.

One event loop on one thread carries all programs. Each has a journal: when its stream breaks, because the server or a
proxy before it has ended, the program is sent again under another id, with what it has had so far. The caller sees a
pause; after ``reconnect_s`` without a server its operations fail once with ``EngineLost``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import ssl
import threading
import time
from collections.abc import Coroutine
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ...protocol import errors
from ...protocol.journal import Journal, with_seeds
from ...protocol.messages import Cancel, Failed, Rejected, RuntimeMessage, Submit, Welcome
from ...protocol.program_call import ProgramCall
from .drivers import LoopThread
from .http_program import HttpProgram

logger = logging.getLogger(__name__)

RECONNECT_S = 30.0
PAUSE_S, MAX_PAUSE_S = 0.1, 2.0  # between attempts, while there is no server
MAX_STRIKES = 3  # streams of a program that break without anything new
MAX_TRIES, TRY_S = 40, 0.05  # to find the one of several servers that has a program
MAX_JOURNAL_BYTES = 64 << 20  # of one program
LOST_STATUSES = (500, 502, 503, 504)
JSON = {"content-type": "application/json"}
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


class HttpClient:
    """The interface of ``protocol.client.Client`` over ``http://``; methods may be called on any thread.

    ``model``: which of the server's models runs the programs; None: the only one, or the first. ``reconnect_s``: how
    long a program whose stream breaks waits for a server; 0: its operations fail at once.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        verify: str | bool | None = None,
        model: str | None = None,
        connect_timeout_s: float = 10.0,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        if not 0 <= reconnect_s < math.inf:
            text = f"reconnect_s={reconnect_s}: it must be 0 or more seconds; 0 fails programs whose stream breaks"
            raise errors.InvalidParams(text, where="reconnect_s")
        self._reconnect_s = reconnect_s
        self._rng = random.Random(os.urandom(16))
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
        self._running: dict[str, HttpProgram] = {}  # on the loop
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
        submit = with_seeds(submit, self._rng)
        if call is not None:
            journal = Journal(call.program, max_bytes=MAX_JOURNAL_BYTES, limits=self.welcome.limits)
            running = self._running[submit.program] = HttpProgram(call, journal)
            journal.sent(submit)
            return self._run(running, submit)
        known = self._running.get(submit.program)
        if known is None:  # it has ended meanwhile
            return None
        known.journal.sent(submit)
        return self._add(known, submit)

    def _end(self, program: str, seq: int | None, op: int | None) -> Coroutine[Any, Any, None] | None:
        if (running := self._running.get(program)) is None:
            return None
        if seq is None and op is None:
            running.is_cancelled.set()
        else:
            running.journal.sent(Cancel(program, seq, op))
        return self._add(running, {name: at for name, at in (("seq", seq), ("op", op)) if at is not None})

    def _add(self, running: HttpProgram, item: Submit | dict[str, int]) -> Coroutine[Any, Any, None] | None:
        running.later.append(item)
        return self._wake(running)

    def _wake(self, running: HttpProgram) -> Coroutine[Any, Any, None] | None:
        if running.is_sending or not running.later:
            return None
        running.is_sending = True
        return self._go_on(running)

    async def _run(self, running: HttpProgram, submit: Submit) -> None:
        """A program from its first submit to its end, in as many attempts as it takes."""
        error: errors.PhloemError | None = None
        try:
            while not running.call.is_over:
                error = await self._attempt(running, submit)
                if error is not None and not running.call.is_over:
                    running.note_loss()
                    self._refuse_or_go_on(running, error)
                    logger.warning("program %s is sent again: %s", running.call.program, error.message)
                    await self._pause(running)
                    submit = running.replay()
                    self._thread.call(self._wake, running)
        except asyncio.CancelledError:
            error = errors.Cancelled("the client was closed")
        except errors.PhloemError as found:
            error = found
        finally:
            running.call.lose(error or errors.EngineLost(f"{self.url}: the stream ended before the program did"))
            running.is_known.set()
            self._running.pop(running.call.program, None)
            with self._lock:
                self._known.discard(running.call.program)

    async def _attempt(self, running: HttpProgram, submit: Submit) -> errors.PhloemError | None:
        """Send ``submit`` and take what comes; returns why it ended before the program did."""
        running.num_attempts += 1
        running.broken = None
        running.is_taken = False
        running.reading = asyncio.create_task(self._stream(running, submit))
        try:
            return await running.reading
        except asyncio.CancelledError:
            if running.broken is None:  # the client is closed
                running.reading.cancel()
                raise
            return running.broken
        finally:
            running.reading = None
            running.is_known.clear()

    def _refuse_or_go_on(self, running: HttpProgram, error: errors.PhloemError) -> None:
        """Raises the error with which a program ends whose stream broke with ``error``, if it is not sent again."""
        can_go_on = isinstance(error, errors.EngineLost) and self._reconnect_s and running.journal.is_whole
        if not can_go_on or running.strikes >= MAX_STRIKES:
            raise error
        if time.monotonic() - running.lost_s > self._reconnect_s:
            raise errors.EngineLost(f"{error.message} (no server for {self._reconnect_s:g} s, reconnect_s)")

    async def _pause(self, running: HttpProgram) -> None:
        """Before another attempt. Raises Cancelled where the caller wants none."""
        waited_s = time.monotonic() - running.lost_s
        pause_s = self._rng.uniform(0.5, 1.5) * min(max(waited_s, PAUSE_S), MAX_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.is_cancelled.wait(), pause_s)
        if running.is_cancelled.is_set():
            raise errors.Cancelled(f"program {running.call.program!r} was cancelled")

    async def _stream(self, running: HttpProgram, submit: Submit) -> errors.PhloemError | None:
        """A program's first submit, and all its messages; returns why they ended before the program did."""
        body = msgspec.json.encode(msgspec.structs.replace(submit, program=running.id))
        try:
            async with self._streams.stream("POST", "/v1/programs", content=body, headers=JSON) as response:
                if response.is_error:
                    await response.aread()
                    error = self._error_of(response.status_code, response.content)
                    if self._reconnect_s and _is_loss(response.status_code, error):
                        return errors.EngineLost(error.message)
                    if running.journal.is_accepted:  # an earlier server had taken it
                        return error
                    running.reject(submit, error)
                    return error
                running.is_taken = True
                running.is_known.set()
                async for line in response.aiter_lines():
                    if not line:
                        continue
                    message = _messages.decode(line)
                    if self._reconnect_s and (lost := _loss_in(message)) is not None:
                        return lost
                    running.take(message)
        except httpx.TransportError as found:
            return self._lost(found)
        except msgspec.MsgspecError as found:
            return errors.ProtocolError(f"{self.url}: a line was not understood: {found}")
        return errors.EngineLost(f"{self.url}: the stream ended before the program did")

    async def _go_on(self, running: HttpProgram) -> None:
        """Later submits and cancels of a program, in order."""
        num_tries = 0
        while running.later and not running.call.is_over:
            await running.is_known.wait()
            if not running.later or running.call.is_over:
                continue
            item, attempt = running.later[0], running.num_attempts
            error = await self._post(running, item)
            if running.num_attempts != attempt or not running.is_known.is_set():
                continue  # the attempt is over; its journal has the item
            if _is_elsewhere(error) and num_tries < MAX_TRIES:  # the address may be that of several servers
                num_tries += 1
                await asyncio.sleep(TRY_S)
                continue
            num_tries = 0
            running.later.popleft()
            if error is None:
                continue
            if not isinstance(item, Submit):
                logger.warning("could not cancel in program %s: %s", running.call.program, error)
            elif self._reconnect_s and isinstance(error, errors.EngineLost) and running.reading is not None:
                running.broken = error
                running.is_known.clear()
                running.reading.cancel()
            else:
                running.reject(item, error)
        running.is_sending = False

    async def _post(self, running: HttpProgram, item: Submit | dict[str, int]) -> errors.PhloemError | None:
        path = f"/v1/programs/{running.id}"
        try:
            if isinstance(item, Submit):
                body = msgspec.json.encode(msgspec.structs.replace(item, program=running.id))
                response = await self._control.post(path, content=body, headers=JSON)
            else:
                response = await self._control.delete(path, params=item)
        except httpx.TransportError as found:
            return self._lost(found)
        if not response.is_error:
            return None
        error = self._error_of(response.status_code, response.content)
        return errors.EngineLost(error.message) if _is_loss(response.status_code, error) else error

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


def _is_loss(status: int, error: errors.PhloemError) -> bool:
    """Whether a refusal comes from a proxy whose server has ended, or from a server without engines."""
    return isinstance(error, errors.EngineLost) or (status in LOST_STATUSES and type(error) is errors.PhloemError)


def _loss_in(message: RuntimeMessage) -> errors.PhloemError | None:
    """The error of ``message`` where the server ends, or has no engine for the program any more."""
    found = [message.error] if isinstance(message, Failed) else message.errors if isinstance(message, Rejected) else []
    lost = [error for error in found if error.kind == "EngineLost"]
    return errors.from_info(lost[0]) if lost else None


def _is_elsewhere(error: errors.PhloemError | None) -> bool:
    return isinstance(error, errors.InvalidRequest) and "is not running here" in error.message
