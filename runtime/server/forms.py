"""The shapes of the answers of OpenAI's endpoints and of ``/generate``: whole objects and stream chunks."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...protocol.answer_splitter import AnswerEvent, AnswerSplitter, ReasoningPiece
from ...protocol.messages import TokenLogprob
from ...protocol.tool_splitter import ArgumentsPiece, CallBegun, TextPiece
from ..tokenizer import Tokenizer
from .conversation import AnswerReader
from .faults import Fault
from .jobs import Piece, Result

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; a token that cannot be sampled shows this

encode = msgspec.json.encode


class Form(Protocol):
    """One endpoint's answer as bytes. A stream is ``opening``, ``piece`` and ``result`` as they come, ``closing``.

    ``failure`` ends a stream that fails after it has begun.
    """

    def whole(self, results: Sequence[Result]) -> bytes: ...
    def opening(self) -> bytes: ...
    def piece(self, piece: Piece) -> bytes: ...
    def result(self, result: Result) -> bytes: ...
    def closing(self, results: Sequence[Result]) -> bytes: ...
    def failure(self, fault: Fault) -> bytes: ...


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


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


def usage_of(results: Iterable[Result], *, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts over all prompts and candidates; a prompt counts once however many candidates it has."""
    prompt = cached = completion = forced = 0
    is_closed = False
    for result in results:
        prompt += result.meta.prompt_tokens
        cached += result.meta.cached_tokens
        completion += sum(c.completion_tokens for c in result.meta.candidates)
        forced += sum(c.forced_tokens for c in result.meta.candidates)
        is_closed |= any(c.closed_by_budget for c in result.meta.candidates)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details: dict[str, Any] = {"forced_tokens": forced} if forced else {}
    if is_closed:
        details["closed_by_budget"] = True
    if reasoning_tokens:
        details["reasoning_tokens"] = reasoning_tokens
    if details:
        usage["completion_tokens_details"] = details
    return usage


class _Failing:
    def failure(self, fault: Fault) -> bytes:
        return b"data: " + fault.body + b"\n\n"


