"""The log of a program: frozen nodes on numbered sequences, from which a backend makes its requests."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..protocol.ops import JoinMode
from .choices import ChoicesSamplingMethod
from .expressions import SglGen
from .values import Leaf


class Node(msgspec.Struct, frozen=True, eq=False, gc=False):
    # gc=False: a node is in no reference cycle, because a leaf holds no reference to its run
    seq: int


class TextNode(Node, frozen=True, eq=False, gc=False):
    text: str


class HoleNode(Node, frozen=True, eq=False, gc=False):
    """The text of an argument of a traced program."""

    name: str


class RoleNode(Node, frozen=True, eq=False, gc=False):
    """A role begins or ends. ``text``: the marker that this adds to the text."""

    role: str
    is_begin: bool
    text: str


class DefaultSystemNode(Node, frozen=True, eq=False, gc=False):
    """The system message that the template adds by default."""

    content: str
    text: str


Leading = TextNode | RoleNode | DefaultSystemNode  # the nodes of a program's constant beginning


class GenNode(Node, frozen=True, eq=False, gc=False):
    """``defaults``: the run's sampling, overridden by that of ``gen``."""

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
    """Append candidate ``index`` of another leaf."""

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
    """Remember this point of the sequence as ``mark``."""

    mark: Leaf


class RollbackNode(Node, frozen=True, eq=False, gc=False):
    """Drop everything after ``mark`` from the sequence."""

    mark: Leaf


class SettleNode(Node, frozen=True, eq=False, gc=False):
    """Append a value that Python decides. ``Settling`` replaces this node once ``leaf`` is resolved.

    Without ``children`` it appends the leaf's text. With ``children`` it appends the fork ``leaf.index`` of them and
    closes them all.
    """

    leaf: Leaf
    children: tuple[int, ...] = ()


class TokensNode(Node, frozen=True, eq=False, gc=False):
    """Append these tokens. Only a runtime of Phloem can."""

    ids: tuple[int, ...]


class TextSinceNode(Node, frozen=True, eq=False, gc=False):
    """Resolve ``leaf`` to the text since ``mark``."""

    leaf: Leaf
    mark: Leaf


class CloseNode(Node, frozen=True, eq=False, gc=False):
    pass
