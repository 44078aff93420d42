"""A node of the radix tree: one edge of tokens, and the slots that hold their KV.

parent.end                    end
    |<------ tokens -------->|          positions of the edge in its sequence
    |<------ slots --------->|
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

Namespace = Hashable

EMPTY = np.empty(0, np.int32)


class RadixNode:
    """``lock_count`` counts the leases and pins that end at this node or below it, ``pin_count`` only the pins.

    ``times`` is how often the path was looked up (``History``), as of when the node became evictable; the edge before
    position ``cut_from`` was looked up more often. ``turn`` is that of the conversation that used the node last,
    ``worth`` what it tells (``Returns``), in uses of the cache, as of the same moment. ``programs`` are the running
    programs that used the node. ``ticket`` is its number in the eviction queue, 0 when it is not in it. ``names`` are
    those of the token blocks that end in this edge; None unless events or tiers are on.
    """

    __slots__ = (
        "children",
        "cut_from",
        "end",
        "hits",
        "last_use",
        "lock_count",
        "names",
        "namespace",
        "parent",
        "pin_count",
        "priority",
        "programs",
        "slots",
        "ticket",
        "times",
        "tokens",
        "turn",
        "worth",
    )

    def __init__(self, namespace: Namespace, parent: RadixNode | None, tokens: np.ndarray, slots: np.ndarray) -> None:
        self.namespace = namespace
        self.parent = parent
        self.children: dict[int, RadixNode] = {}  # by first token
        self.tokens = tokens  # int32 [n]
        self.slots = slots  # int32 [n]
        self.end: int = (parent.end if parent is not None else 0) + len(tokens)
        self.lock_count = 0
        self.pin_count = 0
        self.last_use = 0
        self.hits = 0
        self.times = 0
        self.turn = 0
        self.worth = 0.0
        self.cut_from = 0
        self.priority = 0
        self.programs: set[str] | None = None
        self.ticket = 0
        self.names: list[bytes] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    def __repr__(self) -> str:
        return f"RadixNode([{self.start}, {self.end}), locks={self.lock_count}, children={len(self.children)})"
