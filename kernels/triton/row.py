"""Products of one row with weights as they are stored: bfloat16, or packed in 4 or 8 bits.

A program has ``block_n`` results. Each thread multiplies 16 stored bytes at a time and sums in float32. The matrix
units are not used: one row would fill a 16th of them. One program sums a whole result, so the order of sums is fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_weight import QuantizedWeight
from .config import RowConfig, config_of
from .fp8 import has_fp8, of_bytes


@triton.jit
def int4_terms(weight, scale, zero, column, chunk, width_out, num_groups, x, x_sum, bits):
    """float32 [columns, chunks]: the products of a chunk's x, eight tensors [columns, chunks, 4], and its weights."""
    shown = (column < width_out)[:, None] & (chunk < num_groups)[None, :]
    group = column.to(tl.int64)[:, None] * num_groups + chunk[None, :]
    word = tl.load(weight + group[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], mask=shown[:, :, None], other=0)
    step = tl.load(scale + group, mask=shown, other=0.0).to(tl.float32)
    offset = tl.load(zero + group, mask=shown, other=0.0).to(tl.float32)
    # Four bits moved to bits 16 to 19 of 128.0 have the value 128 + q.
    terms = ((word << 16 & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[0]
    terms += ((word << 8 & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[1]
    terms += ((word & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[2]
    terms += ((word >> 8 & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[3]
    terms += ((word << 12 & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[4]
    terms += ((word << 4 & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[5]
    terms += ((word >> 4 & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[6]
    terms += ((word >> 12 & 0xF0000) | bits).to(tl.float32, bitcast=True) * x[7]
    # w = (q - 8) * scale + zero
    return tl.sum(terms, axis=2) * step + (offset - 136.0 * step) * x_sum


@triton.jit
def four_numbers(wide):
    """Four bfloat16 in each int64, as float32."""
    low, high = wide.to(tl.int32), (wide >> 32).to(tl.int32)
    a0, a1 = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
    a2, a3 = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(tl.float32, bitcast=True)
    return a0, a1, a2, a3


@triton.jit
def int4_row_kernel(
    x,  # bfloat16, four in an int64
    weight,  # eight in an int32
    scale,
    zero,
    bias,
    out,
    width_out,
    num_groups,
    bits,  # of 128.0; no constant, so that one instruction masks and joins
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    CHUNKS: tl.constexpr = BLOCK_K // 32
    column = tl.program_id(0) * (4 * BLOCK_N) + tl.arange(0, BLOCK_N)
    sums0 = tl.zeros([BLOCK_N, CHUNKS], dtype=tl.float32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    for start in range(0, num_groups, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        # Each column reads x for itself, so that a thread holds the x of its own weights.
        at = x + (column * 0)[:, None, None] + chunk[None, :, None] * 8 + tl.arange(0, 4)[None, None, :]
        there = (column >= 0)[:, None, None] & (chunk < num_groups)[None, :, None]
        a0, a1, a2, a3 = four_numbers(tl.load(at, mask=there, other=0))
        a4, a5, a6, a7 = four_numbers(tl.load(at + 4, mask=there, other=0))
        x_sum = tl.sum(a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7, axis=2)
        a = (a0, a1, a2, a3, a4, a5, a6, a7)
        sums0 += int4_terms(weight, scale, zero, column, chunk, width_out, num_groups, a, x_sum, bits)
        sums1 += int4_terms(weight, scale, zero, column + BLOCK_N, chunk, width_out, num_groups, a, x_sum, bits)
        sums2 += int4_terms(weight, scale, zero, column + 2 * BLOCK_N, chunk, width_out, num_groups, a, x_sum, bits)
        sums3 += int4_terms(weight, scale, zero, column + 3 * BLOCK_N, chunk, width_out, num_groups, a, x_sum, bits)
    store_row(sums0, bias, out, column, width_out, HAS_BIAS)
    store_row(sums1, bias, out, column + BLOCK_N, width_out, HAS_BIAS)
    store_row(sums2, bias, out, column + 2 * BLOCK_N, width_out, HAS_BIAS)
    store_row(sums3, bias, out, column + 3 * BLOCK_N, width_out, HAS_BIAS)


@triton.jit
def store_row(sums, bias, out, column, width_out, HAS_BIAS: tl.constexpr):
    total, inside = tl.sum(sums, axis=1), column < width_out
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_product_kernel(
    x,
    weight,
    scale,
    bias,
    out,
    width_out,
    width_in,
    num_groups,
    KIND: tl.constexpr,  # of packed weights; "": they are not packed
    GROUP_LEN: tl.constexpr,  # packed weights of one scale
    HAS_BIAS: tl.constexpr,
    HAS_FP8: tl.constexpr,  # whether the device converts 8-bit floats
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width_out
    lines = column.to(tl.int64)
    # A thread's 16 bytes are a chunk: 16 weights of 8 bits, or 8 of bfloat16.
    CHUNK: tl.constexpr = 8 if KIND == "" else 16
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    sums = tl.zeros([BLOCK_N, CHUNKS], dtype=tl.float32)
    for start in tl.range(0, width_in // CHUNK, CHUNKS, num_stages=NUM_STAGES):
        chunk = start + tl.arange(0, CHUNKS)
        there = chunk < width_in // CHUNK
        shown = inside[:, None] & there[None, :]
        k = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        a = tl.load(x + k, mask=there[:, None], other=0.0).to(tl.float32)
        at = weight + lines[:, None, None] * width_in + k[None, :, :]
        stored = tl.load(at, mask=shown[:, :, None], other=0)
        number = of_bytes(stored, KIND, HAS_FP8)
        terms = tl.sum(number * a[None, :, :], axis=2)
        if KIND != "":
            group = chunk * CHUNK // GROUP_LEN
            step = tl.load(scale + lines[:, None] * num_groups + group[None, :], mask=shown, other=0.0)
            terms = terms * step.to(tl.float32)
        sums += terms
    store_row(sums, bias, out, column, width_out, HAS_BIAS)


def row_product(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: RowConfig | None = None,
) -> Tensor:
    """``x [1, K] @ weight.T + bias -> [1, N]`` in ``out_dtype`` or x's. Only where ``is_row``."""
    assert is_row(x, weight), (x.shape, x.dtype, weight.shape)
    width_out, width_in = weight.shape
    x = x if x.stride(1) == 1 and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    out = torch.empty((1, width_out), dtype=out_dtype or x.dtype, device=x.device)
    if isinstance(weight, QuantizedWeight) and weight.zero is not None:
        config = config or config_of(x.device).row_int4.of_width(width_in)
        int4_row_kernel[(triton.cdiv(width_out, 4 * config.block_n),)](
            x[0].view(torch.int64),
            weight.values.view(torch.int32),
            weight.scale,
            weight.zero,
            x if bias is None else bias,
            out,
            width_out,
            weight.scale.shape[1],
            0x43000000,
            HAS_BIAS=bias is not None,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            num_warps=config.num_warps,
        )
        return out
    packed = weight if isinstance(weight, QuantizedWeight) else None
    values, scale = (weight, x) if not isinstance(weight, QuantizedWeight) else (weight.values, weight.scale)
    config = config or (config_of(x.device).row_dense if packed is None else config_of(x.device).row_bytes)
    row_product_kernel[(triton.cdiv(width_out, config.block_n),)](
        x,
        values,
        scale,
        x if bias is None else bias,
        out,
        width_out,
        width_in,
        scale.shape[1],
        KIND="" if packed is None else packed.kind,
        GROUP_LEN=0 if packed is None else packed.group_len,
        HAS_BIAS=bias is not None,
        HAS_FP8=has_fp8(x.device),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


def is_row(x: Tensor, weight: Tensor | QuantizedWeight) -> bool:
    """Whether ``row_product`` supports them: one row of whole chunks, in bfloat16 if the weights have 4 bits."""
    if x.shape[0] != 1 or x.shape[1] % 16:
        return False
    if isinstance(weight, QuantizedWeight):
        return weight.kind != "int4" or x.dtype == torch.bfloat16
    return weight.is_contiguous()
