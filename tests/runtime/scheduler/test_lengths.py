"""The tokens that a sequence is expected to generate: within its bounds, learned from others of its kind."""

import random
import statistics

import pytest
from phloem.runtime.scheduler import Sequence, TokenBuffer
from phloem.runtime.scheduler.lengths import MAX_KINDS, MAX_OUTPUTS, MIN_OUTPUTS, UNKNOWN, Lengths, Outputs


def sequence(*, made: int = 0, kind: str = "", max_new: int = -1, min_new: int = 0, prompt: int = 3) -> Sequence:
    seq = Sequence(1, TokenBuffer([7] * (prompt + made)), kind=kind)
    seq.prompt_len, seq.max_new, seq.min_new = prompt, max_new, min_new
    seq.num_computed = prompt + made
    return seq


def test_before_anything_is_learned_the_bounds_are_the_estimate():
    lengths = Lengths()
    assert lengths.left(sequence()) == UNKNOWN
    assert lengths.left(sequence(max_new=50, made=20)) == 30
    assert lengths.left(sequence(max_new=50, min_new=50, made=20)) == 30
    assert lengths.left(sequence(max_new=0)) == 0


def test_a_kind_is_learned_by_its_name_and_by_the_size_of_its_bound():
    lengths = Lengths()
    for _ in range(MIN_OUTPUTS):
        lengths.note(sequence(kind="title", made=5, max_new=1000))
        lengths.note(sequence(kind="essay", made=400, max_new=1000))
        lengths.note(sequence(kind="essay", made=10, max_new=16))
    assert lengths.left(sequence(kind="title", max_new=1000)) == pytest.approx(5)
    assert lengths.left(sequence(kind="essay", max_new=1000)) == pytest.approx(400)
    assert lengths.left(sequence(kind="essay", max_new=16)) == pytest.approx(10)
    assert lengths.left(sequence(kind="essay", max_new=1000, min_new=700)) == 700, "never less than min_new"
    assert lengths.left(sequence(kind="poem", max_new=1000)) == pytest.approx((5 + 400 + 10) / 3), "from all kinds"


@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_after_some_tokens_is_the_mean_of_longer_outputs(seed):
    rng, outputs = random.Random(seed), Outputs()
    made = [1 + int(rng.expovariate(1 / 200)) for _ in range(MAX_OUTPUTS - 1)]
    for length in made:
        outputs.note(length)
    for after in (0, 1, 30, 150, 400):
        longer = [length - after for length in made if length > after]
        assert outputs.left(after) == pytest.approx(statistics.mean(longer), rel=0.1)
    assert outputs.left(50_000) == 50_000, "longer than every known output: as much again"


def test_a_change_of_lengths_is_learned():
    outputs = Outputs()
    for _ in range(5 * MAX_OUTPUTS):
        outputs.note(1000)
    for _ in range(3 * MAX_OUTPUTS):
        outputs.note(10)
    assert outputs.left(0) < 150 and outputs.num <= MAX_OUTPUTS


def test_any_number_of_names_leaves_a_bounded_number_of_kinds():
    lengths = Lengths()
    for n in range(3 * MAX_KINDS):
        lengths.note(sequence(kind=f"kind {n}", made=9))
    assert len(lengths.by_kind) == MAX_KINDS
    assert lengths.left(sequence(kind="kind 700")) == pytest.approx(9)
