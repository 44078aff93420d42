"""The next sequence to be admitted: order, the bound on being overtaken, and shares of tenants."""

import math
import random
from collections import Counter

import pytest
from phloem.runtime.scheduler import ORDERS, Sequence, TokenBuffer
from phloem.runtime.scheduler.lengths import Lengths
from phloem.runtime.scheduler.waiting import MAX_IDLE, Waiting


class Queue:
    """A waiting queue, and sequences as the scheduler submits them."""

    def __init__(self, order: str = "first_come", *, max_overtaken: int = 512, **weights: float) -> None:
        self.waiting = Waiting(ORDERS[order], lengths=Lengths(), max_overtaken=max_overtaken, tenant_weights=weights)
        self.num = 0

    def add(self, length: int = 4, *, program_order: int = 0, max_new: int = -1, **options) -> Sequence:
        self.num += 1
        seq = Sequence(self.num, TokenBuffer([7] * length), **options)
        seq.order, seq.program_order = self.num, program_order or self.num
        seq.max_new, seq.prompt_len = max_new, length
        self.waiting.add(seq)
        return seq

    def next(self, *, window: int = 1, matched=lambda seq: 0) -> Sequence | None:
        seq = self.waiting.head(window, matched)
        if seq is not None:
            self.waiting.discard(seq)
        return seq


def test_each_order_ranks_by_its_own_rule():
    queue = Queue("first_come")
    seqs = [queue.add(9), queue.add(1), queue.add(5)]
    assert [queue.next() for _ in range(4)] == [*seqs, None]
    queue = Queue("oldest_program")
    young, old, late = (
        queue.add(program_order=5),
        queue.add(program_order=2),
        queue.add(program_order=1, deadline_s=9.0),
    )
    assert [queue.next() for _ in range(3)] == [late, old, young]
    queue = Queue("random")
    seqs = [queue.add(5) for _ in range(20)]
    drawn = [queue.next() for _ in seqs]
    assert drawn != seqs and sorted(drawn, key=lambda seq: seq.order) == seqs
    queue = Queue("shortest")
    long, short, some = queue.add(50, max_new=9), queue.add(5, max_new=9), queue.add(5, max_new=30)
    assert [queue.next() for _ in range(3)] == [short, long, some], "a prompt token costs little"


def test_urgent_priorities_go_first_whichever_tenant_sends_them():
    queue = Queue()
    seqs = [queue.add(priority=priority, tenant=tenant) for priority in (2, 0, 1) for tenant in "ab"]
    assert [queue.next().priority for _ in seqs] == [0, 0, 1, 1, 2, 2]


def test_the_longest_match_among_the_first_goes_first():
    queue = Queue()
    seqs = [queue.add(n) for n in (1, 9, 5, 90)]
    assert queue.next(window=3, matched=lambda seq: len(seq.tokens)) is seqs[1]
    assert queue.next(window=1, matched=lambda seq: len(seq.tokens)) is seqs[0]


@pytest.mark.parametrize(("order", "window"), [("shortest", 1), ("oldest_program", 1), ("first_come", 16)])
def test_no_sequence_is_overtaken_more_often_than_the_bound(order, window):
    """Short and favoured sequences keep arriving."""
    rng, bound = random.Random(5), 8
    queue, taken, first_left = Queue(order, max_overtaken=bound), [], {}
    for _ in range(2000):
        for _ in range(rng.choice((0, 1, 1, 2)) if len(taken) < 1500 else 0):
            queue.add(rng.choice((1, 2, 900)), program_order=rng.randrange(1, 10**6))
        seq = queue.next(window=window, matched=lambda seq: -len(seq.tokens))
        if seq is None:
            continue
        if seq.order not in first_left:
            first_left[seq.order] = len(first_left) + 1
        taken.append(seq)
    # The k-th to arrive leaves as the (k + bound)-th at the latest.
    assert len(first_left) == queue.num > 1000
    worst = max(left - order for order, left in first_left.items())
    assert 0 < worst <= bound


def test_tenants_share_by_their_weights_however_much_they_send():
    queue = Queue(a=2.0)
    for _ in range(300):
        for tenant in "aabbbbbbbbc":
            queue.add(tenant=tenant)
        seq = queue.next()
        queue.waiting.charge(seq.tenant, 10.0)
        queue.served = [*getattr(queue, "served", []), seq.tenant]
    counts = Counter(queue.served)
    assert counts["b"] == pytest.approx(counts["c"], abs=2)
    assert counts["a"] == pytest.approx(2 * counts["c"], abs=2)


def test_a_tenant_gains_nothing_by_a_pause():
    queue = Queue()
    for _ in range(100):
        queue.add(tenant="busy")
        queue.waiting.charge(queue.next().tenant, 10.0)
    taken = []
    for _ in range(40):
        queue.add(tenant="busy")
        queue.add(tenant="back")
    for _ in range(40):
        taken.append(queue.next().tenant)
        queue.waiting.charge(taken[-1], 10.0)
    assert abs(taken[:10].count("back") - 5) <= 1 and taken.count("back") == 20


def test_any_number_of_tenants_leaves_a_bounded_number_of_counters():
    queue = Queue(max_overtaken=4)
    queue.add(tenant="patient", deadline_s=math.inf)
    for n in range(20 * MAX_IDLE):
        queue.waiting.charge(f"tenant {n}", 5.0)
        queue.add(tenant=f"tenant {n}")
        queue.waiting.charge(queue.next().tenant, 5.0)
    assert len(queue.waiting.served) < 3 * MAX_IDLE and len(queue.waiting.queues) < 3 * MAX_IDLE
