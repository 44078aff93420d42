"""Linear layers whose weights are laid out for the machine's matrix kernels. Never reads a file."""

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["auto", "float32", "bfloat16", "int4"]
Group32 = tuple[Tensor, Tensor, Tensor]  # q uint8 [N, K] of 0..15, scale and zero float32 [N, K / 32]


class PackedLinear:
    """``x [..., K] -> [..., N]`` for weights [N, K], or [N, K] in 4-bit groups: ``w = (q - 8) * scale + zero``."""

    def __init__(
        self,
        weight: Tensor | Group32,
        *,
        precision: Precision = "auto",
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(weight, tuple):
            q, scale, zero = weight
            groups = (q.float() - 8).view(*scale.shape, -1)
            weight = (groups * scale.unsqueeze(-1) + zero.unsqueeze(-1)).view(q.shape)
        self.weight = weight.float() if precision == "float32" else weight.bfloat16()
        self.bias = bias
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x.to(self.weight.dtype), self.weight)
        y = y.to(self.out_dtype or x.dtype)
        return y if self.bias is None else y + self.bias

    def describe(self) -> str:
        return f"{tuple(self.weight.shape)} {self.weight.dtype}"
