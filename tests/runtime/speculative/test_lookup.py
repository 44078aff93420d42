"""The drafts of the lookup."""

import numpy as np
import pytest
from phloem.runtime.speculative import LookupDrafter, Price, Want

PRICE = Price(1.0, 0.01)


def drafter(*, cached: list[int] | None = None) -> LookupDrafter:
    def continuation(tokens: np.ndarray, namespace: str, limit: int) -> np.ndarray:
        return np.array(cached or [], np.int32)[:limit]

    return LookupDrafter(continuation)


def want(tokens: list[int], *, seq_id: int = 1, limit: int = 16, is_first: bool = False, namespace: str = "") -> Want:
    return Want(seq_id, np.array(tokens, np.int32), is_first, 0, namespace, limit, frozenset())


FORKED = [1, 2, 3, 7, 7, 7, 7, 0, 1, 2, 3, 8, 8, 8, 8, 9, 1, 2, 3]


def test_the_last_continuation_is_drafted_and_repeated_up_to_the_limit():
    found = drafter().propose(want(FORKED, limit=9), PRICE)
    assert found is not None and found.draft.source == "lookup"
    assert found.draft.token_ids.tolist() == [8, 8, 8, 8, 9, 1, 2, 3, 8]
    reached = found.reached()
    assert len(reached) == 9 and (np.diff(reached) <= 0).all() and reached[-1] > 0


def test_the_chance_of_a_draft_falls_when_drafts_are_rejected():
    one = drafter()
    before = one.propose(want(FORKED, limit=9), PRICE).chances[0]
    for seq_id in range(20):
        assert one.propose(want(FORKED, seq_id=seq_id, limit=9), PRICE) is not None
        one.observe(seq_id, np.array([7], np.int32))
    assert one.propose(want(FORKED, seq_id=99, limit=9), PRICE).chances[0] < 0.5 * before


def test_a_longer_match_in_another_sequence_is_preferred():
    one = drafter()
    one.propose(want([4, 5, 1, 2, 3, 6, 6, 6], seq_id=1), PRICE)
    one.rest(1)
    found = one.propose(want([9, 2, 3, 7, 7, 0, 4, 5, 1, 2, 3], seq_id=2, limit=8), PRICE)
    assert found is not None and found.draft.source == "shared"
    assert found.draft.token_ids.item(0) == 6


def test_the_cache_s_continuation_comes_first():
    found = drafter(cached=[5, 6, 7]).propose(want(FORKED, is_first=True), PRICE)
    assert found is not None and found.draft.source == "prefix"
    assert found.draft.token_ids.tolist() == [5, 6, 7]


def test_namespaces_share_no_text():
    one = drafter()
    one.propose(want([1, 2, 3, 4, 5, 6], seq_id=1, namespace="a"), PRICE)
    one.forget(1)
    assert one.propose(want([0, 1, 2, 3], seq_id=2, namespace="b"), PRICE) is None
    assert one.propose(want([0, 1, 2, 3], seq_id=3, namespace="a"), PRICE) is not None


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 6, 31])
def test_a_draft_is_never_longer_than_the_limit(limit):
    found = drafter().propose(want(FORKED, limit=limit), PRICE)
    assert found is not None and 0 < len(found.draft) == len(found.chances) <= limit
