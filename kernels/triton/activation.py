"""The gated activation of a feed-forward block, one program for a part of a row.

Reads 2 * rows * width elements and writes rows * width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import config_of


@triton.jit
def gated_kernel(x, y, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + 2 * row * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        opened = gate * tl.sigmoid(tl.maximum(doubled, -60.0))  # below -60, exp would overflow; the result is 0 anyway
    else:
        opened = gate * tl.sigmoid(gate)
    tl.store(y + row * width + column, (opened * up).to(y.dtype.element_ty), mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    return _gated(x, gelu=False)


def gelu_mul(x: Tensor) -> Tensor:
    return _gated(x, gelu=True)


def _gated(x: Tensor, *, gelu: bool) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if y.numel():
        config = config_of(x.device).elementwise
        block = min(config.block_len, triton.next_power_of_2(width))
        grid = (y.numel() // width, triton.cdiv(width, block))
        gated_kernel[grid](x, y, width, GELU=gelu, BLOCK=block, num_warps=config.num_warps)
    return y
