"""What moving running programs to engines with less to do is worth, in the simulator: equal traces with and without.

    python -m benchmarks.rebalance_sim [--seeds 1 2 ...] [--rate 5] [--trace NAME] [--save]

``hot prefix``: the trace of ``fleet_sim``, on 8 engines of an 8-billion-parameter model on an L40S with 64 rows.
``uneven``: single calls of one function whose outputs have lengths by a law with a heavy tail (a tenth is 20 times as
long as the others), on 4 of these engines with 8 rows; ``uneven, CPU``: fewer of them on 4 engines whose step times are
those that ``fleet_steps`` has measured on a CPU. ``burst``: the same lengths, and half of the calls come in three
bursts. ``an engine returns``: as ``uneven``, and one engine is dead for 30 seconds. KV is copied at ``--rate`` GB/s on
GPUs, and at a quarter of a prompt token's time on the CPU.

Latency: from the arrival of a call to its last token. Back: programs that moved away from an engine and back to it.
"""

import argparse
import json
import random
from collections.abc import Callable
from typing import Any

from phloem.cluster.simulate import EngineFault, FleetRule, FleetRun, FleetShape, FleetSimulation
from phloem.cluster.step_clock import StepClock
from phloem.cluster.traces import Paths, Trace

from . import RESULTS, print_header, save
from .fleet_sim import at_share, hot_prefix, step_clock
from .fleet_steps import as_times
from .roles_sim import KV_BYTES
from .traces import _arrivals, _length

SHORT, LONG, LONG_SHARE = 60, 1200, 0.1  # tokens of output
MOST = 4  # programs on their way at once


def uneven(n: int, rate: float, rng: random.Random, *, bursts: int = 0) -> Trace:
    """Calls of one function; half of them come at once in each of ``bursts`` moments."""
    paths, programs = Paths(), []
    last_s = n / rate
    for i, program in enumerate(_arrivals("uneven", n, rate, rng)):
        if bursts and i % 2:
            program.start_s = last_s * (1 + i % bursts) / (bursts + 1)
        program.kind = "uneven"
        path = paths.add(paths.add((), "instruction", 200), f"{i} text", _length(rng, 300))
        program.call(paths, 0, path, _length(rng, LONG if rng.random() < LONG_SHARE else SHORT))
        programs.append(program)
    return Trace("uneven", paths, sorted(programs, key=lambda program: program.start_s))


def burst(n: int, rate: float, rng: random.Random) -> Trace:
    return uneven(n, rate, rng, bursts=3)


def cpu_clock() -> StepClock:
    figures = json.loads((RESULTS / "fleet_steps.json").read_text())["figures"]
    return StepClock.measured(as_times(figures).steps)


RETURNS = "an engine returns"
FAULT = EngineFault(0, 20.0, 30.0, "dies")
# name: (trace, calls, calls a second, engines, clock)
CASES: dict[
    str, tuple[Callable[[int, float, random.Random], Trace], int, float, FleetShape, Callable[[], StepClock]]
] = {
    "hot prefix": (hot_prefix, 2400, 48.0, FleetShape(8, 60_000), step_clock),
    "uneven": (uneven, 800, 6.5, FleetShape(4, 60_000, max_running=8), step_clock),
    "uneven, CPU": (uneven, 400, 6.0, FleetShape(4, 30_000, max_running=8, prefill_chunk=256), cpu_clock),
    RETURNS: (uneven, 600, 6.5, FleetShape(4, 60_000, max_running=8), step_clock),
    "burst": (burst, 400, 3.0, FleetShape(4, 60_000, max_running=8), step_clock),
}


def figures(runs: list[FleetRun]) -> dict[str, Any]:
    latency = sorted(call.end_s - call.arrival_s for run in runs for call in run.calls)
    first = sorted(call.first_s - call.arrival_s for run in runs for call in run.calls)
    return {
        "calls": len(latency),
        "latency_mean_s": round(sum(latency) / len(latency), 3),
        "latency_p50_s": round(at_share(latency, 0.5), 3),
        "latency_p99_s": round(at_share(latency, 0.99), 3),
        "ttft_p99_s": round(at_share(first, 0.99), 3),
        "end_s": round(max(run.end_s for run in runs), 1),
        "busy": round(sum(sum(run.busy_s) / len(run.busy_s) / run.end_s for run in runs) / len(runs), 3),
        "moves": sum(len(run.shifts) for run in runs),
        "most_moves_of_one": max((most_moves(run) for run in runs), default=0),
        "back": sum(num_back(run) for run in runs),
    }


def routes(run: FleetRun) -> dict[str, list[str]]:
    """The engines of each program that moved, in order."""
    found: dict[str, list[str]] = {}
    for _, shift in run.shifts:
        found.setdefault(shift.program, [shift.source]).append(shift.target)
    return found


def most_moves(run: FleetRun) -> int:
    return max((len(route) - 1 for route in routes(run).values()), default=0)


def num_back(run: FleetRun) -> int:
    return sum(len(set(route)) < len(route) for route in routes(run).values())


def measure(name: str, seeds: list[int], gbytes_s: float) -> list[dict[str, Any]]:
    make, n, rate, shape, make_clock = CASES[name]
    clock = make_clock()
    copy_s = clock.rates().prefill_s_per_token / 4 if make_clock is cpu_clock else KV_BYTES / (gbytes_s * 1e9)
    rows = []
    for most in (0, MOST):
        runs = []
        for seed in seeds:
            rule = FleetRule(seed=seed, copy_s_per_token=copy_s, max_rebalanced=most)
            trace, faults = make(n, rate, random.Random(seed)), [FAULT] if name == RETURNS else []
            runs.append(FleetSimulation(trace, rule, shape, clock, faults=faults).run())
        rows.append({"trace": name, "max_rebalanced": most, **figures(runs)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--rate", type=float, default=5.0, help="GB/s")
    parser.add_argument("--trace", choices=CASES, action="append", help="run this one; may be repeated")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    args = parser.parse_args()
    about = print_header()
    made = [row for name in args.trace or CASES for row in measure(name, args.seeds, args.rate)]
    if args.save:
        save(RESULTS / "rebalance_sim.json", {**about, "runs": made})


if __name__ == "__main__":
    main()
