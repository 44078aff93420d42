"""The scheduler's orders compared on calls of very different lengths: seconds from arrival to end.

    python -m benchmarks.scheduler_orders [--quick] [--save] [--load X]

The simulation of ``benchmarks.scheduler_sim`` runs the real scheduler and cache on calls of ``traces.mixed``.
``known``: each call states its number of tokens. ``predicted``: each call states 8,192 as its bound, and the scheduler
learns lengths by program. Rows are scarce in one run (16 rows, slots for all), slots in the other (64 rows).
"""

import argparse
import random
import statistics
from typing import Any

from . import RESULTS, print_header, save
from .scheduler_sim import Setting, Simulation, hit_rate
from .traces import mixed

SETTINGS = (
    Setting("first come", "program_aware", "first_come", 1, True, "unknown"),
    Setting("oldest program", "program_aware", "oldest_program", 1, True, "unknown"),
    Setting("shortest, predicted", "program_aware", "shortest", 1, True, "unknown"),
    Setting("shortest, known", "program_aware", "shortest", 1, True, "known"),
    Setting("shortest remaining, predicted", "program_aware", "shortest_remaining", 1, True, "unknown"),
    Setting("shortest remaining, known", "program_aware", "shortest_remaining", 1, True, "known"),
)
NUM_CALLS, CALLS_PER_S = 3000, 9.0
POOLS = {"rows": (16, 200_000), "slots": (64, 12_000)}  # the scarce resource: (rows, slots)


def figures(simulation: Simulation) -> dict[str, Any]:
    calls = simulation.arrived
    took_s = sorted(call.end_s - call.arrival_s for call in calls)
    by_kind: dict[str, list[float]] = {}
    for call in calls:
        by_kind.setdefault(call.program.kind, []).append(call.end_s - call.arrival_s)
    counters = simulation.scheduler.counters
    return {
        "mean_s": statistics.mean(took_s),
        "p50_s": took_s[len(took_s) // 2],
        "p99_s": took_s[int(0.99 * len(took_s))],
        "max_s": took_s[-1],
        "mean_s_by_kind": {kind: statistics.mean(values) for kind, values in sorted(by_kind.items())},
        "hit_rate": hit_rate(calls),
        "preemptions": counters.num_preemptions,
        "yields": counters.num_yields,
        "makespan_s": simulation.now_s,
    }


def compare(pool: str, *, num_calls: int, rate: float) -> dict[str, Any]:
    max_running, num_slots = POOLS[pool]
    print(f"\n{pool} are short: {num_calls:,} calls, {rate:g} a second, {max_running} rows, {num_slots:,} slots")
    print(f"  {'':30}{'mean':>8}{'p50':>8}{'p99':>8}{'max':>8}{'title':>8}{'answer':>8}{'report':>8}{'yields':>8}")
    made = {}
    for setting in SETTINGS:
        trace = mixed(num_calls, rate, random.Random(1))
        simulation = Simulation(trace, setting, num_slots, max_running=max_running)
        simulation.run()
        f = made[setting.name] = figures(simulation)
        kinds = "".join(f"{f['mean_s_by_kind'][kind]:7.1f}s" for kind in ("title", "answer", "report"))
        print(
            f"  {setting.name:30}{f['mean_s']:7.1f}s{f['p50_s']:7.1f}s{f['p99_s']:7.1f}s{f['max_s']:7.1f}s{kinds}"
            f"{f['yields']:8}",
            flush=True,
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_orders", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run a tenth of the calls")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--load", type=float, default=1.0, help="factor for the arrival rate")
    options = parser.parse_args()
    about = print_header()
    num_calls = NUM_CALLS // 10 if options.quick else NUM_CALLS
    made = {pool: compare(pool, num_calls=num_calls, rate=CALLS_PER_S * options.load) for pool in POOLS}
    if options.save:
        save(RESULTS / "scheduler_orders.json", {**about, "load": options.load, "figures": made})


if __name__ == "__main__":
    main()
