"""Placement rules compared on a simulated fleet, without a model: equal traces, engines and predicted step times.

    python -m benchmarks.fleet_sim [--quick] [--save] [--trace NAME] [--engines N]
    python -m benchmarks.fleet_sim --hour [--save]          1,000 engines and an hour of a trace

Each engine is one L40S that runs an 8-billion-parameter model with 16-bit weights; ``runtime.planning`` predicts its
step times. Hit rate: the share of prompt tokens that a cache held. ``pooled``: one cache with the slots of all engines
serves the same calls one after another. Load: the busiest engine's seconds of work, divided by the mean. Latency: from
the arrival of a call to its last token.

Rules: ``ours`` places programs (``cluster.placement``). The others place each call as an independent request, as
gateways do: round robin; fewest running requests; longest prefix; and the rule of SGLang's gateway. That rule picks the
engine with the longest prefix if the prefix covers 30% of the prompt, else the engine that was sent the fewest tokens.
While the numbers of running requests differ by 64 and by a factor of 1.5, it picks the engine with the fewest. The
other rules read cache contents from our index, which is exact; real gateways estimate them.
"""

import argparse
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phloem.cluster.index import CacheIndex
from phloem.cluster.loads import Rates
from phloem.cluster.simulate import (
    Ask,
    EngineFault,
    FleetRule,
    FleetRun,
    FleetShape,
    FleetSimulation,
    PlacementRule,
    pooled_hit_rate,
)
from phloem.cluster.step_clock import StepClock
from phloem.cluster.traces import Paths, TimedCall, Trace, read_mooncake
from phloem.runtime.planning import HARDWARE, SHAPES

from . import RESULTS, print_header, save
from .traces import _arrivals, _length, agents, chat, few_shot, http_chat, rag, tree_of_thought

NUM_SLOTS = 60_000
SIZES = {8: 1.0, 64: 0.25}  # number of engines -> the share of each trace's programs that an engine gets
# Where caches are equal, rules differ by less than the draws of a trace do, and the end of a short trace leaves some
# engines idle: this trace is run whole, and with 8 engines its calls are those of several draws.
WHOLE, DRAWS = {"hot_prefix"}, {("hot_prefix", 8): 8}
HIT_BAR, LOAD_BAR, HOUR_BAR_S = 0.95, 1.2, 600.0
HIT_TRACES = ("chat", "agents", "few_shot")
MOONCAKE = Path(__file__).parent / "data" / "mooncake_sample.jsonl"


def hot_prefix(n: int, rate: float, rng: random.Random) -> Trace:
    """Single questions that share one prompt of 3,000 tokens."""
    paths, programs = Paths(), []
    for i, program in enumerate(_arrivals("hot", n, rate, rng)):
        path = paths.add(paths.add((), "hot", 3000), f"question {i}", _length(rng, 80))
        program.call(paths, 0, path, _length(rng, 100))
        programs.append(program)
    return Trace("hot_prefix", paths, programs)


