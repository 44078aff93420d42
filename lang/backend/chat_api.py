"""Calls in OpenAI's format, as OpenAI itself and LiteLLM take them, and what all chat APIs have in common."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ...protocol.errors import InvalidRequest
from ...protocol.sampling import Api
from ..expressions import REGEX_OF_DTYPE
from ..sampling_params import SglSamplingParams
from ..types import ParseError
from .base_backend import BaseBackend
from .executor import StreamExecutor
from .token_usage import TokenUsage


def chat_messages(s: StreamExecutor, api: str) -> list[dict[str, Any]]:
    """The turns before the one to generate. Raises if that turn has text already, or is not the assistant's."""
    if s.cur_role != "assistant":
        where = "outside of any role" if s.cur_role is None else f"inside the role {s.cur_role!r}"
        raise InvalidRequest(
            f"gen() stands {where}, but a chat model of {api} writes assistant turns only: "
            "s += assistant(gen(...)), or a completion model"
        )
    if s.num_api_spec_tokens is None and s.text_[s.cur_role_begin_pos :].strip():
        raise InvalidRequest(
            f"gen() does not directly follow the beginning of the assistant's turn, and {api} cannot continue a turn "
            "that has text already; put that text into the user's turn, or let the model write it all with "
            "@function(num_api_spec_tokens=...)"
        )
    return list(s.messages_)


def with_dtype(text: str, params: SglSamplingParams) -> str:
    """The part of ``text`` that is of the wanted dtype: these APIs take no regex."""
    if params.dtype is None:
        return text
    found = re.search(REGEX_OF_DTYPE[params.dtype], text)
    if found is None:
        raise ParseError(f"{text!r} holds no {params.dtype!r}; say in the prompt what to answer", raw=text)
    return found.group().strip()


class OpenAIFormat(BaseBackend):
    """One call in OpenAI's format per generation. A subclass sends it."""

    api: Api = "chat"
    token_usage: TokenUsage

    def create(self, **request: Any) -> Any:
        """Send ``request``; an answer, or with ``stream`` an iterator of events."""
        raise NotImplementedError

    async def create_async(self, **request: Any) -> Any:
        raise NotImplementedError

    def prompt(self, s: StreamExecutor) -> dict[str, Any]:
        """The request's fields that hold what comes before the generation."""
        raise NotImplementedError

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        return self._read(self.create(**self._request(s, sampling_params)), sampling_params)

    async def generate_async(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str | list[str], dict[str, Any]]:
        return self._read(await self.create_async(**self._request(s, sampling_params)), sampling_params)

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if sampling_params.dtype is not None:  # its text is found in the whole answer
            yield from super().generate_stream(s, sampling_params)
            return
        answer = _Streamed(self, sampling_params)
        for event in self.create(**self._request(s, sampling_params), **_STREAM):
            yield answer.take(event), {}
        yield "", answer.meta()

    async def generate_stream_async(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        if sampling_params.dtype is not None:
            text, meta = await self.generate_async(s, sampling_params)
            assert isinstance(text, str)
            yield text, meta
            return
        answer = _Streamed(self, sampling_params)
        async for event in await self.create_async(**self._request(s, sampling_params), **_STREAM):
            yield answer.take(event), {}
        yield "", answer.meta()

    def count(self, usage: Any) -> dict[str, Any]:
        """The tokens of one call, added to ``token_usage``."""
        self.token_usage.add(usage.prompt_tokens, usage.completion_tokens)
        details = getattr(usage, "prompt_tokens_details", None)
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": getattr(details, "cached_tokens", None) or 0,
        }

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        return {"model": self.model_name, **params.kwargs_of(self.api), **self.prompt(s)}

    def _read(self, answer: Any, params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        texts = [with_dtype(self._text_of(choice), params) for choice in answer.choices]
        metas = [
            {
                "finish_reason": {"type": choice.finish_reason},
                **_logprobs(*(_tokens_of(choice) if params.return_logprob else ([], []))),
            }
            for choice in answer.choices
        ]
        usage = getattr(answer, "usage", None)
        meta = {**metas[0], **(self.count(usage) if usage is not None else {})}
        if params.n > 1:
            return texts, {**meta, "candidates": metas}
        return texts[0], meta

    def _text_of(self, choice: Any) -> str:
        return (choice.text if self.api == "completions" else choice.message.content) or ""


_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

# (log-probability, None for the id that these APIs do not return, text)
_Token = tuple[float | None, None, str]


class _Streamed:
    """The text, tokens and usage that the events of one streamed answer have reported so far."""

    def __init__(self, backend: OpenAIFormat, params: SglSamplingParams) -> None:
        self._backend = backend
        self._wants_logprobs = params.return_logprob
        self._tokens: list[_Token] = []
        self._tops: list[list[_Token]] = []
        self._meta: dict[str, Any] = {}

    def take(self, event: Any) -> str:
        """The new text of ``event``."""
        if (usage := getattr(event, "usage", None)) is not None:
            self._meta |= self._backend.count(usage)
        if not event.choices:
            return ""
        (choice,) = event.choices
        if reason := getattr(choice, "finish_reason", None):
            self._meta["finish_reason"] = {"type": reason}
        if self._wants_logprobs:
            tokens, tops = _tokens_of(choice)
            self._tokens += tokens
            self._tops += tops
        return (choice.text if self._backend.api == "completions" else choice.delta.content) or ""

    def meta(self) -> dict[str, Any]:
        return {**self._meta, **_logprobs(self._tokens, self._tops)}


def _logprobs(tokens: list[_Token], tops: list[list[_Token]]) -> dict[str, Any]:
    return {"output_token_logprobs": tokens, "output_top_logprobs": tops} if tokens else {}


def _tokens_of(choice: Any) -> tuple[list[_Token], list[list[_Token]]]:
    """Each token with its log-probability, and the likeliest in its place, of a chat or a completion."""
    found = getattr(choice, "logprobs", None)
    if found is None:
        return [], []
    if (content := getattr(found, "content", None)) is not None:
        tops = [[(top.logprob, None, top.token) for top in token.top_logprobs] for token in content]
        return [(token.logprob, None, token.token) for token in content], tops
    texts = getattr(found, "tokens", None) or []
    tokens = [(value, None, text) for value, text in zip(found.token_logprobs, texts, strict=True)] if texts else []
    rows = (getattr(found, "top_logprobs", None) or [None] * len(tokens)) if texts else []
    return tokens, [[(value, None, text) for text, value in (row or {}).items()] for row in rows]
