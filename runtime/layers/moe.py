"""The feed-forward block of a mixture of experts: each token goes through a few of many experts, and a shared one."""

import torch

from ...kernels import QuantizedWeight, mix_experts, route_experts
from ...kernels.quantized_weight import Experts
from .adapters import AdapterRows
from .linear import Linear
from .mlp import MLP


class MoE:
    """``gate_up`` [E, 2I, C], gates first, and ``down`` [E, C, I] are the experts, as floats or packed. ``router``
    returns float32 [T, E]. ``shared`` is an expert for all tokens, and the Linear [C] -> [1] whose sigmoid weighs it.
    """

    def __init__(
        self,
        router: Linear,
        gate_up: Experts,
        down: Experts,
        *,
        top_k: int,
        normalise: bool,
        shared: tuple[MLP, Linear] | None = None,
    ) -> None:
        self.router = router
        self.gate_up, self.down = gate_up, down
        self.top_k, self.normalise = top_k, normalise
        self.shared = shared

    def __call__(self, x: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:  # [T, C] -> [T, C]
        """``rows`` is not used: experts have no adapters."""
        weights, ids = route_experts(self.router(x), self.top_k, normalise=self.normalise)
        taken = x if isinstance(self.gate_up, QuantizedWeight) else x.to(self.gate_up.dtype)
        mixed = mix_experts(taken, self.gate_up, self.down, weights, ids).to(x.dtype)
        if self.shared is None:
            return mixed
        mlp, gate = self.shared
        return mixed + (gate(x).sigmoid() * mlp(x)).to(x.dtype)

    @property
    def needs_torch_threads(self) -> bool:
        return True  # the experts' products are torch's on a CPU
