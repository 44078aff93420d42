"""Holding back nodes that follow a value which Python decides, until that value is known.

Only nodes that depend on the value are held. ``settle`` returns the nodes to ship now and the values still missing; the
caller ships and waits.
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

AskingNode = GenNode | SelectNode | PinNode | TextSinceNode  # nodes whose leaf the runtime resolves


class Settling:
    """The held nodes of one run. ``held``: taken from the log and not shipped yet."""

    def __init__(self) -> None:
        self.held: list[Node] = []
        self._failed: dict[int, BaseException] = {}  # sequences on which a decided value is an error
        self._unshipped: set[int] = set()  # failed sequences whose fork was not shipped
        self._gone: set[int] = set()  # ids of the leaves failed by this class

    def settle(self, nodes: Sequence[Node], *, is_ending: bool) -> tuple[list[Node], list[Leaf]]:
        """(nodes to ship now, values that the held nodes wait for). ``is_ending``: these are the last nodes."""
        nodes = [*self.held, *nodes]
        self.held = []
        ready: list[Node] = []
        missing: list[Leaf] = []
        stopped: set[int] = set()  # sequences
        stuck: set[int] = set()  # ids of leaves whose node is held
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
        ready += [CloseNode(child) for child in node.children if child not in self._unshipped]

    def _has_failed(self, node: Node, ready: list[Node]) -> bool:
        """Whether ``node`` follows a decided value that failed. If so, its leaf fails too and it is not shipped."""
        failed = self._failed
        if not failed:
            return False
        cause = failed.get(node.seq)
        if cause is None:
            if isinstance(node, PasteNode) and id(node.source) in self._gone:
                cause = node.source.error
            elif isinstance(node, JoinNode) and not failed.keys().isdisjoint(node.children):
                if node.mode == "gather_variable":
                    born = tuple([child for child in node.children if child not in self._unshipped])
                    if born:
                        ready.append(JoinNode(node.seq, born, node.mode))
                    return True
                cause = next(failed[child] for child in node.children if child in failed)
            if cause is None:
                return False
            failed[node.seq] = cause
        if isinstance(node, CloseNode):
            return node.seq in self._unshipped
        if isinstance(node, AskingNode):
            error = DependencyFailed(f"a value that this depends on failed: {cause}")
            error.__cause__ = cause
            node.leaf.fail(error)
            self._gone.add(id(node.leaf))
        elif isinstance(node, ForkNode):
            self._unshipped.update(node.children)
            failed.update(dict.fromkeys(node.children, cause))
        elif isinstance(node, SettleNode):
            ready += [CloseNode(child) for child in node.children if child not in self._unshipped]
        return True


def _is_stopped(node: Node, stopped: set[int], stuck: set[int]) -> bool:
    """Whether ``node`` depends on a held node."""
    if node.seq in stopped:
        return True
    if isinstance(node, PasteNode):
        return id(node.source) in stuck
    return isinstance(node, JoinNode | SettleNode) and not stopped.isdisjoint(node.children)


def _is_computed_on(seq: int, nodes: Sequence[Node]) -> bool:
    """Whether any of ``nodes`` needs the model to run on sequence ``seq``."""
    for i, node in enumerate(nodes):
        match node:
            case GenNode() | SelectNode() | ForkNode() | PinNode() | TextSinceNode() if node.seq == seq:
                return True
            case JoinNode() if seq in node.children and node.mode != "gather_variable":
                return True
            case SettleNode() if seq in node.children and _is_computed_on(node.seq, nodes[i + 1 :]):
                return True
    return False
