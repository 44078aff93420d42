"""The feed-forward block of a mixture of experts: each token goes through a few of many experts, and a shared one."""

import torch

from ...kernels import QuantizedWeight, mix_experts, route_experts
from ...kernels.quantized_weight import Experts
from ..weights.config_parts import Routing
from .adapters import AdapterRows
from .linear import Linear
from .mlp import MLP
from .routing import route_by_groups


class MoE:
    """``gate_up`` [E, 2I, C], gates first, and ``down`` [E, C, I] are the experts, as floats or packed. ``router``
    returns float32 [T, E]. ``shared`` is an expert for all tokens, and ``shared_gate`` the Linear [C] -> [1] whose
    sigmoid weighs it. ``routing`` and its ``bias`` float32 [E]: ``route_by_groups``.
    """

    def __init__(
        self,
        router: Linear,
        gate_up: Experts,
        down: Experts,
        *,
        top_k: int,
        normalise: bool,
        shared: MLP | None = None,
        shared_gate: Linear | None = None,
        routing: Routing | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.router = router
        self.gate_up, self.down = gate_up, down
        self.top_k, self.normalise = top_k, normalise
        self.shared, self.shared_gate = shared, shared_gate
        self.routing, self.bias = routing, bias

    def __call__(self, x: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:  # [T, C] -> [T, C]
        """``rows`` is not used: experts have no adapters."""
        weights, ids = self._route(self.router(x))
        taken = x if isinstance(self.gate_up, QuantizedWeight) else x.to(self.gate_up.dtype)
        mixed = mix_experts(taken, self.gate_up, self.down, weights, ids).to(x.dtype)
        return mixed if self.shared is None else mixed + self._shared_part(x)

    def _shared_part(self, x: torch.Tensor) -> torch.Tensor:  # [T, C] -> [T, C]
        assert self.shared is not None
        shared = self.shared(x)
        return (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared).to(x.dtype)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.routing is None:
            return route_experts(logits, self.top_k, normalise=self.normalise)
        return route_by_groups(logits, self.top_k, routing=self.routing, normalise=self.normalise, bias=self.bias)

    @property
    def needs_torch_threads(self) -> bool:
        return True  # the experts' products are torch's on a CPU
