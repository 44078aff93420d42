"""The OpenAI-compatible endpoints: chat completions, completions, models."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ...protocol import errors
from ...protocol.embeddings import gives_embeddings
from ...protocol.ops import Gen
from . import answers as a
from .conversation import Chat
from .embedding_routes import add_decoder_embeddings
from .forms import ChatForm, CompletionForm, Header, SplitChatForm
from .image_parts import ImageUrl
from .jobs import check_number, make_job, raw_parts
from .openapi import answers, body_of
from .response import GenerationResponse
from .schemas import (
    COMPLETION_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    RefusedRequest,
    check_sampling,
    with_logprobs,
)
from .score_routes import add_decoder_scores
from .service import Service, json_response


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter()
    _add_chat(router, service)
    _add_completions(router, service)
    _add_refusals(router, service)
    if gives_embeddings(service.client.welcome):
        add_decoder_embeddings(router, service)
    add_decoder_scores(router, service)
    add_models(router, service)
    return router


def add_models(router: APIRouter, service: Service) -> None:
    @router.get("/v1/models", responses=answers(a.ModelList))
    async def models() -> Response:
        """The model and its adapters, as far as the caller may use them."""
        return json_response({"object": "list", "data": [model_card(service, name) for name in service.model_names()]})

    @router.get("/v1/models/{name:path}", responses=answers(a.ModelCard))
    async def model(name: str) -> Response:
        """The model or one of its adapters."""
        return json_response(model_card(service, service.adapter_of(name) or service.model_name))


def _add_chat(router: APIRouter, service: Service) -> None:
    welcome = service.client.welcome
    model = Chat(service)

    @router.post(
        "/v1/chat/completions",
        openapi_extra=body_of(ChatRequest),
        responses=answers(a.ChatCompletion, stream="Chunks as `data:` lines, the last one `[DONE]`."),
    )
    async def chat(http: Request) -> Response:
        """A conversation through the model's own template."""
        return await service.respond_with_images(
            http, ChatRequest, images_of, lambda request, fetched: respond(request, http.url.path, fetched)
        )

    def images_of(request: ChatRequest) -> Sequence[ImageUrl]:
        service.adapter_of(request.model)
        return request.images

    def respond(request: ChatRequest, path: str, fetched: Mapping[str, bytes]) -> Response:
        adapter = service.adapter_of(request.model)
        limit = request.token_limit
        params = request.sampling(max_tokens=welcome.context_len if limit is None else limit)
        check_sampling(params, vocab_size=welcome.vocab_size, names=request.names)
        params = with_logprobs(params, (request.top_logprobs or 0) if request.logprobs else None)
        n, is_stream = request.n or 1, bool(request.stream)
        settings = request.settings(path, adapter=adapter)
        asked = model.ask(request.conversation(), params, settings=settings, n=n, stream=is_stream, fetched=fetched)

        def form_for(program: str) -> ChatForm:
            header = Header.new("chatcmpl", program, adapter or service.model_name)
            options: dict[str, Any] = {
                "n": n,
                "logprobs": params.return_logprob,
                "as_ids": bool(request.return_tokens_as_token_ids),
                "include_usage": request.include_usage,
            }
            if asked.reader.is_plain:
                return ChatForm(header, service.tokenizer, **options)
            return SplitChatForm(header, service.tokenizer, **options, reader=asked.reader)

        return GenerationResponse(
            service.bridge,
            asked.job,
            form_for,
            stream=is_stream,
            metrics=service.metrics,
            keep=lambda result: model.keep(asked, result),
        )


def _add_completions(router: APIRouter, service: Service) -> None:
    welcome = service.client.welcome

    @router.post(
        "/v1/completions",
        openapi_extra=body_of(CompletionRequest),
        responses=answers(a.TextCompletion, stream="Chunks as `data:` lines, the last one `[DONE]`."),
    )
    async def completions(http: Request) -> Response:
        """One prompt or many: text, a list of texts, token ids, a list of lists."""
        return await service.respond(http, CompletionRequest, lambda request: respond(request, http.url.path))

    def respond(request: CompletionRequest, path: str) -> Response:
        adapter = service.adapter_of(request.model)
        limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        params = request.sampling(max_tokens=limit)
        check_sampling(params, vocab_size=welcome.vocab_size, names={})
        params = with_logprobs(params, request.logprobs, start=0 if request.echo else -1)
        prompts = request.prompts()
        check_number(prompts, welcome.limits, name="prompt")
        parse_special = bool(request.parse_special)
        gen = Gen(op=0, seq=0, params=params, grammar=request.grammar(), n=request.n or 1, stream=bool(request.stream))
        parts = [
            raw_parts(
                prompt,
                service.tokenizer,
                parse_special=parse_special,
                name="prompt",
                context_len=welcome.context_len,
            )
            for prompt in prompts
        ]
        job = make_job(
            parts,
            [gen] * len(prompts),
            settings=request.settings(path, adapter=adapter),
            limits=welcome.limits,
        )
        echoes = [_text_of(p, service) if request.echo else "" for p in prompts]

        def form_for(program: str) -> CompletionForm:
            header = Header.new("cmpl", program, adapter or service.model_name)
            return CompletionForm(
                header,
                n=gen.n,
                logprobs=request.logprobs,
                as_ids=bool(request.return_tokens_as_token_ids),
                include_usage=request.include_usage,
                echoes=echoes,
            )

        return GenerationResponse(service.bridge, job, form_for, stream=gen.stream, metrics=service.metrics)


def _add_refusals(router: APIRouter, service: Service) -> None:
    """Clients look for this endpoint; a decoder cannot serve it."""
    kind = f"{service.model_name!r} is a decoder, which generates text"
    body = body_of(RefusedRequest)
    refused = answers(a.Error, status=400, said="The served model is a decoder.")

    @router.post("/classify", status_code=400, openapi_extra=body, responses=refused)
    async def classify(http: Request) -> Response:
        """Refused: labels need a model with a classification layer."""
        await service.read_body(http)
        message = f"{kind} and has no classification layer; /v1/score gives the log-probability of a continuation"
        raise errors.Unsupported(message, where="model")


def _text_of(prompt: str | list[int], service: Service) -> str:
    return prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt, skip_special=False)


def model_card(service: Service, name: str) -> dict[str, Any]:
    """What `/v1/models` says of the model or an adapter."""
    return {
        "id": name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "phloem",
        "max_model_len": service.client.welcome.context_len,
    }
