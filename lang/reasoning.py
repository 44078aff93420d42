"""A generation whose ``<think>...</think>`` reasoning and answer are two variables."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ..protocol.errors import InvalidRequest
from ..protocol.messages import ThinkingStyle
from ..protocol.thinking_splitter import ThinkingSplitter
from .values import Leaf

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


class SplitLeaf(Leaf):
    """The whole generation; passes its parts to the leaves ``reasoning`` and ``answer``."""

    __slots__ = ("_splitter", "_style", "answer", "reasoning")

    def __init__(self, lock: threading.Lock, name: str | None, style: ThinkingStyle) -> None:
        super().__init__(lock, name)
        self._style = style
        self._splitter = ThinkingSplitter(style)
        self.answer = Leaf(lock, name)
        self.reasoning = Leaf(lock, None if name is None else f"{name}_reasoning_content")

    def again(self, lock: threading.Lock) -> SplitLeaf:
        """A copy for another run of the program."""
        return SplitLeaf(lock, self.name, self._style)

    def push(self, text: str) -> None:
        super().push(text)
        self._pass_on(*self._splitter.push(text))

    def resolve(self, texts: Sequence[str], meta: Any = None) -> None:
        whole = ThinkingSplitter(self._style)
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
