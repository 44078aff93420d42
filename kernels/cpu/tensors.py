"""What the compiled kernels need to know of a tensor. Never copies one that is laid out as they read it."""

import torch
from torch import Tensor

from ..threads import team
from .vector import BFLOAT16, FLOAT32

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

# Below this many elements a thread, sharing the work takes longer than doing it.
MIN_SHARE = 1 << 16
_TASKS_A_THREAD = 4


def team_size(work: int, *, min_share: int = MIN_SHARE) -> int:
    """The threads that ``work`` elements are worth, of those there are."""
    return max(1, min(team().size, work // min_share))


def task_len(count: int, threads: int, unit: int) -> int:
    """Of ``count`` pieces that lie one behind the other, how many a thread takes at once: whole units.

    Long runs stream at twice the speed of short ones, whose ends the machine reads past in vain; a few a thread are
    enough for one that is held up to be helped.
    """
    return -(-count // (_TASKS_A_THREAD * threads * unit)) * unit


def readable(x: Tensor) -> Tensor:
    """The tensor, dense, as float32 unless it is bfloat16."""
    if x.dtype not in KINDS:
        x = x.float()
    return x.contiguous()


def check_range(what: str, values: Tensor, limit: int) -> None:
    if values.numel():
        low, high = (int(x) for x in values.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{what} {low if low < 0 else high}: must be between 0 and {limit - 1}")
