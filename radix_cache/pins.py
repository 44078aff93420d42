"""Pins: locks on prefixes that end after a time, within a budget of tokens.

Each owner has at most one pin; a pin without an owner belongs to the node where it ends. A token that is pinned several
times counts once.
"""

import math
from collections.abc import Callable, Hashable
from heapq import heappop, heappush

from .node import RadixNode
from .tree import RadixTree


class Pins:
    def __init__(self, tree: RadixTree, *, max_tokens: int, clock: Callable[[], float]) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.nodes: dict[Hashable, RadixNode] = {}  # by owner, where each pin ends
        self._tree = tree
        self._clock = clock
        self._tickets: dict[Hashable, int] = {}
        self.queue: list[tuple[float, int, Hashable]] = []  # dead entries of renewed or ended pins are skipped
        self._num_queued = 0

    def pin(self, node: RadixNode, *, owner: Hashable | None, ttl_s: float) -> int:
        """Lock the path to ``node``, or as much of its front as the budget allows; returns the tokens locked.

        ``ttl_s=0`` ends the owner's pin; without an owner, all pins without owner that end on the path.
        """
        if not ttl_s >= 0.0 or math.isinf(ttl_s):
            raise ValueError(f"ttl_s={ttl_s}: a pin lasts a finite number of seconds, 0 to end it")
        if owner is not None:
            self.unpin(owner)
        elif ttl_s == 0.0:
            above: RadixNode | None = node
            while above is not None:
                self.unpin(above)
                above = above.parent
        if ttl_s == 0.0:
            return 0
        pinned: RadixNode | None = node  # where the part of the path ends that is pinned already
        while pinned is not None and pinned.pin_count == 0:
            pinned = pinned.parent
        room = self.max_tokens - self.num_tokens + (pinned.end if pinned is not None else 0)
        if node.end > room:
            node = self._tree.node_at(node, room)
        if node.parent is None:
            return 0
        if owner is None:
            owner = node
            self.unpin(owner)
        self._tree.lock(node)
        at: RadixNode | None = node
        while at is not None:
            if at.pin_count == 0:
                self.num_tokens += len(at.tokens)
            at.pin_count += 1
            at = at.parent
        self.nodes[owner] = node
        self._num_queued += 1
        self._tickets[owner] = self._num_queued
        heappush(self.queue, (self._clock() + ttl_s, self._num_queued, owner))
        if len(self.queue) > 64 + 2 * len(self.nodes):
            self.queue = sorted(entry for entry in self.queue if self._tickets.get(entry[2]) == entry[1])
        return node.end

    def unpin(self, owner: Hashable) -> None:
        node = self.nodes.pop(owner, None)
        if node is None:
            return
        del self._tickets[owner]
        at: RadixNode | None = node
        while at is not None:
            at.pin_count -= 1
            if at.pin_count == 0:
                self.num_tokens -= len(at.tokens)
            at = at.parent
        self._tree.unlock(node)

    def end_next(self) -> bool:
        """End the pin with least time left; False if there is none."""
        while self.queue:
            _, ticket, owner = heappop(self.queue)
            if self._tickets.get(owner) == ticket:
                self.unpin(owner)
                return True
        return False

    def expire(self) -> None:
        """End the pins whose time is over."""
        if not self.queue:
            return
        now = self._clock()
        while self.queue and self.queue[0][0] <= now:
            _, ticket, owner = heappop(self.queue)
            if self._tickets.get(owner) == ticket:
                self.unpin(owner)
