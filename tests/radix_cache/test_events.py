"""Block names, and the events by which a router follows a cache."""

import subprocess
import sys

import numpy as np
import pytest
from phloem.radix_cache import Evicted, RadixCache, Stored, block_names
from phloem.radix_cache.blocks import root_name


def text(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def cache_with_events(num_slots: int = 40, block_len: int = 4):
    events = []
    return RadixCache(num_slots, on_event=events.append, block_len=block_len), events


def test_names_chain_over_whole_blocks_only():
    assert len(block_names(text(11), block_len=4)) == 2
    assert block_names(text(8), block_len=4) == block_names(text(11), block_len=4)
    other = text(8)
    other[0] = 99
    assert not set(block_names(other, block_len=4)) & set(block_names(text(8), block_len=4))


def test_names_differ_between_namespaces():
    spaces = ["", "a", ("a",), ("a", "b"), ("ab", ""), ("a", ("b",)), 1, "1", b"1", None, ()]
    assert len({root_name(namespace) for namespace in spaces}) == len(spaces)


def test_names_are_equal_in_another_process():
    call = "block_names(range(8), namespace=('m', 1), block_len=4)[-1].hex()"
    code = f"from phloem.radix_cache import block_names; print({call})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == block_names(range(8), namespace=("m", 1), block_len=4)[-1].hex()


def test_a_namespace_that_cannot_be_hashed_is_refused_when_blocks_are_named():
    cache, _ = cache_with_events()
    with pytest.raises(TypeError, match=r"namespace part 1.5 of type float cannot be hashed for block names"):
        cache.acquire(text(3), namespace=("m", 1.5))
    assert cache.tree.roots == {}


def test_stored_and_evicted_name_the_blocks_whose_last_token_was_stored_or_evicted():
    cache, events = cache_with_events()
    names = block_names(text(12), block_len=4)
    lease = cache.acquire(text(12))
    lease.extend(12)
    lease.commit(text(6))
    assert events.pop() == Stored(1, "", root_name(""), (names[0],))
    lease.commit(text(7))
    assert not events
    lease.commit(text(12))
    assert events.pop() == Stored(2, "", names[0], (names[1], names[2]))
    lease.release()
    other = cache.acquire(text(0))
    other.extend(28 + 1)
    assert events.pop() == Evicted(3, "", (names[2],), "space")
    cache.flush()
    assert events.pop() == Evicted(4, "", (names[0], names[1]), "flush")


def test_a_block_that_begins_above_a_branch_belongs_to_the_branch():
    cache, events = cache_with_events()
    ends = {}
    for last in (100, 200):
        tokens = np.r_[text(6), last, last].astype(np.int32)
        lease = cache.acquire(tokens)
        lease.extend(8 - lease.num_cached)
        lease.commit(tokens)
        ends[last] = block_names(tokens, block_len=4)
    assert [event.names for event in events] == [tuple(ends[100]), (ends[200][1],)]
    assert events[1].parent == ends[100][0]


def test_a_block_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="block_len=0"):
        cache_with_events(block_len=0)
