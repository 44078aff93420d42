"""Conversations that come as separate lookups: their turns are counted, and those that have likely ended go first."""

import random

import numpy as np
import pytest
from phloem.radix_cache import POLICIES, RadixCache
from phloem.radix_cache.history import History
from phloem.radix_cache.returns import MAX_LOG_ODDS, MAX_TURN, Returns


def text(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def serve(cache: RadixCache, tokens: np.ndarray) -> int:
    """Serve a whole request; returns how many tokens the cache had."""
    lease = cache.acquire(tokens, limit=len(tokens) - 1)
    lease.extend(len(tokens) - lease.num_cached)
    lease.commit(tokens)
    lease.release()
    return lease.num_cached


def test_a_lookup_that_continues_another_is_its_next_turn():
    history, pauses = History(10_000), []
    history.returns.count = lambda turn, pause=0: pauses.append((turn, pause))
    assert [history.count("", text(0, 100 * k), now=10 * k) for k in (1, 2, 3)] == [1, 2, 3]
    assert history.count("", text(5000, 100), now=40) == 1, "another conversation"
    assert history.count("", text(0, 100), now=50) == 1, "the first lookup again"
    assert history.count("", text(0, 8), now=60) == 0, "too short to tell"
    assert pauses == [(1, 0), (2, 10), (3, 10), (1, 0), (1, 0)]


def test_turns_beyond_the_last_counted_one_count_as_that_one():
    history = History(100_000)
    for k in range(1, 3 * MAX_TURN):
        assert history.count("", text(0, 32 * k), now=k) == min(k, MAX_TURN)
    assert history.returns.worth(MAX_TURN) == history.returns.worth(MAX_TURN + 5)


def test_the_worth_of_a_turn_is_the_mean_pause_times_the_log_odds_that_conversations_go_on():
    returns = Returns()
    for _ in range(5000):  # half of the conversations have one turn, the others two; pauses are of 30 uses
        returns.count(1)
        returns.count(1)
        returns.count(2, 30)
    assert returns.worth(0) == 0.0
    assert returns.worth(1) == pytest.approx(0.0, abs=0.1), "half of them go on"
    assert returns.worth(2) == -MAX_LOG_ODDS * 30, "none goes on"
    before = returns.worth(1), returns.worth(2)
    returns.fade()
    assert (returns.worth(1), returns.worth(2)) == pytest.approx(before, abs=0.1)


def test_without_continued_lookups_leaves_are_evicted_by_recency():
    cache = RadixCache(10_000)
    for i in range(200):
        serve(cache, text(1000 * i, 50))
    assert {node.worth for node in cache.tree.nodes()} == {0.0}


def play(policy: str) -> tuple[int, RadixCache]:
    """24 conversations of three turns at a time, in random order; the pool holds some 20 of them."""
    rng = random.Random(1)
    cache, found = RadixCache(4000, policy=POLICIES[policy]), 0
    running = [(i, 0) for i in range(24)]  # (number, turns so far)
    for step in range(3000):
        at = rng.randrange(24)
        number, turns = running[at] if running[at][1] < 3 else (100 + step, 0)
        found += serve(cache, text(10_000 * number, 100 * (turns + 1)))
        running[at] = (number, turns + 1)
    cache.check()
    return found, cache


def test_conversations_that_have_likely_ended_are_evicted_first():
    (by_recency, _), (found, cache) = play("lru"), play("program_aware")
    assert found > 1.3 * by_recency
    worths = [cache.history.returns.worth(turn) for turn in (1, 2, 3)]
    assert worths[0] > 0 and worths[1] > 0 and worths[2] < -worths[0]
