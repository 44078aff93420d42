"""The cost of a fleet on the host, and the error of its simulation.

    python -m benchmarks.fleet index [--save]
    python -m benchmarks.fleet overhead [--model smollm2] [--rounds 60] [--save]
    python -m benchmarks.fleet ray [--model smollm2] [--rounds 30] [--save]
    python -m benchmarks.fleet steps [--model smollm2] [--save]
    python -m benchmarks.fleet real [--model smollm2] [--talks 24] [--rate 1.2] [--seeds 1 2 3] [--save]

``index``: the time to match a prompt of 1,000 tokens among 1 to 1,000 engines, in three cases: every engine holds the
whole prompt, engines hold prefixes of different lengths (the slowest case), and no engine holds any of it. Then the
time to apply an event of one block, and the bytes per name: as the index counts them, and as Python allocates them.

``overhead``: see ``fleet_overhead``. ``ray``: see ``fleet_ray``; it needs ``phloem[ray]``. ``steps``: see
``fleet_steps``. ``real``: see ``fleet_real``; it takes the step times of ``steps --save`` where they are of this
machine, and measures them where they are not.
"""

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from phloem.cluster.index import CacheIndex
from phloem.protocol.cache_events import BlocksStored, CacheEvents, CacheSnapshot
from phloem.radix_cache import block_names

from . import RESULTS, print_header, save
from .fleet_overhead import measure_overhead
from .fleet_ray import measure_ray
from .fleet_real import measure_real, step_times
from .fleet_steps import MachineTimes, as_times, report

PROMPT_LEN, BLOCK_LEN = 1000, 64  # the engine's blocks
MATCH_BAR_S = 100e-6


def frame(seq: int, names: tuple[bytes, ...], epoch: int = 1) -> CacheEvents:
    return CacheEvents(BLOCK_LEN, (BlocksStored(seq, "", b"", names),), epoch, "m")


def filled(num_engines: int, parts: Callable[[int], int]) -> tuple[CacheIndex, list[bytes]]:
    """An index of engines; engine ``i`` holds the first ``parts(i)`` blocks of a prompt, and 50 blocks of its own."""
    rng = np.random.default_rng(0)
    names = block_names(rng.integers(0, 50_000, PROMPT_LEN), block_len=BLOCK_LEN)
    index = CacheIndex()
    for i in range(num_engines):
        own = tuple(rng.bytes(16) for _ in range(50))
        index.apply(f"engine {i}", frame(1, tuple(names[: parts(i)]) + own))
    return index, names


def call_s(function: Callable[[], object], *, repeats: int = 30, times: int = 20) -> tuple[float, float, float]:
    """Seconds of one call: median, best and worst of ``repeats`` means over ``times`` calls."""
    taken = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        for _ in range(times):
            function()
        taken.append((time.perf_counter() - start_s) / times)
    return statistics.median(taken), min(taken), max(taken)


def match_times() -> dict[str, Any]:
    num_blocks = PROMPT_LEN // BLOCK_LEN
    cases: dict[str, Callable[[int], int]] = {
        "whole prompt": lambda i: num_blocks,
        "different lengths": lambda i: i % (num_blocks + 1),
        "nothing": lambda i: 0,
    }
    made: dict[str, Any] = {}
    print(f"match of {PROMPT_LEN:,} tokens, {num_blocks} blocks; median, best .. worst, microseconds:")
    for num_engines in (1, 8, 64, 1000):
        for case, parts in cases.items():
            index, names = filled(num_engines, parts)
            times_s = call_s(lambda index=index, names=names: index.match(names))
            made[f"{num_engines}, {case}"] = times_s
            median, best, worst = (1e6 * value for value in times_s)
            print(f"  {num_engines:5,} engines  {case:18}{median:8.1f}  {best:8.1f} .. {worst:.1f}")
    return made


def event_time() -> float:
    """Seconds to apply an event of one new block."""
    rng = random.Random(0)
    index = CacheIndex()
    frames = [frame(seq, (rng.randbytes(16),)) for seq in range(1, 100_001)]
    start_s = time.perf_counter()
    for events in frames:
        index.apply("engine", events)
    return (time.perf_counter() - start_s) / len(frames)


