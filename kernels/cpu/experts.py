"""A mixture of experts where choices can be looked at: only the experts that some token takes are run, once each."""

import torch
from torch import Tensor

from .activation import silu_mul


def mix_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        tokens, ranks = (ids == expert).nonzero(as_tuple=True)
        each = silu_mul(x[tokens] @ gate_up[expert].T) @ down[expert].T
        out.index_add_(0, tokens, each.float() * weights[tokens, ranks].unsqueeze(1))
    return out.to(x.dtype)
