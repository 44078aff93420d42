"""Programs over HTTP: the operations of the protocol as JSON in, the runtime's messages as lines of JSON out.

``POST /v1/programs`` opens a program and streams its messages until it is closed; ``POST /v1/programs/{program}`` adds
operations to it, ``DELETE`` cancels it. Never looks into an operation: the engine checks them.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol import errors
from ...protocol.client import Client
from ...protocol.messages import Closed, Rejected, RuntimeMessage, Submit
from . import faults
from .flight import Bridge
from .response import fail_on_disconnect
from .service import Service, json_response

HEARTBEAT_S = 15.0  # a stream that has nothing to say sends an empty line after this
_submits = msgspec.json.Decoder(Submit)


class RunningProgram:
    """One program's messages, brought to the event loop by ``Bridge``. Ends with ``Closed`` or a first ``Rejected``."""

    def __init__(self, client: Client, program: str) -> None:
        self.program = program
        self._client = client
        self._messages: list[RuntimeMessage] = []
        self._is_over = False
        self._is_accepted = False
        self._failure: errors.PhloemError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def messages(self, *, timeout_s: float | None = None) -> Sequence[RuntimeMessage] | None:
        """All that has come since the last call; empty after ``timeout_s`` of silence, None at the end."""
        if not self._messages and self._failure is None and not self._is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._waiter, timeout_s)
        if self._failure is not None:
            raise self._failure
        if not self._messages:
            return None if self._is_over else ()
        messages, self._messages = self._messages, []
        return messages

    def take(self, message: RuntimeMessage) -> None:
        """On the loop's thread."""
        self._messages.append(message)
        if isinstance(message, Closed) or (isinstance(message, Rejected) and not self._is_accepted):
            self._is_over = True
        self._is_accepted = True
        self._wake()

    def fail(self, error: errors.PhloemError) -> None:
        self._failure = self._failure or error
        self.close()
        self._wake()

    def close(self) -> None:
        """Nobody reads on: what still runs is cancelled."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(errors.PhloemError):  # the engine is gone, and the program with it
                self._client.cancel(self.program)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ProgramResponse(Response):
    """A program's messages as they come, one JSON object a line. What is refused at once is an error and no stream."""

    def __init__(self, bridge: Bridge, submit: Submit, client: Client) -> None:
        self.background = None
        self.body = b""
        self.status_code = 200
        self.init_headers(None)
        self._bridge = bridge
        self._submit = submit
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = RunningProgram(self._client, self._submit.program)
        self._bridge.carry(running, self._submit)
        watch = asyncio.ensure_future(fail_on_disconnect(receive, running))
        try:
            messages = await running.messages()
            if messages and isinstance(rejected := messages[0], Rejected):
                await _refusal(rejected)(scope, receive, send)
                return
            await self._send(running, messages, send)
        except errors.Cancelled:
            if not watch.done():  # the client is still there: tell it
                raise
        finally:
            watch.cancel()
            self._bridge.land(running)

    async def _send(self, running: RunningProgram, messages: Sequence[RuntimeMessage] | None, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        encode = msgspec.json.encode
        with contextlib.suppress(errors.PhloemError):  # then the stream ends without a Closed, which tells enough
            while messages is not None:
                body = b"".join([encode(message) + b"\n" for message in messages]) or b"\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
                messages = await running.messages(timeout_s=HEARTBEAT_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def program_routes(service: Service) -> APIRouter:
    router = APIRouter()
    client = service.client

    @router.get("/v1/welcome")
    async def welcome() -> Response:
        """What a client has to know of the engine: model, template, limits."""
        return Response(msgspec.json.encode(client.welcome), media_type="application/json")

    @router.post("/v1/programs")
    async def begin(http: Request) -> Response:
        return ProgramResponse(service.bridge, _read(await service.read_body(http)), client)

    @router.post("/v1/programs/{program}")
    async def go_on(program: str, http: Request) -> Response:
        """What becomes of the operations comes with the program's own stream."""
        submit = _read(await service.read_body(http))
        if submit.program != program:
            message = f"the body is of program {submit.program!r}, the path of {program!r}"
            raise errors.InvalidRequest(message, where="program")
        client.submit(submit)
        return json_response({"program": program}, status=202)

    @router.delete("/v1/programs/{program}")
    async def cancel(program: str, seq: int | None = None, op: int | None = None) -> Response:
        """Nothing happens to a program that has ended."""
        client.cancel(program, seq, op)
        return json_response({"program": program})

    return router


def _read(body: bytes) -> Submit:
    try:
        submit = _submits.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidRequest(f"the body is no submit: {error}") from error
    if not submit.program:
        raise errors.InvalidRequest("a submit has a program: any name that no other program has", where="program")
    return submit


def _refusal(rejected: Rejected) -> Response:
    """The error as for every route, and the message as the engine gave it."""
    fault = faults.of_error(errors.from_info(rejected.errors[0]))
    body = {**msgspec.json.decode(fault.body), "rejected": msgspec.to_builtins(rejected)}
    return Response(msgspec.json.encode(body), fault.status, fault.headers, media_type="application/json")
