"""The shapes of the OpenAI-compatible answers: whole objects, and stream chunks built from prepared bytes."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...protocol.messages import TokenLogprob
from ..tokenizer import Tokenizer
from .faults import Fault
from .generation import Piece, Result

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; a token that cannot be sampled shows this

encode = msgspec.json.encode


class Form(Protocol):
    """One endpoint's answer as bytes. A stream is ``opening``, ``piece`` and ``result`` as they come, ``closing``."""

    def whole(self, results: Sequence[Result]) -> bytes: ...
    def opening(self) -> bytes: ...
    def piece(self, piece: Piece) -> bytes: ...
    def result(self, result: Result) -> bytes: ...
    def closing(self, results: Sequence[Result]) -> bytes: ...


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def failure(fault: Fault) -> bytes:
    """The last chunk of a stream that fails after it has begun."""
    return b"data: " + fault.body + b"\n\n"


@dataclass(frozen=True, slots=True)
class Header:
    """The fields that every object of one answer begins with."""

    id: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, program: str, model: str) -> "Header":
        return cls(f"{prefix}-{program}", model, int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_of(results: Iterable[Result]) -> dict[str, Any]:
    """Token counts over all prompts and candidates; a prompt counts once however many candidates it has."""
    prompt = cached = completion = forced = 0
    for result in results:
        prompt += result.meta.prompt_tokens
        cached += result.meta.cached_tokens
        completion += sum(c.completion_tokens for c in result.meta.candidates)
        forced += sum(c.forced_tokens for c in result.meta.candidates)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if forced:
        usage["completion_tokens_details"] = {"forced_tokens": forced}
    return usage


class _Chunks:
    """Stream chunks of one answer; the part that is the same in each chunk is encoded once."""

    def __init__(self, header: Header, kind: str, *, include_usage: bool) -> None:
        self._fields = {**header.fields(kind), "choices": []}
        # {"id":..,"choices":[]}  ->  data: {"id":..,"choices":[ ... ]<tail>
        self._head = b"data: " + encode(self._fields)[:-2]
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def chunk(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail

    def closing(self, results: Sequence[Result]) -> bytes:
        return event({**self._fields, "usage": usage_of(results)}) + DONE if self._include_usage else DONE


# -- chat -------------------------------------------------------------------------------------------------------------


class ChatForm:
    def __init__(self, header: Header, tokenizer: Tokenizer, *, n: int, logprobs: bool, include_usage: bool) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._n = n
        self._logprobs = logprobs
        self._chunks = _Chunks(header, "chat.completion.chunk", include_usage=include_usage)

    def whole(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._logprobs_of(meta.logprobs) if self._logprobs else None,
                "finish_reason": meta.finish_reason,
            }
            for index, (text, meta) in enumerate(zip(result.texts, result.meta.candidates, strict=True))
        ]
        return encode({**self._header.fields("chat.completion"), "choices": choices, "usage": usage_of(results)})

    def opening(self) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._chunks.chunk(b'{"index":%d%b' % (index, delta)) for index in range(self._n))

    def piece(self, piece: Piece) -> bytes:
        delta = piece.delta
        if not delta.text and not (self._logprobs and delta.logprobs):
            return b""
        logprobs = encode(self._logprobs_of(delta.logprobs)) if self._logprobs else b"null"
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
        return self._chunks.chunk(choice % (delta.index, encode(delta.text), logprobs))

    def result(self, result: Result) -> bytes:
        choice = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
        return b"".join(
            self._chunks.chunk(choice % (index, encode(meta.finish_reason)))
            for index, meta in enumerate(result.meta.candidates)
        )

    def closing(self, results: Sequence[Result]) -> bytes:
        return self._chunks.closing(results)

    def _logprobs_of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._logprob(token.token_id, token.logprob, token.text),
                    "top_logprobs": [self._logprob(*alternative) for alternative in token.top],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _logprob(self, token_id: int, logprob: float | None, text: str) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes[token_id] or text.encode()
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


# -- completions ------------------------------------------------------------------------------------------------------


class CompletionForm:
    """``echoes``: per prompt the text put before every answer to it (empty: no echo)."""

    def __init__(
        self, header: Header, *, n: int, logprobs: int | None, include_usage: bool, echoes: Sequence[str]
    ) -> None:
        self._header = header
        self._n = n
        self._top = logprobs
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes for _ in range(n)]  # per choice, of its next token
        self._chunks = _Chunks(header, "text_completion", include_usage=include_usage)

    def whole(self, results: Sequence[Result]) -> bytes:
        choices = []
        for result in results:
            echo = self._echoes[result.prompt]
            for index, (text, meta) in enumerate(zip(result.texts, result.meta.candidates, strict=True)):
                tokens = (*result.meta.prompt_logprobs, *meta.logprobs) if echo else meta.logprobs
                choices.append(
                    {
                        "index": result.prompt * self._n + index,
                        "text": echo + text,
                        "logprobs": None if self._top is None else self._logprobs_of(tokens, 0)[0],
                        "finish_reason": meta.finish_reason,
                    }
                )
        return encode({**self._header.fields("text_completion"), "choices": choices, "usage": usage_of(results)})

    def opening(self) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
        return b"".join(
            self._chunks.chunk(choice % (prompt * self._n + index, encode(echo)))
            for prompt, echo in enumerate(self._echoes)
            if echo
            for index in range(self._n)
        )

    def piece(self, piece: Piece) -> bytes:
        delta = piece.delta
        choice = piece.prompt * self._n + delta.index
        logprobs = b"null"
        if self._top is not None:
            value, self._offsets[choice] = self._logprobs_of(delta.logprobs, self._offsets[choice])
            logprobs = encode(value)
        if not delta.text and not (self._top is not None and delta.logprobs):
            return b""
        chunk = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}'
        return self._chunks.chunk(chunk % (choice, encode(delta.text), logprobs))

    def result(self, result: Result) -> bytes:
        choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}'
        return b"".join(
            self._chunks.chunk(choice % (result.prompt * self._n + index, encode(meta.finish_reason)))
            for index, meta in enumerate(result.meta.candidates)
        )

    def closing(self, results: Sequence[Result]) -> bytes:
        return self._chunks.closing(results)

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
        """The object for ``tokens``, the first of which begins at character ``offset``; and where the next begins."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        value = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {text: finite(logprob) for _, logprob, text in token.top} if token.logprob is not None else None
                for token in tokens
            ]
            if self._top
            else None,
            "text_offset": offsets,
        }
        return value, offset


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
