"""Preemption for a waiting sequence that is more urgent or shorter: bounded, without loss, and without starvation."""

import math
import random
from collections import Counter

import pytest
from phloem.protocol.errors import InvalidParams
from phloem.runtime.scheduler import SchedulerConfig, Sequence, TokenBuffer
from phloem.runtime.scheduler.scheduler import MAX_PREEMPTED
from phloem.tests.runtime.scheduler.test_scheduler import PlanRunner


class CountedRunner(PlanRunner):
    """A runner whose sequences generate a given number of tokens; a token is a function of its position."""

    def __init__(self, num_slots: int = 4096, *, order: str = "shortest_remaining", **config: object) -> None:
        super().__init__(num_slots, order=order, **config)
        self.outputs: dict[int, int] = {}
        self.ended: list[int] = []

    def ask(self, length: int, num_new: int, *, is_known: bool = True, **options: object) -> Sequence:
        n = len(self.live) + 1
        seq = Sequence(n, self.tokens_of(n, length), **options)
        seq.logits_from = length - 1
        self.live[n], self.outputs[n] = seq, num_new
        self.scheduler.submit(seq, max_new=num_new if is_known else 10_000, min_new=num_new if is_known else 0)
        return seq

    @staticmethod
    def tokens_of(n: int, length: int) -> TokenBuffer:
        return TokenBuffer([n * 10_000 + i for i in range(length)])

    def turn(self) -> None:
        """One step; then each sequence that was computed to its end gets its next token."""
        plan = self.step()
        for row in plan.rows if plan else ():
            seq = self.live[row.seq_id]
            if row.end < len(seq.tokens):
                continue
            seq.tokens.append(seq.seq_id * 10_000 + len(seq.tokens))
            seq.logits_from = len(seq.tokens) - 1
            if len(seq.tokens) - seq.prompt_len == self.outputs[seq.seq_id]:
                self.scheduler.remove(seq)
                self.ended.append(seq.seq_id)

    def turns(self, n: int) -> None:
        for _ in range(n):
            self.turn()

    def finish(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.turn()
        raise AssertionError("the schedule does not end")

    @property
    def num_yields(self) -> int:
        return self.scheduler.counters.num_yields


def test_a_long_sequence_is_preempted_for_a_short_one_and_computes_nothing_again():
    runner = CountedRunner(max_running=1)
    long = runner.ask(50, 200)
    runner.turns(10)
    short = runner.ask(20, 5)
    runner.turn()
    assert short.state == "running" and long.state == "waiting"
    runner.finish()
    assert runner.ended == [short.seq_id, long.seq_id] and runner.num_yields == 1
    assert runner.num_computed == 50 + 199 + 20 + 4, "its KV was still in the cache"


def test_a_predicted_length_counts_like_a_known_one():
    runner = CountedRunner(max_running=2)
    for n in range(60):
        runner.ask(4, 3 if n % 2 else 120, is_known=False, kind="short" if n % 2 else "long")
    runner.finish()
    before = runner.num_yields
    for _ in range(2):
        runner.ask(4, 120, is_known=False, kind="long")
    runner.turns(5)
    short = runner.ask(4, 3, is_known=False, kind="short")
    runner.turn()
    assert short.state == "running" and runner.num_yields == before + 1
    runner.finish()


@pytest.mark.parametrize(
    ("running", "waiting"),
    [
        ({"num_new": 20}, {"num_new": 15}),  # not much shorter
        ({"num_new": 200, "priority": 0}, {"num_new": 5, "priority": 1}),
        ({"num_new": 200, "deadline_s": 5.0}, {"num_new": 5}),
        ({"num_new": 200, "is_known": False}, {"num_new": 5}),  # nothing is learned, so its 10,000 at most count
    ],
    ids=["as long", "more urgent", "earlier deadline", "bound"],
)
def test_only_a_sequence_with_much_more_to_do_is_preempted(running, waiting):
    runner = CountedRunner(max_running=1)
    first = runner.ask(10, **running)
    runner.turns(3)
    runner.ask(10, **waiting)
    runner.turns(2)
    assert (first.state == "running") is (running.get("is_known", True) is True)


def test_siblings_of_a_fork_are_not_preempted():
    runner = CountedRunner(max_running=2)
    siblings = [runner.ask(10, 200, program="tree") for _ in range(2)]
    runner.turns(3)
    other = runner.ask(10, 2)
    runner.turns(5)
    assert [seq.state for seq in siblings] == ["running", "running"] and other.state == "waiting"
    runner.scheduler.remove(siblings[0])
    runner.turn()
    assert other.state == "running" and siblings[1].state == "running"
    own = [runner.ask(10, 2, program="tree"), runner.ask(10, 2, program="tree")]
    runner.turns(1)
    assert siblings[1].state == "running", "not for its own program either"
    assert all(seq.state in ("running", "waiting") for seq in own)
    runner.finish()


def test_a_sequence_that_another_is_blocked_on_is_not_preempted():
    runner = CountedRunner(max_running=1, prefill_chunk=8, max_step_tokens=8)
    first = runner.ask(100, 200)
    runner.turn()
    twin = Sequence(77, runner.tokens_of(first.seq_id, 100))
    assert twin.tokens.ids.tolist() == first.tokens.ids.tolist()
    runner.live[77], runner.outputs[77] = twin, 1
    twin.logits_from = 99
    runner.scheduler.submit(twin, max_new=1, min_new=1)
    runner.turns(3)
    assert first.state == "running" and twin.state == "waiting" and runner.num_yields == 0
    runner.finish()
    assert runner.num_computed == 100 + 199 + 1, "the prompt once, and the last token of its twin"


def test_a_tenants_sequence_is_preempted_only_for_a_tenant_that_was_served_less():
    runner = CountedRunner(max_running=2)
    for n in range(40):
        runner.ask(10, 20, tenant="ab"[n % 2])
    runner.finish()
    busy = [runner.ask(10, 300, tenant="a") for _ in range(2)]
    runner.turns(5)
    runner.ask(10, 2, tenant="b")
    runner.turn()
    assert sorted(seq.state for seq in busy) == ["running", "waiting"]
    runner.finish()
    runner.scheduler.waiting.charge("b", 10_000.0)
    busy = [runner.ask(10, 300, tenant="a") for _ in range(2)]
    runner.turns(5)
    runner.ask(10, 2, tenant="b")
    runner.turns(3)
    assert [seq.state for seq in busy] == ["running", "running"]
    runner.finish()


def test_a_sequence_is_preempted_for_shorter_ones_a_few_times_at_most():
    runner = CountedRunner(max_running=1)
    long = runner.ask(10, 300)
    for _ in range(20):
        runner.turns(8)
        runner.ask(10, 4)
    assert long.num_preempted == MAX_PREEMPTED
    runner.finish()
    assert len(long.tokens) == 310


@pytest.mark.parametrize("order", ["oldest_program", "first_come", "shortest_remaining"])
def test_the_least_urgent_is_preempted_for_an_urgent_sequence_of_any_length(order):
    runner = CountedRunner(max_running=2, order=order)
    calm = runner.ask(10, 40, priority=1)
    idle = [runner.ask(10, 30, priority=2)]
    runner.turns(3)
    urgent = runner.ask(10, 90, priority=0)
    runner.turn()
    assert (urgent.state, calm.state, idle[0].state) == ("running", "running", "waiting")
    idle.append(runner.ask(10, 1, priority=2))
    runner.turns(5)
    assert [seq.state for seq in idle] == ["waiting", "waiting"], "an equally urgent sequence preempts nobody"
    runner.finish()
    assert runner.num_yields == 1 and all(len(seq.tokens) == 10 + runner.outputs[n] for n, seq in runner.live.items())


def test_as_many_sequences_are_preempted_as_an_urgent_one_needs_slots_of():
    runner = CountedRunner(300, max_running=8, order="first_come", decode_reserve=4)
    idle = [runner.ask(60, 50, priority=1) for _ in range(4)]
    runner.turns(3)
    urgent = runner.ask(200, 20, priority=0)
    runner.turns(8)
    assert urgent.state == "running" and sum(seq.state == "running" for seq in idle) <= 1
    runner.finish()
    assert sorted(runner.ended) == [1, 2, 3, 4, 5] and runner.ended[0] == urgent.seq_id


def test_only_a_sequence_with_enough_slots_is_preempted_when_slots_are_short():
    runner = CountedRunner(300, max_running=8, decode_reserve=4)
    small = [runner.ask(20, 60) for _ in range(2)]
    large = runner.ask(100, 90)
    runner.turns(40)
    short = runner.ask(80, 2)
    runner.turns(2)
    assert short.state == "running" and large.state == "waiting"
    assert all(seq.state == "running" for seq in small)
    runner.finish()


def test_the_order_by_remaining_work_refuses_a_match_window():
    with pytest.raises(InvalidParams, match="match_window=4"):
        SchedulerConfig(order="shortest_remaining", match_window=4)


@pytest.mark.parametrize("seed", range(4))
def test_random_loads_lose_no_token_and_starve_no_sequence(seed):
    """Rows and slots are short, lengths differ and are partly unknown, and some sequences are cancelled."""
    rng, bound = random.Random(seed), 24
    runner = CountedRunner(
        rng.choice((400, 2000)),
        max_running=4,
        prefill_chunk=32,
        max_step_tokens=64,
        max_overtaken=bound,
        decode_reserve=2,
    )
    admitted: dict[int, None] = {}  # in this order
    cancelled: set[int] = set()
    for _ in range(1200):
        if rng.random() < 0.25 and runner.scheduler.num_waiting < 40:
            runner.ask(
                rng.randrange(2, 40),
                rng.choice((1, 2, 8, 150)),
                is_known=rng.random() < 0.7,
                kind=rng.choice("ab"),
                program=rng.choice(("", "", "p", "q")),
                deadline_s=rng.choice((math.inf, math.inf, 10.0)),
                priority=rng.choice((0, 0, 0, 1)) if seed % 2 else 0,
            )
        if rng.random() < 0.02:
            alive = [seq for seq in runner.live.values() if seq.state in ("running", "waiting")]
            if alive:
                seq = rng.choice(alive)
                runner.scheduler.remove(seq)
                cancelled.add(seq.seq_id)
        runner.turn()
        admitted.update((n, None) for n, seq in runner.live.items() if seq.admitted_s)
    runner.finish()
    assert runner.num_yields > 3
    ended = Counter(runner.ended)
    assert set(ended) == set(runner.live) - cancelled and set(ended.values()) == {1}
    for n in ended:
        seq = runner.live[n]
        assert seq.tokens.ids.tolist() == [n * 10_000 + i for i in range(len(seq.tokens))]
        assert len(seq.tokens) == seq.prompt_len + runner.outputs[n]
    if seed % 2 == 0:  # all of one priority
        most = MAX_PREEMPTED + runner.scheduler.num_preemptions - runner.num_yields
        assert max(runner.live[n].num_preempted for n in ended) <= most
        # The k-th to arrive was admitted as the (k + bound)-th at the latest.
        assert max(place - n for place, n in enumerate(admitted, start=1)) <= bound + len(cancelled)
    assert runner.cache.num_leased == 0 and runner.cache.num_locked == 0
