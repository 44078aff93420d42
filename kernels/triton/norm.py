"""RMSNorm with the residual, one program for each row.

Reads x, and the residual, once; writes y, and the sum, once: (2 or 4) * rows * width elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    residual,
    y,
    residual_out,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_out + row * width + column, total.to(residual_out.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(total * total) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (total * scale * gain).to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    assert weight.shape == (width,), (weight.shape, x.shape)
    y = torch.empty_like(x)
    if residual is None:
        added, residual_out = x, x
    else:
        assert residual.shape == x.shape, (residual.shape, x.shape)
        added = residual.contiguous()
        residual_out = torch.empty_like(added)
    num_rows = x.numel() // width if width else 0
    if num_rows:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(num_rows,)](
            x,
            weight,
            added,
            y,
            residual_out,
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=warps_of(block),
        )
    return y, residual_out


def warps_of(block: int) -> int:
    """At most 16 elements a thread."""
    return min(max(block // 512, 1), 16)
