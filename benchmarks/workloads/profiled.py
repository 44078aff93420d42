"""Where the steps of a workload's programs spend their time, on an engine in this process.

    python -m benchmarks.workloads.profiled chat_long rag [--model smollm2] [--threads 1] [--repeats 2]

All programs of a workload begin at once, as for the throughput. Shares are of the wall time. ``products``: of the
layers, by packed weights (torch's count as ``python``). ``other kernels``: norms, rope, activation, sampling and masks.
``python``: everything else of a step. ``between``: the time without a step, in which programs and their engine wait for
each other. A step that records a tape (``recorded``) takes some 3 ms of ``python`` more.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from phloem import Engine
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore, ready_engine
from phloem.runtime.profiling import Spans, watch

from .. import header
from .catalogue import WORKLOADS
from .systems import CLIENT_TIMEOUT_S, GREEDY, hello, run_programs

KERNELS = {
    "linear": "products",
    "attention": "attention",
    "head": "head",
    "small ops": "other kernels",
    "mask": "other kernels",
    "sample": "other kernels",
}
WATCHING = "watching"  # what the profile itself takes
SHOWN = ("products", "attention", "head", "other kernels", "python", "between")
COLUMNS = ("steps", "recorded", "rows", "tokens", *SHOWN)


@dataclass(slots=True)
class Profile:
    """Of one workload: counts of steps, and seconds by part."""

    steps: int = 0
    recorded: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)

    def line(self, name: str) -> str:
        whole = sum(self.seconds.values())
        counts = f"{self.steps} | {self.recorded} | {self.rows / self.steps:.1f} | {self.tokens / self.steps:.1f}"
        return f"| {name} | {counts} | " + " | ".join(f"{self.seconds[part] / whole:.0%}" for part in SHOWN) + " |"


def by_part(own_ns: Iterator[tuple[str, int]], wall_s: float) -> Counter[str]:
    """Seconds by the names of ``SHOWN``, from the own times of spans within ``wall_s``."""
    seconds: Counter[str] = Counter()
    for name, spent_ns in own_ns:
        if name == WATCHING:
            wall_s -= spent_ns / 1e9
        else:
            seconds[KERNELS.get(name, "python")] += spent_ns / 1e9
    seconds["between"] = max(0.0, wall_s - sum(seconds.values()))
    return seconds


class Watched:
    """An engine whose steps are profiled. Its ``Engine`` calls ``step`` on a thread."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.spans, self.recorded = core, Spans(), 0
        watch(core, self.spans)
        run = core.step

        def step(inbox: Any) -> Any:
            before = core.loop.counters.steps
            with self.spans.span("step"):
                outbox = run(inbox)
            self.recorded += core.loop.counters.steps > before and core.executor.is_cold
            return outbox

        setattr(core, "step", step)  # noqa: B010

    def profile(self, backend: Engine, name: str, repeat: int) -> Profile:
        workload, counters = WORKLOADS[name], self.core.loop.counters
        cases = workload.make(repeat + 1, workload.count)
        before = counters.steps, counters.forward_rows, counters.forward_tokens, self.recorded
        self.spans.clear()
        begin_s = time.perf_counter()
        run_programs(backend, workload, cases, alone=False, ignore_eos=True)
        wall_s = time.perf_counter() - begin_s
        steps, rows, tokens = (
            now - then
            for now, then in zip(
                (counters.steps, counters.forward_rows, counters.forward_tokens), before[:3], strict=True
            )
        )
        own_ns = ((span.name, span.own_ns) for span in list(self.spans.spans))
        return Profile(steps, self.recorded - before[3], rows, tokens, by_part(own_ns, wall_s))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads.profiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads (default: all)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="the last one is shown, with other texts than before")
    args = parser.parse_args(argv)
    names = args.names or list(WORKLOADS)
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"{unknown[0]!r} is not one of: {', '.join(WORKLOADS)}")
    print(*(f"{key}: {value}" for key, value in header().items()), sep="\n", flush=True)
    core = ready_engine(EngineConfig(model=args.model, num_threads=args.threads, client_timeout_s=CLIENT_TIMEOUT_S))
    watched = Watched(core)
    backend = Engine.over(core)
    try:
        hello.run(backend=backend, **GREEDY).sync()
        print("| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|", sep="\n")
        for name in names:
            found = [watched.profile(backend, name, repeat) for repeat in range(args.repeats)]
            print(found[-1].line(name), flush=True)
    finally:
        backend.shutdown()


if __name__ == "__main__":
    main()
