"""Leases, reuse and eviction of the radix cache, one claim each."""

import numpy as np
import pytest
from phloem.radix_cache import OutOfSlots, RadixCache
from phloem.radix_cache.policies import lfu, lru, priority, size_aware


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def run(cache: RadixCache, tokens: np.ndarray, **where) -> np.ndarray:
    """Acquire, compute, commit and release ``tokens``; returns their slots."""
    lease = cache.acquire(tokens, **where)
    lease.extend(len(tokens) - lease.num_cached)
    lease.commit(tokens)
    slots = lease.slot_ids.copy()
    lease.release()
    cache.check()
    return slots


def test_an_empty_cache_matches_nothing_and_has_all_slots_free():
    cache = RadixCache(10)
    lease = cache.acquire(ids(1, 2, 3))
    assert (lease.num_cached, lease.num_slots, len(lease.slot_ids)) == (0, 0, 0)
    lease.release()
    cache.check()
    assert (cache.num_free, cache.num_cached, cache.num_leased) == (10, 0, 0)


def test_committed_tokens_are_found_again_in_their_slots():
    cache = RadixCache(10)
    slots = run(cache, ids(1, 2, 3, 4))
    lease = cache.acquire(ids(1, 2, 3, 4, 5))
    assert lease.num_cached == 4
    assert (lease.slot_ids == slots).all()
    lease.release()


def test_a_match_may_end_inside_an_edge_and_obeys_its_limit():
    cache = RadixCache(10)
    slots = run(cache, ids(1, 2, 3, 4))
    for tokens, limit, found in [(ids(1, 2, 9), None, 2), (ids(1, 2, 3, 4), 3, 3), (ids(1, 2), 0, 0), (ids(9), 5, 0)]:
        assert cache.peek(tokens, limit=limit) == found
        lease = cache.acquire(tokens, limit=limit)
        assert lease.num_cached == found
        assert (lease.slot_ids == slots[:found]).all()
        lease.release()
        cache.check()


