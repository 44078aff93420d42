"""OpenAI's Responses API: ``/v1/responses``, and the stored responses by their ids."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pydantic
from fastapi import APIRouter, Request, Response

from ...protocol import errors
from . import answers as a
from .conversation import Chat
from .faults import Fault, HttpError
from .image_parts import ImageUrl
from .jobs import Result
from .openapi import answers, body_of
from .response import GenerationResponse
from .response_store import ResponseStore, StoredResponse
from .responses_forms import ResponseForm
from .responses_schemas import AnyItem, ResponsesRequest, turns_of
from .schemas import check_sampling, with_logprobs
from .service import Service, json_response
from .tenants import presented_key


def responses_routes(service: Service, store: ResponseStore) -> APIRouter:
    router = APIRouter()
    welcome = service.client.welcome
    model = Chat(service)

    @router.post(
        "/v1/responses",
        openapi_extra=body_of(ResponsesRequest),
        responses=answers(a.ResponseAnswer, stream="OpenAI's named events, from `response.created` on."),
    )
    async def create(http: Request) -> Response:
        """OpenAI's Responses API."""
        owner = _owner(http)
        return await service.respond_with_images(
            http, ResponsesRequest, images_of, lambda request, fetched: respond(request, http.url.path, owner, fetched)
        )

    def images_of(request: ResponsesRequest) -> Sequence[ImageUrl]:
        service.adapter_of(request.model)
        return request.images

    def respond(request: ResponsesRequest, path: str, owner: bytes, fetched: Mapping[str, bytes]) -> Response:
        adapter = service.adapter_of(request.model)
        params = request.sampling(max_tokens=welcome.context_len)
        check_sampling(params, vocab_size=welcome.vocab_size, names={"max_tokens": "max_output_tokens"})
        params = with_logprobs(params, (request.top_logprobs or 0) if request.has_logprobs else None)
        before = found(request.previous_response_id, owner) if request.previous_response_id else None
        messages = [] if before is None else before.messages
        # tokens of another model's answer mean nothing to this one, which reads its text
        written = None if before is None or before.model != service.model_name else before.written
        conversation = request.continued(messages, written)
        is_stream = bool(request.stream)
        settings = request.settings(path, adapter=adapter)
        asked = model.ask(conversation, params, settings=settings, stream=is_stream, fetched=fetched)
        if request.has_logprobs and not asked.reader.is_plain:
            message = "include: log-probabilities are of answers that are text alone, without tools and reasoning"
            raise errors.Unsupported(message, where="include")
        is_stored = request.store is not False and store.keeps_any

        def form_for(program: str) -> ResponseForm:
            def keep(response: dict[str, Any], result: Result) -> None:
                if is_stored:
                    turns = [*messages, *request.turns(), *turns_of(_answer(response))]
                    text, token_ids = result.texts[0], result.meta.candidates[0].token_ids
                    is_exact = service.tokenizer.decode(list(token_ids)) == text
                    kept = asked.written.with_answer(text, token_ids) if is_exact else asked.written
                    body = msgspec.json.encode(response)
                    store.put(StoredResponse(response["id"], owner, service.model_name, body, turns, kept))

            return ResponseForm(
                program,
                adapter or service.model_name,
                asked.reader,
                echo={**request.echo(params), "store": is_stored},
                has_logprobs=request.has_logprobs,
                keep=keep,
            )

        return GenerationResponse(
            service.bridge,
            asked.job,
            form_for,
            stream=is_stream,
            metrics=service.metrics,
            keep=lambda result: model.keep(asked, result),
        )

    def found(id: str, owner: bytes) -> StoredResponse:
        stored = store.get(id, owner)
        if stored is None:
            param, code = "previous_response_id", "previous_response_not_found"
            raise HttpError(dataclasses.replace(_missing(id), status=400, param=param, code=code))
        return stored

    @router.get("/v1/responses/{id}", responses=answers(a.ResponseAnswer))
    async def retrieve(http: Request, id: str) -> Response:
        """A stored response of the caller's."""
        if http.query_params:
            name = next(iter(http.query_params))
            raise errors.Unsupported(f"the query parameter {name!r} is not supported by this server", where=name)
        stored = store.get(id, _owner(http))
        if stored is None:
            raise HttpError(_missing(id))
        return Response(stored.body, media_type="application/json")

    @router.delete("/v1/responses/{id}", responses=answers(a.DeletedResponse))
    async def delete(http: Request, id: str) -> Response:
        """Deletes a stored response of the caller's."""
        if not store.delete(id, _owner(http)):
            raise HttpError(_missing(id))
        return json_response({"id": id, "object": "response", "deleted": True})

    return router


_ITEMS: pydantic.TypeAdapter[list[Any]] = pydantic.TypeAdapter(list[AnyItem])


def _owner(http: Request) -> bytes:
    """A digest of the request's key, by which stored responses are told apart."""
    return hashlib.sha256(presented_key(dict(http.scope["headers"]))).digest()


def _missing(id: str) -> Fault:
    message = f"there is no stored response {id!r}: it was not stored, was dropped, or belongs to another key"
    return Fault(404, message, param="id", code="response_not_found")


def _answer(response: dict[str, Any]) -> list[Any]:
    """The output as items of an input. A call that was cut short is left out: its arguments are no JSON."""
    whole = [item for item in response["output"] if item["type"] != "function_call" or _is_json(item["arguments"])]
    return _ITEMS.validate_python(whole)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
