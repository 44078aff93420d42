"""Products of rows with the weights of their group: experts of a mixture, adapters of a batch.

    out[p] (+)= row_scale[p] * x[p // divide] @ weight[group_ids[p]].T        rows of group -1 stay unchanged

Activations are not sorted: only row indices are, and each block gathers its rows. The weights of each group that occurs
are read once for every BLOCK_M of its rows; 2 * rows * N * K flops.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..groups import GroupBlocks, Groups
from ..quantized_weight import QuantizedWeight
from .attention import FLOAT32, product_type
from .config import ProductConfig, config_of
from .fp8 import has_fp8, of_bytes
from .quantized import add_int4_terms, of_groups

GROUP_BLOCK = 1024  # rows that are read at a time to group them


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def group_rows_kernel(
    ids,
    order,
    starts,
    block_groups,
    block_firsts,
    num_rows,
    num_groups,
    num_blocks,
    BINS: tl.constexpr,  # a power of two, not less than num_groups + 2
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each group, the last for the rows in none; each counts all groups, then places its own rows."""
    group = tl.program_id(0)
    each = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        found = tl.load(ids + row, mask=row < num_rows, other=num_groups + 1).to(tl.int32)
        counts += tl.histogram(tl.where(found < 0, num_groups, found), BINS)
    before = each < group
    place = tl.sum(tl.where(before, counts, 0), 0)
    count = tl.sum(tl.where(each == group, counts, 0), 0)
    tl.store(starts + group, place)
    block = tl.sum(tl.where(before, (counts + (BLOCK_M - 1)) // BLOCK_M, 0), 0)
    if group < num_groups:
        for first in range(0, count, BLOCK_M):
            tl.store(block_groups + block, group)
            tl.store(block_firsts + block, place + first)
            block += 1
    else:
        tl.store(starts + num_groups + 1, num_rows)
        for first in range(block, num_blocks, BLOCK):
            unused = first + tl.arange(0, BLOCK)
            tl.store(block_groups + unused, -1, mask=unused < num_blocks)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        found = tl.load(ids + row, mask=row < num_rows, other=num_groups + 1).to(tl.int32)
        is_own = (tl.where(found < 0, num_groups, found) == group).to(tl.int32)
        rank = tl.cumsum(is_own, 0) - is_own
        tl.store(order + place + rank, row, mask=is_own == 1)
        place += tl.sum(is_own, 0)


def group_rows(ids: Tensor, num_groups: int, block_len: int) -> GroupBlocks:
    """A stable counting sort of the rows by group, and blocks of up to ``block_len`` rows of one group."""
    num_rows, device = ids.shape[0], ids.device
    num_blocks = min(num_groups + num_rows // block_len, num_rows)
    order, starts, groups, firsts = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (num_rows, num_groups + 2, num_blocks, num_blocks)
    )
    group_rows_kernel[(num_groups + 1,)](
        ids.contiguous(),
        order,
        starts,
        groups,
        firsts,
        num_rows,
        num_groups,
        num_blocks,
        BINS=triton.next_power_of_2(num_groups + 2),
        BLOCK_M=block_len,
        BLOCK=GROUP_BLOCK,
        num_warps=4,
    )
    return GroupBlocks(order, starts, groups, firsts)


@triton.jit
def grouped_product_kernel(
    x,
    weight,
    weight_scale,
    weight_zero,
    order,
    block_groups,
    block_firsts,
    group_starts,
    row_scale,
    out,
    width_out,
    width_in,
    scales_a_row,
    divide,
    x_stride,
    out_stride,
    KIND: tl.constexpr,  # of packed weights; "": they are not packed
    GROUP_LEN: tl.constexpr,  # packed weights of one scale
    HAS_SCALE: tl.constexpr,
    HAS_FP8: tl.constexpr,  # whether the device converts 8-bit floats
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    block = tl.program_id(0)
    group = tl.load(block_groups + block)
    if group < 0:  # a padding block
        return
    place = tl.load(block_firsts + block) + tl.arange(0, BLOCK_M)
    valid = place < tl.load(group_starts + group + 1)
    pair = tl.load(order + place, mask=valid, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width_out
    rows = x + (pair // divide) * x_stride
    lines = group.to(tl.int64) * width_out + column
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if KIND == "int4":
        sums = add_int4_terms(
            sums,
            rows,
            valid,
            weight,
            weight_scale,
            weight_zero,
            lines,
            inside,
            width_in,
            scales_a_row,
            BLOCK_K,
            PRODUCTS,
        )
    else:
        for start in range(0, width_in, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            there = k < width_in
            a = tl.load(rows[:, None] + k[None, :], mask=valid[:, None] & there[None, :], other=0.0)
            b = tl.load(weight + lines[None, :] * width_in + k[:, None], mask=inside[None, :] & there[:, None], other=0)
            if KIND != "":
                GROUPS: tl.constexpr = (BLOCK_K + GROUP_LEN - 1) // GROUP_LEN
                first = start // GROUP_LEN
                step = of_groups(weight_scale, lines, inside, first, scales_a_row, GROUPS, BLOCK_K // GROUPS)
                b = of_bytes(b, KIND, HAS_FP8) * step
            sums = tl.dot(a.to(PRODUCTS), b.to(PRODUCTS), sums, input_precision=FLOAT32)
    if HAS_SCALE:
        sums = sums * tl.load(row_scale + pair, mask=valid, other=0.0)[:, None]
    at = out + pair[:, None] * out_stride + column[None, :]
    stored = valid[:, None] & inside[None, :]
    if ADDS:
        sums += tl.load(at, mask=stored, other=0.0).to(tl.float32)
    tl.store(at, sums.to(out.dtype.element_ty), mask=stored)


def grouped_product(
    x: Tensor,  # [P / divide, K]
    weight: Tensor | QuantizedWeight,  # [groups, N, K]; packed [groups * N, K]
    groups: Groups,
    *,
    divide: int = 1,
    row_scale: Tensor | None = None,  # float32 [P]
    out: Tensor | None = None,
    clears: bool = True,
    config: ProductConfig | None = None,
) -> Tensor:
    """[P, N] in x's dtype; with ``out`` it is added there. Rows in no group are 0, or stay unchanged in ``out``.
    ``clears`` False: they may have any content.
    """
    num_pairs = groups.ids.shape[0]
    kind = weight.kind if isinstance(weight, QuantizedWeight) else ""
    if isinstance(weight, QuantizedWeight):
        values, width_in = weight.values.view(groups.num_groups, -1, weight.values.shape[1]), weight.shape[1]
        scale, group_len = weight.scale, weight.group_len
        zero = scale if weight.zero is None else weight.zero
    else:
        values, width_in, scale, zero, group_len = weight, weight.shape[2], weight, weight, 0
    assert values.is_contiguous() and values.shape[0] == groups.num_groups, values.shape
    assert x.shape == (num_pairs // divide, width_in) and x.stride(1) == 1, (x.shape, values.shape)
    adds = out is not None
    if out is None:
        made = torch.zeros if clears else torch.empty
        out = made((num_pairs, values.shape[1]), dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    if config is None:
        table = config_of(x.device)
        config = table.grouped_few if num_pairs <= 16 * groups.num_groups else table.grouped_many
        if x.dtype == torch.float32:
            config = table.exact_grouped
    if config.block_m not in groups.blocks:
        groups.blocks[config.block_m] = group_rows(groups.ids, groups.num_groups, config.block_m)
    blocks = groups.blocks[config.block_m]
    grouped_product_kernel[(len(blocks.groups), triton.cdiv(values.shape[1], config.block_n))](
        x,
        values,
        scale,
        zero,
        blocks.order,
        blocks.groups,
        blocks.firsts,
        blocks.starts,
        x if row_scale is None else row_scale,
        out,
        values.shape[1],
        width_in,
        scale.shape[1],
        divide,
        x.stride(0),
        out.stride(0),
        KIND=kind,
        GROUP_LEN=group_len,
        HAS_SCALE=row_scale is not None,
        HAS_FP8=has_fp8(x.device),
        ADDS=adds,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PRODUCTS=product_type(x),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def add_adapters(y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Groups) -> Tensor:
    """Low-rank adapters gathered by token (Punica, Chen et al. 2023)."""
    return grouped_product(grouped_product(x, down, adapters, clears=False), up, adapters, out=y)
