"""Products of bfloat16 weights with float32 results: logits rounded to bfloat16 would lose their order.

Packed weights are vectors of 16 outputs: a pair of neighbouring weights of each. x is laid out for 8 rows at a time,
pair by pair. A float32 x is split into two bfloat16, its rounded value and the rounding error, and both are multiplied.
A row's result is the same to the bit however many rows there are.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from ...cpu_isa import Isa, cpu_features, isa
from .entry import FIRST_DONE, FIRST_TASK, TASK, counters, entry
from .llvm import (
    BF16,
    F32,
    I32,
    LANES,
    V16,
    V16_I16,
    V16_I32,
    carry,
    concatenated,
    constant,
    declared,
    fused,
    is_arm,
    load_at,
    narrow,
    number,
    splat,
    vector_at,
)
from .machine_code import helper
from .recording import scratch
from .tensors import KINDS, readable, task_len, team_size
from .vector import (
    compiled,
    get,
    get_bf16,
    local_floats,
    put_bf16,
    put_outputs,
    splat16,
    store16_f32,
    take_number,
    watch,
)

_ROWS = 8
_BLOCKS = 4  # of 16 outputs, computed together
_PACKED = 32  # blocks that are packed at once
_MIN_SHARE = 200_000  # products worth a second thread


_PAIRS = ("avx512bf16", "bf16")  # x86's and Arm's features


@cache
def has_bfloat16_pairs() -> bool:
    """Whether this CPU adds products of two bfloat16 in one instruction, and the chosen instruction set has it."""
    return any(name in cpu_features() and not name.startswith(isa().left_out) for name in _PAIRS)


def pack_bfloat16(weight: Tensor) -> Tensor:
    """bfloat16 [blocks, pairs, 16, 2] from [N, K], padded with zeros to a multiple of four blocks."""
    num_outputs, width = weight.shape
    num_blocks, num_pairs = -(-num_outputs // (LANES * _BLOCKS)) * _BLOCKS, (width + 1) // 2
    packed = torch.zeros((num_blocks, num_pairs, LANES, 2), dtype=torch.bfloat16)
    for first in range(0, num_blocks, _PACKED):  # a head is large, and a second copy of all of it would be too
        rows = weight[first * LANES : (first + _PACKED) * LANES].bfloat16()
        padded = torch.nn.functional.pad(rows, (0, width % 2, 0, -len(rows) % LANES))
        blocks = padded.view(-1, LANES, num_pairs, 2).permute(0, 2, 1, 3)
        packed[first : first + len(blocks)].copy_(blocks)
    return packed


class Bfloat16Product:
    """``x [T, K] -> float32 [T, N]`` for packed weights; bias float32 [N]."""

    def __init__(self, packed: Tensor, num_outputs: int, *, bias: Tensor | None) -> None:
        self.packed, self.num_outputs, self.bias = packed, num_outputs, bias
        _multiply.compile()

    def __call__(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        x = readable(x)
        num_rows, width = x.shape
        out = torch.empty((num_rows, self.num_outputs), dtype=out_dtype)
        threads = team_size(num_rows * width * self.num_outputs, min_share=_MIN_SHARE)
        parts = 1 if x.dtype == torch.bfloat16 else 2
        pairs = (width + 1) // 2
        laid_out = scratch("laid out", -(-num_rows // _ROWS) * _ROWS * 2 * pairs * parts, torch.bfloat16)
        call = Bfloat16Call(
            x.data_ptr(),
            KINDS[x.dtype],
            num_rows,
            width,
            self.packed.data_ptr(),
            self.num_outputs,
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            KINDS[out_dtype],
            laid_out.data_ptr(),
            parts,
            task_len(-(-self.num_outputs // (_BLOCKS * LANES)), threads, 1),
        )
        _multiply(call, threads=threads)
        return out


def _pair_tile(num_rows: int, num_blocks: int) -> Any:
    """Outputs of neighbouring blocks for the first rows of 8: ``f(weights, block_bytes, x, count, out)`` adds to out,
    float32 [8, blocks, 16].
    """

    def emit(builder: Any, weights: Any, block_bytes: Any, x: Any, count: Any, out: Any) -> None:
        for rows, blocks in tile_parts(isa(), num_rows, num_blocks):
            add_products(builder, weights, block_bytes, x, count, out, rows, blocks)

    def add_products(
        builder: Any, weights: Any, block_bytes: Any, x: Any, count: Any, out: Any, rows: range, blocks: range
    ) -> None:
        lanes = [(r, b) for r in rows for b in blocks]

        def place(r: int, b: int) -> Any:
            return vector_at(builder, F32, out, number(LANES * (_BLOCKS * r + b)))

        def step(pair: Any, state: list[Any]) -> list[Any]:
            row, *sums = state
            offset = builder.mul(pair, number(4 * LANES))
            columns = {b: load_at(builder, V16_I32, builder.add(first, offset), 0) for b, first in firsts.items()}
            factors = {r: splat(builder, load_at(builder, I32, row, 4 * r)) for r in rows}
            sums = [dot2(builder, t, factors[r], columns[b]) for t, (r, b) in zip(sums, lanes, strict=True)]
            return [builder.add(row, number(4 * _ROWS)), *sums]

        firsts = {b: builder.add(weights, builder.mul(block_bytes, number(b))) for b in blocks}
        before = [builder.load(place(r, b), align=4) for r, b in lanes]
        _, *sums = carry(builder, count, [x, *before], step)
        for total, (r, b) in zip(sums, lanes, strict=True):
            builder.store(total, place(r, b), align=4)

    emit.__name__ = f"pair_tile_{num_rows}x{num_blocks}"
    return compiled(types.void, *(types.int64,) * 5)(emit)


def dot2(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + the products of each word's two bfloat16, lane by lane."""
    if has_bfloat16_pairs():
        return (
            _dot2_of_arm(builder, total, left, right) if is_arm(builder) else _dot2_of_x86(builder, total, left, right)
        )
    sixteen, upper = constant(V16_I32, 16), constant(V16_I32, 0xFFFF0000)
    lower_halves = [builder.bitcast(builder.shl(word, sixteen), V16) for word in (left, right)]
    upper_halves = [builder.bitcast(builder.and_(word, upper), V16) for word in (left, right)]
    return fused(builder, fused(builder, total, *lower_halves), *upper_halves)


