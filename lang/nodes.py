"""What a program has said, in order: frozen nodes on numbered sequences, before a backend makes requests of them.

Never holds state, and knows neither tokens nor messages.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..protocol.ops import JoinMode
from .choices import ChoicesSamplingMethod
from .expressions import SglGen
from .values import Leaf


class Node(msgspec.Struct, frozen=True, eq=False, gc=False):
    # gc=False: a node is in no cycle, since a leaf does not know its program
    seq: int


class TextNode(Node, frozen=True, eq=False, gc=False):
    text: str


class HoleNode(Node, frozen=True, eq=False, gc=False):
    """Text that an argument will be. Only in a trace."""

    name: str


class RoleNode(Node, frozen=True, eq=False, gc=False):
    """A role begins or ends. ``text`` is what that adds to the program's text."""

    role: str
    is_begin: bool
    text: str


class DefaultSystemNode(Node, frozen=True, eq=False, gc=False):
    """The template's own system message."""

    content: str
    text: str


Leading = TextNode | RoleNode | DefaultSystemNode  # what a program's constant beginning is made of


class GenNode(Node, frozen=True, eq=False, gc=False):
    """``defaults`` are the run's sampling, which what ``gen`` says overrides."""

    leaf: Leaf
    gen: SglGen
    defaults: Mapping[str, Any]
    n: int
    stream: bool


class SelectNode(Node, frozen=True, eq=False, gc=False):
    leaf: Leaf
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod
    temperature: float = 0.0
    append: bool = True


class PasteNode(Node, frozen=True, eq=False, gc=False):
    """Append the text of another leaf's candidate ``index``."""

    source: Leaf
    index: int


class ImageNode(Node, frozen=True, eq=False, gc=False):
    hash: str
    data: bytes


class ForkNode(Node, frozen=True, eq=False, gc=False):
    children: tuple[int, ...]


class JoinNode(Node, frozen=True, eq=False, gc=False):
    children: tuple[int, ...]
    mode: JoinMode


class PinNode(Node, frozen=True, eq=False, gc=False):
    leaf: Leaf
    ttl_s: float


class MarkNode(Node, frozen=True, eq=False, gc=False):
    """Remember this point; ``mark`` stands for it."""

    mark: Leaf


class RollbackNode(Node, frozen=True, eq=False, gc=False):
    """Return to ``mark``: what came after it is dropped from the sequence."""

    mark: Leaf


class SettleNode(Node, frozen=True, eq=False, gc=False):
    """Append what a leaf says that no operation of the runtime has. ``Settling`` makes other nodes of it in time.

    Without ``children`` that is the leaf's text. With: what fork ``leaf.index`` of them holds; all of them end here.
    """

    leaf: Leaf
    children: tuple[int, ...] = ()


class TokensNode(Node, frozen=True, eq=False, gc=False):
    """Append tokens as they are. Only a runtime of ours has an operation for it."""

    ids: tuple[int, ...]


class TextSinceNode(Node, frozen=True, eq=False, gc=False):
    """``leaf`` becomes the text since ``mark``."""

    leaf: Leaf
    mark: Leaf


class CloseNode(Node, frozen=True, eq=False, gc=False):
    pass
