"""The gated feed-forward block: ``down(activation(gate(x)) * up(x))``."""

import torch

from ...kernels import gelu_mul, silu_mul
from ..weights.model_config import Activation
from .adapters import AdapterRows
from .linear import Linear

_GATED = {"silu": silu_mul, "gelu_tanh": gelu_mul}


class MLP:
    def __init__(self, gate_up: Linear, down: Linear, *, activation: Activation = "silu") -> None:
        self.gate_up = gate_up  # [C] -> [2I], gates first
        self.down = down
        self._gated = _GATED[activation]

    def __call__(self, x: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:  # [T, C] -> [T, C]
        return self.down(self._gated(self.gate_up(x, rows)), rows)

    @property
    def needs_torch_threads(self) -> bool:
        return self.gate_up.needs_torch_threads or self.down.needs_torch_threads
