"""Google's models on Vertex AI as a backend, through the ``google-genai`` package. Whole turns, or plain text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ...protocol.errors import Unsupported
from ..chat_template import get_chat_template
from ..expressions import SglSamplingParams
from .base_backend import BaseBackend
from .chat_api import chat_messages, with_dtype
from .executor import StreamExecutor
from .token_usage import TokenUsage


class VertexAI(BaseBackend):
    """``VertexAI("gemini-2.5-flash", project=..., location=...)``; these arguments go to ``google.genai.Client``."""

    is_chat_model = True
    has_own_loop = True  # the async client's connections belong to one event loop

    def __init__(self, model_name: str, safety_settings: list[dict[str, str]] | None = None, **kwargs: Any) -> None:
        try:
            from google import genai
        except ImportError:
            message = "the VertexAI backend needs the google-genai package: pip install 'phloem[vertexai]'"
            raise Unsupported(message) from None
        self.model_name = model_name
        self.chat_template = get_chat_template("default")
        self.token_usage = TokenUsage()
        self._safety_settings = safety_settings
        self._client: Any = genai.Client(vertexai=True, **kwargs)

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        return self._read(self._client.models.generate_content(**self._request(s, sampling_params)), sampling_params)

    async def generate_async(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], dict[str, Any]]:
        answer = await self._client.aio.models.generate_content(**self._request(s, sampling_params))
        return self._read(answer, sampling_params)

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        usage = None
        for event in self._client.models.generate_content_stream(**self._request(s, sampling_params)):
            usage = event.usage_metadata or usage
            yield event.text or "", {}
        yield "", self._count(usage)

    async def generate_stream_async(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        usage = None
        async for event in await self._client.aio.models.generate_content_stream(**self._request(s, sampling_params)):
            usage = event.usage_metadata or usage
            yield event.text or "", {}
        yield "", self._count(usage)

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        config = params.to_vertexai_kwargs()
        if params.json_schema is not None:
            config["response_mime_type"] = "application/json"
            config["response_json_schema"] = json.loads(params.json_schema)
        if self._safety_settings is not None:
            config["safety_settings"] = self._safety_settings
        if s.cur_role is None and not s.messages_:
            return {"model": self.model_name, "contents": s.text_, "config": config}
        messages = chat_messages(s, "Vertex AI")
        system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        if system:
            config["system_instruction"] = system
        contents = [
            {"role": "model" if m["role"] == "assistant" else "user", "parts": [{"text": m["content"]}]}
            for m in messages
            if m["role"] != "system"
        ]
        return {"model": self.model_name, "contents": contents, "config": config}

    def _read(self, answer: Any, params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        texts = [
            with_dtype("".join(part.text or "" for part in candidate.content.parts or ()), params)
            for candidate in answer.candidates
        ]
        reason = getattr(answer.candidates[0].finish_reason, "name", None)
        meta = {"finish_reason": {"type": (reason or "stop").lower()}, **self._count(answer.usage_metadata)}
        return (texts if params.n > 1 else texts[0]), meta

    def _count(self, usage: Any) -> dict[str, Any]:
        if usage is None:
            return {}
        prompt, completion = usage.prompt_token_count or 0, usage.candidates_token_count or 0
        self.token_usage.add(prompt, completion)
        cached = getattr(usage, "cached_content_token_count", None) or 0
        return {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
