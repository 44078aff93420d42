"""Tensors as the compiled kernels take them, and how many threads their work is worth."""

import torch
from torch import Tensor

from ..threads import team
from .vector import BFLOAT16, FLOAT32

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

# Below this many elements a thread, sharing the work takes longer than doing it.
MIN_SHARE = 1 << 16
_TASKS_A_THREAD = 4
# Up to so many threads, each prepares x of a product for itself: to read what another core has just written takes as
# long as to write it again, and no thread waits for the others.
ALONE_THREADS = 4


def team_size(work: int, *, min_share: int = MIN_SHARE) -> int:
    """How many of the team's threads ``work`` elements are worth."""
    return max(1, min(team().size, work // min_share))


def task_len(count: int, threads: int, unit: int) -> int:
    """How many of ``count`` neighbouring pieces make a task, in whole units: a few tasks for each thread.

    Long runs are read at twice the speed of short ones, because the CPU prefetches beyond the end of each run. With a
    few tasks for each thread, other threads take over the work of one that is delayed.
    """
    return -(-count // (_TASKS_A_THREAD * threads * unit)) * unit


def readable(x: Tensor) -> Tensor:
    """The tensor dense and as float32 or bfloat16; copied only if it is not so already."""
    if x.dtype not in KINDS:
        x = x.float()
    return x.contiguous()


def check_range(what: str, values: Tensor, limit: int) -> None:
    if values.numel():
        low, high = (int(x) for x in values.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{what} {low if low < 0 else high}: must be between 0 and {limit - 1}")
