"""Eviction policies: functions from a leaf to a key. The unlocked leaf with the lowest key is evicted first.

A policy reads the leaf's ``num_tokens, end, last_use, hits, times, priority`` and ``programs``. ``age`` is the greatest
first number of the keys evicted so far: adding it lets a new leaf outrank one that was useful long ago. The key is
computed when a leaf becomes evictable, and again when it shrinks or one of its programs ends.
"""

from collections.abc import Callable
from math import log2

from .node import RadixNode

Key = tuple[float, ...]
Policy = Callable[[RadixNode, float], Key]


def lru(leaf: RadixNode, age: float) -> Key:
    """Least recently used first."""
    return (leaf.last_use,)


def lfu(leaf: RadixNode, age: float) -> Key:
    """Least often matched first, then least recently used."""
    return (leaf.hits, leaf.last_use)


def size_aware(leaf: RadixNode, age: float) -> Key:
    """Lowest cost of recomputation per slot first: GreedyDual-Size-Frequency (Cherkasova, 1998), H = L + F * C / S.

    C is the cost of computing the edge again. A token costs one unit, plus attention to all tokens before it, so C / S
    grows with the mean depth; at ATTENTION_DEPTH both parts are equal.
    """
    mean_depth = leaf.end - leaf.num_tokens / 2
    return (age + (1 + leaf.hits) * (1 + mean_depth / ATTENTION_DEPTH), leaf.last_use)


def priority(leaf: RadixNode, age: float) -> Key:
    """Least urgent first (a lower number is more urgent), then least recently used."""
    return (-leaf.priority, leaf.last_use)


def program_aware(leaf: RadixNode, age: float) -> Key:
    """Leaves that no running program has used first, then by recency and number of lookups.

    Twice as many lookups are worth HALF_LIFE later uses of the cache. All keys age alike, so the difference of two keys
    is constant: a key stays right until its leaf is used again.
    """
    return (1.0 if leaf.programs else 0.0, (leaf.last_use + leaf.worth) / HALF_LIFE + log2(max(leaf.times, 1)))


ATTENTION_DEPTH = 4096
HALF_LIFE = 2000
WITH_HISTORY = frozenset((program_aware,))  # policies that read ``times``

POLICIES: dict[str, Policy] = {
    "lru": lru,
    "lfu": lfu,
    "size_aware": size_aware,
    "priority": priority,
    "program_aware": program_aware,
}
