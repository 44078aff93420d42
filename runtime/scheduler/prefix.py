"""What the cache holds of a sequence, and how the sequence takes hold of it and lets go. Never decides who does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from ...radix_cache import RadixCache, ReadAhead


def matched_len(seq: Sequence, cache: RadixCache) -> int:
    """How many of a waiting sequence's tokens have KV; looked up again only when the cache has changed."""
    if seq.lease is not None:
        return seq.num_computed
    if seq.matched[0] != cache.version:
        seq.matched = (cache.version, cache.peek(seq.tokens.ids, namespace=seq.namespace))
    return seq.matched[1]


def read_ahead(seq: Sequence, cache: RadixCache) -> ReadAhead | None:
    """Begin to read what the disk has of a new sequence's tokens; None when there is nothing to wait for."""
    tiers = cache.tiers
    if tiers is None or seq.lease is not None or not cache.reuse:
        return None
    reading = tiers.read_ahead(seq.tokens.ids, start=matched_len(seq, cache), namespace=seq.namespace)
    return None if reading.is_done else reading


def commit(seq: Sequence) -> None:
    """Give what ``seq`` has computed to the cache, so that others find it."""
    if seq.lease is not None:
        seq.lease.commit(seq.tokens.ids[: seq.num_computed])


def attach(seq: Sequence, cache: RadixCache) -> int:
    """Give a waiting sequence the longest usable KV: its own lease's, or the cache's.

    Returns how many tokens came back from host memory or disk.
    """
    limit = min(seq.length - 1, seq.logits_from)
    num_restored = 0
    if seq.lease is None:
        seq.lease = cache.acquire(
            seq.tokens.ids,
            namespace=seq.namespace,
            limit=limit,
            program=seq.program,
            priority=seq.priority,
            is_again=seq.has_asked,
        )
        seq.has_asked = True
        num_restored = cache.restore(seq.lease, seq.tokens.ids, limit=limit)
        seq.num_restored += num_restored
        seq.num_computed = seq.lease.num_cached
    elif seq.num_computed < limit:
        # A sibling may have computed more of our tokens than we hold.
        commit(seq)
        seq.num_computed += seq.lease.rematch(seq.tokens.ids, limit=limit)
    elif seq.num_computed > limit:
        commit(seq)
        seq.lease.truncate(limit)
        seq.num_computed = limit
    return num_restored


def shorten(seq: Sequence, missing: int) -> bool:
    """Let go of the last ``missing`` slots of a sequence that does not run; False where that is all it has alone.

    What it keeps stays locked: of its tokens only the last are computed again, if they are evicted meanwhile.
    """
    lease = seq.lease
    if lease is None or lease.num_sole <= missing:
        return False
    commit(seq)
    kept = lease.num_slots - missing
    lease.truncate(kept)
    seq.num_computed, seq.table_len = min(seq.num_computed, kept), min(seq.table_len, kept)
    return True
