"""Rules for the number of replicas, compared on a simulated fleet: a day's curve of arrivals, a step and a burst.

    python -m benchmarks.autoscale_sim [--save] [--quick] [--trace NAME] [--seed N] [--rule NAME]

Each engine is one L40S that runs an 8-billion-parameter model with eight rows; ``runtime.planning`` predicts its step
times. It takes programs ``START_S`` after it was ordered. A day is two hours long. Rules:

    ours       ``cluster.autoscale``: the work that waits, by kind of program, and the line through the arrivals
    queue N    Ray Serve's default: running and waiting calls, averaged over 30 s, divided by N; up when that was so for
               30 s, down when it was so for 600 s
    fixed N    N replicas all the time

Replica-hours count from the order of a replica. A turn is an order after a drain or a drain after an order.
"""

import argparse
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from phloem.cluster.autoscale import Autoscaler, ScalingSettings, work_s
from phloem.cluster.simulate import FleetRule, FleetShape, FleetSimulation, ReplicaRule
from phloem.cluster.step_clock import StepClock
from phloem.cluster.traces import TimedCall, Trace

from . import RESULTS, print_header, save
from .fleet_sim import NUM_SLOTS, at_share, step_clock
from .traces import mixed

LOOK_S, START_S, MAX_REPLICAS, ROWS = 5.0, 60.0, 12, 8
DAY_S = 7200.0
GOAL_S = 10.0  # of the 99th percentile of the time to the first token


def trace_of(name: str, *, scale: float, seed: int = 1) -> Trace:
    """Programs of three kinds that arrive by a curve: calls per second over the time."""
    end_s = DAY_S * scale
    times = np.linspace(0.0, end_s, 10_000)
    match name:
        case "day":
            curve = 0.8 + 5.2 * (1 - np.cos(2 * np.pi * times / end_s)) / 2
        case "step":
            curve = np.where(times < end_s / 3, 1.0, 5.0)
        case "burst":
            curve = np.where((times > end_s / 3) & (times < end_s / 3 + 60), 12.0, 1.0)
        case _:
            raise ValueError(f"trace={name!r} is not one of: {', '.join(TRACES)}")
    expected = np.concatenate(([0.0], np.cumsum((curve[1:] + curve[:-1]) / 2 * np.diff(times))))
    made = mixed(int(1.1 * expected[-1]), 1.0, random.Random(seed))
    programs = [program for program in made.programs if program.start_s < expected[-1]]
    for program in programs:  # arrivals of rate 1, moved to where the curve has as many
        program.start_s = float(np.interp(program.start_s, expected, times))
    return Trace(name, made.paths, programs)


TRACES = ("day", "step", "burst")


OURS = ScalingSettings(start_s=START_S, max_replicas=MAX_REPLICAS)


class OurRule:
    look_s = LOOK_S

    def __init__(self, clock: StepClock, settings: ScalingSettings = OURS) -> None:
        self.scaler = Autoscaler(settings)
        self.start_s = settings.start_s
        self._rates = clock.rates()

    def arrived(self, call: TimedCall, now_s: float) -> None:
        self.scaler.arrived(call.program.kind, now_s)

    def ended(self, call: TimedCall, now_s: float) -> None:
        took_s = work_s(self._rates, computed=call.computed, output_tokens=call.num_new, batch=ROWS)
        self.scaler.ended(call.program.kind, took_s)

    def wanted(
        self, now_s: float, *, waiting: Mapping[str, int], ready_in_s: Sequence[float], running: Mapping[str, int]
    ) -> int:
        return self.scaler.wanted(now_s, waiting=waiting, ready_in_s=ready_in_s)


