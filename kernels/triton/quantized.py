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
from .unpack import int4_halves, unpacked_product


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
        offset = of_groups(zero, lines, inside, start // 16, num_groups, BLOCK_K // 32, 16)
        low, high = int4_halves(both, step, offset)
        asked = valid[:, None] & there[None, :]
        first = tl.load(rows[:, None] + k[None, :], mask=asked, other=0.0).to(PRODUCTS)
        second = tl.load(rows[:, None] + k[None, :] + 16, mask=asked, other=0.0).to(PRODUCTS)
        sums = tl.dot(first, low.to(PRODUCTS), sums)
        sums = tl.dot(second, high.to(PRODUCTS), sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
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
    KIND: tl.constexpr,
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
        GROUPS: tl.constexpr = (BLOCK_K + GROUP_LEN - 1) // GROUP_LEN
        for start in range(0, width_in, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            there = k < width_in
            shown = inside[None, :] & there[:, None]
            stored = tl.load(weight + lines[None, :] * width_in + k[:, None], mask=shown, other=0)
            number = of_bytes(stored, KIND, HAS_FP8)
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
    """``x [T, K] @ weight.T + bias -> [T, N]`` in ``out_dtype`` or x's, with float32 sums.

    The number of rows chooses the kernel; with ``config`` it is ``quantized_product_kernel`` for any number.
    """
    num_rows, width_in = x.shape
    if config is None:
        if is_row(x, weight):
            return row_product(x, weight, bias=bias, out_dtype=out_dtype)
        table = config_of(x.device)
        if num_rows > table.most_unpacked_in_registers:
            return unpacked_product(x, weight, bias=bias, out_dtype=out_dtype)
        few = table.int4_few if weight.kind == "int4" else table.bytes_few
        config = few if num_rows <= 16 else table.quantized_many
    width_out = weight.shape[0]
    assert width_in == weight.shape[1], (x.shape, weight.shape)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, width_out), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    quantized_product_kernel[(triton.cdiv(num_rows, config.block_m), triton.cdiv(width_out, config.block_n))](
        x,
        weight.values,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        weight.scale if bias is None else bias,
        out,
        num_rows,
        width_out,
        width_in,
        weight.scale.shape[1],
        x.stride(0),
        KIND=weight.kind,
        GROUP_LEN=weight.group_len,
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
