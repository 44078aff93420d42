"""The drafts of the lookup, and their branches."""

import numpy as np
import pytest
from phloem.runtime.speculative import LookupDrafter, Price, Proposal, Want
from phloem.runtime.speculative.lookup import OTHER

CHEAP, DEAR = Price(1.0, 0.01), Price(1.0, 0.9)


def drafter(*, cached: list[int] | None = None) -> LookupDrafter:
    def continuation(tokens: np.ndarray, namespace: str, limit: int) -> np.ndarray:
        return np.array(cached or [], np.int32)[:limit]

    return LookupDrafter(continuation)


def want(tokens: list[int], *, seq_id: int = 1, limit: int = 16, is_first: bool = False, namespace: str = "") -> Want:
    return Want(seq_id, np.array(tokens, np.int32), is_first, 0, namespace, limit, frozenset())


def texts_of(proposal: Proposal) -> set[tuple[int, ...]]:
    """The paths from the root to each leaf."""
    parents, tokens = proposal.draft.parent_list(), proposal.draft.token_ids.tolist()
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {path for i, path in enumerate(paths) if i not in parents}


FORKED = [1, 2, 3, 7, 7, 7, 7, 0, 1, 2, 3, 8, 8, 8, 8, 9, 1, 2, 3]


def test_two_continuations_make_a_tree_if_rows_are_cheap():
    found = drafter().propose(want(FORKED, limit=9), CHEAP)
    assert found is not None
    assert texts_of(found) == {(8, 8, 8, 8, 9), (7, 7, 7, 7)}
    reached = found.reached()
    assert len(reached) == 9 and reached[0] > reached[5] > 0
    parents = found.draft.parents.tolist()
    assert all(reached[i] <= reached[parent] for i, parent in enumerate(parents) if parent >= 0)


def test_only_the_last_continuation_is_drafted_if_rows_are_expensive():
    found = drafter().propose(want(FORKED, limit=9), DEAR)
    assert found is not None and found.draft.parents is None
    assert found.draft.token_ids.tolist() == [8, 8, 8, 8, 9, 1, 2, 3, 8]


def test_the_chance_of_a_branch_is_learnt_without_running_it():
    one = drafter()
    before = one.acceptance.rates[OTHER].copy()
    for seq_id in range(20):
        assert one.propose(want(FORKED, seq_id=seq_id, limit=9), DEAR) is not None
        one.observe(seq_id, np.array([7], np.int32))
    assert one.acceptance.rates[OTHER].max() > 0.8 > before.max()
    found = one.propose(want(FORKED, seq_id=99, limit=9), Price(1.0, 0.3))
    assert found is not None and (7, 7, 7, 7) in texts_of(found)


def test_a_longer_match_elsewhere_is_the_draft_and_the_own_one_a_branch():
    one = drafter()
    one.propose(want([4, 5, 1, 2, 3, 6, 6, 6], seq_id=1), CHEAP)
    one.rest(1)
    found = one.propose(want([9, 2, 3, 7, 7, 0, 4, 5, 1, 2, 3], seq_id=2, limit=8), CHEAP)
    assert found is not None and found.draft.source == "shared"
    assert {text[0] for text in texts_of(found)} == {6, 7}


def test_the_cache_s_continuation_comes_first():
    found = drafter(cached=[5, 6, 7]).propose(want(FORKED, is_first=True), CHEAP)
    assert found is not None and found.draft.source == "prefix"
    assert (5, 6, 7) in texts_of(found)


def test_namespaces_share_no_text():
    one = drafter()
    one.propose(want([1, 2, 3, 4, 5, 6], seq_id=1, namespace="a"), CHEAP)
    one.forget(1)
    assert one.propose(want([0, 1, 2, 3], seq_id=2, namespace="b"), CHEAP) is None
    assert one.propose(want([0, 1, 2, 3], seq_id=3, namespace="a"), CHEAP) is not None


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 6, 31])
def test_a_draft_is_never_longer_than_the_limit(limit):
    found = drafter().propose(want(FORKED, limit=limit), CHEAP)
    assert found is not None and 0 < len(found.draft) == len(found.chances) <= limit
