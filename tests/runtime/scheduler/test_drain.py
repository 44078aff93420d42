"""The expected time until present work has drained: work left over work done per second, within bounds."""

import pytest
from phloem.runtime.scheduler import Sequence, TokenBuffer
from phloem.runtime.scheduler.drain import LEAST_S, MOST_S, Drain
from phloem.runtime.scheduler.lengths import Lengths
from phloem.tests.runtime.scheduler.test_scheduler import PlanRunner


def waiting(num: int, *, num_new: int) -> list[Sequence]:
    made = []
    for n in range(num):
        seq = Sequence(n, TokenBuffer([7] * 32))
        seq.prompt_len, seq.max_new, seq.min_new = 32, num_new, num_new
        made.append(seq)
    return made


def test_the_time_is_work_left_over_the_measured_rate_and_pauses_do_not_count():
    drain = Drain()
    drain.begin(0.0)
    for n in range(1, 101):
        drain.note(5.0, n * 0.1)
    assert drain.wait_s(waiting(10, num_new=99), Lengths(), step=1) == pytest.approx(10 * (99 + 1) / 50, rel=1e-6)
    drain.pause()
    drain.begin(1000.0)
    drain.note(5.0, 1000.1)
    assert drain.wait_s(waiting(10, num_new=99), Lengths(), step=2) == pytest.approx(20.0, rel=1e-6)


def test_old_work_counts_little():
    drain = Drain()
    drain.begin(-1.0)
    for n in range(200):
        drain.note(100.0, n * 1.0)
    for n in range(200, 500):
        drain.note(1.0, n * 1.0)
    assert drain.wait_s(waiting(1, num_new=19), Lengths(), step=1) == pytest.approx(20.0, rel=0.05)


def test_the_time_has_bounds_and_is_computed_once_a_step():
    drain = Drain()
    assert drain.wait_s(waiting(9, num_new=999), Lengths(), step=1) == LEAST_S, "nothing is known of the rate yet"
    drain.begin(0.0)
    drain.note(1.0, 1.0)
    assert drain.wait_s(waiting(9, num_new=999), Lengths(), step=1) == LEAST_S
    assert drain.wait_s(waiting(9, num_new=999), Lengths(), step=2) == MOST_S
    assert drain.wait_s([], Lengths(), step=3) == LEAST_S


def test_the_scheduler_counts_running_waiting_and_blocked_sequences():
    now_s = 0.0
    runner = PlanRunner(max_running=1, prefill_chunk=16)
    runner.scheduler.clock = lambda: now_s
    for _ in range(3):  # two of them are blocked on the first
        seq = runner.add(list(range(64)))
        seq.max_new = seq.min_new = 0
    for _ in range(2):
        now_s += 4.0
        runner.step()
    assert runner.scheduler.num_waiting == 2
    # Two prompts of 64 tokens are left and 32 of the first, each token at 1/32; two steps of 16 took 4 s each.
    work, rate = (64 + 64 + 32) / 32, (16 + 16) / 32 / 8.0
    assert runner.scheduler.drained_in_s() == pytest.approx(work / rate, rel=0.1)
