"""Packed weights written to memory as floats, for products of many rows, which torch then computes.

Each weight is read once and written once: 2 + 5 / 8 bytes from 4 bits to bfloat16. The product reads it again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_weight import QuantizedWeight
from .fp8 import has_fp8, of_bytes

SCRATCH_BYTES = 128 << 20  # of unpacked weights at a time
BLOCK = 256  # chunks of a program
NUM_WARPS = 8


@triton.jit
def int4_halves(stored, scale, zero):
    """Two float32 of each byte: the weight (q - 8) * scale + zero of its low half, and of its high half."""
    bits = stored.to(tl.int32)
    offset = zero - 136.0 * scale  # 128 + q is q in the lowest bits of bfloat16's 128, so nothing is converted
    low = (((bits & 15) << 16) | 0x43000000).to(tl.float32, bitcast=True) * scale + offset
    high = (((bits >> 4) << 16) | 0x43000000).to(tl.float32, bitcast=True) * scale + offset
    return low, high


@triton.jit(do_not_specialize=["num_chunks"])
def unpack_kernel(
    values,
    scale,
    zero,
    out,
    num_chunks,  # of 16 stored bytes
    KIND: tl.constexpr,
    GROUP_LEN: tl.constexpr,
    HAS_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = chunk < num_chunks
    at = chunk[:, None] * 16 + tl.arange(0, 16)[None, :]
    stored = tl.load(values + at, mask=there[:, None], other=0)
    if KIND == "int4":
        step = tl.load(scale + chunk, mask=there, other=0.0).to(tl.float32)[:, None]
        offset = tl.load(zero + chunk, mask=there, other=0.0).to(tl.float32)[:, None]
        low, high = int4_halves(stored, step, offset)
        to = out + chunk[:, None] * 32 + tl.arange(0, 16)[None, :]
        tl.store(to, low.to(out.dtype.element_ty), mask=there[:, None])
        tl.store(to + 16, high.to(out.dtype.element_ty), mask=there[:, None])
    else:
        step = tl.load(scale + chunk * 16 // GROUP_LEN, mask=there, other=0.0).to(tl.float32)[:, None]
        number = of_bytes(stored, KIND, HAS_FP8)
        tl.store(out + at, (number * step).to(out.dtype.element_ty), mask=there[:, None])


def unpack(weight: QuantizedWeight, first: int, out: Tensor) -> None:
    """Writes rows ``first`` and following of ``weight`` to ``out`` [rows, K], which is contiguous."""
    last = first + out.shape[0]
    values, scale = weight.values[first:last], weight.scale[first:last]
    num_chunks = values.numel() // 16
    unpack_kernel[(triton.cdiv(num_chunks, BLOCK),)](
        values,
        scale,
        scale if weight.zero is None else weight.zero[first:last],
        out,
        num_chunks,
        KIND=weight.kind,
        GROUP_LEN=weight.group_len,
        HAS_FP8=has_fp8(out.device),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def unpacked_product(
    x: Tensor,
    weight: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """``x [T, K] @ weight.T + bias -> [T, N]`` in ``out_dtype`` or x's, by torch, some outputs at a time.

    Unpacked weights are of x's type, float32 on a CPU, and take at most ``scratch_bytes`` (or one output's).
    """
    num_rows, width_in = x.shape
    width_out = weight.shape[0]
    dtype = x.dtype if x.is_cuda else torch.float32
    out_dtype = out_dtype or x.dtype
    x = x.to(dtype)
    most = max(scratch_bytes // (width_in * dtype.itemsize), 1)
    num_slices = max(triton.cdiv(width_out, most), 1)
    length = triton.cdiv(triton.cdiv(width_out, num_slices), 16) * 16  # equal parts, aligned
    scratch = torch.empty((min(length, width_out), width_in), dtype=dtype, device=x.device)
    out = torch.empty((num_rows, width_out), dtype=out_dtype, device=x.device)
    for first in range(0, width_out, length):
        last = min(first + length, width_out)
        part = scratch[: last - first]
        unpack(weight, first, part)
        columns = out[:, first:last]
        if out_dtype == dtype and bias is not None:
            torch.addmm(bias[first:last].to(dtype), x, part.T, out=columns)
        elif out_dtype == dtype:
            torch.mm(x, part.T, out=columns)
        else:
            wide = torch.mm(x, part.T, out_dtype=torch.float32) if x.is_cuda else x @ part.T
            columns.copy_(wide if bias is None else wide.add_(bias[first:last]))
    return out