def bytes_of_names(num_engines: int, num_names: int = 100_000) -> tuple[float, float]:
    """Bytes per name: as ``num_bytes`` counts them, and as Python allocates them. One engine holds each name."""
    rng = random.Random(0)
    gc.collect()
    tracemalloc.start()
    index = CacheIndex()
    share = num_names // num_engines
    for i in range(num_engines):
        index.restore(f"engine {i}", snapshot(tuple(rng.randbytes(16) for _ in range(share))))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return index.num_bytes / len(index), taken / len(index)


def snapshot(names: tuple[bytes, ...]) -> CacheSnapshot:
    return CacheSnapshot(BLOCK_LEN, 1, 1, "m", names)


def measure_index() -> dict[str, Any]:
    made: dict[str, Any] = {"match_s": match_times(), "event_s": event_time(), "name_bytes": {}}
    print(f"an event of one block: {1e6 * made['event_s']:.2f} microseconds")
    for num_engines in (1, 64, 1000):
        counted, allocated = made["name_bytes"][num_engines] = bytes_of_names(num_engines)
        print(f"a name among {num_engines:5,} engines: {counted:.0f} bytes counted, {allocated:.0f} allocated")
    slowest = max(times_s[0] for case, times_s in made["match_s"].items() if case.startswith("1000,"))
    print(f"1,000 engines, slowest case: {1e6 * slowest:.0f} microseconds (bar: {1e6 * MATCH_BAR_S:.0f})")
    return made


def known_steps(model: str, machine: str) -> MachineTimes | None:
    """The step times in the file of results, if they are of this model and machine."""
    path = RESULTS / "fleet_steps.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if (found.get("machine"), found.get("figures", {}).get("model")) != (machine, model):
        return None
    print(f"step times: {path.name}, measured at commit {found['commit']}")
    return as_times(found["figures"])


def seeds_of_before(made: dict[str, Any]) -> dict[str, Any]:
    """The seeds in the file of results, if they were run with as many conversations at the same rate."""
    path = RESULTS / "fleet_real.json"
    before = json.loads(path.read_text())["figures"] if path.exists() else {}
    return before["seeds"] if all(before.get(name) == made[name] for name in ("talks", "rate")) else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="what", required=True)
    parsers.add_parser("index", help="times of matches and events, and bytes per name")
    overhead = parsers.add_parser("overhead", help="times of FleetClient beside those of Client")
    overhead.add_argument("--model", default="smollm2")
    overhead.add_argument("--rounds", type=int, default=60)
    on_ray = parsers.add_parser("ray", help="start of two replicas on Ray Serve, and times through it")
    on_ray.add_argument("--model", default="smollm2")
    on_ray.add_argument("--rounds", type=int, default=30)
    steps = parsers.add_parser("steps", help="step times of two engines that work at once")
    steps.add_argument("--model", default="smollm2")
    real = parsers.add_parser("real", help="two real engines against their simulation")
    real.add_argument("--model", default="smollm2")
    real.add_argument("--talks", type=int, default=24, help="conversations of a run")
    real.add_argument("--rate", type=float, default=1.2, help="conversations that begin in a second")
    real.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one run each")
    for subparser in parsers.choices.values():
        subparser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    about = print_header()
    match options.what:
        case "index":
            made = measure_index()
        case "overhead":
            made = measure_overhead(options.model, options.rounds)
        case "ray":
            made = measure_ray(options.model, options.rounds)
        case "steps":
            made = report(step_times(options.model)) | {"model": options.model}
        case _:
            times = known_steps(options.model, about["machine"]) or step_times(options.model)
            made = measure_real(options.model, times, num_talks=options.talks, rate=options.rate, seeds=options.seeds)
            made["seeds"] = seeds_of_before(made) | made["seeds"]
    if options.save:
        save(RESULTS / f"fleet_{options.what}.json", {**about, "figures": made})


if __name__ == "__main__":
    main()
