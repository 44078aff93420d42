"""Running programs move to an engine with less to do where that pays; nothing swings; texts are equal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from phloem.benchmarks.rebalance_sim import MOST, most_moves, num_back, uneven
from phloem.cluster.limits import FleetLimits
from phloem.cluster.loads import Booking, Loads, Rates
from phloem.cluster.rebalance import SETTLE_S, Rebalancing, Room, Shift, Work
from phloem.cluster.simulate import EngineFault, FleetRule, FleetRun, FleetShape, FleetSimulation
from phloem.cluster.step_clock import StepClock
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InvalidParams
from phloem.protocol.journal import Journal
from phloem.protocol.ops import AnyOp
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.planning import HARDWARE, SHAPES
from phloem.tests.cluster.hosts import Asked, fleet_of
from phloem.tests.cluster.test_client import stream, undisturbed

RATES = Rates(prefill_s_per_token=1e-3, step_s=10e-3, row_s=0.0)
SLOW_ROWS = Rates(prefill_s_per_token=1e-3, step_s=10e-3, row_s=1e-3)

# -- the rule ---------------------------------------------------------------------------------------------------------


def loads_of(rates: Rates = RATES) -> Loads:
    loads = Loads()
    for engine in ("a", "b"):
        loads.add(engine, rates=rates, max_rows=4)
    return loads


def works_of(
    engine: str, num: int, *, left: float = 500.0, first: int = 0, running: int = 4, **fields: Any
) -> list[Work]:
    return [
        Work(f"{engine} {i}", engine, 1.0, left, 100, float(i), is_running=i < running, **fields)
        for i in range(first, first + num)
    ]


def plan(works: list[Work], loads: Loads | None = None, at: Rebalancing | None = None, **options: Any) -> list[Shift]:
    loads = loads or loads_of()
    rooms = {name: Room(float(loads.max_rows[loads.position[name]]), 10_000.0) for name in loads.names}
    options = {"among": loads.names, "rooms": rooms, "copy_s_per_token": 1e-4, "most": 4, "now_s": 100.0} | options
    return (at or Rebalancing()).plan(works, loads, **options)


def moves(shifts: list[Shift]) -> list[tuple[str, str]]:
    return [(shift.program, shift.target) for shift in shifts]


def test_programs_that_wait_move_to_an_engine_with_rows_the_last_one_first() -> None:
    assert moves(plan(works_of("a", 7))) == [("a 6", "b"), ("a 5", "b"), ("a 4", "b")]


def test_a_running_program_moves_where_both_engines_then_take_shorter_steps() -> None:
    works = works_of("a", 4, left=2000.0)
    assert plan(works) == [], "a step takes as long with any number of rows"
    found, *_ = plan(works, loads_of(SLOW_ROWS))
    assert found.source == "a" and found.target == "b"
    # 1,990 steps: it takes 3 ms less for each, the three others 1 ms
    left = 2000.0 - 100 * 1e-4 / 14e-3
    assert found.gain_s == pytest.approx(left * 3e-3 + 3 * left * 1e-3)
    assert found.cost_s == pytest.approx(2 * 11e-3)


@pytest.mark.parametrize(
    ("works", "options"),
    [
        ([], {}),
        (works_of("a", 1), {}),  # it has its engine for itself
        (works_of("a", 2) + works_of("b", 2), {}),  # both have the same
        (works_of("a", 4, left=50.0), {}),  # they end soon
        (works_of("a", 5, left=50.0), {}),  # a row is free soon
        (works_of("a", 6) + works_of("b", 4), {}),  # the other has no rows
        (works_of("a", 7, may_move=False), {}),
        (works_of("a", 7), {"most": 0}),
        (works_of("a", 7), {"among": ["a"]}),  # the other computes prompts only
        (works_of("a", 7), {"rooms": {"b": Room(4.0, 100.0)}}),  # no slots there
        (works_of("a", 7), {"rooms": {}}),  # it has not told its slots yet
        (works_of("a", 4, left=2000.0), {"copy_s_per_token": 1.0}),  # the copy takes longer than the program
    ],
)
def test_programs_stay_where_a_move_does_not_pay(works: list[Work], options: dict[str, Any]) -> None:
    assert plan(works, loads_of(SLOW_ROWS), **options) == []


def test_shorter_steps_count_for_as_long_as_nobody_comes_to_take_them() -> None:
    """Four rows differ; at 100 new ones a second they differ for 40 ms."""
    loads = loads_of(SLOW_ROWS)
    for i in range(1500):
        booking = loads_of_booking(at_s=100.0 - 15.0 + i / 100)
        loads.book(booking)
        loads.finish(booking, booking.booked_s)
    assert plan(works_of("a", 4, left=2000.0), loads) == []
    assert moves(plan(works_of("a", 6), loads)) == [("a 5", "b"), ("a 4", "b")], "they wait for rows all the same"


def loads_of_booking(at_s: float) -> Booking:
    return Booking("a", 1.0, 0.0, 10.0, at_s, 0.0, 0.01)


def test_what_has_moved_stays_and_engines_do_not_change_sides_at_once() -> None:
    rule = Rebalancing()
    (shift,) = plan(works_of("a", 5), at=rule)
    assert shift.program == "a 4"
    there = [replace(work, program="a 4") for work in works_of("b", 1)]
    assert plan(works_of("b", 7) + there, at=rule, now_s=101.0) == [], "b has taken one, so it gives none"
    assert plan(there + works_of("b", 4), at=rule, now_s=101.0) == []
    late_s = 100.0 + SETTLE_S
    assert moves(plan(works_of("b", 7), at=rule, now_s=late_s)) == [("b 6", "a"), ("b 5", "a"), ("b 4", "a")]


def test_an_engine_whose_slots_are_short_runs_fewer_rows_than_it_could() -> None:
    works = works_of("a", 4, running=2)
    assert plan(works) == []
    rooms = {"a": Room(2.0, 0.0), "b": Room(4.0, 10_000.0)}
    assert moves(plan(works, rooms=rooms)) == [("a 3", "b"), ("a 2", "b")]


# -- in the simulator -------------------------------------------------------------------------------------------------


def run(most: int) -> FleetRun:
    """One of four engines is dead for half a minute."""
    clock = StepClock.planned(replace(SHAPES["llama-3.1-8b"], weight_bits=16), HARDWARE["l40s"])
    shape, faults = FleetShape(4, 60_000, max_running=8), [EngineFault(0, 5.0, 30.0, "dies")]
    rule = FleetRule(seed=1, copy_s_per_token=25e-6, max_rebalanced=most)
    simulation = FleetSimulation(uneven(400, 6.5, random.Random(1)), rule, shape, clock, faults=faults)
    found = simulation.run()
    for engine in simulation.engines:
        engine.cache.check()
        assert engine.cache.num_leased == engine.cache.num_locked == 0 and not engine.live
    return found


def test_programs_wait_less_where_an_engine_returns_and_none_swings() -> None:
    stays, moves = run(0), run(MOST)
    assert not stays.shifts and moves.shifts
    assert sum(call.first_s - call.arrival_s for call in moves.calls) < 0.95 * sum(
        call.first_s - call.arrival_s for call in stays.calls
    )
    assert most_moves(moves) <= 2 and num_back(moves) == 0


# -- two engines ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(
        model=str(tiny_model_path), precision="float32", num_slots=16_384, num_threads=1, max_running=2
    )
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


def asked_for() -> list[list[AnyOp]]:
    return [stream(f"stream {i} that is long enough " * 6, max_tokens=400) for i in range(5)]


def test_programs_move_to_an_engine_that_has_come_and_their_texts_are_equal(
    engines: list[EngineCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phloem.cluster.client.TICK_S", 0.02)
    monkeypatch.setattr("phloem.cluster.client.LOOK_S", 0.05)
    monkeypatch.setattr("phloem.cluster.rebalance.LEAST_GAIN_S", 0.0)  # these texts take a moment
    programs = asked_for()
    want = undisturbed(engines[0], tmp_path, programs)
    for engine in engines:
        engine.cache.flush()
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        asked = [Asked(fleet.client, ops) for ops in programs]
        asked[0].events += asked[0].heard.until(m.Delta)
        fleet.add()
        assert [one.result() for one in asked] == want
        report = fleet.client.query("fleet")
        assert 1 <= report["rebalanced"] <= report["migrations"] == report["replays"] <= 4
        assert {row["name"]: row["programs"] for row in report["replicas"]} == {"e1": 0, "e2": 0}
    for engine in engines:
        engine.check()


def test_no_running_program_moves_where_that_is_turned_off(
    engines: list[EngineCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phloem.cluster.client.TICK_S", 0.02)
    monkeypatch.setattr("phloem.cluster.client.LOOK_S", 0.05)
    monkeypatch.setattr("phloem.cluster.rebalance.LEAST_GAIN_S", 0.0)
    with fleet_of(engines, tmp_path, limits=FleetLimits(max_rebalanced=0)) as fleet:
        fleet.add()
        asked = [Asked(fleet.client, ops) for ops in asked_for()[:3]]
        asked[0].events += asked[0].heard.until(m.Delta)
        fleet.add()
        for one in asked:
            one.result()
        assert fleet.client.query("fleet")["rebalanced"] == fleet.client.query("fleet")["migrations"] == 0


def test_a_wrong_bound_is_refused_by_name() -> None:
    with pytest.raises(InvalidParams, match="max_rebalanced=9: it must be 0 to 8; 0 moves no running program"):
        FleetLimits(max_rebalanced=9)


# -- what a journal says of a move ------------------------------------------------------------------------------------


def journal_of(*gens: o.Gen, trace: bool = False) -> Journal:
    journal = Journal("p", max_bytes=1 << 20)
    ops: list[AnyOp] = [o.Text(op=0, seq=0, text="x" * 400), *gens]
    journal.sent(m.Submit("p", ops, settings=m.ProgramSettings(trace=trace)))
    journal.came(m.Accepted("p"))
    return journal


def gen(**fields: Any) -> o.Gen:
    params = {name: fields.pop(name) for name in ("return_logprob", "logprob_start_len") if name in fields}
    return o.Gen(op=1, seq=0, params=SamplingParams(max_tokens=9, **params), **fields)


def test_a_journal_knows_how_far_its_streams_are_and_how_long_its_text_is() -> None:
    journal = journal_of(gen(stream=True, n=2))
    assert (journal.num_streamed, journal.num_prompt_tokens) == (0, 100)
    journal.came(m.Delta("p", 1, "ab", (1, 2), index=0))
    journal.came(m.Delta("p", 1, "abc", (1, 2, 3), index=1))
    assert journal.num_streamed == 3


@pytest.mark.parametrize(
    ("op", "trace", "goes_on"),
    [
        (gen(stream=True), False, True),
        (gen(), False, True),
        (gen(stream=True, return_logprob=True), False, True),
        (gen(return_logprob=True), False, False),
        (gen(stream=True, return_logprob=True, logprob_start_len=0), False, False),
        (gen(stream=True), True, False),
    ],
)
def test_a_journal_knows_whether_a_replay_draws_a_text_again(op: o.Gen, trace: bool, goes_on: bool) -> None:
    assert journal_of(op, trace=trace).goes_on is goes_on
