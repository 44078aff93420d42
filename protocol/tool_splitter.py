"""A model's text split as it streams: plain text, and calls with their name and arguments. Values are not checked.

    text ... <trigger> rest of begin, name, middle { arguments } end  text ...

Text that may be the start of a call is held back, and blanks around calls are dropped; pieces can be shown at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .messages import ToolTemplate


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Call ``index`` of the text calls ``name``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int


SplitEvent = TextPiece | CallBegun | ArgumentsPiece | CallEnded


class CallSplitter:
    """Text in pieces, in; events, out. ``trigger`` is where a call begins; ``names`` are those that can be called."""

    def __init__(self, template: ToolTemplate, trigger: str, names: Sequence[str]) -> None:
        self._trigger = trigger
        self._begins = {template.call_begin + name + template.call_middle: name for name in names}
        self._end = template.call_end
        self._read = self._read_text
        self._held = ""
        self._blanks = ""  # before the trigger
        self._events: list[SplitEvent] = []
        self._depth = 0
        self._is_string = self._is_escaped = self._has_text_after_call = False
        self.num_calls = 0

    @property
    def is_inside_call(self) -> bool:
        """Whether a call's arguments are being written."""
        return self._read == self._read_arguments or self._read == self._read_end

    def push(self, text: str) -> list[SplitEvent]:
        self._held += text
        while self._read():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[SplitEvent]:
        """The text has ended. A call that was not finished gets no ``CallEnded``."""
        if not self.is_inside_call:
            self._show(self._held)
            self._held = ""
        events, self._events = self._events, []
        return events

    # one method for each state; False where it needs more text

    def _read_text(self) -> bool:
        at = self._held.find(self._trigger)
        if at >= 0:
            text = self._held[:at].rstrip()
            self._show(text)
            self._blanks, self._held = self._held[len(text) : at], self._held[at:]
            self._read = self._read_begin
            return True
        text, trigger = self._held, self._trigger
        tail = max((n for n in range(1, min(len(trigger) - 1, len(text)) + 1) if text.endswith(trigger[:n])), default=0)
        safe = len(text[: len(text) - tail].rstrip())
        self._show(text[:safe])
        self._held = text[safe:]
        return False

    def _show(self, text: str) -> None:
        if self.num_calls and not self._has_text_after_call:
            text = text.lstrip()
            self._has_text_after_call = bool(text)
        if text:
            self._events.append(TextPiece(text))

    def _read_begin(self) -> bool:
        held = self._held
        for begin, name in self._begins.items():
            if held.startswith(begin):
                self._events.append(CallBegun(self.num_calls, name))
                self._held = held[len(begin) :]
                self._depth, self._is_string = 0, False
                self._read = self._read_arguments
                return True
        if any(begin.startswith(held) for begin in self._begins):
            return False
        self._show(self._blanks + held[: len(self._trigger)])  # no call after all
        self._held = held[len(self._trigger) :]
        self._read = self._read_text
        return True

    def _read_arguments(self) -> bool:
        if not self._depth and not self._is_string:
            self._held = self._held.lstrip()  # before the object begins
        end = self._end_of_arguments(self._held)
        piece, self._held = self._held[:end], self._held[end:]
        if piece:
            self._events.append(ArgumentsPiece(self.num_calls, piece))
        if self._depth or not piece.strip():
            return False
        self._read = self._read_end
        return True

    def _end_of_arguments(self, text: str) -> int:
        """The end of the open object, or of the text."""
        for at, char in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_string = False
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return len(text)

    def _read_end(self) -> bool:
        held, end = self._held, self._end
        if not held.startswith(end) and end.startswith(held):
            return False
        self._held = held.removeprefix(end)
        self._events.append(CallEnded(self.num_calls))
        self.num_calls += 1
        self._has_text_after_call = False
        self._read = self._read_text
        return True