def mooncake(n: int, rate: float, rng: random.Random) -> Trace:
    """Our sample in Mooncake's format: 400 calls in four minutes, copied with more users until it has ``n`` calls."""
    return read_mooncake(MOONCAKE, copies=max(1, n // 400))


# name: (generator, programs per engine, programs per second and engine)
TRACES: dict[str, tuple[Callable[[int, float, random.Random], Trace], int, float]] = {
    "chat": (chat, 80, 1.0),
    "http_chat": (http_chat, 80, 1.0),
    "agents": (agents, 60, 0.7),
    "few_shot": (few_shot, 400, 12.0),
    "rag": (rag, 200, 4.0),
    "tree_of_thought": (tree_of_thought, 20, 0.35),
    "hot_prefix": (hot_prefix, 300, 6.0),
    "mooncake": (mooncake, 200, 0.0),
    "chat_faults": (chat, 80, 1.0),
}
# In "chat_faults" one engine is down for 20 s, another is four times slower for 30 s, and every engine loses a fifth of
# its cache events.
DIES, SLOW = EngineFault(0, 30.0, 20.0, "dies"), EngineFault(1, 20.0, 30.0, "slow", slowness=4.0)
EVENT_LOSS = 0.2


@dataclass
class RoundRobin:
    """Each call goes to the next engine."""

    index: CacheIndex | None = None
    keeps_programs: bool = False
    engines: list[str] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_placed: int = 0

    def join(self, engine: str, rates: Rates, max_rows: int) -> None:
        self.engines.append(engine)
        self.running[engine] = self.sent[engine] = 0

    def leave(self, engine: str) -> None:
        self.engines.remove(engine)
        del self.running[engine], self.sent[engine]
        if self.index is not None:
            self.index.remove(engine)

    def place(self, ask: Ask, now_s: float) -> str:
        engine = self.choose(ask)
        self.num_placed += 1
        self.running[engine] += 1
        self.sent[engine] += len(ask.tokens)
        return engine

    def ended(self, call: TimedCall, engine: str, now_s: float, *, is_done: bool) -> None:
        if engine in self.running:
            self.running[engine] -= 1

    def choose(self, ask: Ask) -> str:
        return self.engines[self.num_placed % len(self.engines)]

    def least_loaded(self, among: list[str] | None = None) -> str:
        among = among or self.engines
        least = min(self.running[engine] for engine in among)
        return self.rng.choice([engine for engine in among if self.running[engine] == least])


class LeastLoaded(RoundRobin):
    """The engine with the fewest running requests."""

    def choose(self, ask: Ask) -> str:
        return self.least_loaded()


@dataclass
class PureAffinity(RoundRobin):
    """The engine with the longest cached prefix; among equals, the one with the fewest requests."""

    index: CacheIndex | None = field(default_factory=CacheIndex)

    def choose(self, ask: Ask) -> str:
        assert self.index is not None
        matches = self.index.match(ask.names)
        most = max((match.tokens for match in matches.values()), default=0)
        return self.least_loaded([engine for engine, match in matches.items() if match.tokens == most])


@dataclass
class Sglang(RoundRobin):
    """The rule of SGLang's gateway."""

    index: CacheIndex | None = field(default_factory=CacheIndex)

    def choose(self, ask: Ask) -> str:
        assert self.index is not None
        low, high = min(self.running.values()), max(self.running.values())
        if high - low > 64 and high > 1.5 * low:
            return self.least_loaded()
        matches = self.index.match(ask.names)
        most = max((match.tokens for match in matches.values()), default=0)
        if most >= 0.3 * len(ask.tokens):
            return self.least_loaded([engine for engine, match in matches.items() if match.tokens == most])
        return min(self.engines, key=self.sent.__getitem__)


RULES: dict[str, Callable[[], PlacementRule]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "pure affinity": PureAffinity,
    "sglang": Sglang,
    "ours": FleetRule,
}


def step_clock() -> StepClock:
    return StepClock.planned(replace(SHAPES["llama-3.1-8b"], weight_bits=16), HARDWARE["l40s"])


def figures(*runs: FleetRun) -> dict[str, Any]:
    """Of the calls of all runs. ``load`` is the greatest of theirs, ``busy`` their mean."""
    calls = [call for run in runs for call in run.calls]
    latency = sorted(call.end_s - call.arrival_s for call in calls)
    first = sorted(call.first_s - call.arrival_s for call in calls)
    spans: dict[tuple[int, str], tuple[float, float]] = {}
    reasons: Counter[str] = Counter()
    for number, run in enumerate(runs):
        reasons.update(run.reasons)
        for call in run.calls:
            begun, ended = spans.get((number, call.program.name), (call.arrival_s, call.end_s))
            spans[number, call.program.name] = (min(begun, call.arrival_s), max(ended, call.end_s))
    programs = sorted(ended - begun for begun, ended in spans.values())
    mean_busy_s = [sum(run.busy_s) / len(run.busy_s) for run in runs]
    return {
        "calls": len(calls),
        "hit_rate": 1 - sum(call.computed for call in calls) / sum(call.prompt_len for call in calls),
        "latency_mean_s": sum(latency) / len(latency),
        "latency_p50_s": at_share(latency, 0.5),
        "latency_p99_s": at_share(latency, 0.99),
        "ttft_p50_s": at_share(first, 0.5),
        "ttft_p99_s": at_share(first, 0.99),
        "program_p99_s": at_share(programs, 0.99),
        "load": max(max(run.busy_s) / mean_s for run, mean_s in zip(runs, mean_busy_s, strict=True)),
        "busy": sum(mean_s / run.end_s for run, mean_s in zip(runs, mean_busy_s, strict=True)) / len(runs),
        "replayed": sum(run.num_replayed for run in runs),
        "reasons": dict(reasons),
    }


def at_share(ascending: list[float], share: float) -> float:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)]


