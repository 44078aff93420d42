"""Activation-aware scales (AWQ; Lin et al., 2024): inputs that are large get finer steps of their weights.

An input k of a product is divided by s[k] and its weights multiplied by it, which changes nothing before rounding. The
division goes into the weights of the layer before: a norm, or the up projection. ``s = mean |x| ^ alpha``, with the
alpha of 0, 0.1 ... 1 that loses least on the calibration text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...kernels.linear import PackedLinear
from ...protocol.errors import Unsupported
from ..layers.attention import Attention
from ..layers.linear import Linear
from ..layers.mlp import MLP
from ..weights.model_config import ModelConfig
from .quality import CHUNK, TextReader

ALPHAS = tuple(i / 10 for i in range(11))
_ROWS = 128  # inputs of a product that are kept, to compare its results
Round = Callable[[torch.Tensor], torch.Tensor]  # weight [N, K] -> the rounded weight


@dataclass(slots=True)
class Inputs:
    """The inputs of one product: their sizes and products summed, and some of them."""

    count: int = 0
    sizes: torch.Tensor | None = None  # float32 [K]: sum of |x|
    products: torch.Tensor | None = None  # float32 [K, K]: sum of x x^T
    rows: list[torch.Tensor] = field(default_factory=list)

    def see(self, x: torch.Tensor) -> None:  # [T, K]
        x = x.float()
        sizes = x.abs().sum(dim=0)
        self.sizes = sizes if self.sizes is None else self.sizes + sizes
        if self.products is None:
            self.products = torch.zeros(x.shape[1], x.shape[1])
        self.products.addmm_(x.T, x)
        self.count += len(x)
        have = sum(map(len, self.rows))
        if have < _ROWS:
            self.rows.append(x[:: max(1, len(x) // 32)][: _ROWS - have].clone())

    @property
    def mean_size(self) -> torch.Tensor:
        assert self.sizes is not None
        return self.sizes / self.count

    def scaled(self, scales: torch.Tensor) -> torch.Tensor:
        """The sum of x x^T of inputs that are divided by ``scales`` [K]."""
        assert self.products is not None
        return self.products / (scales.unsqueeze(1) * scales)


class _Watched(PackedLinear):
    """A product that shows its inputs."""

    def __init__(self, product: PackedLinear, inputs: Inputs) -> None:
        vars(self).update(vars(product))
        self._inputs = inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._inputs.see(x)
        return super().__call__(x)


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


def inputs_of(reader: TextReader, tokens: torch.Tensor, layers: range) -> dict[tuple[int, str], Inputs]:
    """What the products of some layers read on a text: ``(layer, "qkv" | "output" | "gate_up" | "down")``."""
    found: dict[tuple[int, str], Inputs] = {}
    changed: list[tuple[Linear, tuple[PackedLinear, ...]]] = []
    for i in layers:
        layer = reader.model.layers[i]
        assert isinstance(layer.mlp, MLP) and isinstance(layer.attention, Attention)
        products = {"qkv": layer.attention.qkv, "output": layer.attention.output}
        products |= {"gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
        for name, linear in products.items():
            seen = found[i, name] = Inputs()
            changed.append((linear, linear.parts))
            linear.parts = tuple(_Watched(part, seen) for part in linear.parts)
    try:
        for window in tokens.split(min(reader.model.max_positions, 2 * CHUNK)):
            for _ in reader.logits(window):
                pass
    finally:
        for linear, parts in changed:
            linear.parts = parts
    return found


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
