"""A model's text split as it streams into the reasoning between its tags and the answer after them."""

from __future__ import annotations

from .messages import ThinkingStyle


class ThinkingSplitter:
    """Splits a stream of text into (reasoning, answer) pieces. A tag may be split between two pieces."""

    def __init__(self, style: ThinkingStyle) -> None:
        self._style = style
        self._held = ""
        self._is_thinking: bool | None = None  # None: too little text to tell
        self._has_thought = False
        self._has_answered = False

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        return self._release(is_last=False)

    def finish(self) -> tuple[str, str]:
        return self._release(is_last=True)

    def _release(self, *, is_last: bool) -> tuple[str, str]:
        style = self._style
        reasoning = ""
        if self._is_thinking is None:
            start = self._held.lstrip()
            if start.startswith(style.begin):
                self._is_thinking = True
                self._held = start[len(style.begin) :]
            elif is_last or not style.begin.startswith(start):
                self._is_thinking = style.is_forced
            else:
                return "", ""
        if self._is_thinking:
            if not self._has_thought:
                self._held = self._held.lstrip("\n")
                self._has_thought = bool(self._held)
            at = self._held.find(style.end)
            if at >= 0:
                reasoning = self._held[:at].rstrip("\n")
                self._held = self._held[at + len(style.end) :]
                self._is_thinking = False
            else:
                keep = 0 if is_last else _held_back(self._held, style.end)
                reasoning, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                return reasoning, ""
        answer, self._held = self._held, ""
        if not self._has_answered:
            answer = answer.lstrip("\n")
            self._has_answered = bool(answer)
        return reasoning, answer


def _held_back(text: str, tag: str) -> int:
    """Length of the end of ``text`` that may be the beginning of ``tag``, line breaks before it included."""
    tail = max((n for n in range(min(len(tag) - 1, len(text)) + 1) if text.endswith(tag[:n])), default=0)
    before = text[: len(text) - tail]
    return tail + len(before) - len(before.rstrip("\n"))
