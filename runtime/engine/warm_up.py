"""Warm-up steps before the first request: they load libraries, record tapes and touch memory.

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
ROWS = (1, 2, 4)  # of the decode steps; others are recorded at their first step or before, about 3 ms each


def ready_engine(
    config: EngineConfig, progress: Progress | None = None, *, clock: Callable[[], float] = time.monotonic
) -> EngineCore:
    """A warmed-up engine: its first answer takes no longer than its tenth."""
    engine = EngineCore(config, clock=clock, progress=progress)
    if engine.executor.accelerator is None:
        num_slots = min(engine.cache.num_slots, engine.context_len)
        _try_steps(engine.executor, most_rows=config.max_running, num_slots=num_slots)
        # Not on a thread beside steps: in a first start it compiles kernels, for which a step would wait.
        engine.executor.prepare_draws()
    return_freed_memory()

    def finish() -> None:
        engine.grammars.begin()
        # On a thread, as it takes 20 ms; the pages that steps need are mapped again from the page cache.
        Thread(target=unmap_library_code, name="phloem-finish", daemon=True).start()

    engine.when_idle = finish  # what no first answer waits for
    return engine


def _try_steps(executor: Executor, *, most_rows: int, num_slots: int) -> None:
    """Run one prompt, then decode steps of few rows that share it: greedy, and with penalties, top-k and top-p."""
    prompt_len = min(PROMPT_LEN, num_slots - 1)
    if prompt_len < 1:
        return
    greedy = SamplingParams(temperature=0.0)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, presence_penalty=0.1)
    _step(executor, num_rows=1, start=0, count=prompt_len, params=greedy)
    for num_rows in (rows for rows in ROWS if rows <= most_rows):
        for params in (greedy, sampled):  # the first step is recorded, the second runs from the tape
            _step(executor, num_rows=num_rows, start=prompt_len, count=1, params=params)


def _step(executor: Executor, *, num_rows: int, start: int, count: int, params: SamplingParams) -> None:
    tokens, slots = np.zeros(count, np.int32), np.arange(start + count, dtype=np.int32)
    rows = tuple(PlanRow(i, i, start, tokens, slots, 0, 1) for i in range(num_rows))
    logits = executor.forward(StepPlan(0, rows))
    executor.sample(logits, [SampleRow(i, params, i, tokens, 0) for i in range(num_rows)])