class QueueDepth:
    """The rule of Ray Serve's default policy, with its default delays."""

    look_s, start_s = LOOK_S, START_S

    def __init__(self, target: float, *, up_s: float = 30.0, down_s: float = 600.0, mean_s: float = 30.0) -> None:
        self.target, self.up_s, self.down_s = target, up_s, down_s
        self._counts: deque[int] = deque(maxlen=round(mean_s / LOOK_S))
        self._since_s = 0.0
        self._direction = 0

    def arrived(self, call: TimedCall, now_s: float) -> None: ...
    def ended(self, call: TimedCall, now_s: float) -> None: ...

    def wanted(
        self, now_s: float, *, waiting: Mapping[str, int], ready_in_s: Sequence[float], running: Mapping[str, int]
    ) -> int:
        self._counts.append(sum(running.values()))
        present = len(ready_in_s)
        mean = sum(self._counts) / len(self._counts)
        wanted = min(max(1, math.ceil(mean / self.target)), MAX_REPLICAS)
        direction = (wanted > present) - (wanted < present)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        delay_s = {1: self.up_s, -1: self.down_s, 0: math.inf}[direction]
        if now_s - self._since_s < delay_s:
            return present
        self._since_s = now_s
        return wanted


class Fixed(QueueDepth):
    def wanted(
        self, now_s: float, *, waiting: Mapping[str, int], ready_in_s: Sequence[float], running: Mapping[str, int]
    ) -> int:
        return int(self.target)


RULES = ("ours", *(f"queue {n}" for n in (2, 3, 4, 5, 6)), "fixed 6", "fixed 9")


def rule_of(name: str, clock: StepClock) -> ReplicaRule:
    kind, _, number = name.partition(" ")
    match kind:
        case "ours":
            return OurRule(clock)
        case "queue":
            return QueueDepth(float(number))
    return Fixed(float(number))


def run(trace: Trace, rule: ReplicaRule, clock: StepClock) -> dict[str, Any]:
    shape = FleetShape(MAX_REPLICAS, NUM_SLOTS, max_running=ROWS)
    made = FleetSimulation(trace, FleetRule(), shape, clock, scaling=rule).run()
    first = sorted(call.first_s - call.arrival_s for call in made.calls)
    numbers = [wanted for _, wanted in made.wanted]
    changes = [b - a for a, b in itertools.pairwise(numbers) if a != b]
    return {
        "calls": len(made.calls),
        "unfinished": sum(len(program.calls) for program in trace.programs) - len(made.calls),
        "ttft_p50_s": at_share(first, 0.5),
        "ttft_p99_s": at_share(first, 0.99),
        "ttft_max_s": first[-1],
        "over_goal": sum(one > GOAL_S for one in first) / len(first),
        "replica_hours": made.paid_s / 3600,
        "most": max(numbers),
        "changes": len(changes),
        "turns": sum((a > 0) != (b > 0) for a, b in itertools.pairwise(changes)),
        "moved": made.num_replayed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a tenth of each trace")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--trace", choices=TRACES, action="append", help="run this trace; may be repeated")
    parser.add_argument("--seed", type=int, action="append", help="draw the arrivals by this seed; may be repeated")
    parser.add_argument("--rule", choices=RULES, action="append", help="this rule; may be repeated")
    options = parser.parse_args()
    about, clock, made = print_header(), step_clock(), {}
    for name, seed in itertools.product(options.trace or TRACES, options.seed or (1,)):
        print(
            f"\n{name}, seed {seed}\n"
            f"  {'':10}{'calls':>7}{'p50':>8}{'p99':>8}{'most':>8}{'over goal':>11}{'hours':>7}{'most':>6}"
            f"{'changes':>9}{'turns':>7}{'moved':>7}{'CPU':>7}"
        )
        for rule_name in options.rule or RULES:
            start_s = time.process_time()
            trace = trace_of(name, scale=0.1 if options.quick else 1.0, seed=seed)
            made[f"{name}, {rule_name}, seed {seed}"] = found = run(trace, rule_of(rule_name, clock), clock)
            print(
                f"  {rule_name:10}{found['calls']:7,}{found['ttft_p50_s']:7.2f}s{found['ttft_p99_s']:7.2f}s"
                f"{found['ttft_max_s']:7.1f}s{found['over_goal']:11.2%}{found['replica_hours']:7.1f}{found['most']:6}"
                f"{found['changes']:9}{found['turns']:7}{found['moved']:7}{time.process_time() - start_s:6.1f}s",
                flush=True,
            )
    if options.save:
        save(RESULTS / "autoscale_sim.json", {**about, "goal_s": GOAL_S, "figures": made})


if __name__ == "__main__":
    main()
