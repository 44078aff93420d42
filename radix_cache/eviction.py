"""The unlocked leaves in the order in which they go. Never touches the tree.

A heap with lazy deletion: what is withdrawn or offered again leaves a dead entry, skipped when it surfaces and swept
out when the dead outnumber the living, so every call costs O(log leaves) amortised.
"""

from heapq import heapify, heappop, heappush

from .node import RadixNode
from .policies import Key, Policy


class EvictionQueue:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.num_leaves = 0
        self.age = 0.0
        self._heap: list[tuple[Key, int, RadixNode]] = []
        self._tickets = 0

    def offer(self, leaf: RadixNode) -> None:
        """Put an unlocked leaf up for eviction, or give it a new place."""
        if leaf.ticket == 0:
            self.num_leaves += 1
        self._tickets += 1
        leaf.ticket = self._tickets
        heappush(self._heap, (self.policy(leaf, self.age), leaf.ticket, leaf))
        if len(self._heap) > 64 + 2 * self.num_leaves:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def withdraw(self, leaf: RadixNode) -> None:
        if leaf.ticket:
            leaf.ticket = 0
            self.num_leaves -= 1

    def pop(self) -> RadixNode:
        """The leaf that goes first; it is no longer in the queue."""
        while True:
            key, ticket, leaf = heappop(self._heap)
            if leaf.ticket == ticket:
                self.withdraw(leaf)
                self.age = max(self.age, key[0])
                return leaf
