"""Copies go where they relieve the busiest group, and each block of tokens goes to a group that has its expert."""

from itertools import product

import numpy as np
import pytest
from phloem.runtime.parallel.expert_places import BLOCK, MIN_GAIN, Places
from phloem.runtime.parallel.sharding import even_parts


def places_of(num_experts: int, num_groups: int, num_spare: int, spare: list[list[int]] | None = None) -> Places:
    found = Places(even_parts(num_experts, num_groups), num_spare)
    if spare is not None:
        found.spare = np.array(spare)
    return found


def settled(places: Places, load: np.ndarray) -> int:
    """Makes all copies that the load asks for; returns in how many reviews."""
    for review in range(20):
        moves = places.moves(load)
        assert len({move.to for move in moves}) == len(moves), "a group gets one copy at a time"
        for move in moves:
            assert move.to not in places.groups_of(move.expert) and move.source == places.home[move.expert]
            places.make(move)
        if not moves:
            return review
    raise AssertionError("copies change for ever")


def tokens_of(places: Places, counts: np.ndarray, *, use_copies: bool = True) -> np.ndarray:
    """Each group's tokens."""
    groups, firsts = places.share_out(counts, use_copies=use_copies)
    tokens = np.zeros(places.num_groups, np.int64)
    for expert, count in enumerate(counts.tolist()):
        for block, first in enumerate(range(0, count, BLOCK)):
            group = groups[firsts[expert] + block]
            assert group in places.groups_of(expert)
            tokens[group] += min(BLOCK, count - first)
    assert tokens.sum() == counts.sum() and len(groups) == (-(-counts // BLOCK)).sum()
    return tokens


def test_every_block_goes_to_a_group_that_has_its_expert() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        num_groups, num_spare = int(rng.integers(2, 5)), int(rng.integers(1, 3))
        places = places_of(9, num_groups, num_spare)
        counts = rng.integers(0, 200, 9) * rng.integers(0, 2, 9)
        assert np.array_equal(tokens_of(places, counts), places.tokens_at_home(counts))
        settled(places, rng.random(9) ** 3)
        assert np.array_equal(tokens_of(places, counts, use_copies=False), places.tokens_at_home(counts))
        again = places.share_out(counts)
        assert all(np.array_equal(one, other) for one, other in zip(places.share_out(counts), again, strict=True))
        tokens_of(places, counts)


def test_an_expert_of_half_of_all_tokens_is_shared_by_all_groups() -> None:
    places = places_of(8, 4, 1)
    load = np.array([50.0, 10, 10, 10, 5, 5, 5, 5])
    assert places.busiest(load) == 60
    assert settled(places, load) >= 1
    assert sorted(places.groups_of(0)) == [0, 1, 2, 3]
    assert places.busiest(load) <= 1.02 * 25
    counts = (load * 40).astype(np.int64)
    assert tokens_of(places, counts).max() <= 1000 + BLOCK
    assert tokens_of(places, counts, use_copies=False).max() == 2400


def test_even_loads_and_no_loads_are_left_alone() -> None:
    places = places_of(8, 4, 2)
    assert places.moves(np.full(8, 100.0)) == [] and places.moves(np.zeros(8)) == []


def test_copies_follow_another_load_and_then_stay() -> None:
    places = places_of(8, 2, 1)
    first = np.array([90.0, 5, 5, 5, 5, 5, 5, 5])
    settled(places, first)
    assert places.spare.tolist() == [[-1], [0]]
    assert settled(places, first[::-1].copy()) == 1 and 7 in places.spare[0]
    assert places.moves(first[::-1] * 1.01) == []


@pytest.mark.parametrize("seed", range(6))
def test_copies_are_nearly_as_good_as_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.random(6) ** 4
    places = places_of(6, 3, 1)
    settled(places, load)
    best = min(
        places_of(6, 3, 1, [[one], [two], [three]]).busiest(load)
        for one, two, three in product((2, 3, 4, 5), (0, 1, 4, 5), (0, 1, 2, 3))
    )
    assert places.busiest(load) <= (1.15 + MIN_GAIN) * best


def test_rows_of_a_group_are_its_experts_and_then_its_copies() -> None:
    places = places_of(5, 2, 2, [[-1, 4], [0, -1]])
    assert places.row_of(0).tolist() == [0, 1, 2, -1, 4]
    assert places.row_of(1).tolist() == [2, -1, -1, 0, 1]
