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

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, K] -> [T, N]
        if len(self.parts) == 1:
            return self.parts[0](x)
        return torch.cat([part(x) for part in self.parts], dim=-1)


def stacked_linear(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor] | None = None,
    *,
    precision: LinearPrecision,
    device: torch.device | str = "cpu",
    out_dtype: torch.dtype | None = None,
) -> Linear:
    """One ``Linear`` of the weights, top to bottom; its results are of ``out_dtype``, else of x's.

    ``auto`` keeps 4-bit weights 4-bit, with a bfloat16 copy for steps of many rows, and takes the others as bfloat16;
    ``int4`` rounds those to 4 bits too and holds 4 bits only.
    """
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    parts: list[PackedLinear] = []
    start = 0
    for end in range(1, len(weights) + 1):
        if end < len(weights) and _is_4bit(weights[end], precision) == _is_4bit(weights[start], precision):
            continue
        bias = None if biases is None else torch.cat(list(biases[start:end])).to(dtype).to(device)
        parts.append(_pack(weights[start:end], bias, precision, torch.device(device), out_dtype))
        start = end
    return Linear(parts)


def as_float(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the file holds: exactly in float32, rounded once in another type."""
    return weight.dequantize(dtype) if isinstance(weight, QuantTensor) else weight.to(dtype)


def _is_4bit(weight: Weight, precision: LinearPrecision) -> bool:
    if precision == "auto":
        return isinstance(weight, QuantTensor) and weight.kind in GROUP32_KINDS
    return precision == "int4"


def _pack(
    weights: Sequence[Weight],
    bias: torch.Tensor | None,
    precision: LinearPrecision,
    device: torch.device,
    out_dtype: torch.dtype | None,
) -> PackedLinear:
    if not _is_4bit(weights[0], precision):
        dtype: Literal["float32", "bfloat16"] = "float32" if precision == "float32" else "bfloat16"
        floats = [as_float(weight, getattr(torch, dtype)) for weight in weights]
        whole = floats[0] if len(floats) == 1 else torch.cat(floats)
        return PackedLinear(whole.to(device), precision=dtype, bias=bias, out_dtype=out_dtype)
    groups = [
        repack_group32(weight)
        if isinstance(weight, QuantTensor) and weight.kind in GROUP32_KINDS
        else quantize_group32(as_float(weight))
        for weight in weights
    ]
    q, scale, zero = (torch.cat(pieces).to(device) for pieces in zip(*groups, strict=True))
    return PackedLinear((q, scale, zero), precision=precision, bias=bias, out_dtype=out_dtype)
