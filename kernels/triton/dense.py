"""Products with weights that are not packed: torch's, except for one row of bfloat16 with many terms."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import config_of
from .row import is_row, row_product


def dense_product(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """``x [T, K] @ weight.T + bias -> [T, N]`` in x's type, which is the weight's; sums are float32."""
    if x.dtype == torch.bfloat16 and x.shape[1] >= config_of(x.device).row_dense_least and is_row(x, weight):
        return row_product(x, weight, bias=bias)
    return F.linear(x, weight, bias)
