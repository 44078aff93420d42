"""Two real engines against their simulation: the same conversations, in real time and in ``cluster.simulate``.

The simulator takes the machine's step times as ``fleet_steps`` measures them on two engines, with other calls.
Nothing is fitted to the runs that it predicts. Engines do not draft here: the simulator has no drafts.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import phloem
from phloem.cluster.client import FleetClient
from phloem.cluster.simulate import FleetRule, FleetShape, FleetSimulation
from phloem.cluster.step_clock import StepClock, Tapes
from phloem.cluster.traces import Paths, TimedCall, TimedProgram, Trace, tokens_of
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.program_call import OpFailed, ProgramCall, ProgramEvent, SubmitRefused
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig

from .fleet_steps import MachineTimes, Play, measure_steps
from .restart import wait_ready

NUM_ENGINES, NUM_SLOTS, MAX_RUNNING = 2, 32_768, 32
OPTIONS = {"num_slots": NUM_SLOTS, "max_running": MAX_RUNNING, "num_threads": 1, "speculative": "off"}
WARM_UP = 0  # its seed
NUM_DRAWS = 9  # simulated runs of a trace
LIMIT_S = 300.0
WHAT = ("latency", "ttft")


def talks(n: int, rate: float, rng: random.Random) -> Trace:
    """Conversations of 1 to 5 turns below one of 4 system prompts, with 1.5 s of thinking."""
    paths, programs = Paths(), []
    now_s = 0.0
    for i in range(n):
        now_s += rng.expovariate(rate)
        program = TimedProgram(f"talk {i}", now_s, kind="talk")
        path = paths.add((), f"system {rng.randrange(4)}", 300)
        last: tuple[TimedCall, ...] = ()
        for turn in range(rng.randint(1, 5)):
            path = paths.add(path, f"{i} turn {turn}", rng.randint(20, 120))
            delay_s = rng.expovariate(1 / 1.5) if turn else 0.0
            call = program.call(paths, 0, path, rng.randint(16, 96), delay_s=delay_s, after=last)
            path, last = call.output, (call,)
        programs.append(program)
    return Trace("talks", paths, programs)


class RealRun:
    """Plays a trace on a fleet, call by call, and sets the calls' times. Programs have one sequence each."""

    def __init__(self, trace: Trace, fleet: FleetClient, vocab_size: int) -> None:
        self.trace = trace
        self._fleet = fleet
        self._vocab_size = vocab_size
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._num_left = sum(len(program.calls) for program in trace.programs)
        self._num_due = 0
        self._failed: list[str] = []
        self._begun_s = 0.0

    def run(self) -> list[TimedCall]:
        for program in self.trace.programs:
            self._plan(program.start_s, _Talk(self, program).next)
        self._begun_s = time.perf_counter()
        with self._changed:
            while self._num_left and not self._failed:
                now_s = self.now_s
                if now_s > LIMIT_S:
                    raise TimeoutError(f"{self._num_left} calls are not answered after {LIMIT_S:g} s")
                while self._due and self._due[0][0] <= now_s:
                    heapq.heappop(self._due)[2]()
                self._changed.wait(max(0.0, self._due[0][0] - self.now_s) if self._due else 1.0)
        if self._failed:
            raise RuntimeError(self._failed[0])
        return [call for program in self.trace.programs for call in program.calls]

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _plan(self, when_s: float, act: Callable[[], None]) -> None:
        with self._changed:
            self._num_due += 1
            heapq.heappush(self._due, (when_s, self._num_due, act))
            self._changed.notify()

    def begin(self, hear: Callable[[ProgramEvent], None]) -> ProgramCall:
        return ProgramCall(self._fleet, hear)

    def ids(self, call: TimedCall, begin: int) -> tuple[int, ...]:
        """The prompt's tokens from position ``begin`` on, spread over the vocabulary's ordinary tokens."""
        return tuple((1000 + tokens_of(call.prompt)[begin:] * 7919 % (self._vocab_size - 2000)).tolist())

    def ended(self, later: TimedCall | None, act: Callable[[], None]) -> None:
        with self._changed:
            self._num_left -= 1
            self._changed.notify()
        if later is not None:
            self._plan(self.now_s + later.delay_s, act)

    def fail(self, message: object) -> None:
        with self._changed:
            self._failed.append(str(message))
            self._changed.notify()


