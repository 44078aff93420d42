"""An engine's rates, learned from its metrics."""

import random

import pytest
from phloem.cluster.index import Match, Matches
from phloem.cluster.loads import (
    DEFAULT_RATES,
    MOST_TOKENS_A_STEP,
    UNKNOWN_OUTPUT,
    Booking,
    Loads,
    OutputLengths,
    Rates,
    RatesFit,
)
from phloem.cluster.placement import Demand, Placement


class Metrics:
    """The counts of an engine whose steps take the time of ``rates``, within 5%."""

    def __init__(self, rates: Rates, seed: int) -> None:
        self.rates, self.rng = rates, random.Random(seed)
        self.counts = {"steps": 0, "forward_rows": 0, "forward_tokens": 0, "step_seconds": 0.0}

    def run(self, steps: int, *, prompts: float = 0.3) -> dict[str, float]:
        busy = self.rng.randrange(1, 16)
        for _ in range(steps):
            new = self.rng.randrange(50, 400) if self.rng.random() < prompts else 0
            rates, rows = self.rates, busy
            seconds = rates.step_s + rates.row_s * rows + rates.prefill_s_per_token * new
            self.counts["steps"] += 1
            self.counts["forward_rows"] += rows
            self.counts["forward_tokens"] += rows + new
            self.counts["step_seconds"] += seconds * self.rng.uniform(0.95, 1.05)
        return dict(self.counts)


@pytest.mark.parametrize("true", [Rates(2e-4, 0.02, 1e-3), Rates(1e-3, 0.05, 5e-3), Rates(20e-6, 8e-3, 5e-5)])
def test_rates_are_found_from_reports_with_different_loads(true):
    engine, fit = Metrics(true, seed=1), RatesFit()
    for i in range(60):
        fit.note("a", engine.run(200, prompts=(i % 4) / 4))
    found = fit.rates
    assert found.prefill_s_per_token == pytest.approx(true.prefill_s_per_token, rel=0.2)
    # Of a step with eight rows; its two parts are told apart only by how loads differ.
    step_s = found.step_s + 8 * found.row_s
    assert step_s == pytest.approx(true.step_s + 8 * true.row_s, rel=0.2)


def test_a_cpu_a_hundred_times_slower_than_the_first_rates_is_known_after_a_few_prompts():
    engine, fit = Metrics(true := Rates(3e-3, 0.02, 5e-3), seed=5), RatesFit()
    for i in range(4):
        fit.note("a", engine.run(20, prompts=(i % 2) / 4))
    assert fit.rates.prefill_s_per_token == pytest.approx(true.prefill_s_per_token, rel=0.3)


def test_a_change_of_speed_is_learned_and_a_restart_begins_anew():
    fit = RatesFit()
    for rates in (Rates(2e-4, 0.02, 1e-3), Rates(4e-4, 0.04, 2e-3)):
        engine = Metrics(rates, seed=2)  # the counts begin at 0 again
        for i in range(60):
            fit.note("a", engine.run(200, prompts=(i % 4) / 4))
        assert fit.rates.prefill_s_per_token == pytest.approx(rates.prefill_s_per_token, rel=0.2)


def test_no_noise_makes_prompts_cost_nothing():
    """Steps without a prompt that the machine held up say that prompts make steps shorter."""
    fit = RatesFit()
    fit.note("a", {"steps": 20, "forward_rows": 20, "forward_tokens": 4020, "step_seconds": 0.2})
    fit.note("a", {"steps": 40, "forward_rows": 40, "forward_tokens": 4040, "step_seconds": 1.2})
    found = fit.rates
    assert found.prefill_s_per_token == pytest.approx(found.step_s / MOST_TOKENS_A_STEP)
    where = Placement(rng=random.Random(0))
    for name in ("a", "b"):
        where.loads.add(name, rates=found, max_rows=16)
    matches = Matches.of({"b": Match(832, 832)})
    assert {where.choose(Demand(900, 2), matches, 0.0).engine for _ in range(50)} == {"b"}


def test_an_idle_engine_keeps_the_rates_that_were_given():
    fit = RatesFit()
    zero = {"steps": 0, "forward_rows": 0, "forward_tokens": 0, "step_seconds": 0.0}
    assert fit.note("a", zero) == fit.note("a", zero) == DEFAULT_RATES


def test_engines_of_one_kind_share_their_rates():
    true = Rates(2e-4, 0.02, 1e-3)
    both, alone = RatesFit(), RatesFit()
    first, second = Metrics(true, seed=3), Metrics(true, seed=4)
    for i in range(30):
        report = first.run(200, prompts=(i % 4) / 4)
        alone.note("a", report)
        both.note("a", report)
        both.note("b", second.run(200, prompts=(i % 3) / 4))
    of_both, of_one = (fit.rates.step_s + 8 * fit.rates.row_s for fit in (both, alone))
    assert of_both == pytest.approx(of_one, rel=0.1)


def test_expectations_that_are_wrong_everywhere_say_nothing_against_one_engine():
    loads = Loads()
    for name in ("a", "b", "c"):
        loads.add(name, max_rows=16)
    for i in range(20):  # only "a" has had work, and all of it took ten times as long as the first rates say
        booking = Booking("a", 1, 0.1, 10.0, float(i), 0.0, 0.01)
        loads.book(booking)
        loads.finish(booking, i + 2.0, made=10)
    assert loads.slowness(22.0) == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)
    for i in range(20):  # "b" took half of that
        booking = Booking("b", 1, 0.1, 10.0, float(i), 0.0, 0.01)
        loads.book(booking)
        loads.finish(booking, i + 1.0, made=10)
    a, b, c = loads.slowness(22.0)
    assert b < c < a


def test_outputs_are_predicted_by_name_within_their_bound():
    lengths = OutputLengths()
    assert lengths.predict("title", -1) == UNKNOWN_OUTPUT and lengths.predict("title", 5) == 5
    for i in range(30):
        lengths.note("title", 8 + i % 5)
        lengths.note("essay", 400 + i)
    assert lengths.predict("title", -1) == pytest.approx(10, rel=0.1)
    assert lengths.predict("essay", -1) == pytest.approx(415, rel=0.1)
    assert lengths.predict("essay", 100) == 100
    assert 10 < lengths.predict("another", -1) < 415  # as all others
