"""``/tokenize`` and ``/detokenize``: a prompt as its token ids and back, without the engine."""

from fastapi import APIRouter, Request, Response

from ...cluster.prompts import first_prompt
from ...protocol.errors import Unsupported
from ...protocol.ops import Special, Text
from . import answers as a
from .conversation import prompt_of
from .jobs import check_ids, raw_parts
from .openapi import answers, body_of
from .schemas import DetokenizeRequest, TokenizeRequest
from .service import Service, json_response


def tokenizer_routes(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer, context_len = service.tokenizer, service.client.welcome.context_len

    @router.post("/tokenize", openapi_extra=body_of(TokenizeRequest), responses=answers(a.Tokenized))
    async def tokenize(http: Request) -> Response:
        """The token ids that the model gets for a prompt or a conversation."""
        return await service.respond(http, TokenizeRequest, respond)

    def respond(request: TokenizeRequest) -> Response:
        service.adapter_of(request.model)
        tokens = tokens_of(request)
        texts = [tokenizer.decode([token], skip_special=False) for token in tokens]
        body = {"count": len(tokens), "max_model_len": context_len, "tokens": tokens}
        return json_response({**body, "token_strs": texts if request.return_token_strs else None})

    def tokens_of(request: TokenizeRequest) -> list[int]:
        if request.prompt is None:
            is_open = request.add_generation_prompt is not False
            conversation = request.conversation()
            if conversation.images:
                message = "an image's tokens are not listed; leave image_url parts out"
                raise Unsupported(message, where="messages")
            parts = prompt_of(conversation, service, add_generation_prompt=is_open)
        else:
            parse_special = bool(request.parse_special)
            parts = raw_parts(
                request.prompt, tokenizer, parse_special=parse_special, name="prompt", context_len=context_len
            )
        ops = [
            Text(op=i, seq=0, text=part) if isinstance(part, str) else Special(op=i, seq=0, ids=part)
            for i, part in enumerate(parts)
        ]
        tokens = first_prompt(ops, tokenizer)
        begins = next((part[0] for part in parts if part), None)
        is_bos_ours = tokenizer.add_bos and begins != tokenizer.bos_id
        return tokens[1:] if is_bos_ours and request.add_special_tokens is False else tokens

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), responses=answers(a.Detokenized))
    async def detokenize(http: Request) -> Response:
        """The text of token ids, special tokens included."""
        return await service.respond(http, DetokenizeRequest, text_of)

    def text_of(request: DetokenizeRequest) -> Response:
        service.adapter_of(request.model)
        check_ids(request.tokens, tokenizer, name="tokens", context_len=context_len)
        return json_response({"prompt": tokenizer.decode(request.tokens, skip_special=False)})

    return router
