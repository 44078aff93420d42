"""What the compiled kernels need to know of a tensor. Never copies one that is laid out as they read it."""

import torch
from torch import Tensor

from ..threads import team
from .vector import BFLOAT16, FLOAT32

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

# Below this many elements a thread, sharing the work takes longer than doing it.
MIN_SHARE = 1 << 16


def team_size(work: int, *, min_share: int = MIN_SHARE) -> int:
    """The threads that ``work`` elements are worth, of those there are."""
    return max(1, min(team().size, work // min_share))


def readable(x: Tensor) -> Tensor:
    """The tensor, dense, as float32 unless it is bfloat16."""
    if x.dtype not in KINDS:
        x = x.float()
    return x.contiguous()
