"""Products of 4- and 8-bit weights in groups of 32 with activations rounded to 8 or 16 bits.

Each row of x is rounded to 8 bits with a scale for every 32 neighbours (ggml's Q8), and multiplied in integers:

    y[n] = sum over groups g of  scale[n, g] * x_scale[g] * ((q[n, g] - centre) . xq[g])  +  zero[n, g] * sum(x in g)

The only quantisation error is that of x in the first term. For 16 bits, the rounding error of x is itself rounded to 8
bits and multiplied too. A row's result is the same to the bit however many rows there are: each weight is read once
for up to eight rows, and each row has its own sums.
"""

from functools import cache
from itertools import repeat
from typing import Any, Literal, NamedTuple

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from torch import Tensor

from .entry import FIRST_DONE, FIRST_TASK, TASK, counters, entry
from .llvm import (
    F16,
    F32,
    FUSED,
    I32,
    LANES,
    V16,
    V16_I32,
    carry,
    constant,
    declared,
    fused,
    load_at,
    number,
    splat,
    vector_at,
)
from .packing import GROUP_LEN, QUADS, record_len
from .recording import scratch
from .tensors import KINDS, readable, task_len, team_size
from .vector import (
    above16,
    choose16,
    compiled,
    get_i32,
    highest16_of_four,
    lane16,
    load16,
    local_floats,
    max16,
    put_f32,
    put_i32,
    put_outputs,
    round16,
    splat16,
    store16_i8,
    sum16_of_four,
    take_number,
    watch,
)

_BLOCKS_AT_ONCE = 2  # their weights stay in the first cache from one tile of rows to the next
_MIN_SHARE = 200_000  # products worth a second thread