@pytest.mark.parametrize("length", [511, 512, 513, 2560, 2561, 30_000])
def test_a_mismatch_is_found_wherever_it_is_in_a_long_edge(length):
    cache = RadixCache(60_000)
    tokens = np.arange(length, dtype=np.int32)
    run(cache, tokens)
    for at in {0, 1, length // 2, length - 1}:
        other = tokens.copy()
        other[at] = -1
        assert cache.peek(other) == at
    assert cache.peek(tokens) == length


def test_namespaces_do_not_share():
    cache = RadixCache(20)
    run(cache, ids(1, 2, 3), namespace="a")
    assert cache.peek(ids(1, 2, 3), namespace="a") == 3
    assert cache.peek(ids(1, 2, 3), namespace=("a", "salt")) == 0
    assert cache.peek(ids(1, 2, 3)) == 0


def test_without_reuse_nothing_is_matched_and_all_slots_are_freed():
    cache = RadixCache(10, reuse=False)
    run(cache, ids(1, 2, 3))
    assert (cache.num_free, cache.peek(ids(1, 2, 3))) == (10, 0)
    lease = cache.acquire(ids(1, 2, 3))
    lease.extend(3)
    lease.commit(ids(1, 2, 3))
    assert (lease.num_cached, lease.num_shared, lease.num_private) == (0, 0, 3)
    cache.check()


def test_where_the_last_prompt_is_kept_another_one_replaces_it():
    cache = RadixCache(20, policy=lru, kept="last")
    run(cache, ids(1, 2, 3))
    run(cache, ids(1, 2, 3, 4))
    assert cache.peek(ids(1, 2, 3, 4)) == 4
    run(cache, ids(1, 2, 9))
    assert [cache.peek(ids(1, 2, 3, 4)), cache.peek(ids(1, 2, 9)), cache.num_cached] == [2, 3, 3]
    held = cache.acquire(ids(1, 2, 9))
    run(cache, ids(5, 6))
    assert [cache.peek(ids(1, 2, 9)), cache.peek(ids(5, 6))] == [3, 2], "a prefix in use stays"
    held.release()
    assert [cache.peek(ids(1, 2, 9)), cache.peek(ids(5, 6)), cache.num_cached] == [3, 0, 3]
    cache.check()


def test_duplicates_are_adopted_and_stale_from_is_the_first_changed_position():
    cache = RadixCache(20)
    first, second = cache.acquire(ids(1, 2, 3, 4)), cache.acquire(ids(1, 2, 3, 9))
    for lease, tokens in ((first, ids(1, 2, 3, 4)), (second, ids(1, 2, 3, 9))):
        lease.extend(4)
        lease.mark_fresh()
        assert lease.stale_from == 4
        lease.commit(tokens)
        cache.check()
    assert first.stale_from == 4
    assert second.stale_from == 0
    assert (first.slot_ids[:3] == second.slot_ids[:3]).all()
    assert first.slot_ids[3] != second.slot_ids[3]
    assert (cache.num_cached, cache.num_leased, cache.num_free) == (5, 0, 15)


def test_commit_may_leave_later_slots_private():
    cache = RadixCache(10)
    lease = cache.acquire(ids(1, 2))
    lease.extend(6)
    lease.commit(ids(1, 2))
    assert (lease.num_shared, lease.num_private) == (2, 4)
    lease.commit(ids(1, 2, 3))
    assert (lease.num_shared, lease.num_private) == (3, 3)
    cache.check()
    lease.release()
    assert (cache.num_free, cache.num_cached) == (7, 3)


def test_committing_token_by_token_makes_few_nodes_and_finds_all():
    cache = RadixCache(3000)
    tokens = np.arange(2000, dtype=np.int32)
    lease = cache.acquire(tokens)
    for n in range(1, 2001):
        lease.extend(1)
        lease.commit(tokens[:n])
    cache.check()
    assert cache.tree.num_nodes < 10
    assert cache.peek(tokens) == 2000
    lease.release()


def test_extending_a_shared_path_never_grows_another_leases_path():
    cache = RadixCache(20)
    lease = cache.acquire(ids(1, 2))
    lease.extend(2)
    lease.commit(ids(1, 2))
    other = cache.acquire(ids(1, 2))
    lease.extend(1)
    lease.commit(ids(1, 2, 3))
    cache.check()
    assert (lease.num_slots, other.num_slots) == (3, 2)


def test_a_caller_may_reuse_its_token_buffer_after_commit():
    cache = RadixCache(10)
    tokens = ids(1, 2, 3)
    lease = cache.acquire(tokens)
    lease.extend(3)
    lease.commit(tokens)
    tokens[:] = 9
    assert cache.peek(ids(1, 2, 3)) == 3


def test_num_sole_is_the_number_of_slots_that_release_frees():
    cache = RadixCache(20)
    first = cache.acquire(ids(1, 2, 3, 4, 5))
    first.extend(6)
    assert first.num_sole == 6
    first.commit(ids(1, 2, 3, 4, 5))
    assert first.num_sole == 6, "in the tree, and locked by no other lease"
    second = cache.acquire(ids(1, 2, 3))
    assert (first.num_sole, second.num_sole) == (3, 0)
    room = cache.num_free + cache.num_evictable
    first.release()
    assert cache.num_free + cache.num_evictable == room + 3
    assert second.num_sole == 3
    second.release()
    cache.check()


def test_a_second_lease_shares_the_committed_part_only_and_costs_no_slot():
    cache = RadixCache(10)
    lease = cache.acquire(ids(1, 2, 3))
    lease.extend(4)
    lease.commit(ids(1, 2, 3))
    free = cache.num_free
    child = cache.acquire(ids(1, 2, 3, 4))
    assert cache.num_free == free
    assert (child.slot_ids == lease.slot_ids[:3]).all()
    lease.release()
    assert cache.num_locked == 3
    child.release()
    cache.check()
    assert cache.num_evictable == 3


def test_truncate_inside_the_committed_part_never_gives_out_a_slot_of_the_tree():
    cache = RadixCache(10)
    lease = cache.acquire(ids(1, 2, 3, 4))
    lease.extend(5)
    lease.commit(ids(1, 2, 3, 4))
    old = lease.slot_ids.copy()
    lease.mark_fresh()
    lease.truncate(2)
    cache.check()
    assert (lease.num_slots, lease.num_shared, lease.stale_from) == (2, 2, 2)
    assert (cache.num_locked, cache.num_evictable) == (2, 2)
    lease.extend(3)
    assert not set(lease.slot_ids[2:]) & set(old[:4])
    lease.commit(ids(1, 2, 7, 8, 9))
    cache.check()
    assert cache.peek(ids(1, 2, 3, 4)) == 4
    assert cache.peek(ids(1, 2, 7, 8, 9)) == 5


def test_truncate_of_private_slots_frees_them():
    cache = RadixCache(10)
    lease = cache.acquire(ids(1, 2))
    lease.extend(6)
    lease.commit(ids(1, 2))
    lease.truncate(3)
    assert (lease.num_slots, lease.num_shared, cache.num_free) == (3, 2, 7)
    cache.check()


def test_extend_all_gives_the_same_slots_as_extend_one_by_one():
    caches = RadixCache(64), RadixCache(64)
    leases = [[cache.acquire(np.arange(4, dtype=np.int32)) for _ in range(5)] for cache in caches]
    for lease in leases[0]:
        lease.extend(6)
    taken = caches[1].extend_all(leases[1], 6)
    assert [lease.slot_ids.tolist() for lease in leases[1]] == taken.tolist()
    assert [lease.slot_ids.tolist() for lease in leases[0]] == taken.tolist()
    with pytest.raises(OutOfSlots):
        caches[1].extend_all(leases[1], 7)
    assert all(lease.num_slots == 6 for lease in leases[1])
    caches[1].check()


def test_extend_after_truncate_marks_the_changed_positions_stale():
    cache = RadixCache(10)
    lease = cache.acquire(ids(1))
    lease.extend(6)
    lease.mark_fresh()
    lease.truncate(4)
    lease.extend(2)
    assert lease.stale_from == 4


def test_rematch_shares_tokens_that_another_sequence_computed_meanwhile():
    cache = RadixCache(20)
    waiting = cache.acquire(ids(1, 2, 3, 4), limit=3)
    waiting.extend(2)
    assert waiting.rematch(ids(1, 2, 3, 4), limit=3) == 0
    slots = run(cache, ids(1, 2, 3, 4))
    assert waiting.rematch(ids(1, 2, 3, 4), limit=3) == 3
    assert (waiting.num_cached, waiting.num_shared, waiting.num_slots) == (3, 3, 3)
    assert (waiting.slot_ids == slots[:3]).all()
    cache.check()
    waiting.release()
    cache.check()


def test_exactly_the_shortfall_is_evicted_from_the_end_of_a_leaf():
    cache = RadixCache(10)
    run(cache, ids(1, 2, 3, 4, 5, 6))
    lease = cache.acquire(ids(9))
    lease.extend(7)
    cache.check()
    assert cache.peek(ids(1, 2, 3, 4, 5, 6)) == 3
    assert cache.counters.evicted_tokens == {"space": 3}


def test_free_up_evicts_the_shortfall_and_at_most_all_evictable_slots():
    cache = RadixCache(20)
    held = cache.acquire(ids(0))
    held.extend(8)
    held.commit(ids(*range(8)))
    other = cache.acquire(ids(50))
    other.extend(10)
    other.commit(ids(*range(50, 60)))
    other.release()
    cache.free_up(2)
    assert (cache.num_free, cache.num_evictable) == (2, 10)
    cache.free_up(5)
    assert (cache.num_free, cache.num_evictable) == (5, 7) and cache.counters.evicted_tokens == {"space": 3}
    cache.free_up(19)
    assert (cache.num_free, cache.num_evictable, cache.num_locked) == (12, 0, 8)
    cache.check()


def test_out_of_slots_reports_the_numbers_and_changes_nothing():
    cache = RadixCache(10)
    run(cache, ids(1, 2, 3))
    held = cache.acquire(ids(5, 6))
    held.extend(4)
    with pytest.raises(OutOfSlots, match="7 slots needed, but 3 are free and 3 evictable") as error:
        held.extend(7)
    assert (error.value.need, error.value.free, error.value.evictable) == (7, 3, 3)
    assert (held.num_slots, cache.peek(ids(1, 2, 3))) == (4, 3)
    cache.check()
    held.extend(6)
    assert cache.num_cached == 0


def test_evict_never_frees_a_locked_slot():
    cache = RadixCache(8)
    run(cache, ids(1, 2, 3, 4))
    lease = cache.acquire(ids(1, 2))
    other = cache.acquire(ids(9))
    other.extend(6)
    cache.check()
    assert cache.peek(ids(1, 2, 3, 4)) == 2
    with pytest.raises(OutOfSlots):
        other.extend(1)
    assert lease.num_slots == 2


def test_a_parent_is_evictable_once_its_children_are_gone():
    cache = RadixCache(10)
    run(cache, ids(1, 2, 3))
    run(cache, ids(1, 2, 4))
    assert cache.flush() == 4
    cache.check()
    assert (cache.num_free, cache.tree.roots) == (10, {})


def test_flush_keeps_locked_tokens():
    cache = RadixCache(10)
    run(cache, ids(1, 2, 3))
    lease = cache.acquire(ids(1, 2))
    assert cache.flush() == 1
    cache.check()
    assert cache.num_cached == 2
    lease.release()


def test_what_was_committed_ahead_of_a_step_is_forgotten_with_all_that_follows_it():
    cache = RadixCache(20)
    lease = cache.acquire(ids(1, 2, 3, 4, 5, 6))
    lease.extend(6)
    lease.commit(ids(1, 2))
    slots = lease.slot_ids.copy()
    lease.commit_new(ids(1, 2, 3, 4, 5, 6))
    assert (lease.slot_ids == slots).all()
    for tail in (7, 8):
        run(cache, ids(1, 2, 3, 4, tail))
    other = run(cache, ids(1, 2, 9))
    lease.truncate(2)
    cache.forget(ids(1, 2, 3, 4, 5, 6), start=2)
    cache.check()
    assert cache.peek(ids(1, 2, 3, 4, 7)) == 2 and cache.counters.evicted_tokens == {"flush": 6}
    assert cache.peek(ids(1, 2, 9)) == 3 and (cache.slots_of(ids(1, 2, 9)) == other).all()
    lease.release()
    cache.forget(ids(1, 2, 3), start=2)
    cache.forget(ids(4), start=0)
    cache.forget(ids(4), start=0, namespace="unknown")
    assert cache.num_cached == 3
    cache.forget(ids(1, 2, 3), start=0)
    assert cache.num_cached == 0 and cache.num_free == 20 and not cache.tree.roots
    cache.check()


def test_tokens_that_a_lease_or_a_pin_holds_are_not_forgotten():
    cache = RadixCache(20)
    run(cache, ids(1, 2, 3, 4))
    cache.pin(ids(1, 2, 3), ttl_s=60.0)
    with pytest.raises(AssertionError, match="is held"):
        cache.forget(ids(1, 2, 3, 4), start=1)


def test_a_second_release_is_an_assertion_error():
    lease = RadixCache(4).acquire(ids(1))
    lease.release()
    with pytest.raises(AssertionError, match="released once"):
        lease.release()


def test_commit_asserts_that_shared_tokens_are_unchanged():
    cache = RadixCache(10)
    lease = cache.acquire(ids(1, 2))
    lease.extend(4)
    lease.commit(ids(1, 2))
    with pytest.raises(AssertionError, match="shared tokens changed"):
        lease.commit(ids(1, 9, 3))


def survivors(cache: RadixCache, *, evict: int) -> set[int]:
    """The first tokens of the sequences of which nothing was evicted, after ``evict`` tokens were."""
    whole = {t: cache.peek(ids(t, t, t)) for t in range(1, 10)}
    lease = cache.acquire(ids(99))
    lease.extend(cache.num_free + evict)
    lease.release()
    cache.check()
    return {t for t, n in whole.items() if n and cache.peek(ids(t, t, t)) == n}


def test_lru_evicts_the_least_recently_used_first():
    cache = RadixCache(9, policy=lru)
    for t in (1, 2, 3):
        run(cache, ids(t, t, t))
    run(cache, ids(1, 1, 1))
    assert survivors(cache, evict=3) == {1, 3}
    assert survivors(cache, evict=3) == {1}


def test_lfu_evicts_the_least_often_matched_first():
    cache = RadixCache(9, policy=lfu)
    for t in (1, 1, 1, 2, 3, 3):
        run(cache, ids(t, t, t))
    assert survivors(cache, evict=3) == {1, 3}
    assert survivors(cache, evict=3) == {1}


def test_priority_evicts_the_least_urgent_first():
    cache = RadixCache(9, policy=priority)
    for t, level in ((1, 0), (2, 5), (3, -5)):
        run(cache, ids(t, t, t), priority=level)
    assert survivors(cache, evict=3) == {1, 3}
    assert survivors(cache, evict=3) == {3}


def test_size_aware_keeps_tokens_that_cost_most_to_compute_again():
    cache = RadixCache(40_000, policy=size_aware)
    deep = np.zeros(20_000, np.int32)
    run(cache, deep[:19_990])
    run(cache, deep)
    for t in range(1, 10):
        run(cache, ids(t, t, t))
    assert survivors(cache, evict=27) == set()
    assert cache.peek(deep) == 20_000


def test_program_aware_first_evicts_leaves_that_no_running_program_used():
    cache = RadixCache(12)
    for t, program in ((1, "a"), (2, ""), (3, "b"), (4, "a")):
        run(cache, ids(t, t, t), program=program)
    assert survivors(cache, evict=3) == {1, 3, 4}
    cache.end_program("b")
    cache.check()
    assert survivors(cache, evict=3) == {1, 4}
    cache.end_program("a")
    cache.end_program("never seen")
    assert survivors(cache, evict=3) == {4}


def test_a_leaf_that_two_programs_used_stays_until_both_end():
    cache = RadixCache(9)
    run(cache, ids(1, 1, 1), program="a")
    run(cache, ids(1, 1, 1), program="b")
    run(cache, ids(2, 2, 2), program="c")
    cache.end_program("a")
    cache.end_program("c")
    assert survivors(cache, evict=3) == {1}
    cache.end_program("b")
    assert survivors(cache, evict=3) == set()
    assert not any(cache.tree.touched.values())


def test_snapshot_shows_the_tree_and_counts_the_nodes_it_leaves_out():
    cache = RadixCache(30)
    run(cache, ids(1, 2, 3, 4), namespace="a", program="p")
    run(cache, ids(1, 2, 5), namespace="a")
    held = cache.acquire(ids(1, 2, 5), namespace="a")
    (root,) = cache.snapshot(num_first_tokens=1)
    assert (root.namespace, root.num_tokens, root.lock_count) == ("a", 0, 1)
    (shared,) = root.children
    assert (shared.num_tokens, shared.first_tokens, shared.lock_count, shared.programs) == (2, (1,), 1, ("p",))
    assert {(c.num_tokens, c.first_tokens, c.lock_count) for c in shared.children} == {(2, (3,), 0), (1, (5,), 1)}
    (root,) = cache.snapshot(max_nodes=1)
    assert (len(root.children), root.children[0].num_hidden) == (1, 2)
    held.release()


def test_counters_count_lookups_hits_and_tokens():
    cache = RadixCache(30)
    run(cache, ids(1, 2, 3))
    run(cache, ids(1, 2, 4, 5))
    cache.flush()
    counters = cache.counters
    assert (counters.lookups, counters.hits, counters.looked_up_tokens, counters.matched_tokens) == (2, 1, 7, 2)
    assert counters.evicted_tokens == {"flush": 5}


def test_version_changes_exactly_when_tokens_are_stored_or_evicted():
    cache = RadixCache(30)
    before = cache.version
    lease = cache.acquire(ids(1, 2))
    lease.extend(2)
    assert cache.version == before
    lease.commit(ids(1, 2))
    assert cache.version > before
    lease.release()
    before = cache.version
    cache.acquire(ids(1)).release()
    assert cache.version == before
    cache.flush()
    assert cache.version > before


def test_the_rest_of_a_long_edge_does_not_keep_the_whole_arrays_alive():
    cache = RadixCache(2000)
    run(cache, np.arange(1000, dtype=np.int32))
    lease = cache.acquire(ids(0))
    other = cache.acquire(ids(5000))
    other.extend(1998)
    cache.check()
    nodes = list(cache.tree.nodes())
    assert [node.num_tokens for node in nodes] == [1, 1]
    for array in (array for node in nodes for array in (node.tokens, node.slots)):
        assert (array if array.base is None else array.base).size <= 2
    lease.release()


def test_a_cache_without_slots_is_refused():
    with pytest.raises(ValueError, match="num_slots=0"):
        RadixCache(0)
