"""Separating ``<think>...</think>`` reasoning from the answer, also in streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import InvalidRequest
from .values import Leaf


@dataclass(frozen=True, slots=True)
class ThinkingStyle:
    """The tags of a model family. ``is_forced``: text without ``begin`` is reasoning from its first character."""

    begin: str = "<think>"
    end: str = "</think>"
    is_forced: bool = False


STYLES: dict[str, ThinkingStyle] = {
    "": ThinkingStyle(),
    "deepseek-r1": ThinkingStyle(is_forced=True),
    "deepseek-v3": ThinkingStyle(),
    "glm45": ThinkingStyle(),
    "kimi": ThinkingStyle("◁think▷", "◁/think▷"),
    "qwen3": ThinkingStyle(),
    "qwen3-thinking": ThinkingStyle(is_forced=True),
    "smollm3": ThinkingStyle(),
    "step3": ThinkingStyle(is_forced=True),
}


class Splitter:
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


class SplitLeaf(Leaf):
    """The whole generation; passes its parts to the leaves ``reasoning`` and ``answer``."""

    __slots__ = ("_splitter", "_style", "answer", "reasoning")

    def __init__(self, lock: threading.Lock, name: str | None, style: ThinkingStyle) -> None:
        super().__init__(lock, name)
        self._style = style
        self._splitter = Splitter(style)
        self.answer = Leaf(lock, name)
        self.reasoning = Leaf(lock, None if name is None else f"{name}_reasoning_content")

    def again(self, lock: threading.Lock) -> SplitLeaf:
        """A copy for another run of the program."""
        return SplitLeaf(lock, self.name, self._style)

    def push(self, text: str) -> None:
        super().push(text)
        self._pass_on(*self._splitter.push(text))

    def resolve(self, texts: Sequence[str], meta: Any = None) -> None:
        whole = Splitter(self._style)
        reasoning, answer = whole.push(texts[0])
        rest_reasoning, rest_answer = whole.finish()
        super().resolve(texts, meta)
        self.reasoning.resolve((reasoning + rest_reasoning,), meta)
        self.answer.resolve((answer + rest_answer,), meta)

    def fail(self, error: BaseException, partial: Sequence[str] = ()) -> None:
        super().fail(error, partial)
        for leaf in (self.reasoning, self.answer):
            leaf.fail(error, ("".join(leaf.chunks or ()),))

    def _pass_on(self, reasoning: str, answer: str) -> None:
        if reasoning:
            self.reasoning.push(reasoning)
        if answer:
            self.answer.push(answer)


def thinking_style(model_type: str) -> ThinkingStyle:
    """Raises InvalidRequest for a ``model_type`` that is not in ``STYLES``."""
    style = STYLES.get(model_type)
    if style is None:
        known = ", ".join(repr(name) for name in STYLES if name)
        raise InvalidRequest(f"separate_reasoning: model_type {model_type!r} is unknown; there are {known}")
    return style
