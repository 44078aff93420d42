"""A mixture of experts on the CPU: runs only the experts that some token takes, once each."""

import torch
from torch import Tensor

from ..quantized_weight import Experts
from .activation import silu_mul


def mix_experts(x: Tensor, gate_up: Experts, down: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "packed experts on a CPU"
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        tokens, ranks = (ids == expert).nonzero(as_tuple=True)
        each = silu_mul(x[tokens] @ gate_up[expert].T) @ down[expert].T
        out.index_add_(0, tokens, each.float() * weights[tokens, ranks].unsqueeze(1))
    return out.to(x.dtype)
