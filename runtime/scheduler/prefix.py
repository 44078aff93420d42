"""A sequence and its KV in the cache: how much is there, and taking, sharing and shortening its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .sequence import Sequence

if TYPE_CHECKING:
    from ...radix_cache import RadixCache, ReadAhead


def matched_len(seq: Sequence, cache: RadixCache) -> int:
    """How many of a waiting sequence's tokens have KV; looked up again only after the cache has changed."""
    if seq.lease is not None:
        return seq.num_computed
    if seq.matched[0] != cache.version:
        seq.matched = (cache.version, cache.peek(seq.tokens.ids, namespace=seq.namespace))
    return seq.matched[1]


def read_ahead(seq: Sequence, cache: RadixCache) -> ReadAhead | None:
    """Begin to read the KV that the disk has of a new sequence's tokens; None when nothing has to be read."""
    tiers = cache.tiers
    if tiers is None or seq.lease is not None or not cache.reuse:
        return None
    reading = tiers.read_ahead(seq.tokens.ids, start=matched_len(seq, cache), namespace=seq.namespace)
    return None if reading.is_done else reading


def commit(seq: Sequence) -> None:
    """Give the KV that ``seq`` has computed to the cache, so that other sequences find it."""
    if seq.lease is not None:
        seq.lease.commit(seq.tokens.ids[: seq.num_computed])


class CommittedAhead(NamedTuple):
    """Tokens that are in the cache before the planned step computes those from ``start`` on."""

    seq_id: int  # of the sequence whose row computes them
    namespace: str
    tokens: np.ndarray  # int32, a copy: from the sequence's first token on
    start: int


def commit_ahead(seq: Sequence, end: int) -> CommittedAhead | None:
    """Give the tokens of ``seq`` up to ``end``, which the planned step computes, to the cache.

    None, without a change, where slots of ``seq`` would change: the cache holds some of the tokens in other slots.
    """
    assert seq.lease is not None
    tokens = seq.tokens.ids[:end]
    seq.lease.commit_new(tokens)
    if seq.lease.num_shared < len(tokens):
        return None
    return CommittedAhead(seq.seq_id, seq.namespace, tokens.copy(), seq.num_computed)


def attach(seq: Sequence, cache: RadixCache) -> int:
    """Give a waiting sequence the longest usable KV: that of its own lease, or of the cache.

    Returns how many tokens were restored from host memory or disk.
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
            is_repeated=seq.is_looked_up,
        )
        seq.is_looked_up = True
        num_restored = cache.restore(seq.lease, seq.tokens.ids, limit=limit)
        seq.num_restored += num_restored
        seq.num_computed = seq.lease.num_cached
    elif seq.num_computed < limit:
        # Another sequence may have computed more of these tokens meanwhile.
        commit(seq)
        seq.num_computed += seq.lease.rematch(seq.tokens.ids, limit=limit)
    elif seq.num_computed > limit:
        commit(seq)
        seq.lease.truncate(limit)
        seq.num_computed = limit
    return num_restored


def shorten(seq: Sequence, missing: int) -> bool:
    """Unlock the last ``missing`` slots of a parked sequence; False if it has no more than these to itself.

    The slots before stay locked, so at most the last tokens are computed again when it is submitted.
    """
    lease = seq.lease
    if lease is None or lease.num_sole <= missing:
        return False
    commit(seq)
    kept = lease.num_slots - missing
    lease.truncate(kept)
    seq.num_computed, seq.table_len = min(seq.num_computed, kept), min(seq.table_len, kept)
    return True