@cache
def has_integer_products() -> bool:
    """Whether this CPU multiplies and adds 64 bytes in one instruction; other CPUs are slow at it."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni", False))


class IntegerProduct:
    """``x [T, K] -> [T, N]`` for weights packed by ``packing``; bias float32 [N]."""

    def __init__(
        self, packed: Tensor, num_outputs: int, *, bits: Literal[4, 8], x_bits: Literal[8, 16], bias: Tensor | None
    ) -> None:
        self.packed, self.num_outputs, self.bias = packed, num_outputs, bias
        self.x_bits = x_bits
        self._run = {(4, 8): _run_4x8, (4, 16): _run_4x16, (8, 8): _run_8x8, (8, 16): _run_8x16}[bits, x_bits]
        self._run.compile()

    def __call__(
        self, x: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None, blocks: Tensor | None = None
    ) -> Tensor:
        """``out`` [T, N], if given, receives the results; it may be columns of a larger tensor.

        With ``blocks`` (int32) only outputs [16 b, 16 b + 16) of each block b are written.
        """
        x = readable(x)
        num_rows, width = x.shape
        if out is None:
            out = torch.empty((num_rows, self.num_outputs), dtype=out_dtype)
        assert out.dtype == out_dtype and out.shape == (num_rows, self.num_outputs) and out.stride(1) == 1
        num_records = -(-num_rows // _ROWS) * (width // GROUP_LEN)
        num_blocks = -(-self.num_outputs // LANES) if blocks is None else len(blocks)
        threads = team_size(num_rows * width * num_blocks * LANES, min_share=_MIN_SHARE)
        rounded = scratch("rounded", num_records * _record_bytes.py_func(self.x_bits // 8), torch.uint8)
        call = IntegerCall(
            x.data_ptr(),
            KINDS[x.dtype],
            num_rows,
            width,
            self.packed.data_ptr(),
            self.num_outputs,
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            KINDS[out_dtype],
            out.stride(0),
            rounded.data_ptr(),
            task_len(num_blocks, threads, _BLOCKS_AT_ONCE),
            0 if blocks is None else blocks.data_ptr(),
            num_blocks,
        )
        self._run(call, threads=threads)
        return out


class IntegerCall(NamedTuple):
    x: int  # [T, K]
    kind: int  # of x
    num_rows: int
    width: int  # K
    packed: int  # see ``packing``
    num_outputs: int
    bias: int  # float32 [N], or 0: there is none
    out: int  # [T, N]
    out_kind: int
    out_step: int  # numbers from one row of out to the next
    rounded: int  # records of x in 8 or 16 bits, written in the first phase
    blocks_a_task: int
    blocks: int  # int32 [num_blocks]: the blocks of 16 outputs to compute, or 0: all
    num_blocks: int


# The rounded x is a stream of records, one for each 8 rows (the last one may have fewer) and group, in the order in
# which a tile reads them: scales [8] and sums [8] (float32); then for each part (the upper and, with 16 bits, the lower
# 8 bits) minus the centre times the sum of its bytes (int32 [8]); then for each part its bytes [8, 32].
_ROWS = 8
_RUN = 16  # groups of 8 rows that one thread rounds: whole cache lines, so no two threads write to the same one
_X_SUMS, _X_COUNTS = 4 * _ROWS, 8 * _ROWS
_FINER = 254  # steps of the lower part in one of the upper: a rounding error is at most half a step


@njit(forceinline=True)
def _bytes_at(parts: int) -> int:
    return _X_COUNTS + 4 * _ROWS * parts


@njit(forceinline=True)
def _record_bytes(parts: int) -> int:
    return _X_COUNTS + (4 + GROUP_LEN) * _ROWS * parts


def _group_tile(num_rows: int, bits: int, parts: int) -> Any:
    """16 outputs of the first rows of a record: ``f(weights, x, num_groups, out)``, out float32 [rows, 16]."""
    w_record = record_len(bits)
    num_loads = QUADS * bits // 8
    x_bytes, x_record = _bytes_at.py_func(parts), _record_bytes.py_func(parts)

    def emit(builder: Any, weights: Any, x: Any, num_groups: Any, out: Any) -> None:
        def each_row(kind: Any, record: Any, offset: int, step: int = 4) -> list[Any]:
            return [splat(builder, load_at(builder, kind, record, offset + step * r)) for r in range(num_rows)]

        def step(_: Any, state: list[Any]) -> list[Any]:
            w, record, *sums = state
            quads = [load_at(builder, V16_I32, w, 64 * j) for j in range(num_loads)]
            if bits == 4:
                mask, four = constant(V16_I32, 0x0F0F0F0F), constant(V16_I32, 4)
                upper = [builder.and_(builder.lshr(pair, four), mask) for pair in quads]
                quads = [builder.and_(pair, mask) for pair in quads] + upper
            halves = ir.VectorType(F16, LANES)
            scale = builder.fpext(load_at(builder, halves, w, 64 * num_loads), V16)
            counts: list[list[Any]] = []
            for part in range(parts):
                row_counts = each_row(I32, record, _X_COUNTS + 4 * _ROWS * part)
                for j, quad in enumerate(quads):
                    four_bytes = each_row(I32, record, x_bytes + GROUP_LEN * _ROWS * part + 4 * j, GROUP_LEN)
                    row_counts = [_dot4(builder, *each) for each in zip(row_counts, repeat(quad), four_bytes)]
                counts.append([builder.sitofp(count, V16) for count in row_counts])
            totals = counts[0]
            if parts == 2:
                finer = constant(V16, float(_FINER))
                totals = [fused(builder, lower, upper, finer) for upper, lower in zip(*counts, strict=True)]
            products = [builder.fmul(total, scale, flags=FUSED) for total in totals]
            sums = [fused(builder, *each) for each in zip(sums, products, each_row(F32, record, 0), strict=True)]
            if bits == 4:
                zero = builder.fpext(load_at(builder, halves, w, 64 * num_loads + 2 * LANES), V16)
                x_sums = each_row(F32, record, _X_SUMS)
                sums = [fused(builder, total, zero, x_sum) for total, x_sum in zip(sums, x_sums, strict=True)]
            return [builder.add(w, number(w_record)), builder.add(record, number(x_record)), *sums]

        zeros = [constant(V16, 0.0)] * num_rows
        _, _, *sums = carry(builder, num_groups, [weights, x, *zeros], step)
        for r, total in enumerate(sums):
            builder.store(total, vector_at(builder, F32, out, number(LANES * r)), align=4)

    emit.__name__ = f"group_tile_{num_rows}x{bits}x{parts}"
    return compiled(types.void, *(types.int64,) * 4)(emit)


def _dot4(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """total + the products of each word's four bytes, the first's without sign; lane by lane."""
    if has_integer_products():
        function = declared(builder, "llvm.x86.avx512.vpdpbusd.512", V16_I32, *(V16_I32,) * 3)
        return builder.call(function, [total, unsigned, signed])
    for shift in (0, 8, 16, 24):
        left = builder.and_(builder.lshr(unsigned, constant(V16_I32, shift)), constant(V16_I32, 255))
        right = builder.ashr(builder.shl(signed, constant(V16_I32, 24 - shift)), constant(V16_I32, 24))
        total = builder.add(total, builder.mul(left, right))
    return total


def _block_tiles(bits: int, parts: int) -> Any:
    """``f(weights, x, num_groups, out, rows)``: the smallest tile that holds ``rows`` rows."""
    tile_1, tile_2, tile_4, tile_8 = (_group_tile(rows, bits, parts) for rows in (1, 2, 4, 8))

    @njit
    def multiply_block(weights: int, x: int, num_groups: int, out: int, rows: int) -> None:
        # A tile may have more rows than are left: the rest is computed and not stored.
        if rows > 4:
            tile_8(weights, x, num_groups, out)
        elif rows > 2:
            tile_4(weights, x, num_groups, out)
        elif rows == 2:
            tile_2(weights, x, num_groups, out)
        else:
            tile_1(weights, x, num_groups, out)

    return multiply_block


_block_4x8, _block_4x16, _block_8x8, _block_8x16 = (_block_tiles(*key) for key in ((4, 1), (4, 2), (8, 1), (8, 2)))
_RECORD_4, _RECORD_8 = record_len(4), record_len(8)
_local_tile = local_floats(_ROWS * LANES)


@entry
def _run_4x8(call: IntegerCall) -> None:
    _round_rows(call, 8, 1)
    _multiply_blocks(call, _RECORD_4, 1, _block_4x8)


@entry
def _run_4x16(call: IntegerCall) -> None:
    _round_rows(call, 8, 2)
    _multiply_blocks(call, _RECORD_4, 2, _block_4x16)


@entry
def _run_8x8(call: IntegerCall) -> None:
    _round_rows(call, 128, 1)
    _multiply_blocks(call, _RECORD_8, 1, _block_8x8)


@entry
def _run_8x16(call: IntegerCall) -> None:
    _round_rows(call, 128, 2)
    _multiply_blocks(call, _RECORD_8, 2, _block_8x16)


@njit
def _round_rows(call: IntegerCall, centre: int, parts: int) -> None:
    """The first phase: rounds the rows of x to bytes, shared by the team. Returns when all are done."""
    x, kind, num_rows, width, rounded = call.x, call.kind, call.num_rows, call.width, call.rounded
    num_groups = width // GROUP_LEN
    runs = (num_groups + _RUN - 1) // _RUN
    num_tasks = (num_rows + _ROWS - 1) // _ROWS * runs
    task = take_number(counters(call), FIRST_TASK)
    while task < num_tasks:
        first_row, first = task // runs * _ROWS, task % runs * _RUN
        to = rounded + (first_row // _ROWS * num_groups + first) * _record_bytes(parts)
        for row in range(first_row, min(first_row + _ROWS, num_rows)):
            at = row * width + first * GROUP_LEN
            _round_groups(x, kind, at, min(_RUN, num_groups - first), to, row - first_row, centre, parts)
        take_number(counters(call), FIRST_DONE)
        task = take_number(counters(call), FIRST_TASK)
    while watch(counters(call), FIRST_DONE) < num_tasks:
        pass


@njit
def _round_groups(x: int, kind: int, start: int, count: int, to: int, r: int, centre: int, parts: int) -> None:
    """Rounds ``count`` groups of row r of a record, four at once; past the end, the last group is repeated."""
    nothing, one = splat16(0.0), splat16(1.0)
    steps_of_scale, finer = splat16(127.0), splat16(np.float32(_FINER))
    last = count - 1
    for group in range(0, last + 1, 4):
        second, third, fourth = min(group + 1, last), min(group + 2, last), min(group + 3, last)
        low_0, high_0 = _load_group(x, kind, start, group)
        low_1, high_1 = _load_group(x, kind, start, second)
        low_2, high_2 = _load_group(x, kind, start, third)
        low_3, high_3 = _load_group(x, kind, start, fourth)
        to_0, to_1 = to + group * _record_bytes(parts), to + second * _record_bytes(parts)
        to_2, to_3 = to + third * _record_bytes(parts), to + fourth * _record_bytes(parts)
        sums = sum16_of_four(low_0 + high_0, low_1 + high_1, low_2 + high_2, low_3 + high_3)
        _put_floats(to_0, to_1, to_2, to_3, _X_SUMS, r, sums)
        sizes = highest16_of_four(
            _sizes(low_0, high_0), _sizes(low_1, high_1), _sizes(low_2, high_2), _sizes(low_3, high_3)
        )
        scales = sizes / steps_of_scale
        _put_floats(to_0, to_1, to_2, to_3, 0, r, scales if parts == 1 else scales / finer)
        inverses = choose16(above16(scales, nothing), one / scales, nothing)
        low_0, high_0 = low_0 * splat16(lane16(inverses, 0)), high_0 * splat16(lane16(inverses, 0))
        low_1, high_1 = low_1 * splat16(lane16(inverses, 4)), high_1 * splat16(lane16(inverses, 4))
        low_2, high_2 = low_2 * splat16(lane16(inverses, 8)), high_2 * splat16(lane16(inverses, 8))
        low_3, high_3 = low_3 * splat16(lane16(inverses, 12)), high_3 * splat16(lane16(inverses, 12))
        for part in range(parts):
            at = _bytes_at(parts) + GROUP_LEN * (_ROWS * part + r)
            steps = sum16_of_four(
                _store_steps(to_0 + at, low_0, high_0),
                _store_steps(to_1 + at, low_1, high_1),
                _store_steps(to_2 + at, low_2, high_2),
                _store_steps(to_3 + at, low_3, high_3),
            )
            at = _X_COUNTS + 4 * _ROWS * part
            put_i32(to_0 + at, r, -centre * int(lane16(steps, 0)))
            put_i32(to_1 + at, r, -centre * int(lane16(steps, 4)))
            put_i32(to_2 + at, r, -centre * int(lane16(steps, 8)))
            put_i32(to_3 + at, r, -centre * int(lane16(steps, 12)))
            if part + 1 < parts:
                low_0, high_0 = (low_0 - round16(low_0)) * finer, (high_0 - round16(high_0)) * finer
                low_1, high_1 = (low_1 - round16(low_1)) * finer, (high_1 - round16(high_1)) * finer
                low_2, high_2 = (low_2 - round16(low_2)) * finer, (high_2 - round16(high_2)) * finer
                low_3, high_3 = (low_3 - round16(low_3)) * finer, (high_3 - round16(high_3)) * finer


@njit(forceinline=True)
def _load_group(x: int, kind: int, start: int, group: int) -> Any:
    at = start + GROUP_LEN * group
    return load16(x, at, kind), load16(x, at + LANES, kind)


@njit(forceinline=True)
def _sizes(low: Any, high: Any) -> Any:
    nothing = splat16(0.0)
    return max16(max16(low, nothing - low), max16(high, nothing - high))


@njit(forceinline=True)
def _put_floats(to_0: int, to_1: int, to_2: int, to_3: int, at: int, r: int, values: Any) -> None:
    put_f32(to_0 + at, r, lane16(values, 0))
    put_f32(to_1 + at, r, lane16(values, 4))
    put_f32(to_2 + at, r, lane16(values, 8))
    put_f32(to_3 + at, r, lane16(values, 12))


@njit(forceinline=True)
def _store_steps(to: int, low: Any, high: Any) -> Any:
    """Rounds the numbers to bytes at ``to``; returns the sum of both halves, lane by lane."""
    low_steps, high_steps = round16(low), round16(high)
    store16_i8(to, 0, low_steps)
    store16_i8(to, LANES, high_steps)
    return low_steps + high_steps


@njit(forceinline=True)
def _multiply_blocks(call: IntegerCall, weight_record: int, parts: int, multiply_block: Any) -> None:
    num_rows, num_groups, packed, num_outputs = call.num_rows, call.width // GROUP_LEN, call.packed, call.num_outputs
    bias, out, out_kind, out_step, rounded = call.bias, call.out, call.out_kind, call.out_step, call.rounded
    blocks_a_task, picked, num_blocks = call.blocks_a_task, call.blocks, call.num_blocks
    tile = _local_tile()
    task = take_number(counters(call), TASK)
    while task * blocks_a_task < num_blocks:
        end = min((task + 1) * blocks_a_task, num_blocks)
        for first in range(task * blocks_a_task, end, _BLOCKS_AT_ONCE):
            x = rounded
            for row in range(0, num_rows, _ROWS):
                rows = min(_ROWS, num_rows - row)
                for i in range(first, min(first + _BLOCKS_AT_ONCE, end)):
                    block = i if picked == 0 else get_i32(picked, i)
                    multiply_block(packed + block * num_groups * weight_record, x, num_groups, tile, rows)
                    for r in range(rows):
                        put_outputs(tile, r * LANES, bias, out, out_kind, row + r, out_step, block * LANES, num_outputs)
                x += num_groups * _record_bytes(parts)
        task = take_number(counters(call), TASK)
