"""The cost of a killed engine: the pause of each stream, and the time until the next engine is ready.

``python -m benchmarks.restart [--model smollm2] [--replicas 1 2] [--rounds 3] [--out FILE]``. In each round streams
begin, then SIGKILL ends the engine with most of them. The pause of a stream is its longest gap between two pieces of
text after the kill. The texts must equal those of a run without a kill.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import phloem
from phloem.cluster.supervisor import Replica

from . import header, save

STREAMS, TOKENS, KILL_AFTER = 8, 200, 5  # pieces of text, each of one token or more
LIMIT_S = 300.0
PROMPTS = [f"Write a short story about tree number {i}." for i in range(STREAMS)]


async def streams(runtime: phloem.Runtime, kill: Callable[[], None] | None) -> tuple[list[str], list[float], float]:
    """The texts, the longest gap of each stream after the kill, and the time of the kill."""
    times: list[list[float]] = [[] for _ in PROMPTS]
    killed_s = 0.0

    async def one(index: int) -> str:
        nonlocal killed_s
        text = ""
        options = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        async for piece in runtime.async_generate(PROMPTS[index], options):
            times[index].append(time.perf_counter())
            text += piece
            if kill is not None and not killed_s and min(map(len, times)) >= KILL_AFTER:
                kill()
                killed_s = time.perf_counter()
        return text

    texts = await asyncio.gather(*map(one, range(STREAMS)))
    gaps = []
    for row in times:
        after = [killed_s, *(at for at in row if at >= killed_s)]
        gaps.append(max((b - a for a, b in itertools.pairwise(after)), default=0.0))
    return list(texts), gaps, killed_s


def measure(model: str, replicas: int, rounds: int) -> dict[str, Any]:
    with phloem.Runtime(model=model, replicas=replicas) as runtime:
        wait_ready(runtime)
        expected, _, _ = asyncio.run(streams(runtime, None))
        pauses, restarts = [], []
        for _ in range(rounds):
            wait_ready(runtime)
            with ThreadPoolExecutor(1) as beside:
                ready: list[Future[float]] = []

                def kill() -> None:
                    programs = {row["name"]: row["programs"] for row in runtime.client.query("fleet")["replicas"]}
                    victim = max(runtime.fleet(), key=lambda replica: programs[replica.name])
                    os.kill(victim.pid, signal.SIGKILL)
                    ready.append(beside.submit(wait_epoch, runtime, victim))  # noqa: B023

                texts, gaps, killed_s = asyncio.run(streams(runtime, kill))
                restarts.append(ready[0].result() - killed_s)
            assert texts == expected, "a stream's text differs from that of an undisturbed run"
            pauses += gaps
    return {
        "replicas": replicas,
        "pause_p50_s": round(median(pauses), 3),
        "pause_max_s": round(max(pauses), 3),
        "restart_s": [round(value, 3) for value in restarts],
    }


def wait_ready(runtime: phloem.Runtime) -> None:
    end_s = time.perf_counter() + LIMIT_S
    while any(replica.state != "ready" for replica in runtime.fleet()):
        assert time.perf_counter() < end_s, f"the replicas were not ready within {LIMIT_S:g} s"
        time.sleep(0.01)


def wait_epoch(runtime: phloem.Runtime, victim: Replica) -> float:
    """The time at which the engine that replaces ``victim`` became ready."""
    end_s = time.perf_counter() + LIMIT_S
    while time.perf_counter() < end_s:
        now = next(replica for replica in runtime.fleet() if replica.name == victim.name)
        if now.epoch > victim.epoch and now.state == "ready":
            return time.perf_counter()
        time.sleep(0.005)
    raise AssertionError(f"replica {victim.name} had no new engine within {LIMIT_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = header() | {"streams": STREAMS, "runs": [measure(args.model, n, args.rounds) for n in args.replicas]}
    print(json.dumps(report, indent=1))
    if args.out is not None:
        save(args.out, report)


if __name__ == "__main__":
    main()
