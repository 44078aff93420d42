"""The tags around a model's reasoning, found in its template and its vocabulary."""

from __future__ import annotations

import contextlib

from ...protocol.errors import InvalidRequest
from ...protocol.messages import ThinkingStyle
from .tokenizer import Tokenizer
from .tool_split import Renderer

TAGS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"))


def find_thinking(template: Renderer, tokenizer: Tokenizer) -> ThinkingStyle | None:
    """The tags that the template writes or that are tokens of the vocabulary; None where there are none.

    The reasoning is forced where the template ends the prompt of an answer with the tag that begins it.
    """
    for begin, end in TAGS:
        ids = [tokenizer.encode(tag, special=True) for tag in (begin, end)]
        if end in template.source or all(len(one) == 1 for one in ids):
            prompt = ""
            with contextlib.suppress(InvalidRequest):  # a template that wants more than one user's message
                prompt = template.render_text([{"role": "user", "content": "Quser"}], add_generation_prompt=True)
            is_special = any(not tokenizer.special_ids.isdisjoint(one) for one in ids)
            return ThinkingStyle(begin, end, is_forced=prompt.rstrip().endswith(begin), is_special=is_special)
    return None
