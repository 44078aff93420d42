"""OpenAI's API (and what is compatible with it) as a backend, through the ``openai`` package.

Chat models write whole assistant turns; completion models go on with any text. Never retries: the package does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ...protocol.errors import Unsupported
from ..chat_template import ChatTemplate, get_chat_template
from ..expressions import SglSamplingParams
from .base_backend import BaseBackend
from .chat_api import chat_messages, with_dtype
from .drivers import loop_of
from .executor import StreamExecutor
from .token_usage import TokenUsage

_COMPLETION_MODELS = ("instruct", "davinci-002", "babbage-002")


class OpenAI(BaseBackend):
    """``OpenAI("gpt-4o-mini")``; further arguments go to ``openai.OpenAI`` (``base_url=``, ``api_key=``, ...)."""

    has_own_loop = True  # the async client's connections belong to one event loop

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        try:
            import openai
        except ImportError:
            raise Unsupported("the OpenAI backend needs the openai package: pip install 'phloem[openai]'") from None
        self.model_name = model_name
        self.is_chat_model = (
            not any(word in model_name for word in _COMPLETION_MODELS) if is_chat_model is None else is_chat_model
        )
        self.chat_template = chat_template or get_chat_template("default")
        self.token_usage = TokenUsage()
        self._client = (openai.AzureOpenAI if is_azure else openai.OpenAI)(*args, **kwargs)
        self._async_client = (openai.AsyncAzureOpenAI if is_azure else openai.AsyncOpenAI)(*args, **kwargs)

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        answer = self._endpoint(self._client).create(**self._request(s, sampling_params))
        return self._read(answer, sampling_params)

    async def generate_async(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], dict[str, Any]]:
        answer = await self._endpoint(self._async_client).create(**self._request(s, sampling_params))
        return self._read(answer, sampling_params)

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        request = self._request(s, sampling_params)
        for event in self._endpoint(self._client).create(
            **request, stream=True, stream_options={"include_usage": True}
        ):
            if (piece := self._piece(event)) is not None:
                yield piece

    async def generate_stream_async(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        request = self._request(s, sampling_params)
        events = await self._endpoint(self._async_client).create(
            **request, stream=True, stream_options={"include_usage": True}
        )
        async for event in events:
            if (piece := self._piece(event)) is not None:
                yield piece

    def shutdown(self) -> None:
        """Close the connections."""
        self._client.close()
        asyncio.run_coroutine_threadsafe(self._async_client.close(), loop_of(self).loop).result(10.0)

    def _endpoint(self, client: Any) -> Any:
        return client.chat.completions if self.is_chat_model else client.completions

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        kwargs = params.to_openai_kwargs()
        if params.return_logprob:
            kwargs |= (
                {"logprobs": True, "top_logprobs": params.top_logprobs_num or 0}
                if self.is_chat_model
                else {"logprobs": 1}
            )
        if params.json_schema is not None:
            if not self.is_chat_model:
                raise Unsupported(f"{self.model_name} is a completion model and takes no json_schema; use a chat model")
            kwargs["response_format"] = params.response_format()
        if self.is_chat_model:
            return {"model": self.model_name, "messages": chat_messages(s, "OpenAI"), **kwargs}
        return {"model": self.model_name, "prompt": s.text_, **kwargs}

    def _read(self, answer: Any, params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        texts = [with_dtype(self._text_of(choice), params) for choice in answer.choices]
        meta: dict[str, Any] = {"finish_reason": {"type": answer.choices[0].finish_reason}}
        if answer.usage is not None:
            meta |= self._count(answer.usage)
        logprobs = getattr(answer.choices[0], "logprobs", None)
        if params.return_logprob and self.is_chat_model and logprobs is not None:
            meta["output_token_logprobs"] = [(token.logprob, None, token.token) for token in logprobs.content or ()]
            meta["output_top_logprobs"] = [
                [(top.logprob, None, top.token) for top in token.top_logprobs] for token in logprobs.content or ()
            ]
        return (texts if params.n > 1 else texts[0]), meta

    def _text_of(self, choice: Any) -> str:
        return (choice.message.content or "") if self.is_chat_model else choice.text

    def _piece(self, event: Any) -> tuple[str, dict[str, Any]] | None:
        if event.usage is not None:
            return "", self._count(event.usage)
        if not event.choices:
            return None
        choice = event.choices[0]
        return (choice.delta.content if self.is_chat_model else choice.text) or "", {}

    def _count(self, usage: Any) -> dict[str, Any]:
        self.token_usage.add(usage.prompt_tokens, usage.completion_tokens)
        details = getattr(usage, "prompt_tokens_details", None)
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": getattr(details, "cached_tokens", None) or 0,
        }
