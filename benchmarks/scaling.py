"""How a decode step's time grows with the batch, the context and the size of the cache; memory; start-up time.

    python -m benchmarks.scaling [PART ...] [--model smollm2] [--quick] [--out FILE] [--images docs/images]

Parts: batch, context, cached, head, memory, start; all by default. Steps are timed in this process, without a server.
A point is the median of its steps, with the best beside it. Cached tokens are inserted into the tree without being
computed: the time of a step must not depend on them. Memory and start-up times are those of fresh processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore, ready_engine
from phloem.runtime.executor import SampleRow
from phloem.runtime.profiling import Load, run_load
from phloem.runtime.scheduler import PlanRow, StepPlan

from . import RESULTS, header, save
from .chart import line_chart
from .serving import free_port, stop

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (100, 500, 1000, 2000, 4000, 6000, 8000)
CACHED = (0, 20_000, 50_000, 100_000, 150_000, 200_000)
PREFIX_LEN = 500  # of each cached prefix
MEMORY_TOKENS = 32_000
NEW_TOKENS = 24
Point = dict[str, float]


def engine_of(model: str, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=model, speculative="off", **options))


def step_ms(engine: EngineCore, load: Load) -> Point:
    run_load(engine, load)
    times = sorted(run_load(engine, load, flush=False).decode_ms)
    return {"best": times[0], "median": statistics.median(times), "worst": times[-1]}


def batch(args: argparse.Namespace) -> list[Point]:
    engine = engine_of(args.model)
    points = []
    for rows in BATCHES[:: 3 if args.quick else 1]:
        new_tokens = NEW_TOKENS + rows // 2  # the last row must begin before the first one ends
        points.append({"x": rows, **step_ms(engine, Load(rows, 100, new_tokens))})
        show("rows", points[-1])
    engine.close()
    return points


def context(args: argparse.Namespace) -> list[Point]:
    longest = max(CONTEXTS)
    engine = engine_of(args.model, max_seq_len=min(8192, longest + NEW_TOKENS + 100))
    points = []
    for length in CONTEXTS[:: 3 if args.quick else 1]:
        points.append({"x": length, **step_ms(engine, Load(1, length, NEW_TOKENS))})
        show("tokens of context", points[-1])
    engine.close()
    return points


def cached(args: argparse.Namespace) -> list[Point]:
    points = []
    engine = engine_of(args.model, num_slots=max(CACHED) + 4096)
    numbers, held = np.random.default_rng(0), 0
    load = Load(4, 100, NEW_TOKENS)
    run_load(engine, load)
    for goal in CACHED[:: 3 if args.quick else 1]:
        while held < goal:
            tokens = numbers.integers(0, engine.vocab_size, PREFIX_LEN).astype(np.int32)
            lease = engine.cache.acquire(tokens)
            lease.extend(PREFIX_LEN - lease.num_slots)
            lease.commit(tokens)
            lease.release()
            held += PREFIX_LEN
        times = sorted(run_load(engine, load, flush=False, seed=goal + 1).decode_ms)
        points.append({"x": goal, "best": times[0], "median": statistics.median(times), "worst": times[-1]})
        show("cached tokens", points[-1])
    engine.close()
    return points


def head(args: argparse.Namespace) -> list[Point]:
    """A grammar allows ten tokens: compute the whole head, and only the blocks with these tokens, in turns."""
    engine = engine_of(args.model)
    executor, points = engine.executor, []
    mask = np.zeros(-(-engine.vocab_size // 32), dtype=np.uint32)
    mask[[1000 * i % len(mask) for i in range(10)]] = 1
    for num_rows in (1, 4, 16):
        slots = np.arange(101 * num_rows, dtype=np.int32).reshape(num_rows, 101)
        token = np.array([5], dtype=np.int32)
        plan = StepPlan(0, tuple(PlanRow(r, r, 100, token, slots[r], 0, 1) for r in range(num_rows)))
        params = SamplingParams(temperature=0.0)
        rows = [SampleRow(r, params, 1, token, 1, mask=mask) for r in range(num_rows)]
        times: dict[str, list[float]] = {"whole": [], "picked": []}
        for _ in range(40):
            for kind, found in times.items():
                start = time.perf_counter()
                logits = executor.forward(plan)
                if kind == "whole":
                    logits.whole()
                executor.sample(logits, rows)
                found.append((time.perf_counter() - start) * 1e3)
        points.append({"x": num_rows, **{kind: statistics.median(found[5:]) for kind, found in times.items()}})
        point = points[-1]
        print(
            f"{num_rows:>9} rows: whole head {point['whole']:.2f} ms a step, picked {point['picked']:.2f}", flush=True
        )
    engine.close()
    return points


def memory(args: argparse.Namespace) -> list[Point]:
    """Peak resident memory (VmHWM) of an engine process after each stage, with the settings of a server's engine.

    It includes the pages of libraries and of the interpreter, but not the page cache of files that were read.
    """
    command = [sys.executable, "-m", "phloem.benchmarks.scaling", "--inner-memory", "--model", args.model]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    stages: dict[str, dict[str, float]] = json.loads(found.stdout.splitlines()[-1])
    for stage, sizes in stages.items():
        print(
            f"{stage:<34}"
            + "".join(f"{name.removesuffix('_bytes')} {size / 1e9:.3f} GB  " for name, size in sizes.items()),
            flush=True,
        )
    return [{"x": MEMORY_TOKENS, **list(stages.values())[-1]}]


def inner_memory(args: argparse.Namespace) -> None:
    stages = {"imports": resident()}
    engine = ready_engine(EngineConfig(model=args.model, speculative="off"))
    stages["ready"] = resident()
    run_load(engine, Load(16, 200, NEW_TOKENS))
    stages["16 rows served"] = resident()
    for cache in (*engine.kv.k, *engine.kv.v):  # the system allocates memory when it is first written
        cache[:MEMORY_TOKENS] = 1.0
    run_load(engine, Load(16, 200, NEW_TOKENS))
    kv_bytes = engine.kv.size_bytes // engine.kv.num_slots * MEMORY_TOKENS
    stages[f"{MEMORY_TOKENS:,} tokens, 16 rows served"] = {**resident(), "kv_bytes": kv_bytes}
    print(json.dumps(stages))


def resident() -> dict[str, float]:
    """Bytes of resident memory: the peak, the current value, its anonymous part, and its pages of files (libraries)."""
    names = {"VmHWM": "peak_bytes", "VmRSS": "now_bytes", "RssAnon": "own_bytes", "RssFile": "library_bytes"}
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {names[key[:-1]]: int(rest[0]) * 1024 for key, *rest in lines if key[:-1] in names}


def start(args: argparse.Namespace) -> list[Point]:
    """Seconds from the start of a server process to the first streamed token, twice; the second start finds caches."""
    points: list[Point] = []
    for turn in (1, 2):
        port = free_port()
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "phloem", "serve", args.model, "--port", str(port)])
        try:
            points.append({"x": turn, "seconds": first_token_s(port, args.model, began)})
        finally:
            stop(process)
        print(f"start {turn}: {points[-1]['seconds']:.2f} s to the first token", flush=True)
    return points


def first_token_s(port: int, model: str, began: float) -> float:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
    while time.monotonic() - began < 300:
        try:
            with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if '"content":"' in line and '"content":""' not in line:
                        return time.monotonic() - began
        except httpx.TransportError:
            time.sleep(0.05)
    raise SystemExit("no first token after 300 s")


def show(what: str, point: Point) -> None:
    print(f"{point['x']:>9,.0f} {what}: {point['median']:.2f} ms a step (best {point['best']:.2f})", flush=True)


PARTS = {"batch": batch, "context": context, "cached": cached, "head": head, "memory": memory, "start": start}
CHARTS = {
    "batch": ("Decode step against the batch, contexts of 100 tokens", "rows"),
    "context": ("Decode step of one row against its context", "tokens of context"),
    "cached": ("Decode step of 4 rows against the number of cached tokens", "tokens in the cache"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="every third point")
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json")
    parser.add_argument("--images", type=Path, help="write a chart of each part to this folder")
    parser.add_argument("--inner-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; they are: {', '.join(PARTS)}")
    if args.inner_memory:
        inner_memory(args)
        return 0
    report: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    report |= header() | {"model": args.model}
    print(*(f"{key}: {value}" for key, value in report.items() if key not in PARTS), sep="\n")
    for part in args.parts or PARTS:
        print(f"\n{part}")
        report[part] = PARTS[part](args)
        save(args.out, report)
        if args.images and part in CHARTS:
            title, label = CHARTS[part]
            lines = {f"{kind} step": [(p["x"], p[kind]) for p in report[part]] for kind in ("median", "best")}
            note = f"{args.model}, {report['machine']}, {report['date']}"
            args.images.mkdir(parents=True, exist_ok=True)
            chart = line_chart(title, label, "milliseconds a step", lines, note=note)
            (args.images / f"step-{part}.svg").write_text(chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
