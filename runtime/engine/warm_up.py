"""Warm-up steps before the first request: they load libraries, record tapes and touch memory; on a GPU they compile
kernels, unless an earlier start has left them on the disk, and capture graphs.

They bypass the scheduler and the cache, so no prefix and no count is left of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread

import numpy as np

from ...protocol.sampling import SamplingParams
from ..config import EngineConfig, Progress
from ..executor import Executor, SampleRow
from ..memory import return_freed_memory, unmap_library_code
from ..scheduler import PlanRow, StepPlan
from .engine import EngineCore

PROMPT_LEN = 48
GPU_PROMPT_LENS = (600, 90, PROMPT_LEN)  # each needs other products of packed weights
GPU_ACTIVITY = "preparing the GPU's kernels"
GRAPHS = 8  # captured at the start; an idle engine captures others
ROWS = (1, 2, 4)  # of the decode steps; others are recorded at their first step or before, about 3 ms each


def ready_engine(
    config: EngineConfig, progress: Progress | None = None, *, clock: Callable[[], float] = time.monotonic
) -> EngineCore:
    """A warmed-up engine: its first answer takes no longer than its tenth."""
    engine = EngineCore(config, clock=clock, progress=progress)
    prepare(engine, progress)
    return_freed_memory()

    def finish() -> None:
        engine.grammars.begin()
        # On a thread, as it takes 20 ms; the pages that steps need are mapped again from the page cache.
        Thread(target=unmap_library_code, name="phloem-finish", daemon=True).start()

    engine.when_idle = finish  # what no first answer waits for
    return engine


def prepare(engine: EngineCore, progress: Progress | None = None) -> None:
    """Run the steps. The ranks of a split model on GPUs prepare nothing: they capture a graph at the same step."""
    executor, config, num_slots = engine.executor, engine.config, min(engine.cache.num_slots, engine.context_len)
    if executor.accelerator is None:
        _try_steps(executor, (PROMPT_LEN,), most_rows=config.max_running, num_slots=num_slots)
        # Not on a thread beside steps: in a first start it compiles kernels, for which a step would wait.
        executor.prepare_draws()
    elif engine.ranks is None:
        report = progress or (lambda activity, done, total: None)
        report(GPU_ACTIVITY, 0, GRAPHS + 1)
        lengths = tuple(min(length, config.max_step_tokens) for length in GPU_PROMPT_LENS)
        _try_steps(executor, lengths, most_rows=config.max_running, num_slots=num_slots)
        for done in range(1, GRAPHS + 1):
            report(GPU_ACTIVITY, done, GRAPHS + 1)
            executor.record_ahead()
        report(GPU_ACTIVITY, GRAPHS + 1, GRAPHS + 1)


def _try_steps(executor: Executor, prompt_lens: tuple[int, ...], *, most_rows: int, num_slots: int) -> None:
    """Run prompts, then decode steps of few rows that share the last one: greedy, and with penalties and cuts."""
    prompt_len = min(prompt_lens[-1], num_slots - 1)
    if prompt_len < 1:
        return
    greedy = SamplingParams(temperature=0.0)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, presence_penalty=0.1)
    for length in prompt_lens:
        if length < num_slots:
            _step(executor, num_rows=1, start=0, count=length, params=greedy)
    for num_rows in (rows for rows in ROWS if rows <= most_rows):
        for params in (greedy, sampled):  # the first step is recorded, the second runs from the tape
            _step(executor, num_rows=num_rows, start=prompt_len, count=1, params=params)


def _step(executor: Executor, *, num_rows: int, start: int, count: int, params: SamplingParams) -> None:
    tokens, slots = np.zeros(count, np.int32), np.arange(start + count, dtype=np.int32)
    rows = tuple(PlanRow(i, i, start, tokens, slots, 0, 1) for i in range(num_rows))
    logits = executor.forward(StepPlan(0, rows))
    executor.sample(logits, [SampleRow(i, params, i, tokens, 0) for i in range(num_rows)])
