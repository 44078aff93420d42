"""The endpoints of a server of an encoder: models, and embeddings or scores. Requests for text are refused by name."""

from fastapi import APIRouter, Request, Response

from . import answers as a
from .embedding_routes import add_encoder_embeddings
from .openai_routes import add_models
from .openapi import answers, body_of
from .schemas import RefusedRequest
from .score_routes import RERANK_PATHS, add_classifying, add_reranking
from .service import Service

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
    "/v1/adapters",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


def encoder_routes(service: Service) -> APIRouter:
    router = APIRouter()
    labels = service.client.welcome.labels
    add_models(router, service)
    served: tuple[str, ...] = ()
    if not labels:
        add_encoder_embeddings(router, service)
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
