"""Tokens that a step computes are found by rows behind them in the same step, and by nobody if the step is not run."""

import random

import numpy as np
import pytest
from phloem.runtime.scheduler import Sequence, StepPlan, TokenBuffer
from phloem.tests.runtime.scheduler.test_scheduler import PlanRunner

TEXT = list(range(594))


def questions(runner: PlanRunner, count: int, *, shared: int = 579, **options: object) -> list[Sequence]:
    return [runner.add([*TEXT[:shared], *range(7000 + 20 * i, 7000 + 20 * i + 15)], **options) for i in range(count)]


def spans(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """Of each row its sequence, and where it begins and ends."""
    assert plan is not None
    return [(row.seq_id, row.start, row.end) for row in plan.rows]


def planned(runner: PlanRunner) -> StepPlan:
    plan = runner.scheduler.plan()
    assert plan is not None
    return plan


def test_sequences_run_in_the_step_that_computes_the_last_tokens_they_share():
    runner = PlanRunner(2048)
    first = runner.add(TEXT)
    assert spans(runner.step()) == [(1, 0, 256)]
    asked = questions(runner, 15)
    assert spans(runner.step()) == [(1, 256, 512)] and runner.scheduler.num_waiting == 15
    assert spans(runner.step()) == [(1, 512, 594), *((seq.seq_id, 579, 594) for seq in asked)]
    assert runner.num_computed == 594 + 15 * 15 and first.num_run == 594
    assert all((seq.num_cached, seq.num_run) == (579, 15) for seq in asked)


def test_a_sequence_admitted_in_a_step_serves_the_next_ones_of_that_step():
    runner = PlanRunner(4096, max_running=32)
    first = runner.add(TEXT[:200])
    asked = questions(runner, 15, shared=180)
    assert spans(runner.step()) == [(first.seq_id, 0, 200), *((seq.seq_id, 180, 195) for seq in asked)]


def test_a_row_that_reads_tokens_of_its_step_may_serve_others_too():
    runner = PlanRunner(4096)
    for end in (100, 200, 300):
        runner.add([*TEXT[:end], 7000 + end])
    assert spans(runner.step()) == [(1, 0, 101), (2, 100, 201), (3, 200, 301)]


def test_equal_prompts_take_one_step():
    runner = PlanRunner()
    for _ in range(8):
        runner.add(TEXT[:100])
    assert spans(runner.step()) == [(1, 0, 100), *((i, 99, 100) for i in range(2, 9))]


def test_a_sequence_stays_blocked_while_the_planned_row_ends_before_its_last_shared_token():
    runner = PlanRunner(2048)
    runner.add(TEXT)
    (asked,) = questions(runner, 1, shared=513)
    for end in (256, 512):
        assert spans(runner.step()) == [(1, end - 256, end)]
        assert asked.blocked_on is not None and asked.blocked_on[1] == 513
    assert spans(runner.step()) == [(1, 512, 594), (2, 513, 528)]


def test_rows_of_a_step_share_its_tokens_within_the_budget():
    runner = PlanRunner(2048, max_step_tokens=256)
    runner.add(TEXT)
    asked = questions(runner, 15)
    plans = [runner.step() for _ in range(4)]
    assert [plan.num_tokens for plan in plans if plan] == [256, 256, 256, 594 + 15 * 15 - 3 * 256]
    assert spans(plans[2])[0] == (1, 512, 594) and len(spans(plans[2])) == 1 + 12
    assert all(seq.num_pending == 0 for seq in asked) and runner.num_computed == 594 + 15 * 15


def test_adapters_and_a_cache_without_reuse_share_nothing():
    runner = PlanRunner(4096)
    runner.add(TEXT[:100])
    runner.add(TEXT[:100], namespace="other")
    assert spans(runner.step()) == [(1, 0, 100), (2, 0, 100)]
    runner = PlanRunner(4096, reuse=False)
    runner.add(TEXT[:100])
    runner.add(TEXT[:100])
    assert spans(runner.step()) == [(1, 0, 100), (2, 0, 100)]


def test_a_sequence_that_was_parked_with_slots_takes_the_tokens_of_the_step():
    runner = PlanRunner(4096)
    parked = runner.add(TEXT[:50])
    runner.step()
    runner.scheduler.park(parked)
    runner.add(TEXT[:200])
    parked.tokens.extend([*TEXT[50:150], 7000])
    parked.logits_from = 150
    runner.scheduler.submit(parked)
    assert spans(runner.step()) == [(2, 50, 200), (1, 150, 151)]


def test_tokens_that_the_cache_holds_in_other_slots_are_not_committed_ahead():
    """The slots of a row would change if its tokens were committed now, so the next sequence waits for the step."""
    runner = PlanRunner(4096, prefill_chunk=100)
    first = runner.add(TEXT[:150])
    runner.step()
    # As if another sequence had computed the next tokens too, and had ended.
    lease = runner.cache.acquire(np.arange(130, dtype=np.int32))
    lease.extend(30)
    for position, slot in enumerate(lease.slot_ids.tolist()):
        runner.slots[slot] = tuple(TEXT[: position + 1])
    lease.commit(np.arange(130, dtype=np.int32))
    lease.release()
    second = runner.add([*TEXT[:148], 7000])
    plan = planned(runner)
    assert spans(plan) == [(first.seq_id, 100, 150)] and second.blocked_on == (first, 148)
    runner.run_plan(plan)
    assert spans(runner.step()) == [(second.seq_id, 148, 149)]


def test_even_a_single_token_of_the_step_is_shared_as_it_costs_no_wait():
    runner = PlanRunner(4096, prefill_chunk=100)
    first = runner.add(TEXT[:200])
    second = runner.add([*TEXT[:1], *range(7000, 7200)])
    assert spans(runner.step()) == [(first.seq_id, 0, 100), (second.seq_id, 1, 101)]


# -- a step that is not run -------------------------------------------------------------------------------------------


def assert_only_computed_tokens_are_found(runner: PlanRunner) -> None:
    """Every slot of the tree holds the text that leads to it."""
    runner.cache.check()
    for root in runner.cache.tree.roots.values():
        branches = [(node, ()) for node in root.children.values()]
        for node, before in branches:
            tokens = before + tuple(node.tokens.tolist())
            for i, slot in enumerate(node.slots.tolist()):
                assert runner.slots.get(slot) == tokens[: len(before) + i + 1]
            branches += [(child, tokens) for child in node.children.values()]


@pytest.mark.parametrize("num_asked", [0, 3])
def test_rows_that_read_from_an_ended_sequence_are_not_run_and_wait_again(num_asked: int):
    runner = PlanRunner(2048)
    first, other = runner.add(TEXT[:200]), runner.add(list(range(3000, 3010)))
    asked = questions(runner, num_asked, shared=180)
    chained = [runner.add([*asked[0].tokens.ids.tolist(), *range(9000, 9020)])] if asked else []
    plan = planned(runner)
    assert len(plan.rows) == 2 + num_asked + len(chained)
    runner.scheduler.remove(runner.live.pop(first.seq_id))
    left = runner.scheduler.without_ended(plan, runner.live)
    assert spans(left) == [(other.seq_id, 0, 10)]
    assert all(seq.state == "waiting" and seq.lease is None for seq in [*asked, *chained])
    assert_only_computed_tokens_are_found(runner)
    assert runner.cache.num_cached == 0
    assert left is not None
    runner.run_plan(left)
    runner.step()
    assert all(seq.num_pending == 0 for seq in [*asked, *chained])
    assert_only_computed_tokens_are_found(runner)


def test_a_plan_without_an_ended_row_that_only_read_is_run():
    runner = PlanRunner(2048)
    first = runner.add(TEXT[:200])
    asked = questions(runner, 3, shared=180)
    plan = planned(runner)
    runner.scheduler.remove(runner.live.pop(asked[1].seq_id))
    left = runner.scheduler.without_ended(plan, runner.live)
    assert [row[0] for row in spans(left)] == [first.seq_id, asked[0].seq_id, asked[2].seq_id]
    assert left is not None
    runner.run_plan(left)
    assert_only_computed_tokens_are_found(runner)


def test_nothing_is_left_of_a_plan_whose_rows_have_ended():
    runner = PlanRunner(2048)
    first = runner.add(TEXT[:200])
    (asked,) = questions(runner, 1, shared=180)
    plan = planned(runner)
    for seq in (first, asked):
        runner.scheduler.remove(runner.live.pop(seq.seq_id))
    assert runner.scheduler.without_ended(plan, runner.live) is None
    runner.cache.check()
    assert runner.cache.num_cached == runner.cache.num_leased == 0


def test_a_sequence_that_was_parked_is_not_run_either():
    runner = PlanRunner(2048)
    first = runner.add(TEXT[:200])
    (asked,) = questions(runner, 1, shared=180)
    plan = planned(runner)
    runner.scheduler.park(first)
    assert runner.scheduler.without_ended(plan, runner.live) is None
    assert (first.state, first.num_computed, asked.state) == ("parked", 0, "waiting")
    assert runner.cache.num_cached == 0
    runner.scheduler.submit(first)
    assert spans(runner.step()) == [(asked.seq_id, 0, 195), (first.seq_id, 180, 200)]


def test_a_dropped_plan_leaves_the_tokens_that_were_computed_before_it():
    runner = PlanRunner(2048)
    first = runner.add(TEXT)
    runner.step()
    runner.step()
    (asked,) = questions(runner, 1)
    planned(runner)
    assert runner.cache.num_cached > 512
    for seq in (first, asked):
        runner.scheduler.remove(runner.live.pop(seq.seq_id))
    runner.scheduler.drop_plan()
    assert_only_computed_tokens_are_found(runner)
    assert runner.cache.num_cached == 512 and runner.cache.num_leased == 0


# -- random loads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_shared_texts_read_only_what_is_computed(seed: int):
    """Few texts with long shared parts, in few slots; some steps lose rows or are not run at all.

    Evicted tokens come back from host memory, with the KV that they had when they were saved.
    """
    rng = random.Random(seed)
    num_slots = rng.choice((120, 300, 1000))
    runner = PlanRunner(
        num_slots,
        has_tiers=seed % 2 == 1,
        max_running=rng.choice((4, 12)),
        max_step_tokens=rng.choice((48, 128)),
        prefill_chunk=rng.choice((16, 40)),
        decode_reserve=2,
        match_window=rng.choice((1, 8)),
    )
    scheduler = runner.scheduler
    stems: list[list[int]] = [[0] * 80]
    num_ahead = num_lost = 0
    for _ in range(500):
        live = list(runner.live.values())
        if rng.random() < 0.2:
            runner.cache.flush()
            stems = [[rng.randrange(3) for _ in range(80)] for _ in range(2)]
        for _ in range(rng.choice((0, 0, 1, 4))):
            if len(live) < 16:
                stem = rng.choice(stems)[: rng.randrange(20, 80)]
                tokens = [*stem, *(rng.randrange(3) for _ in range(rng.randrange(20)))]
                seq = Sequence(rng.randrange(1 << 40), TokenBuffer(tokens), namespace=rng.choice(("", "", "b")))
                seq.logits_from = len(tokens) - 1 if rng.random() < 0.8 else rng.randrange(len(tokens))
                runner.live[seq.seq_id] = seq
                scheduler.submit(seq)
        if live and rng.random() < 0.15:
            runner.roll_back(rng.choice(live), rng, most=40)
        if runner.cache.tiers is not None and rng.random() < 0.2:
            runner.cache.tiers.write_behind(4)
        plan = scheduler.plan()
        runner.cache.check()
        if plan is None:
            continue
        written = {slot for row in plan.rows for slot in row.slot_ids[row.start :].tolist()}
        num_ahead += any(written & set(row.slot_ids[: row.start].tolist()) for row in plan.rows)
        fate = rng.random()
        if fate < 0.1:
            for row in rng.sample(plan.rows, rng.randrange(1, len(plan.rows) + 1)):
                seq = runner.live[row.seq_id]
                if rng.random() < 0.5:
                    scheduler.remove(runner.live.pop(seq.seq_id))
                else:
                    scheduler.park(seq)
            left = scheduler.without_ended(plan, runner.live)
            num_lost += len(plan.rows) - (len(left.rows) if left else 0)
            plan = left
        elif fate < 0.13:
            for seq in list(runner.live.values()):
                scheduler.remove(runner.live.pop(seq.seq_id))
            scheduler.drop_plan()
            plan = None
        if plan is not None:
            runner.run_plan(plan)
        assert_only_computed_tokens_are_found(runner)
        for row in plan.rows if plan else ():
            seq = runner.live[row.seq_id]
            if row.end == len(seq.tokens):
                if rng.random() < 0.2:
                    scheduler.remove(runner.live.pop(seq.seq_id))
                else:
                    seq.tokens.append(rng.randrange(3))
                    seq.logits_from = len(seq.tokens) - 1
    assert num_ahead > 3 and num_lost > 3
    assert runner.cache.tiers is None or num_slots == 1000 or runner.cache.tiers.counters.restored > 3
    for seq in list(runner.live.values()):
        scheduler.remove(runner.live.pop(seq.seq_id))
    runner.cache.check()
    assert runner.cache.num_leased == 0 and runner.cache.num_locked == 0
