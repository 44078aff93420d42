"""The radix tree: token sequences by shared prefix, the slots of their KV, and locks.

    root --[the quick]-- node --[ brown fox]-- leaf        children by first token, no two with the same one
                          |----[ red hen]----- leaf        locks are counted along the path to the root

Matching, inserting and splitting take time proportional to the tokens compared and the nodes passed. Only unlocked
leaves are evicted: a lock on a node keeps the whole path above it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from .eviction import EvictionQueue
from .history import History
from .node import EMPTY, Namespace, RadixNode
from .policies import Policy

FIRST_COMPARED = 512  # tokens compared in the first numpy call; each next call compares four times as many
SHORT_EDGE = 256  # tokens; a shorter edge grows in place even by single tokens


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix of two int32 arrays."""
    n = min(len(a), len(b))
    at, width = 0, FIRST_COMPARED
    while at < n:
        differs = a[at : min(at + width, n)] != b[at : min(at + width, n)]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
        at += width
        width *= 4
    return n


def as_tokens(tokens: Sequence[int] | np.ndarray, limit: int | None = None) -> np.ndarray:
    """At most ``limit`` of ``tokens``, as an int32 array."""
    assert limit is None or limit >= 0, f"limit={limit}"
    return np.asarray(tokens[:limit], np.int32)


def compact(view: np.ndarray) -> np.ndarray:
    """``view``, copied if it keeps an array more than twice its size alive."""
    owner = view.base
    return view.copy() if owner is not None and owner.size > 2 * view.size else view


class Observer(Protocol):
    """Called for a new root, after tokens from ``start`` on are stored, before they are evicted, after a split."""

    def rooted(self, root: RadixNode) -> None: ...
    def stored(self, node: RadixNode, start: int) -> None: ...
    def evicted(self, node: RadixNode, start: int, cause: str) -> None: ...
    def split(self, head: RadixNode, tail: RadixNode) -> None: ...


