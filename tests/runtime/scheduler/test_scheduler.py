"""The scheduler with the real radix cache, and a forward that records which prefix was computed into which slot."""

import pickle
import random

import numpy as np
import pytest
from phloem.radix_cache import HostTier, RadixCache, Tiers
from phloem.radix_cache.tree import common_prefix_len
from phloem.runtime.scheduler import Scheduler, SchedulerConfig, Sequence, StepPlan, TokenBuffer


class PlanRunner:
    """Runs plans: writes each computed token's whole prefix into its slot, and checks the slots of the context.

    A row may read what earlier steps and the rows before it in the plan write; no row of the plan may overwrite it.
    """

    def __init__(self, num_slots: int = 512, *, reuse: bool = True, has_tiers: bool = False, **config: int) -> None:
        self.slots: dict[int, tuple[int, ...]] = {}
        sizes = {"host": HostTier(1 << 24), "block_len": 8, "clock": lambda: 0.0}
        tiers = Tiers(save=self._save, load=self._load, **sizes) if has_tiers else None
        self.cache = RadixCache(num_slots, reuse=reuse, tiers=tiers, block_len=8)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.cache)
        self.table = np.full((self.scheduler.config.max_running, 4096), -1, np.int32)
        self.live: dict[int, Sequence] = {}
        self.num_computed = 0
        self.steps: list[StepPlan] = []

    def _save(self, slots: np.ndarray) -> list[bytes]:
        return [pickle.dumps([self.slots.get(slot) for slot in block]) for block in slots.tolist()]

    def _load(self, slots: np.ndarray, blocks: list[bytes]) -> None:
        for row, block in zip(slots.tolist(), blocks, strict=True):
            self.slots.update(zip(row, pickle.loads(block), strict=True))

    def add(self, tokens: list[int], **options: object) -> Sequence:
        seq = Sequence(len(self.live) + 1, TokenBuffer(tokens), **options)
        seq.logits_from = len(tokens) - 1
        self.live[seq.seq_id] = seq
        self.scheduler.submit(seq)
        return seq

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.run_plan(plan)
        return plan

    def run_plan(self, plan: StepPlan) -> None:
        self.steps.append(plan)
        assert len({row.row_id for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            tokens = tuple(self.live[row.seq_id].tokens.ids.tolist())
            self.table[row.row_id, row.stale_from : row.end] = row.slot_ids[row.stale_from : row.end]
            held = self.table[row.row_id, : row.end]
            assert (held == row.slot_ids).all(), "the executor's table is stale"
            for position in range(row.start):
                assert self.slots.get(int(held[position])) == tokens[: position + 1]
            for position in range(row.start, row.end):
                self.slots[int(row.slot_ids[position])] = tokens[: position + 1]
            self.num_computed += row.end - row.start
        for row in plan.rows:
            tokens = tuple(self.live[row.seq_id].tokens.ids.tolist())
            for position, slot in enumerate(row.slot_ids.tolist()):
                assert self.slots[slot] == tokens[: position + 1]
        self.scheduler.complete(plan, self.live)
        self.cache.check()

    def roll_back(self, seq: Sequence, rng: random.Random, *, most: int) -> None:
        """Cut a running or parked sequence at random, and submit it with fewer than ``most`` other tokens behind."""
        if seq.state == "running":
            self.scheduler.park(seq)
        if seq.state == "parked":
            self.scheduler.truncate(seq, rng.randrange(1, len(seq.tokens) + 1))
            seq.tokens.extend([rng.randrange(3) for _ in range(rng.randrange(most))])
            seq.logits_from = len(seq.tokens) - 1
            self.scheduler.submit(seq)

    def run(self, num_outputs: int = 0, *, limit: int = 2000) -> None:
        """Decode ``num_outputs`` tokens for every sequence, then end it."""
        for _ in range(limit):
            plan = self.step()
            if plan is None:
                assert not self.scheduler.has_work
                return
            for row in plan.rows:
                seq = self.live[row.seq_id]
                if row.end < len(seq.tokens):
                    continue
                assert row.num_logits == 1
                made = seq.tag or 0
                if made == num_outputs:
                    self.scheduler.remove(seq)
                else:
                    seq.tag = made + 1
                    seq.tokens.append(1000 + seq.seq_id)
                    seq.logits_from = len(seq.tokens) - 1
        raise AssertionError("the schedule does not end")


def test_chunks_of_a_prompt_cover_it_once_and_only_the_last_has_logits():
    runner = PlanRunner(prefill_chunk=10)
    runner.add(list(range(35)))
    runner.run()
    rows = [plan.rows[0] for plan in runner.steps]
    assert [(row.start, row.end, row.num_logits) for row in rows] == [(0, 10, 0), (10, 20, 0), (20, 30, 0), (30, 35, 1)]


def test_equal_prompts_that_arrive_together_are_computed_once():
    runner = PlanRunner(prefill_chunk=16)
    prompt = list(range(100))
    for _ in range(32):
        runner.add(prompt)
    runner.run()
    # Each sequence computes its last token for the logits; the 99 tokens before are computed once.
    assert runner.num_computed == 99 + 32


def test_a_shared_prefix_is_computed_once_and_suffixes_run_together():
    runner = PlanRunner(num_slots=2048, prefill_chunk=64)
    prefix = list(range(200))
    for i in range(8):
        runner.add([*prefix, 5000 + i, 6000 + i])
    runner.run()
    assert runner.num_computed == 200 + 8 * 2
    assert max(len(plan.rows) for plan in runner.steps) >= 7


def test_without_reuse_nothing_is_shared():
    runner = PlanRunner(num_slots=2048, reuse=False)
    for _ in range(4):
        runner.add(list(range(50)))
    runner.run()
    assert runner.num_computed == 200


def test_decodes_go_on_while_a_long_prompt_is_prefilled():
    runner = PlanRunner(num_slots=2048, max_step_tokens=32, prefill_chunk=32)
    first = runner.add([1, 2, 3])
    runner.step()
    first.tokens.append(9)
    first.logits_from = 3
    runner.add(list(range(100, 400)))
    plan = runner.step()
    assert plan is not None and [len(row.token_ids) for row in plan.rows] == [1, 31]


def test_all_preempted_sequences_get_their_tokens_in_the_end():
    runner = PlanRunner(num_slots=120, decode_reserve=0, prefill_chunk=16)
    sequences = [runner.add([i * 1000 + j for j in range(30)]) for i in range(6)]
    runner.run(num_outputs=25)
    assert runner.scheduler.num_preemptions > 0
    assert all(len(seq.tokens) == 55 and seq.state == "ended" for seq in sequences)
    assert runner.cache.num_leased == 0 and runner.cache.num_locked == 0


def test_a_sequence_larger_than_the_pool_fails_by_name_and_others_go_on():
    runner = PlanRunner(num_slots=64)
    big = runner.add(list(range(100)))
    small = runner.add([7, 8, 9])
    runner.run(num_outputs=3)
    ((failed, error),) = runner.scheduler.failed
    assert failed is big and "needs 100 KV slots, but the pool has 64" in str(error)
    assert small.state == "ended" and len(small.tokens) == 6


def test_a_parked_sequence_continues_without_computing_its_history_again():
    runner = PlanRunner()
    seq = runner.add(list(range(40)))
    runner.step()
    runner.scheduler.park(seq)
    seq.tokens.extend([90, 91, 92])
    seq.logits_from = 42
    runner.scheduler.submit(seq)
    plan = runner.step()
    assert plan is not None and (plan.rows[0].start, plan.rows[0].end) == (40, 43)
    assert seq.num_cached == 40


def test_parked_sequences_release_slots_that_others_need():
    runner = PlanRunner(num_slots=64, decode_reserve=0)
    seq = runner.add(list(range(40)))
    runner.step()
    runner.scheduler.park(seq)
    other = runner.add(list(range(100, 160)))
    runner.run(num_outputs=2)
    assert other.state == "ended"
    runner.scheduler.submit(seq)
    runner.run()
    assert seq.state == "ended"


def test_a_parked_sequence_releases_no_more_slots_than_are_missing():
    runner = PlanRunner(num_slots=64, decode_reserve=0, slot_chunk=1)
    seq = runner.add(list(range(40)))
    runner.step()
    runner.scheduler.park(seq)
    other = runner.add(list(range(100, 130)))
    runner.step()
    assert other.state == "running" and seq.lease is not None and seq.lease.num_slots == 64 - 30
    runner.scheduler.remove(other)
    seq.tokens.append(40)
    seq.logits_from = 40
    runner.scheduler.submit(seq)
    runner.run()
    assert runner.num_computed == 40 + 30 + 6 + 1, "the six that it released, and the new one"


def test_waiting_sequences_with_leases_do_not_deadlock():
    runner = PlanRunner(num_slots=100, decode_reserve=0)
    sequences = []
    for i in range(3):
        sequences.append(runner.add([i * 1000 + j for j in range(32)]))
        runner.step()
        runner.scheduler.park(sequences[-1])
    for seq in sequences:
        seq.tokens.extend(range(9000, 9040))
        seq.logits_from = len(seq.tokens) - 1
        runner.scheduler.submit(seq)
    runner.run(num_outputs=2)
    assert all(seq.state == "ended" for seq in sequences)


def test_logits_of_cached_positions_are_computed_again():
    runner = PlanRunner()
    runner.add(list(range(20)))
    runner.run()
    seq = Sequence(99, TokenBuffer(range(20)))
    seq.logits_from = 5
    runner.live[99] = seq
    runner.scheduler.submit(seq)
    plan = runner.step()
    assert plan is not None and (plan.rows[0].start, plan.rows[0].num_logits) == (5, 15)


def test_urgent_sequences_are_admitted_first():
    runner = PlanRunner(max_running=1)
    runner.add([1, 2, 3], priority=5)
    urgent = runner.add([4, 5, 6], priority=-5)
    plan = runner.step()
    assert plan is not None and plan.rows[0].seq_id == urgent.seq_id


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_aborts_and_rollbacks_keep_every_slot_right(seed: int):
    rng = random.Random(seed)
    runner = PlanRunner(num_slots=200, max_running=6, max_step_tokens=40, prefill_chunk=16, decode_reserve=2)
    scheduler = runner.scheduler
    for _ in range(400):
        live = [seq for seq in runner.live.values() if seq.state != "ended"]
        if rng.random() < 0.3 and len(live) < 12:
            stem = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            runner.add(stem, namespace=rng.choice(["", "other"]), priority=rng.randrange(3))
        if live and rng.random() < 0.15:
            scheduler.remove(rng.choice(live))
        if live and rng.random() < 0.15:
            runner.roll_back(rng.choice(live), rng, most=9)
        plan = runner.step()
        for row in plan.rows if plan else ():
            seq = runner.live[row.seq_id]
            if row.end == len(seq.tokens):
                seq.tokens.append(rng.randrange(3))
                seq.logits_from = len(seq.tokens) - 1
    for seq in runner.live.values():
        if seq.state != "ended":
            scheduler.remove(seq)
    runner.cache.check()
    assert runner.cache.num_leased == 0 and runner.cache.num_locked == 0


def test_common_prefix_len_finds_the_first_difference_anywhere():
    a = np.arange(5000, dtype=np.int32)
    for n in (0, 1, 63, 64, 65, 575, 576, 577, 4999):
        b = a.copy()
        b[n] = -1
        assert common_prefix_len(a, b) == n
    assert common_prefix_len(a, a[:77]) == 77
    assert common_prefix_len(a, a[:0]) == 0
