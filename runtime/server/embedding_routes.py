"""``/v1/embeddings``: of an encoder, whose folder says how it pools, and of a decoder, where the request says it."""

import asyncio
import base64
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from ...protocol import errors
from ...protocol.embeddings import BATCH, VectorsComing, check_inputs, embedding_ops
from ...protocol.messages import Embedded, ProgramSettings
from ...protocol.ops import Pooling
from . import answers as a
from .encoder_calls import ask_encoder
from .jobs import check_ids
from .openapi import answers, body_of
from .response import running
from .schemas import EmbeddingsRequest
from .service import Service, json_response

Inputs = list[str | list[int]]


def add_encoder_embeddings(router: APIRouter, service: Service) -> None:
    @router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingsRequest), responses=answers(a.Embeddings))
    async def embeddings(http: Request) -> Response:
        """The vectors of a text, a list of texts, token ids, or a list of lists."""
        request, inputs = await service.respond(http, EmbeddingsRequest, read)
        ask = partial(service.client.embed, inputs, truncate=request.truncate is not False)
        found = await ask_encoder(service, http, inputs, ask)
        return await asyncio.to_thread(_response, request, found, service.model_name)

    def read(request: EmbeddingsRequest) -> tuple[EmbeddingsRequest, Inputs]:
        service.adapter_of(request.model)
        if request.pooling is not None:
            text = f"pooling={request.pooling!r}: {service.model_name!r} is an encoder, which pools as its folder says"
            raise errors.Unsupported(f"{text}; leave the field out", where="pooling")
        size = service.client.welcome.embedding_size
        if request.dimensions is not None and request.dimensions != size:
            text = f"dimensions is {request.dimensions:,}, but the vectors of {service.model_name!r} have {size:,}"
            raise errors.InvalidParams(f"{text} and are not cut; leave the field out", where="dimensions")
        return request, request.inputs()


def add_decoder_embeddings(router: APIRouter, service: Service) -> None:
    """The inputs of a request run as programs of ``BATCH`` sequences, one after another."""
    welcome, tokenizer = service.client.welcome, service.tokenizer

    @router.post("/v1/embeddings", openapi_extra=body_of(EmbeddingsRequest), responses=answers(a.Embeddings))
    async def embeddings(http: Request) -> Response:
        """The pooled last hidden states of a text, a list of texts, token ids, or a list of lists."""
        request, inputs, settings = await service.respond(http, EmbeddingsRequest, partial(read, http.url.path))
        pooling: Pooling = request.pooling or "last"
        found = Embedded([], [])
        for first in range(0, len(inputs), BATCH):
            batch = inputs[first : first + BATCH]
            coming = VectorsComing(len(batch), first=first)
            async with running(service.bridge, embedding_ops(batch, pooling), settings, http.receive) as bridged:
                while not coming.is_whole:
                    for event in await bridged.events():
                        coming.take(event)
            part = coming.embedded()
            found.vectors.extend(part.vectors)
            found.num_tokens.extend(part.num_tokens)
        service.metrics.count_prompt(sum(found.num_tokens))
        return await asyncio.to_thread(_response, request, found, settings.adapter or service.model_name, pooling)

    def read(path: str, request: EmbeddingsRequest) -> tuple[EmbeddingsRequest, Inputs, ProgramSettings]:
        adapter = service.adapter_of(request.model)
        if request.truncate:
            raise errors.Unsupported("truncate: a decoder's texts are not cut; leave the field out", where="truncate")
        if request.dimensions is not None and request.dimensions > welcome.embedding_size:
            text = f"dimensions is {request.dimensions:,}, but the vectors have {welcome.embedding_size:,}"
            raise errors.InvalidParams(f"{text}; give at most that, or leave the field out", where="dimensions")
        inputs = request.inputs()
        check_inputs(inputs)
        for i, given in enumerate(inputs):
            if isinstance(given, str):
                tokenizer.check_length(len(given), welcome.context_len)
            else:
                check_ids(given, tokenizer, name=f"input.{i}", context_len=welcome.context_len)
        return request, inputs, ProgramSettings(adapter=adapter, name=path)


def _response(request: EmbeddingsRequest, found: Embedded, model: str, pooling: Pooling | None = None) -> Response:
    def spelled(vector: bytes) -> str | list[float]:
        if request.dimensions is not None and len(vector) > 4 * request.dimensions:
            cut = np.frombuffer(vector, "<f4")[: request.dimensions]
            vector = (cut / (np.linalg.norm(cut) or 1.0)).astype("<f4").tobytes()
        if request.encoding_format == "base64":
            return base64.b64encode(vector).decode()
        numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
        return numbers

    data = [{"object": "embedding", "index": i, "embedding": spelled(v)} for i, v in enumerate(found.vectors)]
    count = sum(found.num_tokens)
    body: dict[str, Any] = {"object": "list", "data": data, "model": model}
    body["usage"] = {"prompt_tokens": count, "total_tokens": count}
    return json_response(body if pooling is None else body | {"pooling": pooling})
