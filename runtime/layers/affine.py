"""A weight and a bias, of a linear layer or of a norm that subtracts the mean; encoders have both everywhere."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Affine:
    """``weight`` [outputs, inputs] of a linear layer, or [E] of a norm, and its ``bias``."""

    weight: torch.Tensor
    bias: torch.Tensor

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, eps)
