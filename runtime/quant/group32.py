"""Weights as 4-bit integers in groups of 32: ``w = (q - 8) * scale + zero``.

``q`` is uint8 [N, K] of 0..15; ``scale`` and ``zero`` are float32 [N, K / 32].
"""

import numpy as np
import torch

from ...protocol.errors import Unsupported
from .block_decoding import halves, split_k_fours, split_nibbles
from .quant_tensor import QuantTensor

GROUP_LEN = 32
GROUP32_KINDS = ("Q4_0", "Q4_1", "Q4_K")

Group32 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def repack_group32(weight: QuantTensor) -> Group32:
    """The same weights as ``(q, scale, zero)``, exact up to the float32 rounding of ``zero``."""
    q, scale, minimum = affine_group32(weight)
    zero = torch.zeros_like(scale) if weight.kind == "Q4_0" else minimum + 8 * scale
    return q, scale, zero


def affine_group32(weight: QuantTensor) -> Group32:
    """The same weights as ``(q, scale, minimum)``: ``w = q * scale + minimum``, exactly what the blocks hold."""
    if weight.kind not in GROUP32_KINDS:
        raise Unsupported(
            f"{weight.kind} as 4-bit groups of 32; only {', '.join(GROUP32_KINDS)} are made of such groups"
        )
    num_rows, row_len = weight.shape
    blocks = weight.blocks.reshape(-1, weight.blocks.shape[-1]).numpy()
    q = np.empty((num_rows, row_len), dtype=np.uint8)
    if weight.kind == "Q4_K":
        scale, offset = np.empty((2, len(blocks), 8), dtype=np.float32)
        split_k_fours(blocks, halves(blocks, 0), halves(blocks, 2), q.reshape(-1, 256), scale, offset)
        minimum = -offset
    else:
        scale = halves(blocks, 0)
        minimum = -8 * scale if weight.kind == "Q4_0" else halves(blocks, 2)
        split_nibbles(blocks, 2 if weight.kind == "Q4_0" else 4, q.reshape(-1, GROUP_LEN))
    scale, minimum = (part.reshape(num_rows, row_len // GROUP_LEN) for part in (scale, minimum))
    return torch.from_numpy(q), torch.from_numpy(scale), torch.from_numpy(minimum)


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
