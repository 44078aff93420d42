"""Clients for the plain forms: the ``openai`` package at a server, and a peer behind a pipe.

Each spells a regex in its server's way: ours takes ``regex``, llama.cpp's a grammar in GBNF. Both count what they send.
With ``to_the_end`` an answer without a grammar goes on past the token that ends a text.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai

from ..vs_peers import Piped
from .workload import Messages

GUESSES = 20  # the most log-probabilities of one position that OpenAI's API allows


@dataclass(slots=True)
class Usage:
    """Requests and tokens. ``prompt_tokens`` counts a prefix each time that it is sent."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class OpenAIClient:
    """``workload.Client`` at a server with OpenAI's API.

    ``regex_field(regex)``: the server's own field for a regex. ``sampling``: more fields of each request.
    """

    def __init__(self, url: str, model: str, regex_field: Callable[[str], dict[str, str]], **sampling: Any) -> None:
        self.usage = Usage()
        self.to_the_end = True
        self._model, self._regex_field, self._sampling = model, regex_field, sampling
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=900.0)

    async def close(self) -> None:
        await self._openai.close()

    async def chat(
        self,
        messages: Messages,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        regex: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> str:
        more: dict[str, Any] = {"extra_body": {"ignore_eos": True}} if self.to_the_end else {}
        if regex is not None:
            more["extra_body"] = self._regex_field(regex)
        elif schema is not None:
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
            more = {"response_format": form}
        if seed is not None:
            more["seed"] = seed
        more |= self._sampling
        answer = await self._openai.chat.completions.create(
            model=self._model, messages=messages, max_tokens=max_tokens, temperature=temperature, **more
        )
        self._count(answer.usage)
        return answer.choices[0].message.content or ""

    async def beam(self, text: str, width: int, max_tokens: int) -> str:
        """A beam search of the client: one request for each beam and token, as no such API has one."""
        beams = [(0.0, "")]
        for _ in range(max_tokens):
            found = await asyncio.gather(*(self._next(text + beam, 2 * width) for _, beam in beams))
            longer = [
                (total + logprob, beam + token)
                for (total, beam), guesses in zip(beams, found, strict=True)
                for token, logprob in guesses
            ]
            beams = sorted(longer, key=lambda one: -one[0])[:width]
        return beams[0][1]

    async def _next(self, text: str, num: int) -> list[tuple[str, float]]:
        """The likeliest next tokens and their log-probabilities."""
        answer = await self._openai.completions.create(
            model=self._model, prompt=text, max_tokens=1, temperature=0.0, logprobs=min(num, GUESSES), **self._sampling
        )
        self._count(answer.usage)
        return top_logprobs(answer.choices[0].logprobs)

    def _count(self, usage: Any) -> None:
        self.usage.requests += 1
        self.usage.prompt_tokens += usage.prompt_tokens
        self.usage.output_tokens += usage.completion_tokens
        details = usage.prompt_tokens_details
        self.usage.cached_tokens += (details.cached_tokens or 0) if details is not None else 0


def top_logprobs(logprobs: Any) -> list[tuple[str, float]]:
    """The likeliest first tokens of a text completion, in OpenAI's older form or in llama.cpp's newer one."""
    if logprobs is None:
        return []
    if logprobs.top_logprobs:
        return list(logprobs.top_logprobs[0].items())
    content = (logprobs.model_extra or {}).get("content") or []
    return [(one["token"], one["logprob"]) for one in content[0]["top_logprobs"] if math.isfinite(one["logprob"])]


class PipedClient:
    """``workload.Client`` at a peer of ``benchmarks.peers``, which has a beam search of its own."""

    def __init__(self, peer: Piped) -> None:
        self.usage = Usage()
        self.to_the_end = True
        self._peer = peer

    async def chat(
        self,
        messages: Messages,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        regex: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> str:
        more = {"temperature": temperature, "seed": seed, "regex": regex, "schema": schema}
        return await self._ask(messages, max_tokens, **more)

    async def beam(self, text: str, width: int, max_tokens: int) -> str:
        return await self._ask(text, max_tokens, width=width)

    async def _ask(self, prompt: Messages | str, max_tokens: int, **more: Any) -> str:
        to_the_end = self.to_the_end and more.get("regex") is None and more.get("schema") is None
        answer = await self._peer.request(prompt, max_tokens, to_the_end=to_the_end, **more)
        self.usage.requests += 1
        self.usage.prompt_tokens += answer.prompt_tokens
        self.usage.output_tokens += answer.completion_tokens
        return answer.text


def gbnf(regex: str) -> str:
    r"""The grammar of llama.cpp for a regex of literals, classes, groups, ``|`` and ``{m,n}``.

    Classes, groups and repetitions are written alike in both; literals stand in quotes. ``\`` makes the next character
    literal.
    """
    parts, i = [], 0
    while i < len(regex):
        char = regex[i]
        if char in "[{":
            end = i
            close = {"[": "]", "{": "}"}[char]
            while regex[end] != close or regex[end - 1] == "\\":
                end += 1
            parts.append(regex[i : end + 1])
            i = end
        elif char in "()|*+?":
            parts.append(char)
        else:
            if char == "\\":
                i += 1
                char = "\n" if regex[i] == "n" else regex[i]
            parts.append({'"': r'"\""', "\\": r'"\\"', "\n": r'"\n"'}.get(char, f'"{char}"'))
        i += 1
    return "root ::= " + " ".join(parts).replace(" {", "{").replace(" *", "*").replace(" +", "+").replace(" ?", "?")
