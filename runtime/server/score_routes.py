"""Scores of texts and of pairs of texts: classifiers at ``/classify``, rerankers at ``/rerank`` and ``/v1/score``.

Of decoders they are by the operation ``Score``: at ``/v1/score`` the log-probability of a continuation, at ``/rerank``
the likelihood of the query after each document.
"""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from ...protocol import errors
from ...protocol.messages import Done, ProgramSettings, SelectMeta
from ...protocol.ops import AnyOp, Close, Score, Text
from ...protocol.program_call import OpFailed, SubmitRefused
from . import answers as a
from .bridge import BridgedCall
from .encoder_calls import ask_encoder
from .openapi import answers, body_of
from .response import running
from .schemas import ClassifyRequest, RerankRequest, ScoreRequest
from .service import Service, json_response

RERANK_PATHS = ("/v1/rerank", "/rerank")
_OPS_A_PAIR = 3
# The query's likelihood as a question about the document: Sachan et al. 2022, "Improving Passage Retrieval with
# Zero-Shot Question Generation". The document comes first, so that later queries find it in the cache.
_QUESTION = "Passage: {document}\nPlease write a question based on this passage.\nQuestion:"

Pairs = list[tuple[str, str]]


def add_classifying(router: APIRouter, service: Service) -> None:
    """The endpoint of every classifier."""
    labels = service.client.welcome.labels

    @router.post("/classify", openapi_extra=body_of(ClassifyRequest), responses=answers(a.Classified))
    async def classify(http: Request) -> Response:
        """Each text's scores by label."""
        request = await service.respond(http, ClassifyRequest, read)
        found, num_tokens = await _scores_of(service, request.texts(), [], request.truncate, http)
        scores = found.reshape(-1, len(labels))
        data = [
            {"index": i, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
            for i, row in enumerate(scores)
        ]
        return _list_response(service, "classify", data, num_tokens)

    def read(request: ClassifyRequest) -> ClassifyRequest:
        service.adapter_of(request.model)
        return request


def add_reranking(router: APIRouter, service: Service) -> None:
    """The endpoints of a reranker, a classifier of one label."""

    async def rerank(http: Request) -> Response:
        """How relevant each document is to the query, most relevant first."""
        request = await service.respond(http, RerankRequest, read_rerank)
        texts = request.texts()
        scores, num_tokens = await _scores_of(service, [request.query] * len(texts), texts, request.truncate, http)
        return _reranked(service, request, texts, scores, num_tokens)

    def read_rerank(request: RerankRequest) -> RerankRequest:
        service.adapter_of(request.model)
        return request

    for path in RERANK_PATHS:
        router.post(path, openapi_extra=body_of(RerankRequest), responses=answers(a.Reranked))(rerank)

    @router.post("/v1/score", openapi_extra=body_of(ScoreRequest), responses=answers(a.Scores))
    async def score(http: Request) -> Response:
        """The reranker's score of each pair of texts."""
        request, pairs = await service.respond(http, ScoreRequest, read_score)
        firsts, seconds = [first for first, _ in pairs], [second for _, second in pairs]
        scores, num_tokens = await _scores_of(service, firsts, seconds, request.truncate, http)
        return _scores_response(service, scores.tolist(), num_tokens)

    def read_score(request: ScoreRequest) -> tuple[ScoreRequest, Pairs]:
        service.adapter_of(request.model)
        return request, request.pairs()


def add_decoder_scores(router: APIRouter, service: Service) -> None:
    """``/v1/score``, ``/rerank`` and ``/v1/rerank`` of a decoder."""

    async def scored(http: Request, ops: list[AnyOp], settings: ProgramSettings) -> list[Done]:
        async with running(service.bridge, ops, settings, http.receive) as bridged:
            done = await _results(bridged, len(ops) // _OPS_A_PAIR)
        service.metrics.count_prompt(sum(_num_tokens(event) for event in done))
        return done

    @router.post("/v1/score", openapi_extra=body_of(ScoreRequest), responses=answers(a.Scores))
    async def score(http: Request) -> Response:
        """The log-probability (natural log) of each `text_2` as the continuation of its `text_1`."""
        ops, settings = await service.respond(http, ScoreRequest, lambda request: read_score(request, http.url.path))
        done = await scored(http, ops, settings)
        return _scores_response(service, [float(event.value) for event in done], sum(map(_num_tokens, done)))

    def read_score(request: ScoreRequest, path: str) -> tuple[list[AnyOp], ProgramSettings]:
        adapter, pairs = service.adapter_of(request.model), request.pairs()
        empty = next((i for i, (_, second) in enumerate(pairs) if not second), None)
        if empty is not None:
            text = f"text_2 of pair {empty} is empty; give the continuation that is to be scored"
            raise errors.InvalidRequest(text, where="text_2")
        return _score_ops(service, pairs, request.truncate, "text_2"), ProgramSettings(adapter=adapter, name=path)

    @router.post("/v1/rerank", openapi_extra=body_of(RerankRequest), responses=answers(a.Reranked))
    @router.post("/rerank", openapi_extra=body_of(RerankRequest), responses=answers(a.Reranked))
    async def rerank(http: Request) -> Response:
        """How likely the query is as a question about each document, likeliest first."""
        request, ops, settings = await service.respond(
            http, RerankRequest, lambda request: read_rerank(request, http.url.path)
        )
        done = await scored(http, ops, settings)
        means = [float(event.value) / _num_scored(event) for event in done]
        return _reranked(service, request, request.texts(), np.exp(means), sum(map(_num_tokens, done)))

    def read_rerank(request: RerankRequest, path: str) -> tuple[RerankRequest, list[AnyOp], ProgramSettings]:
        adapter = service.adapter_of(request.model)
        if not request.query:
            raise errors.InvalidRequest("query is empty; give the text to compare documents with", where="query")
        pairs = [(_QUESTION.format(document=text), f" {request.query}") for text in request.texts()]
        ops = _score_ops(service, pairs, request.truncate, "documents")
        return request, ops, ProgramSettings(adapter=adapter, name=path)


def _score_ops(service: Service, pairs: Pairs, truncate: bool | None, where: str) -> list[AnyOp]:
    """A program with a sequence for each pair, of ``_OPS_A_PAIR`` operations; the second text is scored.

    Raises Unsupported for ``truncate``, and LimitExceeded and PromptTooLong where the engine would.
    """
    welcome = service.client.welcome
    if truncate:
        raise errors.Unsupported("truncate: a decoder's texts are not cut; leave the field out", where="truncate")
    most = welcome.limits.max_ops_per_submit // _OPS_A_PAIR
    if len(pairs) > most:
        raise errors.LimitExceeded(f"{len(pairs):,} pairs, but one request may have {most:,}", where=where)
    ops: list[AnyOp] = []
    for seq, (first, second) in enumerate(pairs):
        service.tokenizer.check_length(len(first) + len(second), welcome.context_len)
        ops.append(Text(op=len(ops), seq=seq, text=first))
        ops.append(Score(op=len(ops), seq=seq, text=second, append=False))
        ops.append(Close(op=len(ops), seq=seq))
    return ops


async def _results(bridged: BridgedCall, count: int) -> list[Done]:
    """The results of ``count`` scores, in the order of their operations. Raises the first failure."""
    found: dict[int, Done] = {}
    while len(found) < count:
        for event in await bridged.events():
            if type(event) is Done and isinstance(event.meta, SelectMeta):
                found[event.op] = event
            elif isinstance(event, OpFailed | SubmitRefused):
                raise event.error
    return [found[op] for op in sorted(found)]


def _num_scored(event: Done) -> int:
    """Tokens whose probability was computed; at least one."""
    assert isinstance(event.meta, SelectMeta)
    return len(event.meta.token_ids[0])


def _num_tokens(event: Done) -> int:
    assert isinstance(event.meta, SelectMeta)
    return event.meta.prompt_tokens + _num_scored(event)


async def _scores_of(
    service: Service, firsts: list[str], seconds: list[str], truncate: bool | None, http: Request
) -> tuple[np.ndarray, int]:
    """A classifier's scores, float32, of texts or pairs one after another, and the number of tokens that were run."""
    ask = partial(service.client.score, firsts, seconds, truncate=truncate is not False)
    found = await ask_encoder(service, http, [*firsts, *seconds], ask)
    return np.frombuffer(b"".join(found.vectors), "<f4"), sum(found.num_tokens)


def _reranked(
    service: Service, request: RerankRequest, texts: Sequence[str], scores: np.ndarray, num_tokens: int
) -> Response:
    order = np.argsort(-scores, kind="stable")[: request.top_n or None].tolist()
    results = [{"index": i, "relevance_score": float(scores[i])} for i in order]
    if request.return_documents is not False:
        results = [found | {"document": {"text": texts[i]}} for found, i in zip(results, order, strict=True)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    about = {"id": f"rerank-{uuid.uuid4().hex}", "model": service.model_name, "usage": usage}
    return json_response(about | {"results": results})


def _scores_response(service: Service, scores: Sequence[float], num_tokens: int) -> Response:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return _list_response(service, "score", data, num_tokens)


def _list_response(service: Service, kind: str, data: list[dict[str, Any]], num_tokens: int) -> Response:
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    header = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return json_response(header | {"model": service.model_name, "data": data, "usage": usage})