class RadixTree:
    """``history``, if given, says how often a leaf was looked up when it becomes evictable."""

    def __init__(self, policy: Policy, observer: Observer | None = None, *, history: History | None = None) -> None:
        self.roots: dict[Namespace, RadixNode] = {}
        self.queue = EvictionQueue(policy)
        self.num_tokens = 0
        self.num_locked = 0
        self.num_nodes = 0
        self.now = 0  # a count of uses: the clock of the policies
        self.version = 0  # changes whenever tokens are stored or evicted
        self.observer = observer
        self.history = history
        self.touched: dict[str, set[RadixNode]] = {}  # by running program

    def root(self, namespace: Namespace) -> RadixNode:
        """The root of ``namespace``, made if there is none. The caller locks it or calls ``drop_root_if_unused``."""
        found = self.roots.get(namespace)
        if found is None:
            found = RadixNode(namespace, None, EMPTY, EMPTY)
            if self.observer is not None:
                self.observer.rooted(found)
            self.roots[namespace] = found
        return found

    def drop_root_if_unused(self, root: RadixNode) -> None:
        if not root.children and root.lock_count == 0:
            self.roots.pop(root.namespace, None)

    # -- finding ------------------------------------------------------------------------------------------------------

    def find(self, node: RadixNode, tokens: np.ndarray) -> tuple[RadixNode, int]:
        """The longest match of ``tokens`` below ``node``: the node in which it ends, perhaps midway, and its length."""
        at, n = 0, len(tokens)
        while at < n:
            child = node.children.get(tokens.item(at))
            if child is None:
                break
            equal = common_prefix_len(child.tokens, tokens[at:])
            at += equal
            node = child
            if equal < len(child.tokens):
                break
        return node, at

    def node_at(self, node: RadixNode, position: int) -> RadixNode:
        """The node on the path to ``node`` that ends at ``position``; splits an edge if need be."""
        assert 0 <= position <= node.end
        while node.parent is not None and node.parent.end >= position:
            node = node.parent
        return node if node.end == position else self._split(node, position)

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the roots, parents first."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.parent is not None:
                yield node

    # -- changing -----------------------------------------------------------------------------------------------------

    def append(self, node: RadixNode, tokens: np.ndarray, slots: np.ndarray) -> RadixNode:
        """Store ``tokens`` below ``node``, which has no child with that first token; returns the node that ends there.

        The caller holds a lock on ``node``; if that is the only one, a leaf's edge may grow in place. A new node is
        unlocked and not in the eviction queue: the caller locks it next. Both arrays are copied.
        """
        assert node.lock_count > 0 and len(tokens) == len(slots) > 0
        grows = node.lock_count == 1 and not node.children and node.parent is not None
        if grows and (len(node.tokens) < SHORT_EDGE or len(tokens) >= len(node.tokens)):
            start, added = node.end, node
            node.tokens = np.concatenate((node.tokens, tokens))
            node.slots = np.concatenate((node.slots, slots))
            node.end += len(tokens)
            self.num_locked += len(tokens)
        else:
            added = RadixNode(node.namespace, node, tokens.copy(), slots.copy())
            start = node.end
            node.children[tokens.item(0)] = added
            self.num_nodes += 1
        self.num_tokens += len(tokens)
        self.version += 1
        if self.observer is not None:
            self.observer.stored(added, start)
        return added

    def evict(self, n: int, cause: str) -> np.ndarray:
        """Evict exactly ``n`` tokens from the ends of unlocked leaves; returns their slots."""
        assert n <= self.num_tokens - self.num_locked
        freed = []
        while n > 0:
            leaf = self.queue.pop()
            assert leaf.lock_count == 0 and not leaf.children
            size = len(leaf.tokens)
            keep = max(size - n, 0)
            if self.history is not None:
                keep = max(keep, leaf.cut_from - leaf.start)  # tokens before it were looked up more often
            if self.observer is not None:
                self.observer.evicted(leaf, leaf.start + keep, cause)
            freed.append(leaf.slots[keep:])
            n -= size - keep
            self.num_tokens -= size - keep
            if keep:
                leaf.tokens = compact(leaf.tokens[:keep])
                leaf.slots = compact(leaf.slots[:keep])
                leaf.end -= size - keep
                if leaf.end > leaf.cut_from and self.history is not None:
                    self.queue.offer(leaf)  # the rest was looked up as often as the evicted tokens
                else:
                    self._offer(leaf)
            else:
                self._remove(leaf)
        self.version += 1
        return np.concatenate(freed) if freed else EMPTY

    def evict_branch(self, node: RadixNode, cause: str) -> np.ndarray:
        """Evict all tokens of ``node`` and of the nodes below it, of which none is locked; returns their slots."""
        branch = [node]
        for above in branch:
            branch.extend(above.children.values())
        for leaf in reversed(branch):
            assert leaf.lock_count == 0 and not leaf.children, f"{leaf} is held"
            if self.observer is not None:
                self.observer.evicted(leaf, leaf.start, cause)
            self.queue.withdraw(leaf)
            self.num_tokens -= len(leaf.tokens)
            self._remove(leaf)
        self.version += 1
        return np.concatenate([each.slots for each in branch])

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens.item(0)]
        self.num_nodes -= 1
        for program in leaf.programs or ():
            self.touched[program].discard(leaf)
        if not parent.children and parent.lock_count == 0:
            self._queue_or_drop(parent)

    def _queue_or_drop(self, leaf: RadixNode) -> None:
        """Queue an unlocked node without children for eviction; drop it if it is a root."""
        if leaf.parent is not None:
            self._offer(leaf)
        else:
            self.drop_root_if_unused(leaf)

    def _offer(self, leaf: RadixNode) -> None:
        if self.history is not None:
            leaf.times, leaf.cut_from = self.history.times(leaf)
            leaf.worth = self.history.returns.worth(leaf.turn) if leaf.times <= 1 else 0.0
        self.queue.offer(leaf)

    def _split(self, node: RadixNode, position: int) -> RadixNode:
        """Split the edge at ``position``; returns the upper half. ``node``, where leases may end, is the lower half."""
        parent, head_len = node.parent, position - node.start
        assert parent is not None and 0 < head_len < len(node.tokens)
        head = RadixNode(node.namespace, parent, compact(node.tokens[:head_len]), compact(node.slots[:head_len]))
        parent.children[node.tokens.item(0)] = head
        node.tokens = compact(node.tokens[head_len:])
        node.slots = compact(node.slots[head_len:])
        node.parent = head
        head.children[node.tokens.item(0)] = node
        head.lock_count, head.pin_count = node.lock_count, node.pin_count
        head.last_use, head.hits, head.priority, head.turn = node.last_use, node.hits, node.priority, node.turn
        for program in node.programs or ():
            self._touch_for(head, program)
        if self.observer is not None:
            self.observer.split(head, node)
        self.num_nodes += 1
        return head

    # -- locks and use ------------------------------------------------------------------------------------------------

    def lock(self, node: RadixNode, *, below: RadixNode | None = None) -> None:
        """Add one lock to each node on the path from ``node`` up to the root, or up to the child of ``below``."""
        at: RadixNode | None = node
        while at is not below and at is not None:
            if at.lock_count == 0:
                self.num_locked += len(at.tokens)
                self.queue.withdraw(at)
            at.lock_count += 1
            at = at.parent

    def unlock(self, node: RadixNode, *, below: RadixNode | None = None) -> None:
        """Remove the lock that ``lock`` added with the same arguments."""
        at: RadixNode | None = node
        while at is not below and at is not None:
            assert at.lock_count > 0
            at.lock_count -= 1
            if at.lock_count == 0:
                self.num_locked -= len(at.tokens)
                if not at.children:
                    self._queue_or_drop(at)
            at = at.parent

    def touch(
        self,
        node: RadixNode,
        *,
        hits: int,
        priority: int,
        program: str,
        turn: int = 0,
        below: RadixNode | None = None,
    ) -> None:
        """Record a use of the path by ``program`` at ``priority``, of which the most urgent is kept.

        ``turn``: that of a conversation which has ended, 0 for none.
        """
        at: RadixNode | None = node
        while at is not below and at is not None:
            at.priority = min(at.priority, priority) if at.last_use else priority
            at.last_use = self.now
            at.hits += hits
            at.turn = turn or at.turn
            if program and at.parent is not None:
                self._touch_for(at, program)
            at = at.parent

    def _touch_for(self, node: RadixNode, program: str) -> None:
        if node.programs is None:
            node.programs = set()
        if program not in node.programs:
            node.programs.add(program)
            self.touched.setdefault(program, set()).add(node)

    def end_program(self, program: str) -> None:
        """Forget which nodes ``program`` has used; its leaves take new places in the eviction queue."""
        for node in self.touched.pop(program, ()):
            assert node.programs is not None
            node.programs.discard(program)
            if node.ticket:
                self.queue.offer(node)
