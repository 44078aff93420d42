"""The feed-forward block: ``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` without a gate."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ...kernels import gelu_mul, silu_mul
from ..weights.model_config import Activation
from .adapters import AdapterRows
from .linear import Linear

_Activate = Callable[[torch.Tensor], torch.Tensor]
_GATED: dict[str, _Activate] = {"silu": silu_mul, "gelu_tanh": gelu_mul}
_PLAIN: dict[str, _Activate] = {"gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu}


class MLP:
    def __init__(self, gate_up: Linear, down: Linear, *, activation: Activation = "silu", gated: bool = True) -> None:
        self.gate_up = gate_up  # [C] -> [2I], gates first; [C] -> [I] without gates
        self.down = down
        self._activate = (_GATED if gated else _PLAIN)[activation]
        self._gate: Activation | None = activation if gated else None

    def __call__(self, x: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:  # [T, C] -> [T, C]
        inner = self.gate_up.gated(x, self._gate, self.down) if self._gate is not None and rows is None else None
        return self.down(self._activate(self.gate_up(x, rows)) if inner is None else inner, rows)

    @property
    def needs_torch_threads(self) -> bool:
        return self.gate_up.needs_torch_threads or self.down.needs_torch_threads
