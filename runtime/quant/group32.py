"""Weights as 4-bit integers in groups of 32: ``w = (q - 8) * scale + zero``. Never packs them for a machine's kernel.

``q`` is uint8 [N, K] of 0..15; ``scale`` and ``zero`` are float32 [N, K / 32].
"""

import torch

from ..protocol.errors import Unsupported
from .quant_tensor import QuantTensor, k_nibbles, k_scales

GROUP_LEN = 32
GROUP32_KINDS = ("Q4_0", "Q4_1", "Q4_K")

Group32 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def repack_group32(weight: QuantTensor) -> Group32:
    """The same weights, exactly (up to float32 rounding of ``zero``), as ``(q, scale, zero)``."""
    if weight.kind not in GROUP32_KINDS:
        raise Unsupported(
            f"{weight.kind} as 4-bit groups of 32; only {', '.join(GROUP32_KINDS)} are made of such groups"
        )
    num_rows, row_len = weight.shape
    blocks = weight.blocks.reshape(-1, weight.blocks.shape[-1])
    if weight.kind == "Q4_K":
        sc, minimum = k_scales(blocks[:, 4:16])
        scale = _half(blocks, 0) * sc.float()  # [B, 8]
        zero = 8 * scale - _half(blocks, 2) * minimum.float()
        q = k_nibbles(blocks[:, 16:])
    else:
        packed = blocks[:, 2:] if weight.kind == "Q4_0" else blocks[:, 4:]
        scale = _half(blocks, 0)
        zero = torch.zeros_like(scale) if weight.kind == "Q4_0" else _half(blocks, 2) + 8 * scale
        q = torch.cat((packed & 15, packed >> 4), dim=-1)
    groups = row_len // GROUP_LEN
    return q.view(num_rows, row_len), scale.view(num_rows, groups), zero.view(num_rows, groups)


def quantize_group32(weight: torch.Tensor) -> Group32:
    """Float weights [N, K] rounded to the nearest of 16 even steps between each group's minimum and maximum."""
    num_rows, row_len = weight.shape
    if row_len % GROUP_LEN:
        raise Unsupported(f"4-bit groups of {GROUP_LEN} for rows of {row_len} weights; use precision bfloat16")
    groups = weight.float().view(num_rows, row_len // GROUP_LEN, GROUP_LEN)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    scale = (high - low) / 15
    steps = (groups - low.unsqueeze(-1)) / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    q = steps.round().clamp_(0, 15).to(torch.uint8).view(num_rows, row_len)
    return q, scale, low + 8 * scale


def dequantize_group32(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The float32 weights [N, K] that a ``(q, scale, zero)`` stands for."""
    num_rows, row_len = q.shape
    groups = (q.float() - 8).view(num_rows, row_len // GROUP_LEN, GROUP_LEN)
    return (groups * scale.unsqueeze(-1) + zero.unsqueeze(-1)).view(num_rows, row_len)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()
