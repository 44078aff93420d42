"""A chat answer in which tools may be called: its text is split into content and calls, whole or streamed."""

from collections.abc import Sequence
from typing import Any

from ...protocol.messages import TokenLogprob
from ...protocol.tool_format import ToolFormat
from ...protocol.tool_splitter import ArgumentsPiece, CallBegun, CallSplitter, SplitEvent, TextPiece
from ..tokenizer import Tokenizer
from .forms import ChatForm, Header, encode, usage_of
from .generation import Piece, Result


class ToolChatForm(ChatForm):
    """``names`` are those of the tools that may be called."""

    def __init__(
        self,
        header: Header,
        tokenizer: Tokenizer,
        *,
        n: int,
        logprobs: bool,
        include_usage: bool,
        format: ToolFormat,
        names: Sequence[str],
    ) -> None:
        super().__init__(header, tokenizer, n=n, logprobs=logprobs, include_usage=include_usage)
        self._format = format
        self._names = names
        self._splitters = [self._splitter() for _ in range(n)]
        self._unsent: list[list[TokenLogprob]] = [[] for _ in range(n)]

    def _splitter(self) -> CallSplitter:
        return self._format.splitter(self._names)

    def _call_id(self, choice: int, index: int) -> str:
        return f"call_{self._header.id.rpartition('-')[2][:24]}_{choice}_{index}"

    # -- whole --------------------------------------------------------------------------------------------------------

    def whole(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        choices = []
        for index, (text, meta) in enumerate(zip(result.texts, result.meta.candidates, strict=True)):
            splitter = self._splitter()
            choices.append(
                {
                    "index": index,
                    "message": self._message(index, [*splitter.push(text), *splitter.finish()]),
                    "logprobs": self._logprobs_of(meta.logprobs) if self._logprobs else None,
                    "finish_reason": _reason(meta.finish_reason, splitter),
                }
            )
        return encode({**self._header.fields("chat.completion"), "choices": choices, "usage": usage_of(results)})

    def _message(self, choice: int, events: Sequence[SplitEvent]) -> dict[str, Any]:
        content = ""
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case TextPiece():
                    content += event.text
                case CallBegun():
                    function = {"name": event.name, "arguments": ""}
                    calls.append({"id": self._call_id(choice, event.index), "type": "function", "function": function})
                case ArgumentsPiece():
                    calls[-1]["function"]["arguments"] += event.text
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = calls
        return message

    # -- streamed -----------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        delta = b',"delta":{"role":"assistant","content":null},"logprobs":null,"finish_reason":null}'
        return b"".join(self._chunks.chunk(b'{"index":%d%b' % (index, delta)) for index in range(self._n))

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
            chunks.append(self._chunks.chunk(choice % (index, encode(_reason(meta.finish_reason, splitter)))))
        return b"".join(chunks)

    def _sent(self, choice: int, events: Sequence[SplitEvent]) -> bytes:
        chunks = []
        for event in events:
            match event:
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
        return self._chunks.chunk(text % (choice, encode(delta), logprobs))


def _reason(reason: str, splitter: CallSplitter) -> str:
    return "tool_calls" if reason == "stop" and splitter.num_calls else reason
