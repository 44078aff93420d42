"""Clients for the plain forms: the ``openai`` package at a server, and a peer behind a pipe.

Each spells in its server's way what OpenAI's API does not have (``Dialect``). Both count what they send.
With ``to_the_end`` an answer without a grammar goes on past the token that ends a text.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
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


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server spells what OpenAI's API does not have."""

    regex: Callable[[str], dict[str, str]]  # the fields for a regex
    text: str  # the field of a text at ``/tokenize`` and ``/detokenize``
    tokenize: dict[str, bool]  # more fields of the first, so that it adds the tokens that a prompt has
    ids: dict[str, bool]  # fields for log-probabilities with the tokens' ids


class OpenAIClient:
    """``workload.Client`` at a server with OpenAI's API. ``sampling``: more fields of each request."""

    def __init__(self, url: str, model: str, dialect: Dialect, **sampling: Any) -> None:
        self.usage = Usage()
        self.to_the_end = True
        self._model, self._dialect, self._sampling = model, dialect, sampling
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=900.0)
        self._http = httpx.AsyncClient(base_url=url, timeout=900.0)

    async def close(self) -> None:
        await self._openai.close()
        await self._http.aclose()

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
            more["extra_body"] = self._dialect.regex(regex)
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
        """A beam search of the client: one request for each beam and token, as no such API has one. Beams are tokens:
        their text may be read as others, two line ends as one token.
        """
        asked = {self._dialect.text: text, **self._dialect.tokenize}
        prompt = (await self._post("/tokenize", asked))["tokens"]
        beams = [(0.0, prompt)]
        for _ in range(max_tokens):
            found = await asyncio.gather(*(self._next(beam, 2 * width) for _, beam in beams))
            longer = [
                (total + logprob, [*beam, token])
                for (total, beam), guesses in zip(beams, found, strict=True)
                for token, logprob in guesses
            ]
            beams = sorted(longer, key=lambda one: -one[0])[:width]
        answer = await self._post("/detokenize", {"tokens": beams[0][1][len(prompt) :]})
        return str(answer[self._dialect.text])

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(path, json=body)
        return dict(answer.raise_for_status().json())

    async def _next(self, prompt: list[int], num: int) -> list[tuple[int, float]]:
        """The likeliest next tokens and their log-probabilities."""
        asked: dict[str, Any] = {"logprobs": min(num, GUESSES), "extra_body": self._dialect.ids, **self._sampling}
        answer = await self._openai.completions.create(
            model=self._model, prompt=prompt, max_tokens=1, temperature=0.0, **asked
        )
        self._count(answer.usage)
        return top_logprobs(answer.choices[0].logprobs)

    def _count(self, usage: Any) -> None:
        self.usage.requests += 1
        self.usage.prompt_tokens += usage.prompt_tokens
        self.usage.output_tokens += usage.completion_tokens
        details = usage.prompt_tokens_details
        self.usage.cached_tokens += (details.cached_tokens or 0) if details is not None else 0


def top_logprobs(logprobs: Any) -> list[tuple[int, float]]:
    """The likeliest first tokens of a text completion, in OpenAI's older form with ids (``token_id:7``) or in
    llama.cpp's newer one.
    """
    if logprobs is None:
        return []
    if logprobs.top_logprobs:
        return [(int(name.partition(":")[2]), logprob) for name, logprob in logprobs.top_logprobs[0].items()]
    content = (logprobs.model_extra or {}).get("content") or []
    return [(one["id"], one["logprob"]) for one in content[0]["top_logprobs"] if math.isfinite(one["logprob"])]


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


OURS = Dialect(lambda regex: {"regex": regex}, "prompt", {}, {"return_tokens_as_token_ids": True})
LLAMA_CPP = Dialect(lambda regex: {"grammar": gbnf(regex)}, "content", {"add_special": True}, {})
