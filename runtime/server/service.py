"""The parts that all routes share: client, tokenizer, template, metrics, and the reading of a request's body."""

import asyncio
import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from ...cluster.supervisor import Supervised
from ...protocol import errors
from ...protocol.engine_client import EngineClient
from ..tokenizer import ModelTemplate, Tokenizer
from .bridge import Bridge
from .faults import Fault, HttpError, of_validation
from .image_parts import ImageUrl
from .metrics import ServerMetrics
from .remote_images import NONE_FETCHED, RemoteImages
from .tenants import sender_of_request
from .written import WrittenAnswers

LONG_BODY_BYTES = 16_000  # a longer body is read, rendered and tokenized on a thread

RequestModel = TypeVar("RequestModel", bound=BaseModel)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Service:
    """``supervisor`` is None where the client's engine is not supervised by this process, ``decoder_tokenizer`` where
    the model is an encoder.
    """

    client: EngineClient
    decoder_tokenizer: Tokenizer | None
    template: ModelTemplate | None
    model_name: str
    version: str
    max_body_bytes: int
    bridge: Bridge
    metrics: ServerMetrics
    supervisor: Supervised | None = None
    takes_adapters: bool = False  # while it runs, from a folder that the engine knows
    remote_images: RemoteImages | None = None  # None: no image is fetched
    other_names: frozenset[str] = frozenset()  # of what this server serves beside the model, which no adapter may have
    started_s: float = field(default_factory=time.time)
    written: WrittenAnswers = field(default_factory=WrittenAnswers)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="requests"))

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises Unsupported where the model is an encoder."""
        if self.decoder_tokenizer is None:
            raise self.no_decoder()
        return self.decoder_tokenizer

    def no_decoder(self) -> errors.Unsupported:
        labels = self.client.welcome.labels
        if len(labels) > 1:
            gives = f"scores of {len(labels)} labels at /classify"
        else:
            gives = "scores at /v1/rerank and /v1/score" if labels else "embeddings at /v1/embeddings and no text"
        text = f"{self.model_name!r} is an encoder, which gives {gives}"
        return errors.Unsupported(f"{text}; send the request to a server of a decoder", where="model")

    def adapter_of(self, name: str | None, *, where: str = "model") -> str:
        """The adapter that a request's field ``where`` names; empty: the model itself."""
        names, sender = self.model_names(), sender_of_request()
        if sender is not None and sender.alias is not None and name in (None, sender.alias.named):
            name = sender.alias.model
        if name is None or (name == self.model_name and name in names):
            return ""
        if name not in names:
            served = ", ".join(map(repr, names))
            raise errors.UnknownModel(f"the model {name!r} is not served here; this server has {served}", where=where)
        return name

    def model_names(self) -> tuple[str, ...]:
        """The model and its adapters, as far as the caller may use them."""
        names, sender = (self.model_name, *self.client.adapters), sender_of_request()
        return names if sender is None else tuple(filter(sender.account.may_use, names))

    @property
    def num_in_flight(self) -> int:
        return self.bridge.num_in_flight

    def ask_client(self, what: str, *, timeout_s: float = 10.0) -> Any:
        """The engine's answer, or for "fleet" the client's own. Blocks the thread."""
        return self.client.query(what, timeout_s=timeout_s)

    async def query(self, what: str, *, timeout_s: float = 10.0) -> Any:
        """``ask_client`` on a thread, which is too costly for requests that generate."""
        return await asyncio.to_thread(self.ask_client, what, timeout_s=timeout_s)

    async def respond(
        self, request: Request, model: type[RequestModel], respond: Callable[[RequestModel], Result]
    ) -> Result:
        """``respond(body)``, where the body is a ``model``; that of a long body is made on a thread.

        Raises ``HttpError`` where the body is not valid, and Cancelled where the client leaves meanwhile.
        """
        body = await self.read_body(request)

        def read_and_respond() -> Result:
            try:
                found = model.model_validate_json(body)
            except ValidationError as error:
                raise HttpError(of_validation(error, model)) from None
            return respond(found)

        if len(body) <= LONG_BODY_BYTES:
            return read_and_respond()
        return await self._beside(read_and_respond, request.receive)

    async def respond_with_images(
        self,
        request: Request,
        model: type[RequestModel],
        images_of: Callable[[RequestModel], Sequence[ImageUrl]],
        respond: Callable[[RequestModel, Mapping[str, bytes]], Result],
    ) -> Result:
        """``respond(body, fetched)`` as in ``respond``; ``fetched`` are the remote ones of ``images_of(body)``, by URL.

        ``images_of`` raises what refuses the request, before anything is fetched.
        """

        def respond_or_wait(body: RequestModel) -> tuple[Sequence[ImageUrl], Callable[[Mapping[str, bytes]], Result]]:
            images = () if self.remote_images is None else images_of(body)
            if any(image.is_remote for image in images):
                return images, partial(respond, body)
            result = respond(body, NONE_FETCHED)
            return (), lambda fetched: result

        images, answer = await self.respond(request, model, respond_or_wait)
        if not images or self.remote_images is None:
            return answer(NONE_FETCHED)
        for image in images:
            image.check(self.client.welcome)
        limits = self.client.welcome.limits
        fetching = self.remote_images.fetch(images, max_bytes=limits.max_image_bytes, max_total=limits.max_submit_bytes)
        fetched = await unless_disconnected(asyncio.ensure_future(fetching), request.receive)
        return await self._beside(partial(answer, fetched), request.receive)

    async def _beside(self, work: Callable[[], Result], receive: Receive) -> Result:
        """``work()`` on a thread. Where the client leaves before it has begun, it is not begun."""
        loop = asyncio.get_running_loop()
        coming = loop.run_in_executor(self.threads, contextvars.copy_context().run, work)
        return await unless_disconnected(coming, receive)

    async def read_body(self, request: Request) -> bytes:
        """The JSON body, unparsed, of at most ``max_body_bytes``."""
        if (kind := content_type_of(request)) != "application/json":
            message = f"content-type is {kind or 'missing'}; send application/json"
            raise HttpError(Fault(415, message, code="unsupported_media_type"))
        return await read_bytes(request, self.max_body_bytes)


def content_type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_bytes(request: Request, most: int) -> bytes:
    """The body, of at most ``most`` bytes. Raises Cancelled where the client leaves before its end."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                message = f"the body is larger than this server's limit of {most:,} bytes"
                raise HttpError(Fault(413, message, code="body_too_large"))
    except ClientDisconnect:
        raise errors.Cancelled("the client has disconnected") from None
    return bytes(body)


async def unless_disconnected(coming: asyncio.Future[Result], receive: Receive) -> Result:
    """The result of ``coming``. Where the client leaves first, cancels it and raises Cancelled."""
    left = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((coming, left), return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise errors.Cancelled("the client has disconnected")
        return coming.result()
    finally:
        coming.cancel()
        left.cancel()


async def disconnected(receive: Receive) -> None:
    """Return once the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def note_fault(fault: Fault, scope: Scope) -> None:
    """Remember the error of the request of ``scope`` for the metrics and the log."""
    scope["state"]["fault"] = fault.code or fault.type


def fault_response(fault: Fault, scope: Scope) -> Response:
    """The answer to the request of ``scope``, in the shape of the API that it speaks."""
    is_messages = scope["path"].startswith("/v1/messages")
    note_fault(fault, scope)
    body = fault.messages_body(scope["state"]["request_id"]) if is_messages else fault.body
    return Response(body, fault.status, fault.headers, media_type="application/json")
