"""When prefill replicas pay, in the simulator: by the length of prompts, the load, and the rate at which KV is copied.

    python -m benchmarks.roles_sim [--lengths 500 2000 ...] [--busy 0.4 0.7] [--rates 1 5 25] [--calls 400] [--out FILE]

Four engines of an 8-billion-parameter model on an L40S, as in ``fleet_sim``, with 200,000 slots. Single calls whose
prompts have nothing in common, 200 tokens of output each. Either all four run whole programs, or two have the role
``prefill`` and two ``decode``, and ``cluster.roles`` decides for each call. A copy delays the decode engine for its
whole time. Time for each output token after the first, and time to first token. ``busy`` sets the arrivals: the share
of the engines' time that the calls would take in batches of 8.
"""

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from phloem.cluster.roles import Role
from phloem.cluster.simulate import FleetRule, FleetRun, FleetShape, FleetSimulation
from phloem.cluster.step_clock import StepClock
from phloem.cluster.traces import Paths, Trace
from phloem.runtime.planning import HARDWARE, SHAPES

from . import header, save
from .traces import _arrivals, _length

ENGINES, NEW, SLOTS = 4, 200, 200_000
ROLES: dict[str, Role] = {"engine 0": "prefill", "engine 1": "prefill", "engine 2": "decode", "engine 3": "decode"}
KV_BYTES = 32 * 8 * 128 * 2 * 2  # of a token: layers, heads, size, keys and values, 16 bits


def prompts(n: int, rate: float, length: int, seed: int) -> Trace:
    rng = random.Random(seed)
    paths, programs = Paths(), []
    for i, program in enumerate(_arrivals("single", n, rate, rng)):
        program.call(paths, 0, paths.add((), f"{i} text", _length(rng, length)), _length(rng, NEW))
        programs.append(program)
    return Trace("prompts", paths, programs)


def figures(run: FleetRun) -> dict[str, Any]:
    each = sorted((call.end_s - call.first_s) / (call.num_new - 1) for call in run.calls if call.num_new > 1)
    first = sorted(call.first_s - call.arrival_s for call in run.calls)
    whole = sorted(call.end_s - call.arrival_s for call in run.calls)
    handed = run.reasons.get("prefill", 0) / len(run.calls)
    return {
        "handed_off": round(handed, 3),
        "token_p50_ms": round(1e3 * each[len(each) // 2], 2),
        "token_p99_ms": round(1e3 * each[int(0.99 * len(each))], 2),
        "first_p50_s": round(first[len(first) // 2], 3),
        "first_p99_s": round(first[int(0.99 * len(first))], 3),
        "latency_mean_s": round(sum(whole) / len(whole), 3),
    }


def measure(length: int, busy: float, gbytes_s: list[float], calls: int) -> list[dict[str, Any]]:
    clock = StepClock.planned(replace(SHAPES["llama-3.1-8b"], weight_bits=16), HARDWARE["l40s"])
    rates = clock.rates()
    call_s = length * rates.prefill_s_per_token + NEW * (rates.step_s / 8 + rates.row_s)
    rate = busy * ENGINES / call_s
    shape = FleetShape(ENGINES, SLOTS, max_running=64)
    rows = []

    def run(name: str, gbytes: float | None, rule: FleetRule) -> None:
        made = figures(FleetSimulation(prompts(calls, rate, length, 1), rule, shape, clock).run())
        rows.append(
            {"prompt": length, "busy": busy, "calls_s": round(rate, 2), "gbytes_s": gbytes, "rule": name, **made}
        )
        print(rows[-1], flush=True)

    run("both", None, FleetRule())
    for gbytes in gbytes_s:
        run("roles", gbytes, FleetRule(roles=ROLES, copy_s_per_token=KV_BYTES / (gbytes * 1e9)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000, 8000])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 5.0, 25.0], help="GB/s")
    parser.add_argument("--busy", type=float, nargs="+", default=[0.4, 0.7])
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = [
        row for length in args.lengths for busy in args.busy for row in measure(length, busy, args.rates, args.calls)
    ]
    if args.out is not None:
        save(args.out, header() | {"engines": ENGINES, "new_tokens": NEW, "runs": runs})


if __name__ == "__main__":
    main()
