"""Grants of a cache's blocks: what they lend, what they pin, and that nothing stays of them."""

import random

import numpy as np
import pytest
from phloem.radix_cache import (
    FIRST_CONTENT_ID,
    Grants,
    RadixCache,
    UnknownGrant,
    UnsoundBlock,
    block_names,
    seal,
    unseal,
)

B = 4


class Setting:
    """A cache of ``num_slots`` with its grants, on a clock that stands still."""

    def __init__(self, num_slots: int = 64) -> None:
        self.now_s = 0.0
        self.cache = RadixCache(num_slots, clock=lambda: self.now_s, block_len=B)
        self.grants = Grants(self.cache, block_len=B, clock=lambda: self.now_s)

    def put(self, tokens: list[int]) -> np.ndarray:
        """Compute ``tokens``; their slots."""
        lease = self.cache.acquire(np.array(tokens, np.int32))
        lease.extend(len(tokens) - lease.num_slots)
        lease.commit(np.array(tokens, np.int32))
        slots = lease.slot_ids.copy()
        lease.release()
        return slots

    def lend(self, *sequences: list[int], ttl_s: float = 5.0, grant: str = "") -> tuple[str, list[list[int]]]:
        arrays = [np.array(tokens, np.int32) for tokens in sequences]
        id, prefixes = self.grants.extend(arrays, namespace="", ttl_s=ttl_s, grant=grant)
        return id, [prefix.tokens.tolist() for prefix in prefixes]


def test_whole_blocks_of_the_tree_are_lent_each_once() -> None:
    s = Setting()
    long, fork, lost = [*range(11)], [*range(8), 50, 51, 52, 53, 54], [*range(100, 110)]
    slots = s.put(long)
    forked = s.put(fork)
    grant, prefixes = s.lend(long, fork, lost, long[:7])
    assert prefixes == [fork[:12]], "the longest first; the others have no block of their own, or are not in the tree"
    names = block_names(fork, block_len=B)
    found = s.grants.slots_of(grant, [names[2], names[0], bytes(16)])
    assert [None if one is None else one.tolist() for one in found] == [
        forked[8:12].tolist(),
        slots[:4].tolist(),
        None,
    ]
    s.cache.check()


def test_a_prefix_ends_before_the_first_content() -> None:
    s = Setting()
    tokens = [1, 2, 3, 4, 5, FIRST_CONTENT_ID, FIRST_CONTENT_ID + 1, 6, 7, 8, 9, 10]
    s.put(tokens)
    assert s.lend(tokens)[1] == [[1, 2, 3, 4]]


def test_a_grant_is_renewed_by_an_extension_and_gone_after_its_time_or_its_end() -> None:
    s = Setting()
    tokens = [*range(16)]
    s.put(tokens[:9])
    grant, _ = s.lend(tokens)
    s.now_s = 4.0
    s.put(tokens)
    assert s.lend(tokens, grant=grant) == (grant, [tokens])
    s.now_s = 8.0
    names = block_names(tokens, block_len=B)
    assert all(slots is not None for slots in s.grants.slots_of(grant, names))
    assert s.cache.num_locked == 16
    s.now_s = 13.0
    with pytest.raises(UnknownGrant):
        s.grants.slots_of(grant, names)
    assert s.cache.num_evictable == 16
    again, _ = s.lend(tokens, grant=grant)
    assert again != grant, "an id that was given away is not given again"
    s.grants.end(again)
    assert len(s.grants) == 0 and s.cache.num_locked == 0
    s.cache.check()


def test_inserted_tokens_are_as_computed_ones() -> None:
    s = Setting(num_slots=16)
    tokens = np.arange(12, dtype=np.int32)
    filled: list[int] = []
    options = {"namespace": "", "load": lambda slots: filled.extend(slots.tolist())}
    assert not s.cache.insert(tokens, start=4, **options), "the tokens before are not there"
    s.put(tokens[:5].tolist())
    assert s.cache.insert(tokens, start=4, **options) and len(filled) == 8
    slots = s.cache.slots_of(tokens)
    assert len(slots) == 12 and slots[5:].tolist() == filled[1:], "position 4 was there already"
    lease = s.cache.acquire(np.arange(100, 116, dtype=np.int32))
    lease.extend(10)
    assert not s.cache.insert(np.arange(50, 60, dtype=np.int32), start=0, **options), "10 slots are held"
    lease.release()
    assert s.cache.counters.lookups == 2, "an insertion is no lookup"
    s.cache.check()


def test_a_running_sequence_keeps_its_slots_where_the_tree_has_its_tokens() -> None:
    s = Setting()
    tokens = np.arange(12, dtype=np.int32)
    first, second = s.cache.acquire(tokens), s.cache.acquire(tokens)
    for lease in (first, second):
        lease.extend(12)
    own = second.slot_ids.tolist()
    first.commit_new(tokens)
    assert first.num_shared == 12
    second.commit_new(tokens)
    assert second.num_shared == 0 and second.slot_ids.tolist() == own
    second.truncate(0)
    second.release()
    first.release()
    s.cache.check()


def test_random_grants_lend_what_the_cache_has_and_leave_nothing() -> None:
    """Against a model: each lent slot is the tree's slot of that token."""
    rng = random.Random(3)
    s = Setting(num_slots=80)
    granted: dict[str, list[list[int]]] = {}
    for _ in range(600):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        match rng.randrange(5):
            case 0 | 1:
                if len(tokens) <= s.cache.num_free + s.cache.num_evictable:
                    s.put(tokens)
            case 2:
                grant, prefixes = s.lend(
                    tokens, ttl_s=rng.uniform(0.5, 5), grant=rng.choice(["", *granted]) if granted else ""
                )
                granted[grant] = prefixes
            case 3 if granted:
                grant = rng.choice([*granted])
                try:
                    for prefix in granted[grant]:
                        names = block_names(prefix, block_len=B)
                        path = s.cache.slots_of(np.array(prefix, np.int32)).tolist()
                        for i, slots in enumerate(s.grants.slots_of(grant, names)):
                            want = path[i * B : (i + 1) * B]
                            assert (slots.tolist() if slots is not None else []) == (want if len(want) == B else [])
                except UnknownGrant:
                    del granted[grant]
            case 4:
                s.now_s += rng.uniform(0, 1)
                if granted and rng.random() < 0.3:
                    s.grants.end(granted.popitem()[0])
        s.cache.check()
    s.now_s += 5.0
    assert s.cache.num_evictable == s.cache.num_cached > 0 and len(s.grants) == 0
    assert not s.cache.pins.nodes


def test_a_sealed_block_opens_as_itself_alone() -> None:
    format, name, block = bytes(16), bytes(range(16)), b"keys and values"
    sealed = seal(block, format=format, name=name)
    assert unseal(sealed, format=format, name=name) == block
    for i in range(len(sealed)):
        with pytest.raises(UnsoundBlock):
            unseal(sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :], format=format, name=name)
        with pytest.raises(UnsoundBlock):
            unseal(sealed[:i], format=format, name=name)
    with pytest.raises(UnsoundBlock, match="its checksum, name or format does not verify"):
        unseal(sealed, format=bytes(range(1, 17)), name=name)
