"""RMSNorm (Zhang and Sennrich, 2019) with the residual added first, and the sum without a norm."""

import torch

from ...kernels import rms_norm


class RMSNorm:
    """``weight`` is float32 [C], as files store it, whatever the type of the activations."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; without a residual ``(norm(x), x)``."""
        return rms_norm(x, self.weight, self.eps, residual=residual)


class NoNorm:
    """The sum alone, for layers that have their norms after attention and MLP."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(x + residual, x + residual)``, the first in x's type; without a residual ``(x, x)``."""
        if residual is None:
            return x, x
        total = residual + x
        return total.to(x.dtype), total
