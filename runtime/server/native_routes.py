"""The native endpoints: ``/generate``, and for operators the cache and the server's configuration."""

import os
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from ...protocol.ops import Gen
from . import answers as a
from .forms import NativeForm
from .jobs import check_number, make_job, raw_parts
from .openapi import answers, body_of
from .response import GenerationResponse
from .schemas import NATIVE_NAMES, GenerateRequest, NativeSampling, check_sampling
from .service import Service, json_response


def native_routes(service: Service) -> APIRouter:
    router = APIRouter()
    _add_generate(router, service)

    @router.post("/flush_cache", responses=answers(a.Flushed))
    async def flush_cache() -> Response:
        """Drop every cached prefix that no running request holds."""
        return json_response({"flushed": await service.query("flush_cache")})

    @router.get("/cache_tree", responses=answers(list[dict[str, Any]]))
    async def cache_tree() -> Response:
        """The radix tree of cached prefixes, as nested objects."""
        return json_response(await service.query("cache_tree"))

    return router


def info_routes(service: Service) -> APIRouter:
    """About the model and the server, whatever kind of model it is."""
    router = APIRouter()
    welcome = service.client.welcome

    @router.get("/version", responses=answers(a.Version))
    async def version() -> Response:
        """Phloem's version."""
        return json_response({"version": service.version})

    @router.get("/get_model_info", responses=answers(a.ModelInfo))
    async def model_info() -> Response:
        """The model, as SGLang's clients ask for it."""
        return json_response(
            {
                "model_path": welcome.model_path or welcome.model,
                "tokenizer_path": welcome.model_path or welcome.model,
                "served_model_name": service.model_name,
                "is_generation": service.decoder_tokenizer is not None,
                "max_context_length": welcome.context_len,
                "vocab_size": welcome.vocab_size,
                "preferred_sampling_params": None,
            }
        )

    @router.get("/server_info", responses=answers(a.ServerInfo))
    async def server_info() -> Response:
        """The server's and the engine's configuration."""
        server = {
            "model": service.model_name,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - service.started_s, 3),
            "requests_in_flight": service.bridge.num_in_flight,
            "max_body_bytes": service.max_body_bytes,
            "capabilities": welcome.capabilities,
        }
        return json_response({"server": server, "engine": await service.query("info")})

    return router


def _add_generate(router: APIRouter, service: Service) -> None:
    welcome = service.client.welcome

    @router.post(
        "/generate",
        openapi_extra=body_of(GenerateRequest),
        responses=answers(
            a.Generated | list[a.Generated], stream="The text so far in each `data:` line, the last one `[DONE]`."
        ),
    )
    async def generate(http: Request) -> Response:
        """The native form: text or ids in, text, ids and `meta_info` out."""
        return await service.respond(http, GenerateRequest, lambda request: respond(request, http.url.path))

    def respond(request: GenerateRequest, path: str) -> Response:
        prompts = request.prompts()
        name = "text" if request.text is not None else "input_ids"
        check_number(prompts, welcome.limits, name=name)
        gens = [_gen(sampling, request, welcome.vocab_size) for sampling in request.sampling_of_each(len(prompts))]
        parts = [
            raw_parts(
                prompt,
                service.tokenizer,
                parse_special=request.parse_special,
                name=name,
                context_len=welcome.context_len,
            )
            for prompt in prompts
        ]
        job = make_job(
            parts,
            gens,
            settings=request.settings(path, adapter=service.adapter_of(request.lora_path, where="lora_path")),
            limits=welcome.limits,
        )

        def form_for(program: str) -> NativeForm:
            return NativeForm(
                request.rid or program,
                counts=[gen.n for gen in gens],
                is_batch=request.is_batch,
                logprobs=request.return_logprob,
                with_text=request.return_text_in_logprobs,
            )

        return GenerationResponse(service.bridge, job, form_for, stream=request.stream, metrics=service.metrics)


def _gen(sampling: NativeSampling, request: GenerateRequest, vocab_size: int) -> Gen:
    params = sampling.sampling(request)
    check_sampling(params, vocab_size=vocab_size, names=NATIVE_NAMES)
    return Gen(op=0, seq=0, params=params, grammar=sampling.grammar(), n=sampling.n, stream=request.stream)
