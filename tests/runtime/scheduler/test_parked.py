"""Which parked sequence gives up its slots first."""

import random

import pytest
from phloem.runtime.scheduler import Sequence, TokenBuffer
from phloem.runtime.scheduler.parked import BOUNDS_S, MAX_KINDS, MAX_PAUSES, MIN_PAUSES, Parked, Pauses


def sequence(seq_id: int, kind: str = "", *, has_slots: bool = True) -> Sequence:
    seq = Sequence(seq_id, TokenBuffer([1, 2, 3]), kind=kind)
    seq.lease = object() if has_slots else None  # no code here reads it
    return seq


def learned(parked: Parked, pauses: list[float], kind: str = "", *, came_back: bool = True) -> None:
    for i, pause_s in enumerate(pauses):
        seq = sequence(10_000 + i, kind)
        parked.add(seq, 0.0)
        parked.take(seq, pause_s, came_back=came_back)


def test_before_pauses_are_learned_the_longest_parked_with_slots_goes_first():
    parked = Parked()
    for i in range(4):
        parked.add(sequence(i, has_slots=i != 0), 10.0 * i)
    assert parked.first_to_go(100.0).seq_id == 1
    parked.note_released(parked.first_to_go(100.0))
    assert parked.first_to_go(100.0).seq_id == 2 and len(parked) == 4


def test_if_pauses_are_bounded_the_last_parked_goes_first():
    rng, parked = random.Random(0), Parked()
    learned(parked, [rng.uniform(0.2, 8.0) for _ in range(400)])
    for i in range(5):
        parked.add(sequence(i), 10.0 + i)
    assert parked.first_to_go(15.0).seq_id == 4


def test_if_some_pauses_never_end_the_longest_parked_goes_first():
    rng, parked = random.Random(0), Parked()
    learned(parked, [rng.paretovariate(0.7) for _ in range(800)])
    for i in range(5):
        parked.add(sequence(i), 10.0 + 5 * i)
    assert parked.first_to_go(33.0).seq_id == 0


def test_a_kind_that_returns_soon_is_kept_before_one_that_only_ends():
    parked = Parked()
    learned(parked, [2.0] * 50, "agent")
    learned(parked, [2.0] * 50, "forgetful", came_back=False)
    parked.add(sequence(1, "forgetful"), 0.5)
    parked.add(sequence(2, "agent"), 0.1)
    assert parked.first_to_go(1.0).seq_id == 1
    parked.take(sequence(1, "forgetful"), 1.0, came_back=False)
    assert parked.first_to_go(1.0).seq_id == 2


def test_a_kind_with_few_pauses_is_estimated_from_all():
    rng, parked = random.Random(0), Parked()
    learned(parked, [rng.uniform(0.2, 8.0) for _ in range(400)], "agent")
    learned(parked, [40.0] * 3, "rare")
    assert MIN_PAUSES > 3
    for i in range(3):
        parked.add(sequence(i, "rare"), 10.0 + i)
    assert parked.first_to_go(13.0).seq_id == 2


@pytest.mark.parametrize("elapsed_s", [0.0, 0.7, 3.0, 7.0])
def test_worth_is_returns_per_second_of_remaining_pause(elapsed_s):
    rng, pauses = random.Random(4), Pauses()
    values = [(rng.uniform(0.2, 8.0), rng.random() < 0.8) for _ in range(MAX_PAUSES)]
    for pause_s, came_back in values:
        pauses.note(pause_s, came_back=came_back)
    left = [(pause_s - elapsed_s, came_back) for pause_s, came_back in values if pause_s > elapsed_s]
    true = sum(came_back for _, came_back in left) / sum(pause_s for pause_s, _ in left)
    assert pauses.worth(elapsed_s) == pytest.approx(true, rel=0.5 if elapsed_s == 7.0 else 0.12)
    assert pauses.worth(BOUNDS_S[-1] + 1) == 0.0


def test_old_pauses_fade():
    pauses = Pauses()
    for seconds in (1.0, 100.0):
        for _ in range(3 * MAX_PAUSES):
            pauses.note(seconds, came_back=True)
    assert pauses.worth(0.0) == pytest.approx(0.01, rel=0.3)


def test_any_number_of_kinds_leaves_a_bounded_number_of_counts():
    parked, seqs = Parked(), [sequence(i, f"kind {i}") for i in range(5 * MAX_KINDS)]
    for seq in seqs:
        parked.add(seq, 0.0)
    for seq in seqs:
        parked.take(seq, 1.0, came_back=True)
    assert parked.first_to_go(2.0) is None
    assert len(parked.pauses_of) <= MAX_KINDS + 1 and len(parked) == 0 and not parked.with_slots
