"""Loading and unloading low-rank adapters of a running server, for operators."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from ...protocol import errors
from ...protocol.messages import MAX_NAME
from . import answers as a
from .openapi import answers, body_of, texts
from .schemas import Strict
from .service import Service, json_response

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Folder = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterRequest(Strict):
    """``path``: a folder as PEFT saves it, inside the server's ``--adapter-folder``; a relative one begins there."""

    name: Name
    path: Folder


class LoadLoraRequest(Strict):
    """vLLM's names."""

    lora_name: Name
    lora_path: Folder


class UnloadLoraRequest(Strict):
    lora_name: Name


def adapter_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/adapters", responses=answers(a.AdapterList))
    async def adapters() -> Response:
        """The adapters that are loaded, and how many programs of all engines use each now."""
        return json_response(await _listed(service))

    @router.post("/v1/adapters", openapi_extra=body_of(LoadAdapterRequest), responses=answers(a.AdapterList))
    async def load(http: Request) -> Response:
        """Load an adapter; requests can name it as their model as soon as this has answered."""
        request = await service.respond(http, LoadAdapterRequest, lambda request: request)
        await _load(service, request.name, request.path)
        return json_response(await _listed(service))

    @router.delete("/v1/adapters/{name:path}", responses=answers(a.AdapterList))
    async def unload(name: str) -> Response:
        """Unload an adapter: new requests cannot name it, running ones keep it until they end."""
        await asyncio.to_thread(service.client.unload_adapter, name)
        return json_response(await _listed(service))

    @router.post(
        "/v1/load_lora_adapter",
        openapi_extra=body_of(LoadLoraRequest),
        response_class=Response,
        responses=texts("A sentence.", "text/plain"),
    )
    async def load_lora(http: Request) -> Response:
        """`POST /v1/adapters`, with vLLM's names."""
        request = await service.respond(http, LoadLoraRequest, lambda request: request)
        await _load(service, request.lora_name, request.lora_path)
        return Response(f"LoRA adapter {request.lora_name!r} is loaded.", media_type="text/plain")

    @router.post(
        "/v1/unload_lora_adapter",
        openapi_extra=body_of(UnloadLoraRequest),
        response_class=Response,
        responses=texts("A sentence.", "text/plain"),
    )
    async def unload_lora(http: Request) -> Response:
        """`DELETE /v1/adapters/{name}`, with vLLM's names."""
        request = await service.respond(http, UnloadLoraRequest, lambda request: request)
        await asyncio.to_thread(service.client.unload_adapter, request.lora_name)
        return Response(f"LoRA adapter {request.lora_name!r} is unloaded.", media_type="text/plain")

    return router


async def _load(service: Service, name: str, path: str) -> None:
    if not service.takes_adapters:
        text = "this server was started without a folder of adapters; start it with --adapter-folder DIR"
        raise errors.Unsupported(text, where="path")
    if name == service.model_name:
        raise errors.InvalidParams(f"{name!r} is the model's own name; choose another", where="name")
    if name in service.other_names:
        raise errors.InvalidParams(f"{name!r} is another model or a rule of this server; choose another", where="name")
    await asyncio.to_thread(service.client.load_adapter, name, path)


async def _listed(service: Service) -> dict[str, Any]:
    found = await asyncio.to_thread(service.client.list_adapters)
    data = [{"id": one["name"], "object": "adapter", **one} for one in found]
    return {"object": "list", "data": data}
