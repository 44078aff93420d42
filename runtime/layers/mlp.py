"""The gated feed-forward block: ``down(silu(gate(x)) * up(x))``."""

import torch

from ...kernels import silu_mul
from .adapters import AdapterRows
from .linear import Linear


class MLP:
    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up  # [C] -> [2I], gates first
        self.down = down

    def __call__(self, x: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:  # [T, C] -> [T, C]
        return self.down(silu_mul(self.gate_up(x, rows)), rows)

    @property
    def needs_torch_threads(self) -> bool:
        return self.gate_up.needs_torch_threads or self.down.needs_torch_threads
