"""The shapes of the answers of Anthropic's Messages API: whole messages and the events of a stream."""

from collections.abc import Sequence
from typing import Any

import pydantic_core

from ...protocol.answer_splitter import AnswerEvent, AnswerSplitter, ReasoningPiece
from ...protocol.messages import CandidateMeta
from ...protocol.tool_splitter import ArgumentsPiece, CallBegun, TextPiece
from .conversation import AnswerReader
from .faults import Fault
from .forms import encode
from .jobs import Piece, Result


class MessageForm:
    """A message of one candidate. ``id`` without its prefix; ``max_tokens`` are those of the request."""

    def __init__(self, id: str, model: str, reader: AnswerReader, *, max_tokens: int) -> None:
        self._id = id
        self._model = model
        self._reader = reader
        self._max_tokens = max_tokens
        self._splitter = reader.splitter()
        self._index = -1  # of the last block
        self._open = ""  # its type; empty: none is open

    def whole(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        (text,), (meta,) = result.texts, result.meta.candidates
        content = self._content([*self._splitter.push(text), *self._splitter.finish()])
        return encode(self._message(content, _stop(meta, self._splitter, self._max_tokens), self._usage(result)))

    def opening(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}  # both are known at the end
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return _event("message_start", message=message) + _event("ping")

    def piece(self, piece: Piece) -> bytes:
        return self._sent(self._splitter.push(piece.delta.text))

    def result(self, result: Result) -> bytes:
        (meta,) = result.meta.candidates
        stop = _stop(meta, self._splitter, self._max_tokens)
        ending = self._sent(self._splitter.finish()) + self._closed()
        return ending + _event("message_delta", delta=stop, usage=self._usage(result))

    def closing(self, results: Sequence[Result]) -> bytes:
        return _event("message_stop")

    def failure(self, fault: Fault) -> bytes:
        return b"event: error\ndata: " + fault.messages_body() + b"\n\n"

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        header = {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": self._model}
        return {**header, "content": content, **stop, "usage": usage}

    def _usage(self, result: Result) -> dict[str, Any]:
        """``input_tokens`` are those that the cache did not hold."""
        (meta,) = result.meta.candidates
        thinking = self._reader.num_reasoning_tokens(meta.token_ids, self._splitter)
        return {
            "input_tokens": result.meta.prompt_tokens - result.meta.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": result.meta.cached_tokens,
            "output_tokens": meta.completion_tokens,
            **({"output_tokens_details": {"thinking_tokens": thinking}} if thinking else {}),
        }

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _content(self, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}
        for event in events:
            kind, field = _KINDS.get(type(event), ("", ""))
            match event:
                case ReasoningPiece() | TextPiece():
                    if not blocks or blocks[-1]["type"] != kind:
                        blocks.append(_empty(kind))
                    blocks[-1][field] += event.text
                case CallBegun():
                    blocks.append(self._call(event))
                case ArgumentsPiece():
                    arguments[len(blocks) - 1] = arguments.get(len(blocks) - 1, "") + event.text
        for place, text in arguments.items():  # those of a call that was cut short are no whole JSON
            blocks[place]["input"] = pydantic_core.from_json(text, allow_partial="trailing-strings")
        return blocks

    def _sent(self, events: Sequence[AnswerEvent]) -> bytes:
        sent = b""
        for event in events:
            match event:
                case ReasoningPiece() | TextPiece():
                    kind, field = _KINDS[type(event)]
                    if self._open != kind:
                        sent += self._begun(_empty(kind))
                    sent += self._delta({"type": f"{field}_delta", field: event.text})
                case CallBegun():
                    sent += self._begun(self._call(event))
                case ArgumentsPiece():
                    sent += self._delta({"type": "input_json_delta", "partial_json": event.text})
        return sent

    def _call(self, event: CallBegun) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{self._id[:24]}_{event.index}", "name": event.name, "input": {}}

    def _begun(self, block: dict[str, Any]) -> bytes:
        before = self._closed()
        self._index, self._open = self._index + 1, block["type"]
        return before + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _closed(self) -> bytes:
        was_open, self._open = self._open, ""
        return _event("content_block_stop", index=self._index) if was_open else b""


_KINDS: dict[type, tuple[str, str]] = {ReasoningPiece: ("thinking", "thinking"), TextPiece: ("text", "text")}


def _empty(kind: str) -> dict[str, Any]:
    block = {"type": kind, kind: ""}
    return {**block, "signature": ""} if kind == "thinking" else block


def _stop(meta: CandidateMeta, splitter: AnswerSplitter, max_tokens: int) -> dict[str, Any]:
    sequence = meta.matched_stop if isinstance(meta.matched_stop, str) else None
    if meta.finish_reason == "length":
        reason = "max_tokens" if meta.completion_tokens >= max_tokens else "model_context_window_exceeded"
    elif sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if splitter.num_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
