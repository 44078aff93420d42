"""A waiting sequence is blocked on a running prompt that computes many of its tokens, but not for a few tokens."""

import pytest
from phloem.runtime.scheduler.blocked import FEW, RunningPrompts
from phloem.runtime.scheduler.sequence import Sequence, TokenBuffer


def sequence(tokens: list[int], *, seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, TokenBuffer(tokens))


@pytest.mark.parametrize(
    ("matched", "awaited", "own", "waits"),
    [
        (0, FEW, 1000, True),
        (0, FEW - 1, 1000, False),
        (100, FEW, 1000, True),
        (100, 2, 20, False),  # two questions about one text that begin with the same word
        (100, 0, 20, False),
        (0, 5, 5, True),  # half of all its tokens
        (0, 5, 6, False),
    ],
)
def test_a_sequence_waits_for_many_tokens_or_for_half_of_its_own(
    matched: int, awaited: int, own: int, waits: bool
) -> None:
    shared = list(range(matched + awaited))
    running = sequence([*shared, *[7000] * 50], seq_id=1)
    running.num_computed = matched
    waiting = sequence([*shared, *[8000] * own], seq_id=2)
    found = RunningPrompts([running]).worth_waiting_for(waiting, waiting.length - 1, matched=matched)
    assert found == ((running, matched + awaited) if waits else None)
