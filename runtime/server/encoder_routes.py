"""The endpoints of a server of an encoder: models, and embeddings or scores. Requests for text are refused by name."""

import asyncio
import base64
import functools

import numpy as np
from fastapi import APIRouter, Request, Response

from ...protocol import errors
from ...protocol.messages import Embedded, ProgramStats
from ...protocol.ops import AnyOp, Special, Text
from . import answers as a
from .openai_routes import add_models
from .openapi import answers, body_of
from .schemas import EmbeddingsRequest, RefusedRequest
from .score_routes import RERANK_PATHS, account_of, add_classifying, add_reranking, answer_of
from .service import Service, json_response

# What a server of a decoder answers to a POST, beside /v1/embeddings.
TEXT_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/v1/programs",
    "/v1/programs/{program}",
    "/v1/score",
    "/v1/rerank",
    "/rerank",
    "/classify",
    "/flush_cache",
)


def encoder_routes(service: Service) -> APIRouter:
    router = APIRouter()
    labels = service.client.welcome.labels
    add_models(router, service)
    served: tuple[str, ...] = ()
    if not labels:
        _add_embeddings(router, service)
    else:
        add_classifying(router, service)
        served = ("/classify",)
    if len(labels) == 1:
        add_reranking(router, service)
        served = (*served, *RERANK_PATHS, "/v1/score")

    async def refuse(http: Request) -> Response:
        """Refused: the served model is an encoder, which has no layer for this."""
        await service.read_body(http)
        raise service.no_decoder()

    refused = answers(a.Error, status=400, said="The served model is an encoder.")
    for path in (*TEXT_PATHS, *(("/v1/embeddings",) if labels else ())):
        if path in served:
            continue
        router.post(path, status_code=400, openapi_extra=body_of(RefusedRequest), responses=refused)(refuse)

    @router.get("/v1/welcome", status_code=400, responses=refused)
    async def welcome() -> Response:
        """Refused: an encoder runs no programs."""
        raise service.no_decoder()

    return router


def _add_embeddings(router: APIRouter, service: Service) -> None:
    @router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingsRequest), responses=answers(a.Embeddings))
    async def embeddings(http: Request) -> Response:
        """The vectors of a text, a list of texts, token ids, or a list of lists."""
        request, inputs = await service.respond(http, EmbeddingsRequest, read)
        account, num_tokens = account_of(service), 0
        reserved = account.reserve([_as_op(given) for given in inputs], service.client.welcome.context_len)
        try:
            embed = functools.partial(service.client.embed, inputs, truncate=request.truncate is not False)
            coming = await asyncio.to_thread(embed)
            found = await answer_of(coming, http)
            num_tokens = sum(found.num_tokens)
        finally:
            account.settle(reserved, ProgramStats(prompt_tokens=num_tokens))
        service.metrics.count_prompt(num_tokens)
        return await asyncio.to_thread(_body, request, found, service.model_name)

    def read(request: EmbeddingsRequest) -> tuple[EmbeddingsRequest, list[str | list[int]]]:
        service.adapter_of(request.model)
        _check_dimensions(request.dimensions)
        return request, request.inputs()

    def _check_dimensions(asked: int | None) -> None:
        size = service.client.welcome.embedding_size
        if asked is not None and asked != size:
            text = f"dimensions is {asked:,}, but the vectors of {service.model_name!r} have {size:,}"
            raise errors.InvalidParams(f"{text} and are not cut; leave the field out", where="dimensions")


def _as_op(given: str | list[int]) -> AnyOp:
    """For the estimate of its tokens."""
    return Text(op=0, seq=0, text=given) if isinstance(given, str) else Special(op=0, seq=0, ids=tuple(given))


def _body(request: EmbeddingsRequest, found: Embedded, model: str) -> Response:
    def spelled(vector: bytes) -> str | list[float]:
        if request.encoding_format == "base64":
            return base64.b64encode(vector).decode()
        numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
        return numbers

    data = [{"object": "embedding", "index": i, "embedding": spelled(v)} for i, v in enumerate(found.vectors)]
    count = sum(found.num_tokens)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": model, "usage": usage})
