"""Programs over HTTP: the operations of the protocol as JSON in, the runtime's messages as lines of JSON out.

``POST /v1/programs`` opens a program and streams its messages until it is closed; ``POST /v1/programs/{program}`` adds
operations to it, ``DELETE`` cancels it. The engine checks the operations.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol import errors
from ...protocol.messages import Closed, Failed, Limits, Rejected, RuntimeMessage, Submit
from ...protocol.program_call import OpFailed, ProgramEvent, SubmitRefused
from . import answers as a
from . import faults
from .bridge import Bridge, BridgedCall
from .openapi import answers, body_of, texts
from .query import Whole
from .response import fail_on_disconnect
from .service import Service, json_response, note_fault
from .tenants import sender_of_request

HEARTBEAT_S = 15.0  # a stream without messages sends an empty line after this
_submits = msgspec.json.Decoder(Submit)
_Running = dict[tuple[str, str], BridgedCall]  # by tenant and program


class ProgramResponse(Response):
    """A program's messages, one JSON object a line. A refusal of the first submit is an error status."""

    def __init__(self, bridge: Bridge, submit: Submit, running: _Running) -> None:
        super().__init__()
        self._bridge = bridge
        self._submit = submit
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        submit = self._submit
        bridged = await self._bridge.send(submit.ops, submit.settings, program=submit.program)
        key = _key(submit.program)
        self._running[key] = bridged
        watch = asyncio.ensure_future(fail_on_disconnect(receive, bridged))
        try:
            events = await bridged.events()
            if isinstance(events[0], SubmitRefused):
                await _refusal(events[0].rejected, scope)(scope, receive, send)
                return
            await self._send(bridged, events, send)
        except errors.Cancelled:
            if not watch.done():  # the client is still connected
                raise
        finally:
            watch.cancel()
            bridged.call.cancel()
            self._bridge.release(bridged)
            if self._running.get(key) is bridged:
                del self._running[key]

    async def _send(self, bridged: BridgedCall, events: Sequence[ProgramEvent], send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        encode = msgspec.json.encode
        with contextlib.suppress(errors.PhloemError):  # then the stream ends without a Closed
            while True:
                lines = [encode(_message_of(event, self._submit.program)) + b"\n" for event in events]
                await send({"type": "http.response.body", "body": b"".join(lines) or b"\n", "more_body": True})
                if events and isinstance(events[-1], Closed):
                    break
                events = await bridged.events(timeout_s=HEARTBEAT_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _message_of(event: ProgramEvent, program: str) -> RuntimeMessage:
    match event:
        case OpFailed():
            return Failed(program=program, op=event.op, error=event.error.info(), partial=event.partial)
        case SubmitRefused():
            return event.rejected
    return event


def program_routes(service: Service) -> APIRouter:
    router = APIRouter()
    client = service.client
    limits = client.welcome.limits
    running: _Running = {}

    @router.get("/v1/welcome", responses=answers(dict[str, Any]))
    async def welcome() -> Response:
        """The engine's ``Welcome``: model, template, limits."""
        return Response(msgspec.json.encode(client.welcome), media_type="application/json")

    @router.post(
        "/v1/programs",
        openapi_extra=body_of(Submit),
        response_class=Response,
        responses=texts("A message a line; empty lines keep the connection alive.", "application/x-ndjson"),
    )
    async def begin(http: Request) -> Response:
        """Opens a program and streams its messages until it is closed."""
        return ProgramResponse(service.bridge, _read(await service.read_body(http), limits), running)

    @router.post(
        "/v1/programs/{program}",
        openapi_extra=body_of(Submit),
        status_code=202,
        responses=answers(a.ProgramName, status=202),
    )
    async def go_on(program: str, http: Request) -> Response:
        """More operations for a running program, whose own stream reports how they end."""
        submit = _read(await service.read_body(http), limits)
        if submit.program != program:
            message = f"the body is of program {submit.program!r}, the path of {program!r}"
            raise errors.InvalidRequest(message, where="program")
        bridged = running.get(_key(program))
        if bridged is None:
            message = f"program {program!r} is not running here; begin it with POST /v1/programs"
            raise errors.InvalidRequest(message, where="program")
        await bridged.submit(submit.ops, submit.settings)
        return json_response({"program": program}, status=202)

    @router.delete("/v1/programs/{program}", responses=answers(a.ProgramName))
    async def cancel(program: str, seq: Whole | None = None, op: Whole | None = None) -> Response:
        """Cancels a program, or one of its sequences or operations; does nothing to a program that has ended."""
        if (bridged := running.get(_key(program))) is not None:
            bridged.call.cancel(seq, op)
        return json_response({"program": program})

    return router


def _key(program: str) -> tuple[str, str]:
    """A tenant's program is another's neither to continue nor to cancel."""
    sender = sender_of_request()
    return ("" if sender is None else sender.account.name), program


def _read(body: bytes, limits: Limits) -> Submit:
    try:
        submit = _submits.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidRequest(f"the body is not a submit: {error}") from error
    if len(submit.ops) > limits.max_ops_per_submit:
        text = f"{len(submit.ops):,} ops, but one submit may hold {limits.max_ops_per_submit:,}"
        raise errors.LimitExceeded(f"{text}; send them in several submits", where="ops")
    if not submit.program:
        raise errors.InvalidRequest("a submit names its program: any id that no running program has", where="program")
    return submit


def _refusal(rejected: Rejected, scope: Scope) -> Response:
    """The error body of every route, plus the engine's message."""
    fault = faults.of_error(errors.from_info(rejected.errors[0]))
    note_fault(fault, scope)
    body = {**msgspec.json.decode(fault.body), "rejected": msgspec.to_builtins(rejected)}
    return Response(msgspec.json.encode(body), fault.status, fault.headers, media_type="application/json")
