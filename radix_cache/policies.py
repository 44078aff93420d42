"""Which leaf goes first when slots are short: each policy is a function from a leaf to a key. Never evicts anything.

The unlocked leaf with the least key is evicted first. A policy sees the leaf's ``num_tokens, end, last_use, hits,
priority`` and ``programs``; ``age`` is the greatest first number among the keys evicted so far, for policies in which
what is new must outrank what was useful long ago. A key is taken when a leaf becomes evictable and again when it
shrinks or one of its programs ends.
"""

from collections.abc import Callable

from .node import Node

Key = tuple[float, ...]
Policy = Callable[[Node, float], Key]


def lru(leaf: Node, age: float) -> Key:
    """Least recently used first."""
    return (leaf.last_use,)


def lfu(leaf: Node, age: float) -> Key:
    """Least often matched first, then least recently used."""
    return (leaf.hits, leaf.last_use)


def size_aware(leaf: Node, age: float) -> Key:
    """Least loss per slot first: GreedyDual-Size-Frequency (Cherkasova, 1998), H = L + F * C / S.

    C is the cost of computing the edge again. A token costs one unit plus attention to all before it, so C / S grows
    with the mean depth; at ATTENTION_DEPTH both parts weigh the same.
    """
    mean_depth = leaf.end - leaf.num_tokens / 2
    return (age + (1 + leaf.hits) * (1 + mean_depth / ATTENTION_DEPTH), leaf.last_use)


def priority(leaf: Node, age: float) -> Key:
    """Least urgent first (a lower number is more urgent), then least recently used."""
    return (-leaf.priority, leaf.last_use)


def program_aware(leaf: Node, age: float) -> Key:
    """What no running program has touched first, then least recently used, where each match counts as later use.

    What was matched often comes back sooner than what was used once, a moment ago: beginnings outlive questions.
    """
    return (1.0 if leaf.programs else 0.0, leaf.last_use + MATCH_WORTH * min(leaf.hits, MOST_MATCHES))


ATTENTION_DEPTH = 4096
MATCH_WORTH = 200  # uses of the cache that one earlier match is worth
MOST_MATCHES = 40  # beyond which they count no more: what was popular once must go in the end

POLICIES: dict[str, Policy] = {
    "lru": lru,
    "lfu": lfu,
    "size_aware": size_aware,
    "priority": priority,
    "program_aware": program_aware,
}
