"""Pins: prefixes that stay locked for a time."""

import numpy as np
import pytest
from phloem.radix_cache import OutOfSlots, RadixCache


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def text(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def run(cache: RadixCache, tokens: np.ndarray) -> None:
    lease = cache.acquire(tokens)
    lease.extend(len(tokens) - lease.num_cached)
    lease.commit(tokens)
    lease.release()


def test_a_pinned_prefix_survives_until_its_time_is_over():
    clock = Clock()
    cache = RadixCache(20, clock=clock)
    run(cache, text(0, 8))
    assert cache.pin(text(0, 6), owner="a", ttl_s=10) == 6
    assert (cache.num_pinned, cache.num_evictable) == (6, 2)
    other = cache.acquire(text(50, 1))
    with pytest.raises(OutOfSlots):
        other.extend(15)
    clock.now += 9.9
    assert cache.flush() == 2
    assert cache.peek(text(0, 8)) == 6
    clock.now += 0.1
    cache.check()
    other.extend(20)
    assert (cache.num_pinned, cache.num_cached) == (0, 0)


def test_a_lease_can_be_pinned_and_released():
    cache = RadixCache(20, clock=Clock())
    lease = cache.acquire(text(0, 4))
    lease.extend(6)
    lease.commit(text(0, 4))
    assert cache.pin(lease, owner=("p", 1), ttl_s=5) == 4
    lease.release()
    cache.check()
    assert cache.flush() == 0
    assert cache.pin(text(99, 1), owner=("p", 1), ttl_s=0) == 0
    assert cache.flush() == 4


def test_pins_beyond_the_budget_keep_the_front_of_the_prefix():
    cache = RadixCache(20, pin_share=0.5, clock=Clock())
    run(cache, text(0, 8))
    run(cache, np.r_[text(0, 4), text(50, 8)].astype(np.int32))
    assert cache.pin(text(0, 8), owner="a", ttl_s=5) == 8
    assert cache.pin(np.r_[text(0, 4), text(50, 8)], owner="b", ttl_s=5) == 6  # 4 tokens are pinned already, 2 more fit
    cache.check()
    assert cache.num_pinned == 10
    assert cache.pin(text(0, 8), owner="c", ttl_s=5) == 8


def test_one_token_beyond_the_budget_is_not_pinned():
    cache = RadixCache(20, pin_share=0.25, clock=Clock())
    run(cache, text(0, 6))
    assert cache.pin(text(0, 5), ttl_s=5) == 5
    assert cache.pin(text(0, 6), ttl_s=5) == 5
    cache.check()


def test_a_new_pin_of_an_owner_replaces_the_old():
    clock = Clock()
    cache = RadixCache(20, clock=clock)
    run(cache, text(0, 8))
    cache.pin(text(0, 8), owner="a", ttl_s=5)
    assert cache.pin(text(0, 3), owner="a", ttl_s=20) == 3
    cache.check()
    clock.now += 10
    assert (cache.num_evictable, cache.num_pinned) == (5, 3)


def test_pins_without_owner_belong_to_their_tokens():
    clock = Clock()
    cache = RadixCache(30, clock=clock)
    run(cache, text(0, 8))
    run(cache, text(50, 4))
    assert cache.pin(text(0, 4), ttl_s=5) == 4
    assert cache.pin(text(50, 4), ttl_s=5) == 4
    assert cache.pin(text(0, 4), ttl_s=8) == 4
    cache.check()
    clock.now += 6
    assert cache.num_evictable == 8
    assert cache.num_pinned == 4
    assert cache.pin(text(0, 2), ttl_s=0) == 0
    assert cache.num_pinned == 4
    assert cache.pin(text(0, 8), ttl_s=0) == 0
    assert cache.num_pinned == 0
    cache.check()


def test_a_pin_keeps_its_tokens_when_its_edge_is_split():
    cache = RadixCache(30, clock=Clock())
    run(cache, text(0, 8))
    cache.pin(text(0, 8), ttl_s=5)
    cache.acquire(text(0, 3)).release()
    cache.check()
    assert cache.num_pinned == 8
    cache.pin(text(0, 8), ttl_s=0)
    cache.check()
    assert cache.num_pinned == 0


def test_renewing_a_pin_for_ever_does_not_grow_its_queue():
    cache = RadixCache(20, clock=Clock())
    run(cache, text(0, 8))
    for _ in range(1000):
        cache.pin(text(0, 8), owner="a", ttl_s=1000)
    assert len(cache.pins.queue) < 100


def test_pinning_tokens_that_are_not_cached_changes_nothing():
    cache = RadixCache(20, clock=Clock())
    assert cache.pin(text(0, 8), owner="a", ttl_s=5, namespace="n") == 0
    assert cache.tree.roots == {}
    cache.check()


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_negative_or_infinite_is_refused(ttl_s):
    cache = RadixCache(20)
    with pytest.raises(ValueError, match="ttl_s="):
        cache.pin(text(0, 1), owner="a", ttl_s=ttl_s)


def test_a_share_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match=r"pin_share=1.5.*between 0 and 1"):
        RadixCache(20, pin_share=1.5)


def test_end_pins_ends_the_pins_with_least_time_left_until_slots_suffice():
    cache = RadixCache(20, pin_share=0.8, clock=Clock())
    for first, owner, ttl_s in ((0, "late", 30), (100, "early", 10), (200, "later", 60)):
        run(cache, text(first, 5))
        assert cache.pin(text(first, 5), owner=owner, ttl_s=ttl_s) == 5
    assert cache.end_pins(5) and cache.num_pinned == 15
    assert not cache.end_pins(21) and cache.num_pinned == 15, "no pin ends if all pins would not suffice"
    assert cache.end_pins(8) and cache.num_pinned == 10
    lease = cache.acquire(text(300, 1))
    lease.extend(8)
    assert (cache.peek(text(0, 5)), cache.peek(text(200, 5))) == (5, 5) and cache.peek(text(100, 5)) < 5
    assert cache.end_pins(12) and cache.num_pinned == 0
    lease.release()
    cache.check()
