"""Activation-aware scales (AWQ; Lin et al., 2024): inputs that are large get finer steps of their weights.

An input k of a product is divided by s[k] and its weights multiplied by it, which changes nothing before rounding. The
division goes into the weights of the layer before: a norm, or the up projection. ``s = mean |x| ^ alpha``, with the
alpha of 0, 0.1 ... 1 that loses least on the calibration text.
"""

from collections.abc import Callable, Sequence

import torch

from ...protocol.errors import Unsupported
from ..weights.model_config import ModelConfig
from .layer_inputs import Inputs

ALPHAS = tuple(i / 10 for i in range(11))
Round = Callable[[torch.Tensor], torch.Tensor]  # weight [N, K] -> the rounded weight


def refuse_config(config: ModelConfig) -> None:
    """Raises Unsupported for a family whose norms do not feed its products alone."""
    reasons = {
        "parallel residuals": config.parallel_residual,
        "LayerNorm": config.layer_norm,
        "norms after attention alone": not config.pre_norms,
        "experts": config.num_experts,
        "transposed matrices": config.transposed,
    }
    for reason, applies in reasons.items():
        if applies:
            raise Unsupported(f"scheme int4-awq: {config.family} models have {reason}; use int4-g32")


def best_scales(weights: Sequence[torch.Tensor], inputs: Inputs, rounded: Round) -> torch.Tensor:
    """s float32 [K] for products [N, K] of the same inputs."""
    x, sizes = torch.cat(inputs.rows), inputs.mean_size.clamp_min(1e-8)
    together = torch.cat([weight.float() for weight in weights])
    wanted = x @ together.T
    best, least = torch.ones_like(sizes), float("inf")
    for alpha in ALPHAS:
        scales = sizes.pow(alpha)
        scales = (scales / (scales.amax() * scales.amin()).sqrt()).clamp(1e-4, 1e4)
        error = float(((x / scales) @ rounded(together * scales).T - wanted).square().mean())
        if error < least:
            best, least = scales, error
    return best
