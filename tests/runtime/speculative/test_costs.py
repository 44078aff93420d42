"""The estimated cost of a step, and the number of draft tokens that is worth running at that cost."""

import random

import numpy as np
import pytest
from phloem.runtime.speculative import Speculation, StepCosts
from phloem.runtime.speculative.speculation import RunningStep


def true_cost(n: int) -> float:
    return 0.005 * (1 + 0.1 * (-(-n // 4) * 4 - 1))


def learnt(cost, sizes, *, steps: int = 600, noise: float = 0.0, seed: int = 0) -> StepCosts:
    rng = random.Random(seed)
    costs = StepCosts(slope=0.06)
    for _ in range(steps):
        n = rng.choice(sizes)
        slow = rng.choice((1.0, 1.0, 1.3, 3.0)) if noise and rng.random() < noise else 1.0
        costs.observe(n, cost(n) * slow)
    return costs


def test_the_estimate_equals_the_measurements_and_grows_between_them():
    costs = learnt(true_cost, [1, 2, 4, 8, 16])
    for n in (1, 2, 4, 8, 16):
        assert costs.estimate[n] == pytest.approx(true_cost(n), rel=0.02)
    assert (np.diff(costs.estimate) >= 0).all()
    assert true_cost(8) < costs.estimate[12] < true_cost(16)


def test_occasional_slow_steps_barely_change_the_estimate():
    quiet, noisy = (learnt(true_cost, [1, 4, 8], noise=noise) for noise in (0.0, 0.3))
    for n in (4, 8):
        ratio = noisy.estimate[n] / noisy.estimate[1] / (quiet.estimate[n] / quiet.estimate[1])
        assert 0.85 < ratio < 1.15


def test_the_pace_of_frequent_sizes_applies_to_rare_ones():
    costs = learnt(true_cost, [1, 8], steps=60)
    rng = random.Random(1)
    for _ in range(5000):
        costs.observe(1, 2.0 * true_cost(1) * rng.choice((1.0, 1.0, 1.0, 1.4)))
    assert 0.7 < costs.estimate[8] / costs.estimate[1] / (true_cost(8) / true_cost(1)) < 1.4
    assert costs.estimate[1] == pytest.approx(2.0 * true_cost(1), rel=0.25)


def lengths(cost, chances: list[list[float]], num_tokens: int | None = None) -> list[int]:
    costs = StepCosts(slope=0.0)
    costs.estimate = np.array([cost(n) for n in range(513)])
    speculation = Speculation([], max_draft=31, costs=costs)
    gains = [np.cumprod(part) for part in chances]
    return speculation.lengths(gains, RunningStep(num_tokens or len(chances), len(chances)))


def test_likely_drafts_are_run_and_unlikely_ones_are_not():
    assert lengths(true_cost, [[0.95] * 31])[0] >= 15
    assert lengths(lambda n: 0.005 + 0.0005 * n, [[0.02] * 31]) == [0]
    assert lengths(lambda n: 0.005 + 0.0005 * n, [[0.95] * 31, [0.02] * 31])[1] == 0


def test_no_draft_is_run_when_each_token_costs_what_it_can_gain():
    def steep(n: int) -> float:
        return 0.001 + 0.02 * n

    assert lengths(steep, [[0.9] * 8] * 16) == [0] * 16
    assert sum(lengths(lambda n: 0.02 + 0.0001 * n, [[0.9] * 8] * 16)) > 64


def test_a_prompt_s_chunk_in_the_step_does_not_change_the_drafts():
    def linear(n: int) -> float:
        return 0.005 + 0.0005 * n

    assert lengths(linear, [[0.8] * 12]) == lengths(linear, [[0.8] * 12], num_tokens=257)