def compare(name: str, num_engines: int, *, scale: float) -> dict[str, Any]:
    make, n, rate = TRACES[name]
    clock, shape = step_clock(), FleetShape(num_engines, NUM_SLOTS)
    faults: list[EngineFault] = []
    if name == "chat_faults":
        faults = [EngineFault(i, 0.0, 1e4, "loses_events", loss=EVENT_LOSS) for i in range(num_engines)]
        faults += [DIES, SLOW]
    result: dict[str, Any] = {"rules": {}}
    seeds = range(1, 1 + DRAWS.get((name, num_engines), 1))
    for rule, make_rule in RULES.items():
        start_s = time.process_time()
        runs = []
        for seed in seeds:
            trace = make(max(20, int(n * scale * num_engines)), rate * num_engines, random.Random(seed))
            runs.append(FleetSimulation(trace, make_rule(), shape, clock, faults=faults).run())
        made = result["rules"][rule] = {**figures(*runs), "cpu_s": time.process_time() - start_s}
        if "pooled" not in result:
            result["pooled"] = pooled_hit_rate(runs[0].calls, NUM_SLOTS * num_engines)
            title = f"{name}, {num_engines} engines, {len(seeds)} draws: {made['calls']:,} calls"
            print(f"\n{title}, pooled hit rate {result['pooled']:.1%}")
            print(
                f"  {'':15}{'hit':>7}{'of pooled':>11}{'load':>7}{'busy':>7}{'mean':>9}{'p50':>9}{'p99':>9}"
                f"{'TTFT p50':>10}{'p99':>9}{'program p99':>13}{'CPU':>8}"
            )
        made["of_pooled"] = made["hit_rate"] / result["pooled"]
        print(
            f"  {rule:15}{made['hit_rate']:7.1%}{made['of_pooled']:11.1%}{made['load']:7.2f}{made['busy']:7.1%}"
            f"{made['latency_mean_s']:8.2f}s{made['latency_p50_s']:8.2f}s{made['latency_p99_s']:8.2f}s"
            f"{made['ttft_p50_s']:9.3f}s{made['ttft_p99_s']:8.3f}s{made['program_p99_s']:12.1f}s{made['cpu_s']:7.1f}s",
            flush=True,
        )
    return result


def check_bars(made: dict[str, dict[str, Any]]) -> list[str]:
    """The bars missed, by trace and number of engines."""
    faults = []
    for where, result in made.items():
        rules = result["rules"]
        ours = rules["ours"]
        if where.split(",")[0] in HIT_TRACES and ours["of_pooled"] < HIT_BAR:
            faults.append(f"{where}: hit rate {ours['of_pooled']:.1%} of the pooled one, {HIT_BAR:.0%} wanted")
        if where.startswith("hot_prefix,") and ours["load"] > LOAD_BAR:
            faults.append(f"{where}: load {ours['load']:.2f}, at most {LOAD_BAR} wanted")
        for rule, other in rules.items():
            if rule != "ours" and ours["latency_p99_s"] >= other["latency_p99_s"]:
                faults.append(
                    f"{where}: latency p99 {ours['latency_p99_s']:.2f} s, {rule} has {other['latency_p99_s']:.2f} s"
                )
    return faults


def hour(num_engines: int = 1000) -> dict[str, Any]:
    """Simulate an hour of agents on many engines, in one process."""
    rate = 0.004 * num_engines
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    trace = agents(int(3600 * rate), rate, random.Random(1))
    run = FleetSimulation(trace, FleetRule(), FleetShape(num_engines, NUM_SLOTS), step_clock()).run()
    took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    made = {
        **figures(run),
        "engines": num_engines,
        "simulated_s": run.end_s,
        "steps": run.num_steps,
        "events": run.num_events,
        "took_s": took_s,
        "cpu_s": cpu_s,
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(
        f"\n{num_engines:,} engines, {run.end_s:,.0f} s of agents: {made['calls']:,} calls, {run.num_steps:,} steps in "
        f"{run.num_events:,} events: {took_s:.0f} s ({cpu_s:.0f} s of CPU), {made['max_rss_bytes'] / 1e9:.1f} GB; "
        f"hit rate {made['hit_rate']:.1%}, latency p50 {made['latency_p50_s']:.2f} s, "
        f"p99 {made['latency_p99_s']:.2f} s, load {made['load']:.2f}, engines busy {made['busy']:.1%} of the time"
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a quarter of each trace")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--trace", choices=sorted(TRACES), action="append", help="run this trace; may be repeated")
    parser.add_argument("--engines", type=int, action="append", choices=SIZES, help="fleet size; may be repeated")
    parser.add_argument("--hour", action="store_true", help="run the hour on 1,000 engines instead")
    options = parser.parse_args()
    about = print_header()
    made: dict[str, Any] = {}
    if options.hour:
        made["hour"] = hour()
        if options.save:
            save(RESULTS / "fleet_sim_hour.json", {**about, "figures": made})
    else:
        path = RESULTS / "fleet_sim.json"
        before = json.loads(path.read_text())["figures"] if path.exists() else {}  # of traces that are not run now
        for size in options.engines or SIZES:
            for name in options.trace or TRACES:
                scale = (1.0 if name in WHOLE else SIZES[size]) * (0.25 if options.quick else 1.0)
                made[f"{name}, {size}"] = compare(name, size, scale=scale)
                if options.save:
                    save(path, {**about, "figures": before | made})
        print("\nbars missed:", *(check_bars(made) or ["none"]), sep="\n  ")


if __name__ == "__main__":
    main()
