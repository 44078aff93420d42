"""How many KV slots every rank has room for."""

from __future__ import annotations

import torch

from ...protocol.errors import LimitExceeded
from ..config import EngineConfig
from ..executor import Accelerator, Executor
from ..executor.sizing import measured_slots
from ..executor.step_logits import StepLogits
from ..layers.batch import StepArrays
from ..models import Model
from ..scheduler import StepPlan
from .group import Group
from .tensor import SplitHead


def agreed_slots(
    model: Model, group: Group, accelerator: Accelerator, config: EngineConfig, *, context_len: int
) -> int:
    """Every rank calls it before its pool exists. Raises LimitExceeded on all ranks where one has no room."""
    own, error = 0, None
    try:
        own = measured_slots(model, accelerator, config, context_len=context_len, run=_run_share)
    except LimitExceeded as found:
        error = found
    all_slots = [int(one) for one in group.gather(torch.tensor([own]))]
    if error is not None:
        raise error
    if not min(all_slots):
        raise LimitExceeded(
            f"rank {all_slots.index(0)} has no memory left for keys and values; raise gpu_memory_fraction "
            f"({config.gpu_memory_fraction:g}), or lower max_step_tokens ({config.max_step_tokens:,})"
        )
    return min(all_slots) * config.sequence_parallel


@torch.inference_mode()
def _run_share(executor: Executor, plan: StepPlan) -> StepLogits | None:
    """This rank's part of the step and of its logits, which come together on rank 0."""
    head = executor.model.head
    assert isinstance(head, SplitHead)
    features = executor.run(StepArrays.of(plan))
    if head.rank:
        head.send_whole(features)
        return None
    whole = head.whole_logits(features)
    return StepLogits(features, lambda *_: whole, vocab_size=whole.shape[1], can_pick=False)
