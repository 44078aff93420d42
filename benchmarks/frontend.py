"""The cost of the language itself: time per generation with a model that answers at once, and messages per run.

    python -m benchmarks.frontend              # everything, on one core
    python -m benchmarks.frontend --runs 500   # quicker

``instant`` answers inside the call; ``slow`` takes 50 ms per generation. No model is loaded. ``gc.freeze`` excludes
imported modules from garbage collection; otherwise a collection would scan all of torch during a measurement.
"""

import argparse
import asyncio
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from phloem import function, gen, vote
from phloem.lang.backend.base_backend import BaseBackend
from phloem.lang.backend.phloem_backend import PhloemBackend
from phloem.protocol import messages, ops
from phloem.protocol.program_call import ProgramCall

from . import print_header

GEN_S = 0.05


class Instant:
    """A client whose engine answers every op before ``submit`` returns."""

    def __init__(self) -> None:
        self.welcome = messages.Welcome(
            version=messages.PROTOCOL_VERSION,
            model="instant",
            model_path="",
            context_len=1 << 20,
            vocab_size=1,
            vocab_hash="",
            template=messages.TemplateInfo(),
            limits=messages.Limits(),
        )
        self.meta = messages.GenMeta(1, 0, (messages.CandidateMeta("stop", 1),))

    def submit(self, submit: messages.Submit, call: ProgramCall) -> None:
        take = call.take
        take(messages.Accepted(submit.program))
        for op in submit.ops:
            if type(op) is ops.Gen:
                take(messages.Done(submit.program, op.op, [" ok"], self.meta))
            else:
                take(messages.Done(submit.program, op.op))
        if type(submit.ops[-1]) is ops.Close:
            take(messages.Closed(submit.program, messages.ProgramStats()))

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None: ...


class InstantApi(BaseBackend):
    """A third party's backend that answers at once: one call per generation."""

    precache_in_batch = False

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        return " ok", {}


