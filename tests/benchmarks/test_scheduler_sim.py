"""The simulator on a fraction of each trace: bounds lie in order, and what knows of programs finds more than LRU."""

import random

import pytest
from phloem.benchmarks import scheduler_sim
from phloem.benchmarks.scheduler_sim import REFERENCE, SETTINGS, check_bars, compare
from phloem.benchmarks.traces import TRACES

PLAIN = SETTINGS[0].name


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    """Each trace at a thirtieth, in a pool that is too small for it."""
    settings = (SETTINGS[0], REFERENCE)
    return {
        name: compare(name, slots, scale=1 / 30, load=1.0, settings=settings)
        for name, slots in (("chat", 150_000), ("few_shot", 150_000), ("agents", 240_000), ("rag", 240_000))
    }


def test_nothing_finds_more_than_a_cache_that_never_evicts(results):
    for result in results.values():
        rates = [figures["hit_rate"] for figures in result["settings"].values()]
        assert max(rates) <= result["infinite"] and 0 < result["optimum"] <= result["infinite"]


def test_what_knows_of_programs_finds_more_than_lru(results):
    for name, result in results.items():
        assert result["settings"][REFERENCE.name]["hit_rate"] > result["settings"][PLAIN]["hit_rate"], name


def test_every_call_is_served_once_and_a_run_repeats():
    make, _, rate, (_, slots) = TRACES["tree_of_thought"]
    rates = []
    for _ in range(2):
        trace = make(3, rate, random.Random(7))
        simulation = scheduler_sim.Simulation(trace, REFERENCE, slots)
        simulation.run()
        calls = [call for program in trace.programs for call in program.calls]
        assert len(simulation.arrived) == len(calls) == 120 and all(call.end_s > call.first_s for call in calls)
        rates.append(scheduler_sim.hit_rate(calls))
    assert rates[0] == rates[1] > 0.5


def test_what_does_not_hold_is_said():
    good = {"hit_rate": 0.9, "of_optimum": 0.97, "ttft_max_s": 1.0}
    plain = {"hit_rate": 0.8, "of_optimum": 0.86, "ttft_max_s": 1.0}
    bad = {"hit_rate": 0.8, "of_optimum": 0.9, "ttft_max_s": 11.0}
    made = {
        "a": {"roomy": {"settings": {REFERENCE.name: good, PLAIN: plain}}},
        "b": {"tight": {"settings": {REFERENCE.name: bad, PLAIN: plain}}},
    }
    faults = check_bars(made)
    assert len(faults) == 3 and all(fault.startswith("b, tight: ") for fault in faults)
