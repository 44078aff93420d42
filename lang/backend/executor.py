"""What an interpreting backend sees of one sequence: the text, messages and variables as far as they are computed.

The names are SGLang's (``text_``, ``messages_``, ``sid``, ...), as third parties' backends read them.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..nodes import Node

if TYPE_CHECKING:
    from ..chat_template import ChatTemplate
    from .base_backend import BaseBackend
    from .speculation import Ahead


_sids = itertools.count()
_PREFIX = uuid.uuid4().hex[:16]


def next_sid() -> str:
    """A name that no other sequence of any process has."""
    return f"{_PREFIX}{next(_sids):x}"


class StreamExecutor:
    """Owned by one ``InterpretedSession``; only the driver that runs it writes to it."""

    __slots__ = (
        "ahead",
        "arguments",
        "backend",
        "chat_template",
        "cur_images",
        "cur_role",
        "cur_role_begin_pos",
        "default_sampling_para",
        "error_",
        "fork_start_text_pos",
        "images_",
        "is_driven",
        "is_finished",
        "is_unborn",
        "messages_",
        "meta_info",
        "num_api_spec_tokens",
        "planned",
        "queue",
        "seq",
        "sid",
        "stream",
        "task",
        "text_",
        "variables",
    )

    def __init__(
        self, backend: BaseBackend, seq: int, chat_template: ChatTemplate, *, stream: bool, is_unborn: bool = False
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
        self.images_: Sequence[Any] = ()  # (hash, bytes) of each
        self.cur_images: Sequence[Any] = ()  # of the open role
        self.cur_role: str | None = None
        self.cur_role_begin_pos = 0
        self.fork_start_text_pos = 0
        self.arguments: Mapping[str, Any] = {}
        self.default_sampling_para: Any = None
        self.num_api_spec_tokens: int | None = None
        self.ahead: Ahead | None = None  # what a completion model wrote beyond what was asked
        self.planned: dict[int, str] | None = None  # the gens of the open turn of a chat model
        self.error_: BaseException | None = None
        self.queue: deque[Node] = deque()
        self.is_driven = False
        self.task: Any = None  # that drives it on an event loop, which does not keep it
        self.is_finished = False
        self.is_unborn = is_unborn

    def start_as(self, parent: StreamExecutor) -> None:
        """Become what ``parent`` is now."""
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
        self.is_unborn = False

    def follow(self, constant: str) -> None:
        """The program says ``constant``; what was written ahead holds while it says so too."""
        if self.ahead is not None and not self.ahead.follow(constant):
            self.ahead = None

    def text(self) -> str:
        return self.text_

    def messages(self) -> list[dict[str, Any]]:
        return self.messages_
