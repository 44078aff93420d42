"""The simulated fleet: skipped steps against simulated ones, predicted times, faults, and the gain of placement."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from phloem.benchmarks.autoscale_sim import Fixed, OurRule, trace_of
from phloem.benchmarks.fleet_sim import LeastLoaded, RoundRobin
from phloem.benchmarks.roles_sim import prompts
from phloem.benchmarks.traces import agents, chat, tree_of_thought
from phloem.cluster.autoscale import ScalingSettings
from phloem.cluster.simulate import (
    EngineFault,
    FleetRule,
    FleetRun,
    FleetShape,
    FleetSimulation,
    pooled_hit_rate,
)
from phloem.cluster.step_clock import NO_TAPES, StepClock, StepTimes, TapeCosts, Tapes
from phloem.cluster.traces import Paths, TimedCall, TimedProgram, Trace
from phloem.radix_cache import FIRST_CONTENT_ID
from phloem.runtime.planning import HARDWARE, SHAPES, step_time
from phloem.runtime.scheduler import PlanRow, StepPlan

SHAPE = replace(SHAPES["llama-3.1-8b"], weight_bits=16)
SLOTS = 40_000


@pytest.fixture(scope="module")
def clock() -> StepClock:
    return StepClock.planned(SHAPE, HARDWARE["l40s"])


def simulate(trace: Trace, clock: StepClock, rule=None, *, engines: int = 2, slots: int = SLOTS, **options):
    faults = options.pop("faults", ())
    shape = FleetShape(engines, slots, **options)
    simulation = FleetSimulation(trace, rule or FleetRule(), shape, clock, faults=faults)
    return simulation, simulation.run()


def ends(run: FleetRun) -> list[tuple[float, float, float, int]]:
    return [(call.arrival_s, call.first_s, call.end_s, call.computed) for call in run.calls]


def hit_rate(calls: list[TimedCall]) -> float:
    return 1 - sum(call.computed for call in calls) / sum(call.prompt_len for call in calls)


@pytest.mark.parametrize(("make", "n", "rate"), [(chat, 10, 2.4), (agents, 8, 1.6), (tree_of_thought, 3, 0.5)])
def test_skipped_steps_end_as_steps_that_are_run(clock, make, n, rate):
    runs = []
    for skips in (True, False):
        trace = make(n, rate, random.Random(1))
        simulation, run = simulate(trace, clock, skips=skips)
        runs.append((run.num_steps, ends(run), run.num_events))
        for engine in simulation.engines:
            engine.cache.check()
            assert engine.cache.num_leased == engine.cache.num_locked == 0 and not engine.live
    (steps, fast, few), (exact_steps, exact, many) = runs
    assert steps == exact_steps and few < many
    assert fast == [pytest.approx(row, rel=1e-9) for row in exact]


def test_skipped_steps_wait_until_their_shape_has_a_tape(clock):
    runs = []
    for skips in (True, False):
        costs = TapeCosts(untaped_s=0.01, recording_s=0.03)
        _, run = simulate(chat(10, 2.4, random.Random(1)), clock, skips=skips, tape_costs=costs)
        runs.append((run.num_steps, ends(run)))
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == [pytest.approx(row, rel=1e-9) for row in runs[1][1]]
    _, free = simulate(chat(10, 2.4, random.Random(1)), clock)
    assert sum(run.busy_s) > sum(free.busy_s) + 0.1


def test_a_shape_is_slow_at_its_first_step_which_is_recorded():
    tapes = Tapes(TapeCosts(untaped_s=1.0, recording_s=4.0))
    three = StepPlan(1, tuple(row(i, 30, 1) for i in range(3)))
    assert tapes.has_decode(1) and not tapes.has_decode(3)  # one row was warmed up
    assert [tapes.extra_s(three) for _ in range(3)] == [4.0, 0.0, 0.0]
    assert tapes.has_decode(3)
    long = StepPlan(1, (row(0, 0, 600),))
    assert [tapes.extra_s(long) for _ in range(7)] == [1.0] * 7  # more tokens than a tape has
    assert [Tapes(NO_TAPES).extra_s(three), Tapes(NO_TAPES).has_decode(40)] == [0.0, True]


def test_a_measured_clock_goes_through_the_measured_steps():
    times = StepTimes(((1.0, 0.01), (4.0, 0.016)), ((1.0, 0.01), (100.0, 0.05)), 1e-6, 2e-6)
    measured = StepClock.measured(times)
    assert measured.decodes_s(4, 0, 1) == 0.016 and measured.decodes_s(2, 1000, 1) == pytest.approx(0.012 + 1e-3)
    prompt = StepPlan(1, (row(0, 500, 98), row(1, 300, 1), row(2, 300, 1)))
    assert measured.plan_s(prompt) == pytest.approx(0.05 + 600 * 1e-6 + 98 * (500 + 49) * 2e-6)


def test_the_clock_predicts_what_planning_predicts(clock):
    rng = random.Random(0)

    def planned(rows: int, context: float, prefill: int = 0, seen: float = 0.0) -> float:
        return step_time(
            SHAPE, HARDWARE["l40s"], rows=rows, context=context, prefill=prefill, prefill_context=seen
        ).total

    for _ in range(20):
        rows, context, n = rng.randrange(1, 64), rng.randrange(5000), rng.randrange(1, 30)
        each = [planned(rows, context + i) for i in range(n)]
        assert clock.decodes_s(rows, rows * context, n) == pytest.approx(sum(each))
        elapsed_s = rng.uniform(0, sum(each))
        k = clock.steps_until(rows, rows * context, elapsed_s)
        assert clock.decodes_s(rows, rows * context, k) >= elapsed_s
        assert k == 0 or clock.decodes_s(rows, rows * context, k - 1) < elapsed_s
        chunk = rng.randrange(2, 1000)
        plan = StepPlan(1, (row(0, context, 1), row(1, context, 1), row(2, 512, chunk)))
        assert clock.plan_s(plan) == pytest.approx(planned(2, context, chunk, 512 + chunk // 2))
    rates = clock.rates()
    assert 8 * rates.row_s + rates.step_s == pytest.approx(planned(8, 1000), rel=0.05)


def row(row_id: int, start: int, n: int) -> PlanRow:
    return PlanRow(row_id, row_id, start, range(n), range(start + n), 0, 1)


def test_every_call_ends_once_and_a_run_repeats(clock):
    runs = []
    for _ in range(2):
        trace = chat(20, 2.0, random.Random(3))
        _, run = simulate(trace, clock)
        calls = [call for program in trace.programs for call in program.calls]
        assert Counter(map(id, run.calls)) == Counter(map(id, calls))
        assert all(call.arrival_s < call.first_s <= call.end_s and call.computed > 0 for call in calls)
        runs.append(ends(run))
    assert runs[0] == runs[1]


def test_a_trace_may_have_more_tokens_than_there_are_ids_of_a_vocabulary(clock):
    def turns(skipped: int) -> Trace:
        paths, programs = Paths(), []
        paths.add((), "skipped", skipped)
        for i in range(4):
            program = TimedProgram(f"{i}", 0.1 * i)
            first = program.call(paths, 0, paths.add(paths.add((), "system", 200), f"{i}", 100), 8)
            program.call(paths, 0, paths.add(first.output, f"{i} again", 100), 8, after=(first,))
            programs.append(program)
        return Trace("turns", paths, programs)

    few, many = (ends(simulate(turns(skipped), clock)[1]) for skipped in (1, FIRST_CONTENT_ID))
    assert few == many and any(computed < 200 for *_, computed in few)


def test_programs_that_are_placed_by_prefix_find_more_than_requests_in_turn(clock):
    rates = {}
    for name, rule in (("ours", FleetRule()), ("round robin", RoundRobin()), ("least loaded", LeastLoaded())):
        _, run = simulate(agents(24, 3.0, random.Random(1)), clock, rule, engines=4)
        rates[name] = hit_rate(run.calls)
    pooled = pooled_hit_rate(run.calls, 4 * SLOTS)
    assert pooled >= rates["ours"] > 0.95 * pooled
    assert rates["ours"] > 1.2 * max(rates["round robin"], rates["least loaded"])


@pytest.mark.parametrize("rule", [FleetRule, RoundRobin])
def test_when_engines_die_every_call_ends_elsewhere_or_later(clock, rule):
    trace = agents(30, 2.0, random.Random(2))
    faults = [EngineFault(0, 3.0, 10.0, "dies"), EngineFault(1, 8.0, 4.0, "dies"), EngineFault(2, 8.05, 60.0, "dies")]
    simulation, run = simulate(trace, clock, rule(), engines=3, faults=faults)
    calls = [call for program in trace.programs for call in program.calls]
    assert len(run.calls) == len(calls) and all(call.end_s > call.arrival_s for call in calls)
    assert run.num_replayed > 5
    for engine in simulation.engines:
        engine.cache.check()
        assert engine.cache.num_leased == engine.cache.num_locked == 0 and not engine.live
    # All three were dead from 8.05 to 12 s: nothing ended then.
    assert not [call for call in calls if 8.06 < call.end_s < 12.0]


@pytest.mark.parametrize("dies", [None, 0, 1])
def test_a_call_goes_on_where_its_kv_is_copied_to(clock, dies):
    """A prompt is computed once, by the prefill engine, unless an engine dies."""
    rule = FleetRule(roles={"engine 0": "prefill", "engine 1": "decode"}, copy_s_per_token=1e-7)
    faults = [] if dies is None else [EngineFault(dies, 3.0, 5.0, "dies")]
    simulation, run = simulate(prompts(40, 6.0, 2000, 1), clock, rule, slots=200_000, faults=faults)
    assert len(run.calls) == 40 and all(call.end_s > call.first_s > 0 for call in run.calls)
    assert run.reasons["prefill"] >= 10
    if dies is None:
        assert all(call.computed <= call.prompt_len + 64 for call in run.calls)
    for engine in simulation.engines:
        engine.cache.check()
        assert engine.cache.num_leased == 0 and not engine.live


def test_a_slow_engine_is_given_less(clock):
    faults = [EngineFault(0, 5.0, 1000.0, "slow", slowness=5.0)]
    shares, p99 = {}, {}
    for name, rule in (("ours", FleetRule()), ("round robin", RoundRobin())):
        _, run = simulate(chat(40, 4.0, random.Random(2)), clock, rule, engines=4, faults=faults)
        latency = sorted(call.end_s - call.arrival_s for call in run.calls)
        p99[name] = latency[int(0.99 * len(latency))]
        shares[name] = run.busy_s[0] / sum(run.busy_s)
    assert shares["ours"] < shares["round robin"] and p99["ours"] < 0.8 * p99["round robin"]


def test_with_events_lost_the_index_recovers_by_snapshots(clock):
    faults = [EngineFault(i, 0.0, 30.0, "loses_events", loss=0.3) for i in range(2)]
    rule = FleetRule()
    simulation, run = simulate(chat(24, 4.0, random.Random(2)), clock, rule, faults=faults, slots=6_000)
    pooled = pooled_hit_rate(run.calls, 12_000)
    assert hit_rate(run.calls) > 0.8 * pooled
    names = {engine.name: set(engine.cache.blocks().device) for engine in simulation.engines}
    known = rule.index.claims()
    assert {engine: tiers["device"] for engine, tiers in known.items()} == names


def test_a_fault_of_an_unknown_kind_and_a_call_that_fits_nowhere_are_refused(clock):
    with pytest.raises(ValueError, match="kind='sleeps' of a fault is not one of: dies, slow, loses_events"):
        EngineFault(0, 1.0, 1.0, "sleeps")
    with pytest.raises(ValueError, match="engine 0: the sequence needs"):
        simulate(chat(2, 1.0, random.Random(1)), clock, engines=1, slots=100)


def test_engines_come_and_go_with_a_day_and_every_call_ends(clock):
    settings = ScalingSettings(start_s=10.0, max_replicas=8, window_s=36.0, calm_s=60.0)
    trace = trace_of("day", scale=0.1)
    simulation = FleetSimulation(
        trace, FleetRule(), FleetShape(8, SLOTS, max_running=8), clock, scaling=OurRule(clock, settings)
    )
    run = simulation.run()
    assert len(run.calls) == len(trace.programs) and all(call.end_s > call.first_s > 0 for call in run.calls)
    numbers = [wanted for _, wanted in run.wanted]
    middle = len(numbers) // 2
    assert max(numbers[middle - 20 : middle + 20]) >= 5 and numbers[5] <= 2 and numbers[-1] <= 3
    assert run.num_replayed > 0  # a drain moved calls
    assert sum(call.first_s - call.arrival_s > 10.0 for call in run.calls) < 0.01 * len(run.calls)
    for engine in simulation.engines:
        engine.cache.check()
        assert engine.cache.num_leased == engine.cache.num_locked == 0 and not engine.live


def test_a_fixed_number_of_engines_starts_late_and_is_paid_for(clock):
    trace = trace_of("step", scale=0.02)
    simulation = FleetSimulation(trace, FleetRule(), FleetShape(8, SLOTS, max_running=8), clock, scaling=Fixed(3))
    run = simulation.run()
    assert [engine.is_alive for engine in simulation.engines] == [True] * 3 + [False] * 5
    looks = len(run.wanted)
    assert run.paid_s == pytest.approx(5.0 * (3 * looks - 2))  # the first look sees one engine
