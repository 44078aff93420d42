"""Placement of programs: by prefix, by load, at home, spread; and each placement counts for the next one."""

import random
from collections import Counter

import pytest
from phloem.cluster.index import Match, Matches
from phloem.cluster.loads import Loads, Rates
from phloem.cluster.placement import MISS_WEIGHT, Choice, Demand, Placement
from phloem.protocol.errors import EngineLost

RATES = Rates(prefill_s_per_token=1e-4, step_s=0.01, row_s=1e-4, host_load_s_per_token=1e-5)


def placement(num_engines: int, *, max_rows: int = 16, seed: int = 0, **options) -> Placement:
    made = Placement(rng=random.Random(seed), **options)
    for i in range(num_engines):
        made.loads.add(f"e{i}", rates=RATES, max_rows=max_rows)
    return made


def fill(where: Placement, engine: str, demand: Demand, times: int) -> None:
    """Book ``demand`` on ``engine``, regardless of its cost there."""
    for _ in range(times):
        where.book(demand, Choice(engine, 0.0, 0, "home"), {}, 0.0)


def match(tokens: int) -> Match:
    return Match(tokens, tokens)


def test_without_an_engine_there_is_an_error_and_with_one_no_choice():
    with pytest.raises(EngineLost, match="no engine of the fleet is ready"):
        Placement().choose(Demand(10, 10), {}, 0.0)
    choice = placement(1).choose(Demand(100, 10), Matches.of({"e0": match(64)}), 0.0)
    assert (choice.engine, choice.reason, choice.cached_tokens) == ("e0", "only", 64)


def test_a_prompt_goes_where_its_prefix_is_and_is_computed_beyond_it():
    choice, booking = placement(8).place(Demand(1000, 10), Matches.of({"e5": match(960), "e2": match(64)}), 0.0)
    assert (choice.engine, choice.reason, choice.cached_tokens) == ("e5", "prefix", 960)
    assert booking.prefill_s == pytest.approx(40 * RATES.prefill_s_per_token)
    # one token at least is computed for its logits
    assert placement(2).choose(Demand(64, 10), Matches.of({"e1": match(64)}), 0.0).cached_tokens == 63


def test_a_prefix_on_disk_is_worth_less_than_one_on_the_device_and_more_than_none():
    where = placement(3)
    assert where.choose(Demand(1000, 10), Matches.of({"e0": Match(960, 0), "e1": match(960)}), 0.0).engine == "e1"
    assert where.choose(Demand(1000, 10), Matches.of({"e0": Match(960, 0)}), 0.0).engine == "e0"


def test_what_was_decided_counts_at_once_so_equal_programs_are_shared_out():
    where = placement(4)
    counts = Counter(where.place(Demand(500, 100), {}, 0.0)[0].engine for _ in range(400))
    assert max(counts.values()) - min(counts.values()) <= 4
    hot = placement(4)
    matches = Matches.of({"e0": match(448)})
    counts = Counter(hot.place(Demand(500, 100), matches, 0.0)[0].engine for _ in range(400))
    assert max(counts.values()) < 3 * min(counts.values()), "one hot prefix does not bind all programs to its engine"


def test_near_equals_are_drawn_at_random():
    counts = Counter(placement(4, seed=seed).choose(Demand(500, 100), {}, 0.0).engine for seed in range(200))
    assert len(counts) == 4 and min(counts.values()) > 20


def test_a_busy_engine_with_the_prefix_loses_to_an_idle_one_and_the_reason_is_told():
    where = placement(2)
    for _ in range(40):
        where.place(Demand(4000, 200), Matches.of({"e0": match(3968)}), 0.0)
    busy = where.loads.position["e0"]
    assert where.loads.rows[busy] > 0
    fill(where, "e0", Demand(4000, 500), 20)
    choice = where.choose(Demand(100, 10), Matches.of({"e0": match(64)}), 0.0)
    assert (choice.engine, choice.reason) == ("e1", "spread")