class InstantAsyncApi(InstantApi):
    """``InstantApi`` for an event loop."""

    async def generate_async(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        return " ok", {}


class SlowApi(InstantApi):
    async def generate_async(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(GEN_S)
        return " ok", {}


@function
def linear(s: Any, question: str) -> None:
    s += "Question: " + question + "\nThought:" + gen("thought", max_tokens=32)
    s += "\nAnswer:" + gen("answer", max_tokens=32)
    s += "\nConfidence:" + gen("confidence", max_tokens=4)


@function
async def linear_async(s: Any, question: str) -> None:
    s += "Question: " + question + "\nThought:" + gen("thought", max_tokens=32)
    s += "\nAnswer:" + gen("answer", max_tokens=32)
    s += "\nConfidence:" + gen("confidence", max_tokens=4)
    await s.sync_async()


@function
def tree(s: Any, question: str) -> None:
    s += "Question: " + question
    forks = s.fork(8)
    forks += lambda i: f"\nIdea {i}:" + gen("idea", max_tokens=32)
    forks.join()
    s += "\nBest of" + s.ref("idea", sep=",") + ":" + gen("best", max_tokens=32)


@function
def voting(s: Any, question: str) -> None:
    s += question + vote(gen("thought") + gen("answer"), 8, on="answer") + "\nSo" + gen("end")


@function
def branching(s: Any, question: str) -> None:
    s += question + gen("first")
    s += " yes" if s["first"] else " no"
    s += gen("second")


def per_gen_us(run: Callable[[], Any], num_gens: int, repeats: int) -> tuple[list[float], list[float]]:
    """(wall time, CPU time of this process): the two differ when other programs use the core."""
    run()
    clock, computing = [], []
    for _ in range(repeats):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        run()
        computing.append((time.process_time() - begin_cpu) / num_gens * 1e6)
        clock.append((time.perf_counter() - begin) / num_gens * 1e6)
    return clock, computing


def _spread(found: list[float]) -> str:
    return f"{statistics.median(found):6.1f}  ({min(found):.1f} to {max(found):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print_header()
    gc.collect()
    gc.freeze()

    runs, repeats = options.runs, options.repeats
    items = [{"question": f"number {i}?"} for i in range(runs)]
    compiled, api, async_api = PhloemBackend(Instant()), InstantApi(), InstantAsyncApi()
    graph = linear.compile(backend=compiled)

    def one_by_one(program: Any, backend: BaseBackend, **kwargs: Any) -> Callable[[], None]:
        def run() -> None:
            for item in items:
                program.run(**item, backend=backend, **kwargs)

        return run

    def awaited(program: Any, backend: BaseBackend) -> Callable[[], None]:
        async def run() -> None:
            for item in items:
                await program.run_async(**item, backend=backend)

        return lambda: asyncio.run(run())

    def batch(program: Any, backend: BaseBackend, **kwargs: Any) -> Callable[[], Any]:
        return lambda: program.run_batch(items, backend=backend, **kwargs)

    cases: list[tuple[str, Callable[[], Any], int]] = [
        ("3 gens, run()", one_by_one(linear, compiled), 3 * runs),
        ("3 gens, run_batch()", batch(linear, compiled), 3 * runs),
        ("3 gens, compile()d, run()", one_by_one(graph, compiled), 3 * runs),
        ("3 gens, compile()d, run_batch()", batch(graph, compiled), 3 * runs),
        ("3 gens, async def, await run()", awaited(linear_async, compiled), 3 * runs),
        ("3 gens, async def, run_batch()", batch(linear_async, compiled), 3 * runs),
        ("fork(8) + join + gen, run()", one_by_one(tree, compiled), 9 * runs),
        ("3 gens, third party's backend, run(use_thread=False)", one_by_one(linear, api, use_thread=False), 3 * runs),
        ("3 gens, third party's backend, run_batch(num_threads=1)", batch(linear, api, num_threads=1), 3 * runs),
        ("3 gens, third party's backend, run_batch()", batch(linear, api), 3 * runs),
        ("3 gens, third party's async backend, run_batch()", batch(linear, async_api), 3 * runs),
        ("3 gens, third party's async backend, async def", batch(linear_async, async_api), 3 * runs),
    ]
    print(f"\nmicroseconds per generation, {runs} runs, {repeats} repeats: median (lowest to highest)")
    for name, run, num_gens in cases:
        clock, computing = per_gen_us(run, num_gens, repeats)
        print(f"  {name:56} {_spread(clock)}   computing {_spread(computing)}")
    measure_thousand(repeats)
    count_messages(compiled)


def measure_thousand(repeats: int) -> None:
    """Run a thousand programs at once on an API that takes 50 ms per generation."""
    ideal_s = 3 * GEN_S
    print(
        f"\n1,000 programs of 3 gens, {GEN_S * 1e3:.0f} ms per gen (ideal {ideal_s:.2f} s): median (lowest to highest)"
    )
    thousand = [{"question": f"number {i}?"} for i in range(1000)]
    slow = SlowApi()
    for name, program in (("run_batch()", linear), ("run_batch() of an async program", linear_async)):
        times, cpu = [], []
        program.run_batch(thousand[:10], backend=slow)
        for _ in range(repeats):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            program.run_batch(thousand, backend=slow)
            times.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - begin_cpu)
        spread = f"({min(times):.3f} to {max(times):.3f}) s, of it {min(cpu):.3f} to {max(cpu):.3f} s computing"
        print(f"  {name:56} {statistics.median(times):7.3f}  {spread}")


def count_messages(compiled: PhloemBackend) -> None:
    print("\nmessages per run")
    for name, program in (
        ("3 gens", linear),
        ("fork(8) + join + gen", tree),
        ("one branch on a value", branching),
        ("vote of 8 + gen", voting),
    ):
        print(f"  {name:56} {program.run('why?', backend=compiled).stats()['messages']}")


if __name__ == "__main__":
    main()
