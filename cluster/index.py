"""Which engine has which cached block, learned from the engines' cache events.

Block names follow from the tokens alone (``radix_cache.blocks``), so one name means the same prefix everywhere. A name
is known with a bit for each engine and tier:

    name ──► [device bits, host bits, disk bits]      bit i: engine i

The index never claims a block that no event or snapshot said. A lost event is seen as a gap in the numbers; until the
engine's snapshot has come, the index only forgets for that engine: it believes evictions and no new block after the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..protocol.cache_events import CacheEvents, CacheSnapshot

Tier = Literal["device", "host", "disk"]
Applied = Literal["ok", "gap", "restarted"]


class Match(NamedTuple):
    """The longest prefix that an engine holds: ``tokens`` in all tiers, ``device_tokens`` of them without a load."""

    tokens: int
    device_tokens: int


class CacheIndex:
    """``max_names`` bounds memory: the names used least recently go first. Not for several threads at once.

    ``num_bytes`` is a measured upper bound of what the index holds.
    """

    def __init__(self, *, max_names: int = 1_000_000) -> None:
        raise NotImplementedError

    def apply(self, engine: str, events: CacheEvents) -> Applied:
        """One frame of an engine. ``gap`` and ``restarted``: ask the engine for its snapshot.

        Frames that come late or twice (by epoch and number) change nothing.
        """
        raise NotImplementedError

    def restore(self, engine: str, snapshot: CacheSnapshot) -> None:
        """Replace all that is known of the engine by its snapshot; events up to ``snapshot.seq`` are in it."""
        raise NotImplementedError

    def remove(self, engine: str) -> None:
        """The engine is gone: forget its blocks."""
        raise NotImplementedError

    def match(self, names: Sequence[bytes]) -> dict[str, Match]:
        """For each engine with at least the first block: the prefix of ``names`` that it holds without a hole."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        raise NotImplementedError
