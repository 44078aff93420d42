"""RMSNorm (Zhang and Sennrich, 2019) with the residual added first."""

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
