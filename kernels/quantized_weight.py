"""Weights of 4 and 8 bits, packed for the GPU's products.

There is a scale for every ``group_len`` neighbours of a row; int4 has an offset too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8"]
GROUP_LEN = 32


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """[N, K] in one of three forms; ``zero`` belongs to int4 alone, see ``pack_int4``, ``pack_int8``, ``pack_fp8``."""

    kind: Kind
    values: Tensor  # uint8 [N, K / 2]; int8 [N, K]; uint8 [N, K]
    scale: Tensor  # float16 or float32 [N, K / group_len]; zero is of the same type
    zero: Tensor | None
    group_len: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.values.shape
        return rows, 2 * width if self.kind == "int4" else width


Experts = Tensor | QuantizedWeight  # [E, N, K]; packed [E * N, K]


def joined_experts(experts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Experts of one kind, one after the other."""
    first = experts[0]
    assert all(expert.kind == first.kind and expert.group_len == first.group_len for expert in experts)
    dtype = torch.float32 if any(expert.scale.dtype == torch.float32 for expert in experts) else first.scale.dtype
    values, scale = torch.cat([part.values for part in experts]), torch.cat([part.scale.to(dtype) for part in experts])
    zeros = [part.zero.to(dtype) for part in experts if part.zero is not None]
    return QuantizedWeight(first.kind, values, scale, torch.cat(zeros) if zeros else None, first.group_len)


def num_experts(experts: Experts, width_out: int) -> int:
    """``width_out``: N of one of them."""
    return experts.shape[0] // width_out if isinstance(experts, QuantizedWeight) else experts.shape[0]


def unpacked_experts(experts: Experts, width_out: int) -> Tensor:
    """[E, N, K]; float32 if they were packed."""
    if not isinstance(experts, QuantizedWeight):
        return experts
    return dequantize(experts).view(-1, width_out, experts.shape[1])


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> QuantizedWeight:
    """Of ``w = (q - 8) * scale + zero``: q uint8 [N, K] of 0..15, scale and zero float32 [N, K / 32]."""
    _check_width(q.shape[1])
    halves = q.to(torch.uint8).view(q.shape[0], -1, 2, 16)
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(q.shape[0], -1)
    dtype = _scale_type(scale, zero)
    return QuantizedWeight("int4", packed, scale.to(dtype).contiguous(), zero.to(dtype).contiguous(), GROUP_LEN)


def pack_int8(q: Tensor, scale: Tensor) -> QuantizedWeight:
    """Of ``w = q * scale``: q int8 [N, K], scale float32 [N, K / 32]."""
    _check_width(q.shape[1])
    return QuantizedWeight("int8", q.contiguous(), scale.to(_scale_type(scale)).contiguous(), None, GROUP_LEN)


def pack_fp8(weight: Tensor, *, group_len: int = 128) -> QuantizedWeight:
    """``weight`` [N, K] rounded to 8-bit floats, scaled so that every ``group_len`` neighbours use their full range."""
    rows, width = weight.shape
    if width % group_len:
        raise ValueError(f"fp8 of a weight {width} wide: must be a multiple of its groups of {group_len}")
    groups = weight.float().view(rows, -1, group_len)
    scale = (groups.abs().amax(-1) / 448.0).clamp_min(torch.finfo(torch.float32).tiny)
    stored = (groups / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).view(rows, width)
    return QuantizedWeight("fp8", stored.view(torch.uint8), scale, None, group_len)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """float32 [N, K]."""
    if weight.kind == "int4":
        halves = weight.values.view(weight.shape[0], -1, 1, 16)
        number = torch.cat((halves & 15, halves >> 4), dim=2).view(weight.shape).float() - 8
    else:
        number = (weight.values.view(torch.float8_e4m3fn) if weight.kind == "fp8" else weight.values).float()
    groups = number.view(*weight.scale.shape, weight.group_len) * weight.scale.float().unsqueeze(-1)
    if weight.zero is not None:
        groups = groups + weight.zero.float().unsqueeze(-1)
    return groups.view(weight.shape)


def _scale_type(*scales: Tensor) -> torch.dtype:
    """float16, unless a scale is beyond its range: at 4 bits, float32 scales and offsets would add a bit a weight."""
    fits = all(float(x.abs().max()) < torch.finfo(torch.float16).max for x in scales if x.numel())
    return torch.float16 if fits else torch.float32


def _check_width(width: int) -> None:
    if width % GROUP_LEN:
        raise ValueError(f"a weight {width} wide: must be a multiple of its groups of {GROUP_LEN}")
