"""Products of rows with the weights of their group: experts of a mixture, adapters of a batch.

    out[p] (+)= row_scale[p] * x[p // divide] @ weight[group_ids[p]].T        rows of group -1 stay unchanged

Activations are not sorted: only row indices are, and each block gathers its rows. The weights of each group that occurs
are read once for every BLOCK_M of its rows; 2 * rows * N * K flops.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..groups import Groups
from ..quantized_weight import QuantizedWeight
from .attention import blocks_of, product_type
from .config import ProductConfig, config_of
from .fp8 import has_fp8, of_bytes
from .quantized import add_int4_terms, of_groups


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
    num_groups,
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
    if (group < 0) | (group >= num_groups):  # padding, or rows in no group
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
            sums = tl.dot(a.to(PRODUCTS), b.to(PRODUCTS), sums)
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
    config: ProductConfig | None = None,
) -> Tensor:
    """[P, N] in x's dtype; with ``out`` it is added there. Rows in no group are 0, or stay unchanged in ``out``."""
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
        out = torch.zeros((num_pairs, values.shape[1]), dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    if config is None:
        table = config_of(x.device)
        config = table.grouped_few if num_pairs <= 16 * groups.num_groups else table.grouped_many
    if config.block_m not in groups.blocks:
        groups.blocks[config.block_m] = blocks_of(groups.starts, num_pairs, config.block_m)
    block_groups, block_firsts = groups.blocks[config.block_m]
    grouped_product_kernel[(len(block_groups), triton.cdiv(values.shape[1], config.block_n))](
        x,
        values,
        scale,
        zero,
        groups.order,
        block_groups,
        block_firsts,
        groups.starts,
        x if row_scale is None else row_scale,
        out,
        groups.num_groups,
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
    return grouped_product(grouped_product(x, down, adapters), up, adapters, out=y)
