"""What a cache tells routers: which token blocks came and which went. Never sends anything: it calls ``on_event``.

A block is named by ``blocks.block_names`` and belongs to the node in whose edge its last token lies.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .blocks import chain, root_name
from .node import Namespace, Node


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow each other; the first follows ``parent``. ``seq`` counts events: a gap means one was lost."""

    seq: int
    namespace: Namespace
    parent: bytes
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks that are no longer whole. ``cause``: ``space`` or ``flush``."""

    seq: int
    namespace: Namespace
    names: tuple[bytes, ...]
    cause: str


Event = Stored | Evicted


class BlockEvents:
    """Keeps each node's block names and turns changes of the tree into events."""

    def __init__(self, on_event: Callable[[Event], None], block_len: int) -> None:
        if block_len < 1:
            raise ValueError(f"event_block_len={block_len}: a block needs at least 1 token")
        self.block_len = block_len
        self._on_event = on_event
        self._seq = 0

    def rooted(self, root: Node) -> None:
        root.names = [root_name(root.namespace)]

    def stored(self, node: Node, start: int) -> None:
        """Tokens [start, end) of ``node`` came."""
        first = start - start % self.block_len
        # [first, start) of the block begun above, then [start, end)
        pieces, at = [], node
        while at.end > first:
            pieces.append(at.tokens[max(first - at.start, 0) :])
            assert at.parent is not None
            at = at.parent
        parent = self._name_before(node)
        names = chain(parent, np.concatenate(pieces[::-1]), self.block_len)
        node.names = [*(node.names or ()), *names]
        if names:
            self._seq += 1
            self._on_event(Stored(self._seq, node.namespace, parent, tuple(names)))

    def evicted(self, node: Node, start: int, cause: str) -> None:
        """Tokens [start, end) of ``node`` go."""
        assert node.names is not None
        keep = start // self.block_len - node.start // self.block_len
        gone = node.names[keep:]
        del node.names[keep:]
        if gone:
            self._seq += 1
            self._on_event(Evicted(self._seq, node.namespace, tuple(gone), cause))

    def split(self, head: Node, tail: Node) -> None:
        """``head`` was cut off the front of ``tail``."""
        assert tail.names is not None
        keep = head.end // self.block_len - head.start // self.block_len
        head.names, tail.names = tail.names[:keep], tail.names[keep:]

    def _name_before(self, node: Node) -> bytes:
        """The last name on the path to ``node``, its own included; a root has one."""
        at: Node | None = node
        while at is not None and not at.names:
            at = at.parent
        assert at is not None and at.names
        return at.names[-1]
