"""The unlocked leaves, in the order in which they are evicted.

A heap with lazy deletion: a leaf that is withdrawn or offered again leaves a dead entry behind. ``pop`` skips dead
entries, and ``offer`` rebuilds the heap when they outnumber the leaves, so a call costs O(log leaves) amortised.
"""

from heapq import heapify, heappop, heappush

from .node import RadixNode
from .policies import Key, Policy


class EvictionQueue:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.num_leaves = 0
        self.age = 0.0
        self.heap: list[tuple[Key, int, RadixNode]] = []
        self._tickets = 0

    def offer(self, leaf: RadixNode) -> None:
        """Queue an unlocked leaf for eviction, or give it a new place."""
        if leaf.ticket == 0:
            self.num_leaves += 1
        self._tickets += 1
        leaf.ticket = self._tickets
        heappush(self.heap, (self.policy(leaf, self.age), leaf.ticket, leaf))
        if len(self.heap) > 64 + 2 * self.num_leaves:
            self.heap = [entry for entry in self.heap if entry[2].ticket == entry[1]]
            heapify(self.heap)

    def withdraw(self, leaf: RadixNode) -> None:
        if leaf.ticket:
            leaf.ticket = 0
            self.num_leaves -= 1

    def pop(self) -> RadixNode:
        """Take out the leaf to be evicted first."""
        while True:
            key, ticket, leaf = heappop(self.heap)
            if leaf.ticket == ticket:
                self.withdraw(leaf)
                self.age = max(self.age, key[0])
                return leaf