def tile_parts(one: Isa, num_rows: int, num_blocks: int) -> list[tuple[range, range]]:
    """Rows and blocks of the tile's parts, whose sums fill half of the registers at most.

    AVX-512 has room for the largest tile, Arm for 4 rows by a block.
    """
    most = one.lanes * one.num_registers // (2 * LANES)
    rows = min(num_rows, most)
    blocks = min(num_blocks, most // rows)
    return [
        (range(r, r + rows), range(b, b + blocks))
        for b in range(0, num_blocks, blocks)
        for r in range(0, num_rows, rows)
    ]


def _dot2_of_x86(builder: Any, total: Any, left: Any, right: Any) -> Any:
    function = declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V16, V16, V16_I32, V16_I32)
    return builder.call(function, [total, left, right])


def _dot2_of_arm(builder: Any, total: Any, left: Any, right: Any) -> Any:
    floats, halves = ir.VectorType(F32, 4), ir.VectorType(BF16, 8)
    function = declared(builder, "llvm.aarch64.neon.bfdot.v4f32.v8bf16", floats, floats, halves, halves)
    dots = []
    for first in range(0, LANES, 4):
        picks = ir.Constant(ir.VectorType(I32, 4), list(range(first, first + 4)))
        four, *pairs = (builder.shuffle_vector(each, each, picks) for each in (total, left, right))
        dots.append(builder.call(function, [four, *(builder.bitcast(pair, halves) for pair in pairs)]))
    return concatenated(builder, dots)


