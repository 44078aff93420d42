"""What a program has said, in order: frozen nodes on numbered sequences, before a backend makes requests of them.

Never holds state, and knows neither tokens nor messages.
"""

from typing import Any

import msgspec

from ..constrained.spec import GrammarSpec
from ..runtime.protocol.ops import JoinMode
from ..runtime.protocol.sampling import SamplingParams
from .choices import ChoicesSamplingMethod
from .ir import SglGen
from .values import Leaf


class Node(msgspec.Struct, frozen=True, eq=False):
    seq: int


class TextNode(Node, frozen=True, eq=False):
    text: str


class RoleNode(Node, frozen=True, eq=False):
    """A role begins or ends. ``text`` is what that adds to the program's text."""

    role: str
    is_begin: bool
    text: str


class DefaultSystemNode(Node, frozen=True, eq=False):
    """The template's own system message."""

    content: str
    text: str


class GenNode(Node, frozen=True, eq=False):
    """``defaults`` are the run's sampling; ``params`` and ``n`` the merge of both."""

    leaf: Leaf
    gen: SglGen
    defaults: dict[str, Any]
    params: SamplingParams
    n: int
    grammar: GrammarSpec | None
    stream: bool


class SelectNode(Node, frozen=True, eq=False):
    leaf: Leaf
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod
    temperature: float = 0.0
    append: bool = True


class PasteNode(Node, frozen=True, eq=False):
    """Append the text of another leaf's candidate ``index``."""

    source: Leaf
    index: int


class ImageNode(Node, frozen=True, eq=False):
    hash: str
    data: bytes


class ForkNode(Node, frozen=True, eq=False):
    children: tuple[int, ...]


class JoinNode(Node, frozen=True, eq=False):
    children: tuple[int, ...]
    mode: JoinMode


class PinNode(Node, frozen=True, eq=False):
    leaf: Leaf
    ttl_s: float


class CloseNode(Node, frozen=True, eq=False):
    pass