class _Streamed(_Failing):
    """Stream chunks of one answer; the part that is the same in each chunk is encoded once."""

    def __init__(self, header: Header, kind: str, *, include_usage: bool) -> None:
        self._header = header
        self._fields = {**header.fields(kind), "choices": []}
        # {"id":..,"choices":[]}  ->  data: {"id":..,"choices":[ ... ]<tail>
        self._head = b"data: " + encode(self._fields)[:-2]
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def _chunk_of(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail

    def closing(self, results: Sequence[Result]) -> bytes:
        return event({**self._fields, "usage": self._usage(results)}) + DONE if self._include_usage else DONE

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        return usage_of(results)


# -- chat -------------------------------------------------------------------------------------------------------------


class ChatForm(_Streamed):
    """``as_ids``: log-probabilities name tokens by their ids."""

    def __init__(
        self, header: Header, tokenizer: Tokenizer, *, n: int, logprobs: bool, as_ids: bool, include_usage: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._n = n
        self._logprobs, self._as_ids = logprobs, as_ids
        super().__init__(header, "chat.completion.chunk", include_usage=include_usage)

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
        return b"".join(self._chunk_of(b'{"index":%d%b' % (index, delta)) for index in range(self._n))

    def piece(self, piece: Piece) -> bytes:
        delta = piece.delta
        if not delta.text and not (self._logprobs and delta.logprobs):
            return b""
        logprobs = encode(self._logprobs_of(delta.logprobs)) if self._logprobs else b"null"
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
        return self._chunk_of(choice % (delta.index, encode(delta.text), logprobs))

    def result(self, result: Result) -> bytes:
        choice = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
        return b"".join(
            self._chunk_of(choice % (index, encode(meta.finish_reason)))
            for index, meta in enumerate(result.meta.candidates)
        )

    def _logprobs_of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": logprobs_of(tokens, self._tokenizer, as_ids=self._as_ids), "refusal": None}


def name_of(token_id: int, text: str, as_ids: bool) -> str:
    """A token in a list of log-probabilities. Several tokens may have one text, such as parts of a character."""
    return f"token_id:{token_id}" if as_ids else text


def logprobs_of(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer, *, as_ids: bool = False) -> list[dict[str, Any]]:
    def shown(token_id: int, logprob: float | None, text: str) -> dict[str, Any]:
        raw = tokenizer.token_bytes[token_id] or text.encode()
        return {"token": name_of(token_id, text, as_ids), "logprob": finite(logprob), "bytes": list(raw)}

    return [
        {
            **shown(token.token_id, token.logprob, token.text),
            "top_logprobs": [shown(*alternative) for alternative in token.top],
        }
        for token in tokens
    ]


# -- chat with tools or reasoning -------------------------------------------------------------------------------------


class SplitChatForm(ChatForm):
    """``reader`` splits the text into reasoning, content and calls."""

    def __init__(
        self,
        header: Header,
        tokenizer: Tokenizer,
        *,
        n: int,
        logprobs: bool,
        as_ids: bool,
        include_usage: bool,
        reader: AnswerReader,
    ) -> None:
        super().__init__(header, tokenizer, n=n, logprobs=logprobs, as_ids=as_ids, include_usage=include_usage)
        self._reader = reader
        self._splitters = [reader.splitter() for _ in range(n)]
        self._unsent: list[list[TokenLogprob]] = [[] for _ in range(n)]

    def _call_id(self, choice: int, index: int) -> str:
        return f"call_{self._header.id.rpartition('-')[2][:24]}_{choice}_{index}"

    def whole(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        choices = []
        for index, (text, meta) in enumerate(zip(result.texts, result.meta.candidates, strict=True)):
            splitter = self._splitters[index]
            choices.append(
                {
                    "index": index,
                    "message": self._message(index, [*splitter.push(text), *splitter.finish()]),
                    "logprobs": self._logprobs_of(meta.logprobs) if self._logprobs else None,
                    "finish_reason": _reason(meta.finish_reason, splitter),
                }
            )
        return encode({**self._header.fields("chat.completion"), "choices": choices, "usage": self._usage(results)})

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        metas = [meta for result in results for meta in result.meta.candidates]
        reasoning = sum(map(self._reader.num_reasoning_tokens, [meta.token_ids for meta in metas], self._splitters))
        return usage_of(results, reasoning_tokens=reasoning)

    def _message(self, choice: int, events: Sequence[AnswerEvent]) -> dict[str, Any]:
        reasoning = content = ""
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ReasoningPiece():
                    reasoning += event.text
                case TextPiece():
                    content += event.text
                case CallBegun():
                    function = {"name": event.name, "arguments": ""}
                    calls.append({"id": self._call_id(choice, event.index), "type": "function", "function": function})
                case ArgumentsPiece():
                    calls[-1]["function"]["arguments"] += event.text
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def opening(self) -> bytes:
        delta = b',"delta":{"role":"assistant","content":null},"logprobs":null,"finish_reason":null}'
        return b"".join(self._chunk_of(b'{"index":%d%b' % (index, delta)) for index in range(self._n))

    def piece(self, piece: Piece) -> bytes:
        choice, delta = piece.delta.index, piece.delta
        self._unsent[choice] += delta.logprobs
        return self._sent(choice, self._splitters[choice].push(delta.text))

    def result(self, result: Result) -> bytes:
        chunks = []
        for index, meta in enumerate(result.meta.candidates):
            splitter = self._splitters[index]
            chunks.append(self._sent(index, splitter.finish()))
            if self._unsent[index]:
                chunks.append(self._chunk(index, {}))
            choice = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}'
            chunks.append(self._chunk_of(choice % (index, encode(_reason(meta.finish_reason, splitter)))))
        return b"".join(chunks)

    def _sent(self, choice: int, events: Sequence[AnswerEvent]) -> bytes:
        chunks = []
        for event in events:
            match event:
                case ReasoningPiece():
                    chunks.append(self._chunk(choice, {"reasoning_content": event.text}))
                case TextPiece():
                    chunks.append(self._chunk(choice, {"content": event.text}))
                case CallBegun(index=index):
                    function = {"name": event.name, "arguments": ""}
                    call = {"index": index, "id": self._call_id(choice, index), "type": "function"}
                    chunks.append(self._chunk(choice, {"tool_calls": [{**call, "function": function}]}))
                case ArgumentsPiece(index=index):
                    call = {"index": index, "function": {"arguments": event.text}}
                    chunks.append(self._chunk(choice, {"tool_calls": [call]}))
        return b"".join(chunks)

    def _chunk(self, choice: int, delta: dict[str, Any]) -> bytes:
        """With the log-probabilities of all tokens since the last one: a call's signs are tokens without a delta."""
        tokens, self._unsent[choice] = self._unsent[choice], []
        logprobs = encode(self._logprobs_of(tokens)) if self._logprobs else b"null"
        text = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
        return self._chunk_of(text % (choice, encode(delta), logprobs))


def _reason(reason: str, splitter: AnswerSplitter) -> str:
    return "tool_calls" if reason == "stop" and splitter.num_calls else reason


# -- completions ------------------------------------------------------------------------------------------------------


class CompletionForm(_Streamed):
    """``echoes``: per prompt the text put before every answer to it (empty: no echo). ``as_ids``: log-probabilities
    name tokens by their ids.
    """

    def __init__(
        self,
        header: Header,
        *,
        n: int,
        logprobs: int | None,
        as_ids: bool,
        include_usage: bool,
        echoes: Sequence[str],
    ) -> None:
        self._n = n
        self._top, self._as_ids = logprobs, as_ids
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes for _ in range(n)]  # per choice, of its next token
        super().__init__(header, "text_completion", include_usage=include_usage)

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
            self._chunk_of(choice % (prompt * self._n + index, encode(echo)))
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
        return self._chunk_of(chunk % (choice, encode(delta.text), logprobs))

    def result(self, result: Result) -> bytes:
        choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}'
        return b"".join(
            self._chunk_of(choice % (result.prompt * self._n + index, encode(meta.finish_reason)))
            for index, meta in enumerate(result.meta.candidates)
        )

    def _logprobs_of(self, tokens: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
        """The object for ``tokens``, the first of which begins at character ``offset``; and where the next begins."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        value = {
            "tokens": [name_of(token.token_id, token.text, self._as_ids) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {name_of(token_id, text, self._as_ids): finite(logprob) for token_id, logprob, text in token.top}
                if token.logprob is not None
                else None
                for token in tokens
            ]
            if self._top
            else None,
            "text_offset": offsets,
        }
        return value, offset


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


# -- /generate --------------------------------------------------------------------------------------------------------


class NativeForm(_Failing):
    """``counts``: candidates of each prompt. Answers are listed prompt by prompt, candidate by candidate."""

    def __init__(self, id: str, *, counts: Sequence[int], is_batch: bool, logprobs: bool, with_text: bool) -> None:
        self._id = id
        self._starts = [sum(counts[:i]) for i in range(len(counts))]  # prompt -> place of its first candidate
        self._total = sum(counts)
        self._is_list = is_batch or self._total > 1
        self._logprobs = logprobs
        self._with_text = with_text
        self._texts = [""] * self._total
        self._ids: list[list[int]] = [[] for _ in range(self._total)]

    def whole(self, results: Sequence[Result]) -> bytes:
        answers = [answer for result in results for answer in self._answers(result)]
        return encode(answers if self._is_list else answers[0])

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        delta = piece.delta
        place = self._starts[piece.prompt] + delta.index
        self._texts[place] += delta.text
        self._ids[place] += delta.token_ids
        if not delta.text:
            return b""
        meta = {"id": self._id, "finish_reason": None, "completion_tokens": len(self._ids[place])}
        return event(self._placed(place, {"text": self._texts[place], "output_ids": self._ids[place]}, meta))

    def result(self, result: Result) -> bytes:
        start = self._starts[result.prompt]
        return b"".join(
            event(self._placed(start + i, answer, answer.pop("meta_info")))
            for i, answer in enumerate(self._answers(result))
        )

    def closing(self, results: Sequence[Result]) -> bytes:
        return DONE

    def _placed(self, place: int, answer: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
        """``answer`` as one event of a stream, with its place where there are several."""
        return {**answer, "meta_info": meta, **({"index": place} if self._is_list else {})}

    def _answers(self, result: Result) -> list[dict[str, Any]]:
        gen = result.meta
        answers = []
        for text, meta in zip(result.texts, gen.candidates, strict=True):
            info: dict[str, Any] = {
                "id": self._id,
                "finish_reason": _finish(meta.finish_reason, meta.matched_stop, meta.completion_tokens),
                "prompt_tokens": gen.prompt_tokens,
                "completion_tokens": meta.completion_tokens,
                "cached_tokens": gen.cached_tokens,
                "forced_tokens": meta.forced_tokens,
                **({"closed_by_budget": True} if meta.closed_by_budget else {}),
                "queue_s": gen.queue_s,
                "prefill_s": gen.prefill_s,
                "decode_s": gen.decode_s,
                "e2e_latency": gen.queue_s + gen.prefill_s + gen.decode_s,
            }
            if self._logprobs:
                info["input_token_logprobs"] = self._pairs(gen.prompt_logprobs)
                info["output_token_logprobs"] = self._pairs(meta.logprobs)
                info["input_top_logprobs"] = self._tops(gen.prompt_logprobs)
                info["output_top_logprobs"] = self._tops(meta.logprobs)
            answers.append({"text": text, "output_ids": list(meta.token_ids), "meta_info": info})
        return answers

    def _pairs(self, tokens: Sequence[TokenLogprob]) -> list[tuple[float | None, int, str | None]]:
        return [self._pair(token.token_id, token.logprob, token.text) for token in tokens]

    def _tops(self, tokens: Sequence[TokenLogprob]) -> list[list[tuple[float | None, int, str | None]] | None]:
        return [[self._pair(*alternative) for alternative in token.top] or None for token in tokens]

    def _pair(self, token_id: int, logprob: float | None, text: str) -> tuple[float | None, int, str | None]:
        return finite(logprob), token_id, text if self._with_text else None


def _finish(reason: str, matched: str | int | None, completion_tokens: int) -> dict[str, Any]:
    if reason == "stop":
        return {"type": "stop", "matched": matched}
    return {"type": "length", "length": completion_tokens} if reason == "length" else {"type": reason}
