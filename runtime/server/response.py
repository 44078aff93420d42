"""A generation as an ASGI response: whole or as server-sent events, cancelled as soon as its client goes away.

Never holds more than what the engine has produced and the client not yet read; both are bounded by ``max_tokens``.
"""

import asyncio
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol import errors
from ...protocol.messages import Delta
from . import faults
from .flight import Bridge, Carried, Event, Flight, Job, Piece, Result
from .forms import Form, failure
from .metrics import ServerMetrics


class GenerationResponse(Response):
    """Opens the flight when it is sent. ``form_for(program)`` makes the form, which carries the program's id.

    The status waits for the engine's first word, so that what the engine refuses is an error and no broken stream.
    """

    def __init__(
        self, bridge: Bridge, job: Job, form_for: Callable[[str], Form], *, stream: bool, metrics: ServerMetrics
    ) -> None:
        self.background = None
        self.body = b""
        self.status_code = 200
        self.init_headers(None)
        self._bridge = bridge
        self._job = job
        self._form_for = form_for
        self._is_stream = stream
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        flight = self._bridge.open(self._job)
        watch = asyncio.ensure_future(fail_on_disconnect(receive, flight))
        results: list[Result] = []
        try:
            form = self._form_for(flight.program)
            if self._is_stream:
                results = await self._send_stream(flight, form, send)
            else:
                results = await flight.results()
                await _send_whole(send, form.whole(results))
        except errors.Cancelled:
            if not watch.done():  # the client is still there: tell it
                raise
        finally:
            watch.cancel()
            self._bridge.land(flight)
            self._metrics.count_generation(flight, results)

    async def _send_stream(self, flight: Flight, form: Form, send: Send) -> list[Result]:
        results: list[Result] = []
        sent: dict[tuple[int, int], int] = {}
        events = await flight.events()  # raises while an error status can still be sent
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
                events = await flight.events()
        except errors.PhloemError as error:
            body = failure(faults.of_error(error))
        else:
            results.sort(key=lambda result: result.prompt)
            body = form.closing(results)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return results


def _encoded(
    form: Form, events: Sequence[Event], sent: dict[tuple[int, int], int], results: list[Result]
) -> Sequence[bytes]:
    """The chunks for ``events``; ``sent`` counts the characters sent per (prompt, candidate)."""
    chunks = []
    for event in events:
        if isinstance(event, Piece):
            place = event.prompt, event.delta.index
            sent[place] = sent.get(place, 0) + len(event.delta.text)
            chunks.append(form.piece(event))
            continue
        for index, text in enumerate(event.texts):  # what was held back for a stop string comes with the result
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


async def fail_on_disconnect(receive: Receive, flight: Carried) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.fail(errors.Cancelled("the client has disconnected"))