class _Talk:
    """One program: its calls follow each other on one sequence."""

    def __init__(self, run: RealRun, program: TimedProgram) -> None:
        self._run = run
        self._calls = program.calls
        self._at = -1
        self._length = 0
        self._call: ProgramCall | None = None

    def next(self) -> None:
        self._at += 1
        call = self._calls[self._at]
        call.arrival_s, call.first_s = self._run.now_s, -1.0
        op = 2 * self._at
        params = SamplingParams(temperature=0.0, max_tokens=call.num_new, ignore_eos=True)
        ops: list[o.AnyOp] = [
            o.Special(op=op, seq=0, ids=self._run.ids(call, self._length)),
            o.Gen(op=op + 1, seq=0, params=params, stream=True),
        ]
        if self._at == len(self._calls) - 1:
            ops.append(o.Close(op=op + 2, seq=0))
        self._length = call.prompt_len + call.num_new
        if self._call is None:
            self._call = self._run.begin(self._hear)
        self._call.submit(ops)

    def _hear(self, event: ProgramEvent) -> None:
        call = self._calls[self._at]
        match event:
            case m.Delta() if call.first_s < 0:
                call.first_s = self._run.now_s
            case m.Done(op=op) if op == 2 * self._at + 1:
                call.end_s = self._run.now_s
                is_last = self._at == len(self._calls) - 1
                self._run.ended(None if is_last else self._calls[self._at + 1], self.next)
            case OpFailed() | SubmitRefused():
                self._run.fail(event.error)


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile of ``values``, linear between them."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def figures(calls: Sequence[TimedCall]) -> dict[str, float]:
    times = {
        "latency": [call.end_s - call.arrival_s for call in calls],
        "ttft": [call.first_s - call.arrival_s for call in calls],
    }
    return {f"{what}_p{round(100 * q)}_s": quantile(times[what], q) for what in WHAT for q in (0.5, 0.99)} | {
        "latency_mean_s": sum(times["latency"]) / len(calls)
    }


def simulate(
    make: Callable[[], Trace], times: MachineTimes, tapes: Sequence[Tapes] = ()
) -> tuple[dict[str, float], list[Tapes]]:
    """The median of each figure over runs with different draws among equal engines, and the engines' tapes after one.

    ``tapes``: those of the run before; none: new engines.
    """
    shape = FleetShape(
        NUM_ENGINES,
        NUM_SLOTS,
        max_running=MAX_RUNNING,
        max_step_tokens=EngineConfig("").max_step_tokens,
        prefill_chunk=EngineConfig("").prefill_chunk,
        tape_costs=times.tape_costs,
    )
    made: list[dict[str, float]] = []
    for seed in range(NUM_DRAWS):
        simulation = FleetSimulation(make(), FleetRule(seed=seed), shape, StepClock.measured(times.steps))
        for engine, kept in zip(simulation.engines, tapes, strict=False):
            engine.tapes = copy.deepcopy(kept)
        made.append(figures(simulation.run().calls))
    median = {name: statistics.median(run[name] for run in made) for name in made[0]}
    return median, [engine.tapes for engine in simulation.engines]


def step_times(model: str) -> MachineTimes:
    """Step times of two engines that work at once."""
    with (
        phloem.Runtime(model=model, replicas=1, **OPTIONS) as first,
        phloem.Runtime(model=model, replicas=1, **OPTIONS) as second,
    ):

        def play_on(runtime: phloem.Runtime) -> Play:
            return lambda trace: RealRun(trace, runtime.client, runtime.welcome.vocab_size).run()

        return measure_steps([play_on(first), play_on(second)])


def measure_real(
    model: str, times: MachineTimes, *, num_talks: int, rate: float, seeds: Sequence[int]
) -> dict[str, Any]:
    """Prints and returns, for each seed, the real and the simulated figures."""
    made: dict[str, Any] = {"talks": num_talks, "rate": rate, "seeds": {}}
    print(f"{'seed':>6}{'':12}" + "".join(f"{name:>18}" for name in figures_of_none()))
    with phloem.Runtime(model=model, replicas=NUM_ENGINES, **OPTIONS) as runtime:
        wait_ready(runtime)
        vocab_size = runtime.welcome.vocab_size
        tapes: list[Tapes] = []
        for seed in (WARM_UP, *seeds):  # the warm-up teaches the rates
            num, pace = (6, 4.0) if seed == WARM_UP else (num_talks, rate)

            def make(num: int = num, pace: float = pace, seed: int = seed) -> Trace:
                return talks(num, pace, random.Random(seed))

            runtime.flush_cache()
            calls = RealRun(make(), runtime.client, vocab_size).run()
            simulated, tapes = simulate(make, times, tapes)
            if seed == WARM_UP:
                continue
            real = figures(calls)
            apart = {name: simulated[name] / real[name] - 1 for name in real}
            made["seeds"][str(seed)] = {"calls": len(calls), "real": real, "simulated": simulated, "apart": apart}
            for title, row, form in (("real", real, ".3f"), ("simulated", simulated, ".3f"), ("apart", apart, "+.1%")):
                cells = "".join(f"{format(value, form):>18}" for value in row.values())
                print(f"{seed:6}  {title:10}{cells}", flush=True)
    return made


def figures_of_none() -> list[str]:
    return [*(f"{what} p{q}" for what in WHAT for q in (50, 99)), "latency mean"]
