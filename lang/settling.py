"""Values that Python decides, in their places among what is sent: what follows one is held until it is known.

Other sequences are not held. Never sends and never waits: says what can be sent now, and which values are missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.errors import DependencyFailed
from .nodes import (
    CloseNode,
    ForkNode,
    GenNode,
    JoinNode,
    Node,
    PasteNode,
    PinNode,
    SelectNode,
    SettleNode,
    TextNode,
    TextSinceNode,
)
from .values import Leaf

AskingNode = GenNode | SelectNode | PinNode | TextSinceNode  # what has a leaf that the runtime writes


class Settling:
    """Of one program. ``held`` is what has been taken from the log and not been sent."""

    def __init__(self) -> None:
        self.held: list[Node] = []
        self._failed: dict[int, BaseException] = {}  # sequences whose decided value is an error
        self._unborn: set[int] = set()  # of these, those that the runtime has never heard of
        self._gone: set[int] = set()  # ids of leaves that failed here

    def settle(self, nodes: Sequence[Node], *, is_ending: bool) -> tuple[list[Node], list[Leaf]]:
        """(what can be sent now, the values that the rest waits for). ``is_ending``: no more nodes will come."""
        nodes = [*self.held, *nodes]
        self.held = []
        ready: list[Node] = []
        missing: list[Leaf] = []
        stopped: set[int] = set()  # sequences
        stuck: set[int] = set()  # ids of leaves that are not sent
        for i, node in enumerate(nodes):
            if self._has_failed(node, ready):
                continue
            if not _is_stopped(node, stopped, stuck):
                if not isinstance(node, SettleNode):
                    ready.append(node)
                    continue
                if node.leaf.is_done or (is_ending and not _is_computed_on(node.seq, nodes[i + 1 :])):
                    self._decide(node, ready)
                    continue
                missing.append(node.leaf)
            self.held.append(node)
            stopped.add(node.seq)
            if isinstance(node, ForkNode | SettleNode):
                stopped.update(node.children)
            if isinstance(node, AskingNode):
                stuck.add(id(node.leaf))
        return ready, missing

    def _decide(self, node: SettleNode, ready: list[Node]) -> None:
        leaf, seq = node.leaf, node.seq
        if leaf.error is not None:
            self._failed[seq] = leaf.error
        elif leaf.is_done and node.children:
            ready.append(JoinNode(seq, (node.children[leaf.index],), "concate_and_append"))
        elif leaf.is_done:
            ready.append(TextNode(seq, leaf.texts[0]))
        ready += [CloseNode(child) for child in node.children if child not in self._unborn]

    def _has_failed(self, node: Node, ready: list[Node]) -> bool:
        """Whether ``node`` follows a value that failed here; it then fails with it, and is not sent."""
        failed = self._failed
        if not failed:
            return False
        cause = failed.get(node.seq)
        if cause is None:
            if isinstance(node, PasteNode) and id(node.source) in self._gone:
                cause = node.source.error
            elif isinstance(node, JoinNode) and not failed.keys().isdisjoint(node.children):
                if node.mode == "gather_variable":
                    born = tuple([child for child in node.children if child not in self._unborn])
                    if born:
                        ready.append(JoinNode(node.seq, born, node.mode))
                    return True
                cause = next(failed[child] for child in node.children if child in failed)
            if cause is None:
                return False
            failed[node.seq] = cause
        if isinstance(node, CloseNode):
            return node.seq in self._unborn
        if isinstance(node, AskingNode):
            error = DependencyFailed(f"what stands before this failed: {cause}")
            error.__cause__ = cause
            node.leaf.fail(error)
            self._gone.add(id(node.leaf))
        elif isinstance(node, ForkNode):
            self._unborn.update(node.children)
            failed.update(dict.fromkeys(node.children, cause))
        elif isinstance(node, SettleNode):
            ready += [CloseNode(child) for child in node.children if child not in self._unborn]
        return True


def _is_stopped(node: Node, stopped: set[int], stuck: set[int]) -> bool:
    """Whether ``node`` comes after something that is held."""
    if node.seq in stopped:
        return True
    if isinstance(node, PasteNode):
        return id(node.source) in stuck
    return isinstance(node, JoinNode | SettleNode) and not stopped.isdisjoint(node.children)


def _is_computed_on(seq: int, nodes: Sequence[Node]) -> bool:
    """Whether the model will run on this sequence again."""
    for i, node in enumerate(nodes):
        match node:
            case GenNode() | SelectNode() | ForkNode() | PinNode() | TextSinceNode() if node.seq == seq:
                return True
            case JoinNode() if seq in node.children and node.mode != "gather_variable":
                return True
            case SettleNode() if seq in node.children and _is_computed_on(node.seq, nodes[i + 1 :]):
                return True
    return False
