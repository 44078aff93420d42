"""RMSNorm (Zhang and Sennrich, 2019) with the residual added first, LayerNorm, and the sum without a norm."""

import torch
import torch.nn.functional as F

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


class LayerNorm:
    """LayerNorm (Ba et al., 2016). ``weight`` and ``bias`` are float32 [C]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight, self.bias = weight, bias
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; without a residual ``(norm(x), x)``."""
        total = x if residual is None else residual + x
        normed = F.layer_norm(total.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype), total
