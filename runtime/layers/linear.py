"""Matrix products with a model's weights, several stacked into one. Never chooses a kernel: ``PackedLinear`` does."""

from collections.abc import Sequence
from typing import Literal

import torch

from ...kernels.linear import PackedLinear
from ..quant import GROUP32_KINDS, QuantTensor, quantize_group32, repack_group32

Weight = torch.Tensor | QuantTensor
LinearPrecision = Literal["float32", "bfloat16", "int4", "auto"]


class Linear:
    """``x @ weight.T + bias`` of weights stacked by rows; one product where their precisions allow it, else a few."""

    def __init__(self, parts: Sequence[PackedLinear], bias: torch.Tensor | None = None) -> None:
        self.parts = tuple(parts)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, K] -> [T, N]
        y = self.parts[0](x) if len(self.parts) == 1 else torch.cat([part(x) for part in self.parts], dim=-1)
        return y if self.bias is None else y.add_(self.bias)


def stacked_linear(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor] | None = None,
    *,
    precision: LinearPrecision,
    device: torch.device | str = "cpu",
) -> Linear:
    """One ``Linear`` of the weights, top to bottom.

    ``auto`` keeps 4-bit weights 4-bit and takes the others as bfloat16; ``int4`` rounds those to 4 bits too.
    """
    parts: list[PackedLinear] = []
    run: list[Weight] = []
    for weight in weights:
        if run and _is_4bit(weight, precision) != _is_4bit(run[0], precision):
            parts.append(_pack(run, precision, device))
            run = []
        run.append(weight)
    parts.append(_pack(run, precision, device))
    bias = None
    if biases:
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        bias = torch.cat([part.to(dtype) for part in biases]).to(device)
    return Linear(parts, bias)


def as_float(weight: Weight) -> torch.Tensor:
    """float32, exactly what the file holds."""
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight.float()


def _is_4bit(weight: Weight, precision: LinearPrecision) -> bool:
    if precision == "auto":
        return isinstance(weight, QuantTensor) and weight.kind in GROUP32_KINDS
    return precision == "int4"


def _pack(weights: Sequence[Weight], precision: LinearPrecision, device: torch.device | str) -> PackedLinear:
    if not _is_4bit(weights[0], precision):
        whole = torch.cat([as_float(weight) for weight in weights]).to(device)
        return PackedLinear(whole, precision="float32" if precision == "float32" else "bfloat16")
    groups = [
        repack_group32(weight)
        if isinstance(weight, QuantTensor) and weight.kind in GROUP32_KINDS
        else quantize_group32(as_float(weight))
        for weight in weights
    ]
    q, scale, zero = (torch.cat(pieces).to(device) for pieces in zip(*groups, strict=True))
    return PackedLinear((q, scale, zero), precision="int4")
