"""A sequence's hold on its KV slots: a locked path of the tree, then slots of its own. Never frees what others hold.

[0, num_shared) in the tree, locked, never written again      [num_shared, num_slots) private, written by its owner
"""

from typing import TYPE_CHECKING

import numpy as np

from .node import Node
from .tree import as_tokens

if TYPE_CHECKING:
    from .cache import RadixCache


class Lease:
    """Made by ``RadixCache.acquire`` and ended by exactly one ``release``.

    ``num_cached`` counts the tokens that were found instead of computed: at ``acquire`` and by ``rematch``.
    ``stale_from`` is the first position whose slot has changed since ``mark_fresh``.
    """

    __slots__ = (
        "_buffer",
        "_is_released",
        "cache",
        "node",
        "num_cached",
        "num_shared",
        "num_slots",
        "priority",
        "program",
        "stale_from",
    )

    def __init__(self, cache: "RadixCache", node: Node, program: str, priority: int) -> None:
        self.cache = cache
        self._is_released = False
        self._buffer = np.empty(max(64, node.end + node.end // 4), np.int32)
        self.node = node  # where the shared part ends; locked
        self.program = program
        self.priority = priority
        self.num_slots = self.num_shared = self.num_cached = node.end
        self.stale_from = 0
        self._read_path(0)

    @property
    def slot_ids(self) -> np.ndarray:
        """The slot of every position, int32 [num_slots]; a view, valid until the next call on this lease."""
        return self._buffer[: self.num_slots]

    @property
    def num_private(self) -> int:
        return self.num_slots - self.num_shared

    @property
    def num_sole(self) -> int:
        """Slots that nobody else holds: what others could have after ``release``."""
        node: Node | None = self.node
        while node is not None and node.lock_count == 1:
            node = node.parent
        return self.num_slots - (node.end if node is not None else 0)

    def mark_fresh(self) -> None:
        """The caller has copied ``slot_ids``: until the next change nothing in it is stale."""
        self.stale_from = self.num_slots

    def extend(self, n: int) -> None:
        """Take ``n`` private slots for the positions that follow, evicting exactly what is not free.

        Raises ``OutOfSlots`` and changes nothing when free and evictable slots together do not suffice.
        """
        assert not self._is_released and n >= 0
        self._append(self.cache._take(n))

    def commit(self, tokens: np.ndarray) -> None:
        """The KV of ``tokens`` (the whole sequence from position 0) is computed: give it to the tree.

        What is already in the tree, put there by someone else meanwhile, is adopted: its slots take the place of ours,
        which are freed. ``tokens`` may be shorter than the slots held; the rest stays private. Tokens shared before
        must not have changed. Without reuse nothing happens.
        """
        assert not self._is_released and len(tokens) <= self.num_slots
        cache, tree, n = self.cache, self.cache._tree, len(tokens)
        if n <= self.num_shared or not cache.reuse:
            return
        tokens = as_tokens(tokens)
        assert self.num_shared == 0 or self.node.tokens[-1] == tokens[self.num_shared - 1], "shared tokens changed"
        cache._num_adopted += self._adopt(tokens)
        if n > self.num_shared:
            own = slice(self.num_shared, n)
            added = tree.append(self.node, tokens[own], self._buffer[own])
            cache._num_leased -= n - self.num_shared
            cache._num_inserted += n - self.num_shared
            if added is not self.node:
                tree.lock(added, below=self.node)
            below = self.node if added is not self.node else added.parent
            tree.touch(added, hits=0, priority=self.priority, program=self.program, below=below)
            self.node, self.num_shared = added, n

    def rematch(self, tokens: np.ndarray, *, limit: int | None = None) -> int:
        """Take what the tree holds by now of ``tokens`` beyond the shared part; returns how many tokens that adds.

        For a sequence that waited while another computed their common prefix. Private slots at those positions are
        freed, so nothing may be being computed into them.
        """
        assert not self._is_released
        if not self.cache.reuse:
            return 0
        before = self.num_shared
        self._adopt(as_tokens(tokens, limit))
        gained = self.num_shared - before
        self.num_cached += gained
        self.cache._num_matched += gained
        return gained

    def truncate(self, n: int) -> None:
        """Keep only the first ``n`` positions.

        Private slots beyond are freed. Shared ones stay in the tree for others and may be evicted once nobody holds
        them; what this lease takes next is private again, so a slot of the tree is never written twice.
        """
        assert not self._is_released and 0 <= n <= self.num_slots
        cache, tree = self.cache, self.cache._tree
        keep = max(n, self.num_shared)
        cache._give_back(self._buffer[keep : self.num_slots])
        if n < self.num_shared:
            node = tree.node_at(self.node, n)
            tree.unlock(self.node, below=node)
            self.node, self.num_shared = node, n
        self.num_slots = n
        self.num_cached = min(self.num_cached, n)
        self.stale_from = min(self.stale_from, n)

    def reorder(self, start: int, order: np.ndarray) -> None:
        """The private slots of positions [start, start + len(order)) change places: position start + i takes the slot
        that start + order[i] had. For what was computed side by side and is kept in another order; no KV moves.
        """
        end = start + len(order)
        assert not self._is_released and self.num_shared <= start and end <= self.num_slots, (start, end, self)
        part = self._buffer[start:end]
        part[:] = part[order]
        self.stale_from = min(self.stale_from, start)

    def fork(self) -> "Lease":
        """Another lease on the shared part, at no cost in slots. Private slots are not shared: commit first."""
        assert not self._is_released
        return self.cache._lease(self.node, program=self.program, priority=self.priority, hits=1)

    def release(self) -> None:
        """Free the private slots and unlock the path. The lease is at its end; a second release is an error of ours."""
        assert not self._is_released, "a lease is released once"
        self._is_released = True
        self.cache._release(self, self._buffer[self.num_shared : self.num_slots])

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _append(self, taken: np.ndarray) -> None:
        """These slots are private to us from now on, at the positions that follow."""
        start, end = self.num_slots, self.num_slots + len(taken)
        if end > len(self._buffer):
            self._grow_buffer(end)
        self._buffer[start:end] = taken
        self.num_slots = end  # stale_from never lies beyond what num_slots was, so what is new is stale

    def _adopt(self, tokens: np.ndarray) -> int:
        """Move the lock down along what the tree holds of ``tokens``; returns the number of our slots freed."""
        tree, old_shared, old_node = self.cache._tree, self.num_shared, self.node
        found, equal = tree.find(old_node, tokens[old_shared:])
        if equal == 0:
            return 0
        end = old_shared + equal
        node = tree.node_at(found, end)
        tree.lock(node, below=old_node)
        tree.touch(node, hits=1, priority=self.priority, program=self.program, below=old_node)
        num_freed = min(end, self.num_slots) - old_shared
        self.cache._give_back(self._buffer[old_shared : old_shared + num_freed])
        self._grow_buffer(end)
        self.node, self.num_shared, self.num_slots = node, end, max(end, self.num_slots)
        self._read_path(old_shared)
        self.stale_from = min(self.stale_from, old_shared)
        return num_freed

    def _read_path(self, start: int) -> None:
        """Copy the tree's slots of positions [start, num_shared) into the buffer; ``start`` is where a node ends."""
        at = self.node
        while at.end > start:
            self._buffer[at.start : at.end] = at.slots
            assert at.parent is not None
            at = at.parent

    def _grow_buffer(self, size: int) -> None:
        if size > len(self._buffer):
            grown = np.empty(max(size, 2 * len(self._buffer)), np.int32)
            grown[: self.num_slots] = self._buffer[: self.num_slots]
            self._buffer = grown
