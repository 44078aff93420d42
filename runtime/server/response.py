"""A generation as an ASGI response: whole or as server-sent events, cancelled when its client disconnects.

Events that the client has not read wait here; ``max_tokens`` bounds them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol import errors
from ...protocol.messages import Delta, ProgramSettings
from ...protocol.ops import AnyOp
from . import faults
from .bridge import Bridge, BridgedCall
from .forms import Form
from .jobs import Job, Piece, Result, RunningJob
from .metrics import ServerMetrics
from .service import disconnected, note_fault


class GenerationResponse(Response):
    """Starts the generation when it is sent. ``form_for`` makes the form from the program's id. ``keep`` is called with
    each result before the answer's end is sent.

    The status waits for the engine's first event, so that a request that the engine refuses gets an error status.
    """

    def __init__(
        self,
        bridge: Bridge,
        job: Job,
        form_for: Callable[[str], Form],
        *,
        stream: bool,
        metrics: ServerMetrics,
        keep: Callable[[Result], None] = lambda result: None,
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._job = job
        self._form_for = form_for
        self._is_stream = stream
        self._metrics = metrics
        self._keep = keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = await RunningJob.begin(self._bridge, self._job)
        watch = asyncio.ensure_future(fail_on_disconnect(receive, generation.bridged))
        results: list[Result] = []
        try:
            form = self._form_for(generation.bridged.call.program)
            if self._is_stream:
                results = await self._send_stream(generation, form, scope, send)
            else:
                results = await generation.results()
                for result in results:
                    self._keep(result)
                await _send_whole(send, form.whole(results))
        except errors.Cancelled:
            if not watch.done():  # the client is still there: tell it
                raise
        finally:
            watch.cancel()
            generation.close()
            self._metrics.count_generation(generation, results)

    async def _send_stream(self, generation: RunningJob, form: Form, scope: Scope, send: Send) -> list[Result]:
        results: list[Result] = []
        sent: dict[tuple[int, int], int] = {}
        events = await generation.events()  # a failure here can still be an error status
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = form.opening()
        try:
            while events:
                body += b"".join(_encoded(form, events, sent, results))
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
                events = await generation.events()
        except errors.PhloemError as error:
            fault = faults.of_error(error)
            note_fault(fault, scope)
            body = form.failure(fault)
        else:
            results.sort(key=lambda result: result.prompt)
            for result in results:
                self._keep(result)
            body = form.closing(results)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return results


def _encoded(
    form: Form, events: Sequence[Piece | Result], sent: dict[tuple[int, int], int], results: list[Result]
) -> Sequence[bytes]:
    """The chunks for ``events``; ``sent`` counts the characters sent per (prompt, candidate)."""
    chunks = []
    for event in events:
        if isinstance(event, Piece):
            place = event.prompt, event.delta.index
            sent[place] = sent.get(place, 0) + len(event.delta.text)
            chunks.append(form.piece(event))
            continue
        for index, text in enumerate(event.texts):  # text that was held back for a stop string
            rest = text[sent.get((event.prompt, index), 0) :]
            if rest:
                chunks.append(form.piece(Piece(event.prompt, Delta(program="", op=0, text=rest, index=index))))
        chunks.append(form.result(event))
        results.append(event)
    return chunks


async def _send_whole(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@contextlib.asynccontextmanager
async def running(
    bridge: Bridge, ops: Sequence[AnyOp], settings: ProgramSettings, receive: Receive
) -> AsyncIterator[BridgedCall]:
    """The program of a request that generates nothing. It is cancelled where the block fails or the client leaves."""
    bridged = await bridge.send(ops, settings)
    watch = asyncio.ensure_future(fail_on_disconnect(receive, bridged))
    is_over = False
    try:
        yield bridged
        is_over = True
    finally:
        watch.cancel()
        if not is_over:
            bridged.call.cancel()
        bridge.release(bridged)


async def fail_on_disconnect(receive: Receive, bridged: BridgedCall) -> None:
    await disconnected(receive)
    bridged.fail(errors.Cancelled("the client has disconnected"))
