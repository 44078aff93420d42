"""Products with weights of 4 and 8 bits.

Weights are read as they are stored: 4 or 8 bits each and a scale for every ``group_len`` neighbours of a row. One row
has a kernel of its own (``row``); for many, weights are unpacked to memory first (``unpack``). Between the two a
program has a block of results of all rows, and unpacks its weights in registers: each weight is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_weight import QuantizedWeight
from .attention import product_type
from .config import ProductConfig, config_of
from .fp8 import has_fp8, of_bytes
from .row import is_row, row_product
from .unpack import unpacked_product


@triton.jit
def of_groups(numbers, lines, inside, first, num_groups, GROUPS: tl.constexpr, TIMES: tl.constexpr):
    """float32 [GROUPS * TIMES, columns]: each group's number, read once and repeated for its rows."""
    group = first + tl.arange(0, GROUPS)
    shown = inside[None, :] & (group < num_groups)[:, None]
    read = tl.load(numbers + lines[None, :] * num_groups + group[:, None], mask=shown, other=0.0).to(tl.float32)
    wide = tl.broadcast_to(read[:, None, :], (GROUPS, TIMES, lines.shape[0]))
    return tl.reshape(wide, (GROUPS * TIMES, lines.shape[0]))


@triton.jit
def add_int4_terms(
    sums,
    rows,
    valid,
    weight,
    scale,
    zero,
    lines,
    inside,
    width_in,
    num_groups,
    BLOCK_K: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """``sums`` and the products of x at ``rows`` with the 4-bit weights of ``lines``."""
    # Byte j of a group of 32: weight j in its low half, weight j + 16 in its high half.
    for start in range(0, width_in // 2, BLOCK_K // 2):
        byte = start + tl.arange(0, BLOCK_K // 2)
        there = byte < width_in // 2
        k = byte // 16 * 32 + byte % 16
        shown = inside[None, :] & there[:, None]
        both = tl.load(weight + lines[None, :] * (width_in // 2) + byte[:, None], mask=shown, other=0)
        step = of_groups(scale, lines, inside, start // 16, num_groups, BLOCK_K // 32, 16)
        # w = (q - 8) * scale + zero, and 128 + q is q in the lowest bits of bfloat16's 128: no conversion.
        offset = of_groups(zero, lines, inside, start // 16, num_groups, BLOCK_K // 32, 16) - 136.0 * step
        bits = both.to(tl.int32)
        low = (((bits & 15) << 16) | 0x43000000).to(tl.float32, bitcast=True) * step + offset
        high = (((bits >> 4) << 16) | 0x43000000).to(tl.float32, bitcast=True) * step + offset
        asked = valid[:, None] & there[None, :]
        first = tl.load(rows[:, None] + k[None, :], mask=asked, other=0.0).to(PRODUCTS)
        second = tl.load(rows[:, None] + k[None, :] + 16, mask=asked, other=0.0).to(PRODUCTS)
        sums = tl.dot(first, low.to(PRODUCTS), sums)
        sums = tl.dot(second, high.to(PRODUCTS), sums)
    return sums


@triton.jit
def quantized_product_kernel(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    num_rows,
    width_out,
    width_in,
    num_groups,
    x_stride,
    KIND: tl.constexpr,  # of packed weights; "": they are not packed
    GROUP_LEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FP8: tl.constexpr,  # whether the device converts 8-bit floats
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = row < num_rows
    inside = column < width_out
    lines = column.to(tl.int64)
    rows = x + row.to(tl.int64) * x_stride
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if KIND == "int4":
        sums = add_int4_terms(
            sums, rows, valid, weight, scale, zero, lines, inside, width_in, num_groups, BLOCK_K, PRODUCTS
        )
    else:
        GROUPS: tl.constexpr = 0 if KIND == "" else (BLOCK_K + GROUP_LEN - 1) // GROUP_LEN
        for start in range(0, width_in, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            there = k < width_in
            shown = inside[None, :] & there[:, None]
            stored = tl.load(weight + lines[None, :] * width_in + k[:, None], mask=shown, other=0)
            number = stored if KIND == "" else of_bytes(stored, KIND, HAS_FP8)
            if GROUPS > 1:
                number = number * of_groups(scale, lines, inside, start // GROUP_LEN, num_groups, GROUPS, GROUP_LEN)
            a = tl.load(rows[:, None] + k[None, :], mask=valid[:, None] & there[None, :], other=0.0)
            if GROUPS == 1:  # a group, or a part of one: its scale multiplies the sum
                step = tl.load(scale + lines * num_groups + start // GROUP_LEN, mask=inside, other=0.0)
                sums += tl.dot(a.to(PRODUCTS), number.to(PRODUCTS)) * step.to(tl.float32)[None, :]
            else:
                sums = tl.dot(a.to(PRODUCTS), number.to(PRODUCTS), sums)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * width_out + column[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


def quantized_product(
    x: Tensor,
    weight: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: ProductConfig | None = None,
) -> Tensor:
    """``x [T, K] @ weight.T + bias -> [T, N]`` in ``out_dtype`` or x's, with float32 sums."""
    if config is None and is_row(x, weight):
        return row_product(x, weight, bias=bias, out_dtype=out_dtype)
    if config is None and x.shape[0] > config_of(x.device).most_unpacked_in_registers:
        return unpacked_product(x, weight, bias=bias, out_dtype=out_dtype)
    return block_product(x, weight, bias=bias, out_dtype=out_dtype, config=config)


def block_product(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: ProductConfig | None = None,
) -> Tensor:
    """``x [T, K] @ weight.T + bias -> [T, N]`` in ``out_dtype`` or x's, by blocks of rows and outputs."""
    num_rows, width_in = x.shape
    width_out = weight.shape[0]
    packed = weight if isinstance(weight, QuantizedWeight) else None
    values, scale = (weight.values, weight.scale) if isinstance(weight, QuantizedWeight) else (weight, x)
    assert width_in == weight.shape[1], (x.shape, weight.shape)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, width_out), dtype=out_dtype or x.dtype, device=x.device)
    if config is None:
        table = config_of(x.device)
        few = table.int4_few if weight.kind == "int4" else table.bytes_few
        config = few if num_rows <= 16 else table.quantized_many
    if num_rows:
        quantized_product_kernel[(triton.cdiv(num_rows, config.block_m), triton.cdiv(width_out, config.block_n))](
            x,
            values,
            scale,
            scale if packed is None or packed.zero is None else packed.zero,
            scale if bias is None else bias,
            out,
            num_rows,
            width_out,
            width_in,
            scale.shape[1],
            x.stride(0),
            KIND="" if packed is None else packed.kind,
            GROUP_LEN=0 if packed is None else packed.group_len,
            HAS_BIAS=bias is not None,
            HAS_FP8=has_fp8(x.device),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            PRODUCTS=product_type(x),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out
