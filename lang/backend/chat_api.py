"""What the chat APIs of others have in common: messages instead of a text, and generation only as a whole turn.

Never speaks to a network.
"""

from __future__ import annotations

import re
from typing import Any

from ...protocol.errors import InvalidRequest
from ..expressions import REGEX_OF_DTYPE, SglSamplingParams
from ..types import ParseError
from .executor import StreamExecutor


def chat_messages(s: StreamExecutor, api: str) -> list[dict[str, Any]]:
    """The turns before the one to be generated; refuses where that turn has text already, or is not the assistant's."""
    if s.cur_role != "assistant":
        where = "outside of any role" if s.cur_role is None else f"inside the role {s.cur_role!r}"
        raise InvalidRequest(
            f"gen() stands {where}, but a chat model of {api} writes assistant turns only: "
            "s += assistant(gen(...)), or a completion model"
        )
    if s.num_api_spec_tokens is None and s.text_[s.cur_role_begin_pos :].strip():
        raise InvalidRequest(
            f"gen() does not directly follow the beginning of the assistant's turn, and {api} cannot continue a turn "
            "that has text already; put that text into the user's turn, or let the model write it all with "
            "@function(num_api_spec_tokens=...)"
        )
    return list(s.messages_)


def with_dtype(text: str, params: SglSamplingParams) -> str:
    """The part of ``text`` that is of the wanted dtype: these APIs take no regex."""
    if params.dtype is None:
        return text
    found = re.search(REGEX_OF_DTYPE[params.dtype], text)
    if found is None:
        raise ParseError(f"{text!r} holds no {params.dtype!r}; say in the prompt what to answer", raw=text)
    return found.group().strip()
