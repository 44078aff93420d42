"""How many KV slots fit on a device: a trial of the largest step measures the memory that steps need beside them.

The ranks of a split model run the trial together, each on its device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...protocol.errors import InvalidParams, LimitExceeded
from ...protocol.sampling import SamplingParams
from ..config import EngineConfig
from ..memory import KVPool, slot_size_bytes
from ..scheduler import PlanRow, StepPlan
from .accelerator import Accelerator
from .executor import Executor, SampleRow
from .step_logits import StepLogits

if TYPE_CHECKING:
    from ..models import Model

log = logging.getLogger(__name__)

Forward = Callable[["Executor", StepPlan], StepLogits | None]  # None: another rank has the logits


def measured_slots(
    model: Model,
    accelerator: Accelerator,
    config: EngineConfig,
    *,
    context_len: int,
    run: Forward = Executor.forward,
) -> int:
    """The slots that fit into ``gpu_memory_fraction`` of the device beside the weights and the largest step. ``run``:
    the step's forward and head.
    """
    fraction = config.gpu_memory_fraction
    if not 0.0 < fraction <= 1.0:
        raise InvalidParams(
            f"gpu_memory_fraction={fraction}: must be above 0 and at most 1", where="gpu_memory_fraction"
        )
    step_bytes = _step_bytes(model, accelerator, config, context_len, run)
    free, total = accelerator.free_and_total_bytes()
    budget = int(total * fraction) - (total - free) - step_bytes
    each = slot_size_bytes(model.config, model.kv_dtype, num_layers=len(model.layers))
    num_slots = budget // each - 1  # the executor owns one slot
    if num_slots < 1:
        raise LimitExceeded(
            f"gpu_memory_fraction {fraction:g} of {total:,} bytes leaves {max(budget, 0):,} for keys and values, of "
            f"which a token takes {each:,}: {total - free:,} are taken and a step needs {step_bytes:,}; raise it, or "
            f"lower max_step_tokens ({config.max_step_tokens:,}) or max_running ({config.max_running:,})"
        )
    log.info("%d slots in %d bytes; %d taken, a step needs %d", num_slots, budget, total - free, step_bytes)
    return num_slots


def _step_bytes(model: Model, accelerator: Accelerator, config: EngineConfig, context_len: int, run: Forward) -> int:
    """Peak bytes of the largest prefill step plus those of the largest decode step: CUDA graphs have memory apart."""
    most = max(config.max_step_tokens, config.max_running)
    kv = KVPool.for_model(
        model.config, num_slots=most + 1, dtype=model.kv_dtype, device=model.device, num_layers=len(model.layers)
    )

    def trial(num_rows: int, num_tokens: int) -> int:
        plan = greatest_step(num_rows, num_tokens, context_len=context_len, num_slots=most)
        return accelerator.peak_bytes(lambda: _run(plan, model, kv, accelerator, config, context_len, run))

    return trial(config.max_running, most) + trial(config.max_running, config.max_running)


def greatest_step(num_rows: int, num_tokens: int, *, context_len: int, num_slots: int) -> StepPlan:
    """A step of ``num_tokens`` in ``num_rows`` rows with logits for each row; one row has the longest context."""
    rows = []
    left = num_tokens
    for row in range(num_rows):
        count = min(left - (num_rows - 1 - row), context_len) if row == 0 else 1
        left -= count
        end = context_len if row == 0 else count
        slots = (np.arange(end) % num_slots).astype(np.int32)
        rows.append(PlanRow(row, row, end - count, np.zeros(count, np.int32), slots, 0, 1))
    return StepPlan(0, tuple(rows))


def _run(
    plan: StepPlan,
    model: Model,
    kv: KVPool,
    accelerator: Accelerator,
    config: EngineConfig,
    context_len: int,
    run: Forward,
) -> None:
    executor = Executor(
        model, kv, max_rows=config.max_running, max_len=context_len, accelerator=accelerator, use_graphs=False
    )
    logits = run(executor, plan)
    if logits is None:
        return
    params = SamplingParams(top_p=0.9, presence_penalty=0.1)
    tokens = np.zeros(1, np.int32)
    rows = [SampleRow(i, params, 0, tokens, 0, banned=frozenset({0})) for i in range(len(plan.rows))]
    executor.sample(logits, rows)