def rounded(builder: Any, value: Any) -> Any:
    """16 float32 as the bits of bfloat16, to nearest; where there are products of pairs, numbers below the smallest
    normal one may become 0.
    """
    if not has_bfloat16_pairs():
        return narrow(builder, value, V16)
    if is_arm(builder):
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(BF16, LANES)), V16_I16)
    return builder.call(declared(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", V16_I16, V16), [value])


_tile_8, _tile_4, _tile_2, _tile_1 = (_pair_tile(rows, blocks) for rows, blocks in ((8, 2), (4, 4), (2, 4), (1, 4)))
_local_sums = local_floats(_ROWS * _BLOCKS * LANES)


class Bfloat16Call(NamedTuple):
    x: int  # [T, K]
    kind: int  # of x
    num_rows: int
    width: int  # K
    packed: int  # bfloat16 [blocks, pairs, 16, 2]
    num_outputs: int
    bias: int  # float32 [N], or 0: there is none
    out: int  # [T, N]
    out_kind: int
    laid_out: int  # bfloat16 [T / 8, parts, pairs, 8, 2]: x as the tiles read it, written in the first phase
    parts: int  # bfloat16 numbers for one of x: 1, or 2 of a float32
    fours_a_task: int  # groups of four blocks of 16 outputs


@entry
def _multiply(call: Bfloat16Call) -> None:
    _lay_out_rows(call)
    num_rows, pairs, packed, num_outputs = call.num_rows, (call.width + 1) // 2, call.packed, call.num_outputs
    bias, out, out_kind = call.bias, call.out, call.out_kind
    laid_out, parts, fours_a_task = call.laid_out, call.parts, call.fours_a_task
    block_bytes, x_bytes = pairs * 4 * LANES, pairs * 4 * _ROWS
    width = _BLOCKS * LANES
    sums = _local_sums()
    task = take_number(counters(call), TASK)
    while task * fours_a_task * width < num_outputs:
        for start in range(task * fours_a_task * width, min((task + 1) * fours_a_task * width, num_outputs), width):
            weights = packed + start // LANES * block_bytes
            for row in range(0, num_rows, _ROWS):
                rows = min(_ROWS, num_rows - row)
                for i in range(0, rows * width, LANES):
                    store16_f32(sums, i, splat16(0.0))
                for part in range(parts):
                    x = laid_out + (row // _ROWS * parts + part) * x_bytes
                    # A tile may have more rows than are left: the rest is computed and not stored.
                    if rows > 4:
                        _tile_8(weights, block_bytes, x, pairs, sums)
                        _tile_8(weights + 2 * block_bytes, block_bytes, x, pairs, sums + 8 * LANES)
                    elif rows > 2:
                        _tile_4(weights, block_bytes, x, pairs, sums)
                    elif rows == 2:
                        _tile_2(weights, block_bytes, x, pairs, sums)
                    else:
                        _tile_1(weights, block_bytes, x, pairs, sums)
                for r in range(rows):
                    for column in range(start, min(start + width, num_outputs), LANES):
                        at = r * width + column - start
                        put_outputs(sums, at, bias, out, out_kind, row + r, num_outputs, column, num_outputs)
        task = take_number(counters(call), TASK)


@helper
def _lay_out_rows(call: Bfloat16Call) -> None:
    """The first phase: lays out x pair by pair, the rows shared by the team. Returns when all are done."""
    x, kind, num_rows, width = call.x, call.kind, call.num_rows, call.width
    laid_out, parts = call.laid_out, call.parts
    pairs = (width + 1) // 2
    row = take_number(counters(call), FIRST_TASK)
    while row < num_rows:
        to = laid_out + 4 * (row // _ROWS * parts * pairs * _ROWS + row % _ROWS)
        for i in range(2 * pairs):
            value = get(x, row * width + i, kind) if i < width else np.float32(0.0)
            for part in range(parts):
                at = 2 * _ROWS * (part * pairs + i // 2) + i % 2
                put_bf16(to, at, value)
                value -= get_bf16(to, at)
        take_number(counters(call), FIRST_DONE)
        row = take_number(counters(call), FIRST_TASK)
    while watch(counters(call), FIRST_DONE) < num_rows:
        pass
