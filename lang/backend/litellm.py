"""Any provider that the ``litellm`` package speaks to, as a backend. Whole assistant turns, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...protocol.errors import Unsupported
from ..chat_template import ChatTemplate, get_chat_template_by_model_path
from ..expressions import SglSamplingParams
from .base_backend import BaseBackend
from .chat_api import chat_messages, with_dtype
from .executor import StreamExecutor
from .token_usage import TokenUsage


class LiteLLM(BaseBackend):
    """``LiteLLM("provider/model")``; further arguments go to each ``litellm.completion`` call."""

    is_chat_model = True

    def __init__(self, model_name: str, chat_template: ChatTemplate | None = None, **kwargs: Any) -> None:
        try:
            import litellm
        except ImportError:
            message = "the LiteLLM backend needs the litellm package: pip install 'phloem[litellm]'"
            raise Unsupported(message) from None
        self.model_name = model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        self.token_usage = TokenUsage()
        self._api: Any = litellm
        self._kwargs = kwargs

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        answer = self._api.completion(**self._request(s, sampling_params))
        return self._read(answer, sampling_params)

    async def generate_async(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], dict[str, Any]]:
        answer = await self._api.acompletion(**self._request(s, sampling_params))
        return self._read(answer, sampling_params)

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for event in self._api.completion(**self._request(s, sampling_params), stream=True):
            if event.choices and event.choices[0].delta.content:
                yield event.choices[0].delta.content, {}

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        return {
            "model": self.model_name,
            "messages": chat_messages(s, "LiteLLM"),
            **params.to_litellm_kwargs(),
            **self._kwargs,
        }

    def _read(self, answer: Any, params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        texts = [with_dtype(choice.message.content or "", params) for choice in answer.choices]
        meta: dict[str, Any] = {"finish_reason": {"type": answer.choices[0].finish_reason}}
        usage = getattr(answer, "usage", None)
        if usage is not None:
            self.token_usage.add(usage.prompt_tokens, usage.completion_tokens)
            meta |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        return (texts if params.n > 1 else texts[0]), meta
