"""A chat answer split as it streams: reasoning, text, and calls."""

from __future__ import annotations

from dataclasses import dataclass

from .thinking_splitter import ThinkingSplitter
from .tool_splitter import CallSplitter, SplitEvent, TextPiece


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


AnswerEvent = ReasoningPiece | SplitEvent


class AnswerSplitter:
    """Text in pieces, in; events, out. None: the text has no such part."""

    def __init__(self, thinking: ThinkingSplitter | None, calls: CallSplitter | None) -> None:
        self._thinking = thinking
        self._calls = calls
        self.has_reasoning = False

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[AnswerEvent]:
        if self._thinking is None:
            return self._answered(text)
        reasoning, answer = self._thinking.push(text)
        return [*self._thought(reasoning), *self._answered(answer)]

    def finish(self) -> list[AnswerEvent]:
        """The text has ended. A call that was not finished gets no ``CallEnded``."""
        reasoning, answer = ("", "") if self._thinking is None else self._thinking.finish()
        ending = [] if self._calls is None else self._calls.finish()
        return [*self._thought(reasoning), *self._answered(answer), *ending]

    def _thought(self, text: str) -> list[AnswerEvent]:
        self.has_reasoning |= bool(text)
        return [ReasoningPiece(text)] if text else []

    def _answered(self, text: str) -> list[AnswerEvent]:
        if self._calls is not None:
            return list(self._calls.push(text)) if text else []
        return [TextPiece(text)] if text else []
