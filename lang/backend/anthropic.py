"""Anthropic's API as a backend, through the ``anthropic`` package. It writes whole assistant turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...protocol.errors import Unsupported
from ..chat_template import get_chat_template
from ..sampling_params import SglSamplingParams
from .base_backend import BaseBackend
from .chat_api import chat_messages, with_dtype
from .executor import StreamExecutor
from .token_usage import TokenUsage


class Anthropic(BaseBackend):
    """``Anthropic(model_name)``; further arguments go to ``anthropic.Anthropic``."""

    is_chat_model = True

    def __init__(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        try:
            import anthropic
        except ImportError:
            message = "the Anthropic backend needs the anthropic package: pip install 'phloem[anthropic]'"
            raise Unsupported(message) from None
        self.model_name = model_name
        self.chat_template = get_chat_template("claude")
        self.token_usage = TokenUsage()
        self.client: Any = anthropic.Anthropic(*args, **kwargs)

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str, dict[str, Any]]:
        answer = self.client.messages.create(**self._request(s, sampling_params))
        text = "".join(block.text for block in answer.content if block.type == "text")
        return with_dtype(text, sampling_params), self._meta(answer)

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if sampling_params.dtype is not None:  # its text is found in the whole answer
            yield self.generate(s, sampling_params)
            return
        with self.client.messages.stream(**self._request(s, sampling_params)) as stream:
            for text in stream.text_stream:
                yield text, {}
            answer = stream.get_final_message()
            yield "", self._meta(answer)

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        messages = chat_messages(s, "Anthropic")
        request = {"model": self.model_name, **params.to_anthropic_kwargs()}
        system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        if system:
            request["system"] = system
        return {**request, "messages": [m for m in messages if m["role"] != "system"]}

    def _meta(self, answer: Any) -> dict[str, Any]:
        usage = answer.usage
        self.token_usage.add(usage.input_tokens, usage.output_tokens)
        return {
            "finish_reason": {"type": answer.stop_reason},
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "cached_tokens": getattr(usage, "cache_read_input_tokens", None) or 0,
        }
