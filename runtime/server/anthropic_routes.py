"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request, Response

from ...cluster.prompts import first_prompt
from ...protocol import errors
from ...protocol.messages import ProgramSettings
from ...protocol.sampling import SamplingParams
from . import answers as a
from .anthropic_forms import MessageForm
from .anthropic_schemas import CountRequest, MessagesRequest
from .conversation import Chat
from .image_parts import ImageUrl
from .openapi import answers, body_of
from .response import GenerationResponse
from .schemas import check_sampling
from .service import Service, json_response


def anthropic_routes(service: Service) -> APIRouter:
    router = APIRouter()
    welcome = service.client.welcome
    model = Chat(service)

    @router.post(
        "/v1/messages",
        openapi_extra=body_of(MessagesRequest),
        responses=answers(
            a.AnsweredMessage, stream="Anthropic's named events, from `message_start` to `message_stop`."
        ),
    )
    async def messages(http: Request) -> Response:
        """Anthropic's Messages API."""
        return await service.respond_with_images(
            http, MessagesRequest, images_of, lambda request, fetched: respond(request, http.url.path, fetched)
        )

    def images_of(request: MessagesRequest) -> Sequence[ImageUrl]:
        service.adapter_of(request.model)
        return request.images

    def respond(request: MessagesRequest, path: str, fetched: Mapping[str, bytes]) -> Response:
        adapter = service.adapter_of(request.model)
        params = request.sampling()
        check_sampling(params, vocab_size=welcome.vocab_size, names={"stop": "stop_sequences"})
        check_thinking(request)
        settings = request.settings(path, adapter=adapter)
        is_stream = bool(request.stream)
        asked = model.ask(request.conversation(), params, settings=settings, stream=is_stream, fetched=fetched)

        def form_for(program: str) -> MessageForm:
            return MessageForm(program, adapter or service.model_name, asked.reader, max_tokens=params.max_tokens)

        return GenerationResponse(
            service.bridge,
            asked.job,
            form_for,
            stream=is_stream,
            metrics=service.metrics,
            keep=lambda result: model.keep(asked, result),
        )

    def check_thinking(request: CountRequest) -> None:
        if request.thinking is not None and request.thinking.type == "adaptive" and not model.can_think:
            message = "thinking: this model does not reason between tags; leave it out, or send type 'disabled'"
            raise errors.Unsupported(message, where="thinking")

    @router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountRequest), responses=answers(a.CountedTokens))
    async def count_tokens(http: Request) -> Response:
        """The tokens of a request's prompt."""
        return await service.respond(http, CountRequest, count)

    def count(request: CountRequest) -> Response:
        service.adapter_of(request.model)
        check_thinking(request)
        conversation = request.conversation()
        if conversation.images:
            raise errors.Unsupported("an image's tokens are not counted; leave image blocks out", where="messages")
        asked = model.ask(conversation, SamplingParams(), settings=ProgramSettings())
        return json_response({"input_tokens": len(first_prompt(asked.job.ops, service.tokenizer))})

    return router