def test_a_program_stays_at_home_unless_a_move_gains_more_than_it_costs():
    where = placement(2)
    demand = Demand(2000, 50, home="e0", history_tokens=1900)
    assert where.choose(demand, {}, 0.0).reason == "home"
    fill(where, "e0", Demand(100, 50), 4)  # not reason enough to compute 1,900 tokens again
    assert where.choose(demand, {}, 0.0).reason == "home"
    fill(where, "e0", Demand(2000, 500), 40)
    moved = where.choose(demand, {}, 0.0)
    assert (moved.engine, moved.reason, moved.cached_tokens) == ("e1", "moved", 0)
    assert where.choose(Demand(2000, 50, home="gone", history_tokens=1900), {}, 0.0).cached_tokens == 0


def test_finished_work_is_taken_back_and_prompt_work_drains_with_time():
    where = placement(2)
    booked = [where.place(Demand(1000, 100, branches=3), {}, 0.0)[1] for _ in range(6)]
    loads = where.loads
    assert loads.rows.sum() == 18 and loads.queued_s(0.0).sum() == pytest.approx(0.6)
    assert loads.queued_s(0.2).sum() == pytest.approx(0.2) and loads.queued_s(9.0).sum() == 0
    for booking in booked:
        loads.finish(booking, 1.0)
    assert loads.rows.sum() == 0 and loads.output_tokens.sum() == 0


def test_an_engine_that_is_slower_than_expected_gets_less_and_is_tried_again_later():
    where = placement(2)
    now_s = 0.0
    for _ in range(60):
        _, booking = where.place(Demand(100, 20), {}, now_s)
        now_s += (booking.queued_s + booking.prefill_s + 20 * booking.step_s) * (8 if booking.engine == "e0" else 1)
        where.loads.finish(booking, now_s, made=20)
    slow, good = where.loads.slowness(now_s)
    assert slow > 1.05 * good
    counts = Counter(where.choose(Demand(100, 20), {}, now_s).engine for _ in range(50))
    assert counts["e0"] == 0
    assert where.loads.slowness(now_s + 1000.0) == pytest.approx([1.0, 1.0], abs=1e-3)


def test_a_full_engine_makes_programs_wait_and_another_is_chosen():
    where = placement(2, max_rows=2)
    engines = [where.place(Demand(64, 1000), Matches.of({"e0": match(63)}), 0.0)[0].engine for _ in range(4)]
    assert Counter(engines) == {"e0": 2, "e1": 2}


def test_engines_come_and_go():
    where = placement(3)
    _, booking = where.place(Demand(100, 10), Matches.of({"e1": match(64)}), 0.0)
    where.loads.remove("e1")
    where.loads.finish(booking, 1.0)  # without effect
    assert where.loads.names == ["e0", "e2"] and "e1" not in where.loads
    assert where.choose(Demand(100, 10), Matches.of({"e1": match(64)}), 0.0).engine in ("e0", "e2")
    where.loads.add("e1", rates=RATES, max_rows=4)
    assert where.loads.rows.tolist() == [0, 0, 0] and len(where.loads) == 3


def test_a_choice_among_a_thousand_engines_is_the_least_cost_of_all():
    rng = random.Random(4)
    where = placement(1000)
    for _ in range(3000):
        where.place(Demand(rng.randrange(100, 3000), rng.randrange(1, 300)), {}, 0.0)
    matches = Matches.of({f"e{i}": match(64 * rng.randrange(16)) for i in rng.sample(range(1000), 300)})
    demand = Demand(1000, 50)
    where.near = 0.0
    assert where.choose(demand, matches, 0.1) == where.choose(demand, dict(matches), 0.1)
    choice = where.choose(demand, matches, 0.1)
    each = []
    loads: Loads = where.loads
    for i, name in enumerate(loads.names):
        held = min(matches.get(name, match(0)).tokens, 999)
        prefill = MISS_WEIGHT * (1000 - held) * RATES.prefill_s_per_token
        rows, step = loads.rows[i], RATES.step_s + RATES.row_s * min(loads.rows[i] + 1, 16)
        own = loads.queued_s(0.1)[i] + prefill + 50 * step
        own += max(rows + 1 - 16, 0) / 16 * loads.output_tokens[i] / max(rows, 1) * step
        each.append(own + min(rows, 16) * (prefill + 50 * RATES.row_s))
    assert choice.cost_s <= min(each) * (1 + where.near) + 1e-9
    assert choice.cost_s == pytest.approx(each[loads.position[choice.engine]])
