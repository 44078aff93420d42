"""``StreamExecutor``: one sequence as a ``BaseBackend`` sees it, with its text, messages and variables so far.

The attribute names are SGLang's (``text_``, ``messages_``, ``sid``, ...), because third parties' backends read them.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.messages import ProgramSettings
from ..chat_template import ChatTemplate
from ..nodes import Node
from ..sampling_params import SglSamplingParams

_sids = itertools.count()
_PREFIX = uuid.uuid4().hex[:16]


def next_sid() -> str:
    """A sequence id that is unique across processes."""
    return f"{_PREFIX}{next(_sids):x}"


@dataclass(slots=True)
class Ahead:
    """Generated text that no gen has taken yet: at most ``max_tokens`` tokens.

    ``is_whole``: the model ended the text. ``drawn_by``: its sampling; only a gen with equal sampling can take it.
    ``is_fresh``: no part was taken yet. ``num_asked``: ``max_tokens`` of the call.
    """

    text: str
    max_tokens: int
    is_whole: bool
    drawn_by: SglSamplingParams
    is_fresh: bool = True
    num_asked: int = 0

    def take(self, params: SglSamplingParams) -> str | None:
        """The text that a gen with ``params`` would have generated; None if that is uncertain.

        The number of its tokens is unknown, but at most its number of bytes, and at most ``max_tokens``.
        """
        if params.without_ends() != self.drawn_by:
            return None
        ends = [at for stop in params.stop if (at := self.text.find(stop)) >= 0]
        if ends:
            text = self.text[: min(ends)]
        elif self.text and (self.is_whole or (self.is_fresh and self.num_asked == params.max_new_tokens)):
            text = self.text
        else:
            return None
        if min(self.max_tokens, len(text.encode())) > params.max_new_tokens:
            return None
        self.text = self.text[len(text) :]
        self.is_fresh = False
        return text

    def follow(self, constant: str) -> bool:
        """The program appends ``constant``. False if the text ahead does not begin with it."""
        self.is_fresh = False
        if not self.text.startswith(constant):
            return False
        self.text = self.text[len(constant) :]
        return True


class StreamExecutor:
    """Owned by one ``InterpretedSession``. Only the driver that runs the sequence writes to it."""

    def __init__(
        self, backend: Any, seq: int, chat_template: ChatTemplate, *, stream: bool, awaits_fork: bool = False
    ) -> None:
        self.backend = backend
        self.seq = seq
        self.sid = next_sid()
        self.stream = stream
        self.chat_template = chat_template
        self.text_ = ""
        self.messages_: list[dict[str, Any]] = []
        self.variables: dict[str | None, Any] = {}
        self.meta_info: dict[str | None, Any] = {}
        self.images_: Sequence[Any] = ()  # (hash, bytes) of each image
        self.cur_images: Sequence[Any] = ()  # images of the open role
        self.cur_role: str | None = None
        self.cur_role_begin_pos = 0
        self.fork_start_text_pos = 0
        self.arguments: Mapping[str, Any] = {}
        self.settings = ProgramSettings()  # of the run
        self.default_sampling_para: Any = None
        self.num_api_spec_tokens: int | None = None
        self.ahead: Ahead | None = None  # of a completion model
        self.planned: dict[int, str] | None = None  # texts of the gens of a chat model's open turn
        self.error_: BaseException | None = None
        self.queue: deque[Node] = deque()
        self.is_driven = False
        self.task: Any = None  # the task that drives it; an event loop alone does not keep a task alive
        self.is_finished = False
        self.awaits_fork = awaits_fork  # the fork that makes this sequence has not run yet

    def start_as(self, parent: StreamExecutor) -> None:
        """Copy the present state of ``parent``, as a fork of it."""
        self.text_ = parent.text_
        self.messages_ = list(parent.messages_)
        self.variables = dict(parent.variables)
        self.meta_info = dict(parent.meta_info)
        self.images_ = parent.images_
        self.cur_images = parent.cur_images
        self.cur_role = parent.cur_role
        self.cur_role_begin_pos = parent.cur_role_begin_pos
        self.fork_start_text_pos = len(parent.text_)
        self.default_sampling_para = parent.default_sampling_para
        self.error_ = parent.error_
        self.awaits_fork = False

    def follow(self, constant: str) -> None:
        """The program appends ``constant``. Text generated ahead is dropped if it does not agree."""
        if self.ahead is not None and not self.ahead.follow(constant):
            self.ahead = None

    def text(self) -> str:
        return self.text_

    def messages(self) -> list[dict[str, Any]]:
        return self.messages_
