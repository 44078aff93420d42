"""A weight and a bias, of a linear layer or of a norm that subtracts the mean."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Affine:
    """``weight`` [outputs, inputs] of a linear layer, or [E] of a norm, and its ``bias``, if it has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, eps)


def stacked(parts: Sequence[Affine]) -> Affine:
    """One linear layer with the outputs of all ``parts``. Either all of them have a bias, or none has."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Affine(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
