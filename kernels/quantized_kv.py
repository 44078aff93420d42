"""Keys and values in 8 bits: how a vector lies in a pool of int8.

A vector holds the D numbers of one token and one KV head. It takes ``kv_row_len(D, int8)`` bytes:

    [ D whole numbers, -127 to 127 | a bfloat16 scale for each group of 16 neighbours; the last group may be shorter ]

Number i is ``whole[i] * scale[i // 16]``. Every vector has its own scales, so a token is written without reading or
changing another one, and copying a slot copies its scales.
"""

import torch
from torch import Tensor

KV_GROUP_LEN = 16
GREATEST = 127.0
LEAST_SCALE = 1e-30  # a group with a smaller scale becomes zeros


def kv_row_len(head_dim: int, dtype: torch.dtype) -> int:
    """How many elements of ``dtype`` a vector of ``head_dim`` numbers takes in a pool."""
    return head_dim + 2 * -(-head_dim // KV_GROUP_LEN) if dtype == torch.int8 else head_dim


def quantize_kv(x: Tensor) -> Tensor:
    """float [..., D] -> int8 [..., kv_row_len(D, int8)].

    A number is off by at most half a scale. A scale is a 127th of its group's greatest number, rounded to bfloat16.
    A group with a number that is not finite becomes NaN.
    """
    head_dim = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -head_dim % KV_GROUP_LEN))
    groups = padded.unflatten(-1, (-1, KV_GROUP_LEN))  # [..., groups, 16]
    greatest = groups.abs().amax(dim=-1)
    scales = torch.where(greatest.isfinite(), greatest / GREATEST, torch.nan)
    scales = scales.masked_fill(scales < LEAST_SCALE, 0.0).bfloat16()  # [..., groups]
    inverses = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    whole = (groups * inverses.unsqueeze(-1)).round().nan_to_num().to(torch.int8)
    return torch.cat((whole.flatten(-2)[..., :head_dim], scales.contiguous().view(torch.int8)), dim=-1)


def dequantize_kv(rows: Tensor, head_dim: int) -> Tensor:
    """int8 [..., kv_row_len(D, int8)] -> float32 [..., D]."""
    whole, scales = rows[..., :head_dim].float(), rows[..., head_dim:].contiguous().view(torch.bfloat16).float()
    return whole * scales.repeat_interleave(KV_GROUP_LEN, dim=-1)[..., :head_dim]
