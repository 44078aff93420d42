"""The number of replicas on made series of arrivals, and what is started, drained and ended for it."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from phloem.cluster.autoscale import (
    Autoscaler,
    ReplicaWork,
    ScalingSettings,
    ScalingSteps,
    last_step,
    steps_to,
    work_s,
)
from phloem.cluster.loads import Rates
from phloem.protocol.errors import InvalidParams

LOOK_S, START_S = 5.0, 60.0
SETTINGS = ScalingSettings(start_s=START_S, max_replicas=20, busy=0.7)


def numbers_of(seed: int) -> np.random.RandomState:
    """Those of ``random.Random(seed)``, many at a time."""
    _, words, _ = random.Random(seed).getstate()
    made = np.random.RandomState()
    made.set_state(("MT19937", words[:-1], words[-1]))
    return made


class Fluid:
    """Replicas that work off a queue at one second of work a second each, and start in ``START_S``."""

    def __init__(self, rate: Callable[[float], float], *, seed: int | None = None, settings=SETTINGS) -> None:
        self.scaler = Autoscaler(settings)
        self.rate = rate  # programs of one second's work, per second
        self.rng = None if seed is None else numbers_of(seed)
        self.queue_s = self.now_s = self.fraction = 0.0
        self.ready_at_s = [0.0]
        self.wanted: list[int] = []
        self.waits_s: list[float] = []

    def run(self, until_s: float) -> "Fluid":
        while self.now_s < until_s:
            self.look()
        return self

    def look(self) -> None:
        mean = self.rate(self.now_s) * LOOK_S
        if self.rng is None:
            self.fraction += mean
            arrived, self.fraction = int(self.fraction), self.fraction % 1
        else:
            arrived = int((self.rng.random_sample(1000) < mean / 1000).sum())
        for _ in range(arrived):
            self.scaler.arrived("one", self.now_s)
            self.scaler.ended("one", 1.0)
        self.now_s += LOOK_S
        ready = sum(at <= self.now_s for at in self.ready_at_s)
        self.queue_s = max(self.queue_s + arrived - ready * LOOK_S, 0.0)
        self.waits_s.append(self.queue_s / ready)
        ready_in_s = [max(at - self.now_s, 0.0) for at in self.ready_at_s]
        wanted = self.scaler.wanted(self.now_s, waiting={"one": round(self.queue_s)}, ready_in_s=ready_in_s)
        self.ready_at_s += [self.now_s + START_S] * (wanted - len(self.ready_at_s))
        self.ready_at_s = sorted(self.ready_at_s)[:wanted]
        self.wanted.append(wanted)

    def turns(self) -> int:
        """How often the number changed its direction."""
        changes = [b - a for a, b in pairwise(self.wanted) if a != b]
        return sum((a > 0) != (b > 0) for a, b in pairwise(changes))


def test_a_steady_load_has_the_replicas_that_it_keeps_busy_and_no_others():
    found = Fluid(lambda now_s: 4.2).run(1800)
    assert found.wanted[-1] == math.ceil(4.2 / SETTINGS.busy) and max(found.waits_s[120:]) == 0
    assert found.turns() <= 1  # down from what the queue of the first minute needed


@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_of_a_steady_rate_do_not_make_it_swing(seed):
    found = Fluid(lambda now_s: 5.0, seed=seed).run(7200)
    later = found.wanted[240:]
    assert max(found.waits_s[60:]) < SETTINGS.goal_s
    assert sum(a != b for a, b in pairwise(later)) <= 4, later
    assert min(later) >= 8 and max(later) <= 11


def test_after_a_step_the_queue_is_gone_within_the_goal_of_the_start():
    found = Fluid(lambda now_s: 2.0 if now_s < 1200 else 6.0).run(3000)
    grown = next(i for i, wanted in enumerate(found.wanted) if i * LOOK_S >= 1200 and wanted >= 9) * LOOK_S
    assert grown <= 1200 + 20
    late = [i * LOOK_S for i, wait_s in enumerate(found.waits_s) if i * LOOK_S > 1200 and wait_s > 0]
    assert late and max(late) <= grown + START_S + SETTINGS.goal_s
    assert found.wanted[-1] == 10 and found.turns() <= 3


@pytest.mark.parametrize("seed", range(3))
def test_after_a_random_step_the_number_does_not_swing(seed):
    found = Fluid(lambda now_s: 2.0 if now_s < 1200 else 6.0, seed=seed).run(7200)
    later = found.wanted[int(1260 / LOOK_S) :]
    changes = [b - a for a, b in pairwise(later) if a != b]
    assert sum((a > 0) != (b > 0) for a, b in pairwise(changes)) <= 1, changes
    assert 9 <= later[-1] <= 11


def test_programs_that_come_all_at_once_are_no_step():
    steady = [5.0, 4.0, 6.0, 5.0, 3.0, 7.0, 5.0, 5.0, 4.0, 6.0]
    assert last_step(np.array([*steady, 5.0, 90.0, 5.0])) == 0
    assert last_step(np.array([*steady, 5.0, 4.0, 90.0])) == 0
    assert last_step(np.array([*steady, 5.0, 24.0, 26.0, 25.0])) == 11
    assert last_step(np.array([25.0, 24.0, *steady, *steady])) == 0  # too few before
    assert last_step(np.array([*(5 * x for x in steady), *steady])) == 10  # down
    assert last_step(np.zeros(12)) == last_step(np.zeros(0)) == 0


def test_on_a_ramp_replicas_are_there_before_they_are_needed():
    found = Fluid(lambda now_s: 2.0 + max(now_s - 600, 0) / 200).run(2400)
    assert max(found.waits_s[60:]) == 0 and found.wanted[-1] >= 11 / SETTINGS.busy


@pytest.mark.parametrize("seed", range(3))
def test_on_a_day_curve_nobody_waits_long_and_the_number_turns_at_noon_and_midnight(seed):
    day_s = 14_400
    found = Fluid(lambda now_s: 5 - 4 * math.cos(2 * math.pi * now_s / day_s), seed=seed).run(2 * day_s)
    assert max(found.waits_s[60:]) < SETTINGS.goal_s
    assert max(found.wanted) >= 9 / SETTINGS.busy and min(found.wanted[len(found.wanted) // 3 :]) <= 4
    at_need = 5 / SETTINGS.busy * len(found.wanted)
    assert sum(found.wanted) < 1.35 * at_need
    assert found.turns() <= 7


def test_a_burst_brings_replicas_for_its_queue_which_stay_for_the_calm_time_alone():
    found = Fluid(lambda now_s: 20.0 if 600 <= now_s < 630 else 1.0).run(2400)
    before, after = found.wanted[100], found.wanted[-1]
    assert max(found.wanted) > 3 * before and after == before
    peak = [i * LOOK_S for i, wanted in enumerate(found.wanted) if wanted > before]
    assert peak[-1] <= 630 + SETTINGS.window_s + START_S + SETTINGS.calm_s + 2 * LOOK_S


def test_a_queue_counts_by_the_work_of_its_kinds():
    scaler = Autoscaler(SETTINGS)
    for _ in range(10):
        scaler.ended("title", 0.1)
        scaler.ended("report", 10.0)
    assert scaler.work_of({"title": 20, "report": 2}) == pytest.approx(22.0)
    assert 20 < scaler.work_of({"unknown": 5}) < 30  # the mean of all
    few = scaler.wanted(1.0, waiting={"title": 50}, ready_in_s=[0.0])
    many = scaler.wanted(2.0, waiting={"report": 50}, ready_in_s=[0.0])
    assert (few, many) == (1, math.ceil((500 - START_S) / SETTINGS.goal_s))


def test_replicas_that_start_are_counted_by_what_they_will_have_done():
    asked = {"waiting": {"one": 120}}
    assert Autoscaler(SETTINGS).wanted(0.0, ready_in_s=[0.0], **asked) == 2
    assert Autoscaler(SETTINGS).wanted(0.0, ready_in_s=[0.0, 10.0], **asked) == 1
    assert Autoscaler(SETTINGS).wanted(0.0, ready_in_s=[], **asked) == 4


def test_work_is_the_prompt_and_a_share_of_each_step():
    rates = Rates(prefill_s_per_token=0.001, step_s=0.08, row_s=0.01)
    assert work_s(rates, computed=100, output_tokens=10, batch=8) == pytest.approx(0.1 + 10 * 0.02)


def test_a_replica_ends_only_when_it_was_drained_and_is_empty():
    ready = {name: ReplicaWork("ready", n) for name, n in (("a", 3), ("b", 0), ("c", 1))}
    assert steps_to(1, ready) == ScalingSteps(drain=("b", "c"))
    drained = ready | {"b": ReplicaWork("draining", 0), "c": ReplicaWork("draining", 1)}
    assert steps_to(1, drained) == ScalingSteps(end=("b",))
    assert steps_to(2, drained) == ScalingSteps(resume=("c",), end=("b",))
    assert steps_to(5, drained) == ScalingSteps(start=2, resume=("c", "b"))
    starting = {"a": ReplicaWork("ready", 0), "new": ReplicaWork("starting")}
    assert steps_to(1, starting) == ScalingSteps(drain=("new",))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"busy": 1.5}, "busy=1.5: a replica is busy for at most 1, all of its time"),
        ({"goal_s": 0}, "goal_s=0: it must be more than 0"),
        ({"calm_s": -1}, "calm_s=-1: it must be 0 or more"),
        ({"min_replicas": 9, "max_replicas": 3}, "min_replicas=9: it must be 1 to max_replicas, which is 3"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(InvalidParams, match=message):
        ScalingSettings(start_s=1.0, **wrong)
