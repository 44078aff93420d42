"""Products of 4- and 8-bit weights in groups of 32 with activations rounded to 8 or 16 bits.

Each row of x is rounded to 8 bits with a scale for every 32 neighbours (ggml's Q8), and multiplied in integers:

    y[n] = sum over groups g of  scale[n, g] * x_scale[g] * ((q[n, g] - centre) . xq[g])  +  zero[n, g] * sum(x in g)

The only quantisation error is that of x in the first term. For 16 bits, the rounding error of x is itself rounded to 8
bits and multiplied too. A row's result is the same to the bit however many rows there are: each weight is read once
for all rows of a tile, and each row has its own sums. It is the same on all instruction sets that fuse a product with
the sum it is added to.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...cpu_isa import isa
from .entry import FIRST_DONE, FIRST_TASK, TASK, THREAD, counters, end_of_numbers, entry, task_of
from .group_tile import (
    FINER,
    TWO_BYTES,
    WIDE_BLOCKS,
    WIDE_ROWS,
    WIDE_WORDS,
    WORDS,
    block_tiles,
    has_wide_tiles,
    numbers_at,
    wide_tile,
    x_form,
    x_record_len,
)
from .llvm import LANES
from .machine_code import helper, inlined
from .packing import GROUP_LEN, record_len
from .recording import scratch
from .tensors import ALONE_THREADS, KINDS, readable, task_len, team_size
from .vector import (
    above16,
    choose16,
    get_i32,
    get_i64,
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
    store16_i16_in_pairs,
    sum16_of_four,
    take_number,
    watch,
    when_compiled,
)

# Products of at least so many rows use wide tiles. With fewer rows these were slower, but for a head.
_WIDE_FROM = {8: 32, 16: 9}  # by the bits of x
_BLOCKS_AT_ONCE = 2  # their weights stay in the first cache from one tile of rows to the next
_MIN_SHARE = 200_000  # products worth a second thread
_ALONE_ROWS, _ALONE_BLOCKS = 16, 512  # up to so many rows, or from so many blocks of outputs on, see ALONE_THREADS


class IntegerProduct:
    """``x [T, K] -> [T, N]`` for weights packed by ``packing``; bias float32 [N]."""

    def __init__(
        self,
        packed: Tensor,
        num_outputs: int,
        *,
        bits: Literal[4, 8],
        x_bits: Literal[8, 16],
        bias: Tensor | None,
        wide_from: int | None = None,
    ) -> None:
        """``wide_from``: the fewest rows that use wide tiles, None: as is usual."""
        self.packed, self.num_outputs, self.bias = packed, num_outputs, bias
        self._wide_from = wide_from or _WIDE_FROM[x_bits if bits == 8 else 8]
        self._form = x_form(isa(), bits, x_bits)
        self._run = {(4, 8): _run_4x8, (4, 16): _run_4x16, (8, 8): _run_8x8, (8, 16): _run_8x16}[bits, x_bits]
        self._run.compile()

    def __call__(
        self,
        x: Tensor,
        out_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
        blocks: Tensor | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        """``out`` [T, N], if given, receives the results; it may be columns of a larger tensor.

        With ``blocks`` (int32) only outputs [16 b, 16 b + 16) of each block b are written; with ``count`` (int64 [1])
        those of so many of the blocks, which is read when the kernel runs.
        """
        x = readable(x)
        num_rows, width = x.shape
        if out is None:
            out = torch.empty((num_rows, self.num_outputs), dtype=out_dtype)
        assert out.dtype == out_dtype and out.shape == (num_rows, self.num_outputs) and out.stride(1) == 1
        rows = isa().tile_rows[-1]
        num_records = -(-num_rows // rows) * (width // GROUP_LEN)
        num_blocks = -(-self.num_outputs // LANES) if blocks is None else len(blocks)
        threads = team_size(num_rows * width * num_blocks * LANES, min_share=_MIN_SHARE)
        own_len = num_records * x_record_len(self._form, rows)
        is_alone = threads <= ALONE_THREADS and (num_rows <= _ALONE_ROWS or num_blocks >= _ALONE_BLOCKS)
        rounded = scratch("rounded", own_len * (threads if is_alone else 1), torch.uint8)
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
            own_len if is_alone else 0,
            task_len(num_blocks, threads, _BLOCKS_AT_ONCE) if count is None else _BLOCKS_AT_ONCE,
            0 if blocks is None else blocks.data_ptr(),
            num_blocks,
            threads,
            self._wide_from,
            0 if count is None else count.data_ptr(),
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
    rounded: int  # records of x (``group_tile``), written in the first phase
    own_len: int  # bytes of a thread's own records; 0: all threads share them
    blocks_a_task: int
    blocks: int  # int32 [num_blocks]: the blocks of 16 outputs to compute, or 0: all
    num_blocks: int
    regions: int  # of tasks, see ``entry``
    wide_from: int  # the fewest rows that use wide tiles
    counted: int  # int64: how many of ``blocks`` to compute; 0: num_blocks of them


_RUN = 16  # groups of a tile's rows that one thread rounds: whole cache lines, so no two threads write to the same one

_tile_rows = when_compiled("tile_rows", lambda: isa().tile_rows[-1])


def _form(bits: int, x_bits: int) -> Any:
    return when_compiled(f"form_{bits}x{x_bits}", lambda: x_form(isa(), bits, x_bits))


_form_4x8, _form_4x16, _form_8x8, _form_8x16 = (_form(bits, x_bits) for bits in (4, 8) for x_bits in (8, 16))
_tiles_4x8, _tiles_4x16, _tiles_8x8, _tiles_8x16 = (block_tiles(bits, x_bits) for bits in (4, 8) for x_bits in (8, 16))
_RECORD_4, _RECORD_8 = record_len(4), record_len(8)
_wide_4x8, _wide_4x16, _wide_8x8, _wide_8x16 = (wide_tile(bits, x_bits) for bits in (4, 8) for x_bits in (8, 16))
_has_wide_tiles = when_compiled("has_wide_tiles", lambda: int(has_wide_tiles(isa())))
_local_tile = local_floats(8 * LANES)


@helper
def _wide_block_4x8(weights: int, x: int, num_groups: int, out: int, first: int, later: int, step: int) -> None:
    _wide_4x8(weights, x, num_groups, out, first, later, step)


@helper
def _block_4x8(weights: int, x: int, num_groups: int, out: int, rows: int) -> None:
    _tiles_4x8(weights, x, num_groups, out, rows)


@helper
def _wide_block_4x16(weights: int, x: int, num_groups: int, out: int, first: int, later: int, step: int) -> None:
    _wide_4x16(weights, x, num_groups, out, first, later, step)


@helper
def _block_4x16(weights: int, x: int, num_groups: int, out: int, rows: int) -> None:
    _tiles_4x16(weights, x, num_groups, out, rows)


@helper
def _wide_block_8x8(weights: int, x: int, num_groups: int, out: int, first: int, later: int, step: int) -> None:
    _wide_8x8(weights, x, num_groups, out, first, later, step)


@helper
def _block_8x8(weights: int, x: int, num_groups: int, out: int, rows: int) -> None:
    _tiles_8x8(weights, x, num_groups, out, rows)


@helper
def _wide_block_8x16(weights: int, x: int, num_groups: int, out: int, first: int, later: int, step: int) -> None:
    _wide_8x16(weights, x, num_groups, out, first, later, step)


@helper
def _block_8x16(weights: int, x: int, num_groups: int, out: int, rows: int) -> None:
    _tiles_8x16(weights, x, num_groups, out, rows)


@entry
def _run_4x8(call: IntegerCall) -> None:
    rounded = _round_rows(call, 8, _form_4x8())
    _multiply_blocks(call, rounded, _RECORD_4, _form_4x8(), _block_4x8, _wide_block_4x8)


@entry
def _run_4x16(call: IntegerCall) -> None:
    rounded = _round_rows(call, 8, _form_4x16())
    _multiply_blocks(call, rounded, _RECORD_4, _form_4x16(), _block_4x16, _wide_block_4x16)


@entry
def _run_8x8(call: IntegerCall) -> None:
    rounded = _round_rows(call, 128, _form_8x8())
    _multiply_blocks(call, rounded, _RECORD_8, _form_8x8(), _block_8x8, _wide_block_8x8)


@entry
def _run_8x16(call: IntegerCall) -> None:
    rounded = _round_rows(call, 128, _form_8x16())
    _multiply_blocks(call, rounded, _RECORD_8, _form_8x16(), _block_8x16, _wide_block_8x16)


@helper
def _round_rows(call: IntegerCall, centre: int, form: int) -> int:
    """The first phase: rounds the rows of x, for this thread or shared by the team. Returns where they are, when all
    are done.
    """
    x, kind, num_rows, width, rounded = call.x, call.kind, call.num_rows, call.width, call.rounded
    num_groups = width // GROUP_LEN
    runs = (num_groups + _RUN - 1) // _RUN
    rows, record = _tile_rows(), x_record_len(form, _tile_rows())
    num_tasks = (num_rows + rows - 1) // rows * runs
    is_alone = call.own_len != 0
    if is_alone:
        rounded += take_number(counters(call), THREAD) * call.own_len
        if watch(counters(call), TASK) >= end_of_numbers(_num_tasks(call), call.regions):
            return rounded  # this thread came too late
    task = 0 if is_alone else take_number(counters(call), FIRST_TASK)
    while task < num_tasks:
        first_row, first = task // runs * rows, task % runs * _RUN
        to = rounded + (first_row // rows * num_groups + first) * record
        for row in range(first_row, min(first_row + rows, num_rows)):
            at = row * width + first * GROUP_LEN
            _round_groups(x, kind, at, min(_RUN, num_groups - first), to, row - first_row, centre, form)
        if is_alone:
            task += 1
        else:
            take_number(counters(call), FIRST_DONE)
            task = take_number(counters(call), FIRST_TASK)
    while not is_alone and watch(counters(call), FIRST_DONE) < num_tasks:
        pass
    return rounded


@helper
def _round_groups(x: int, kind: int, start: int, count: int, to: int, r: int, centre: int, form: int) -> None:
    """Rounds ``count`` groups of row r of a record, four at once; past the end, the last group is repeated."""
    nothing, one = splat16(0.0), splat16(1.0)
    steps_of_scale, finer = splat16(127.0), splat16(np.float32(FINER))
    rows, record, is_wide = _tile_rows(), x_record_len(form, _tile_rows()), form in (TWO_BYTES, WIDE_WORDS)
    last = count - 1
    for group in range(0, last + 1, 4):
        second, third, fourth = min(group + 1, last), min(group + 2, last), min(group + 3, last)
        low_0, high_0 = _load_group(x, kind, start, group)
        low_1, high_1 = _load_group(x, kind, start, second)
        low_2, high_2 = _load_group(x, kind, start, third)
        low_3, high_3 = _load_group(x, kind, start, fourth)
        to_0, to_1 = to + group * record, to + second * record
        to_2, to_3 = to + third * record, to + fourth * record
        sums = sum16_of_four(low_0 + high_0, low_1 + high_1, low_2 + high_2, low_3 + high_3)
        _put_floats(to_0, to_1, to_2, to_3, 4 * rows, r, sums)
        sizes = highest16_of_four(
            _sizes(low_0, high_0), _sizes(low_1, high_1), _sizes(low_2, high_2), _sizes(low_3, high_3)
        )
        scales = sizes / steps_of_scale
        _put_floats(to_0, to_1, to_2, to_3, 0, r, scales / finer if is_wide else scales)
        inverses = choose16(above16(scales, nothing), one / scales, nothing)
        low_0, high_0 = low_0 * splat16(lane16(inverses, 0)), high_0 * splat16(lane16(inverses, 0))
        low_1, high_1 = low_1 * splat16(lane16(inverses, 4)), high_1 * splat16(lane16(inverses, 4))
        low_2, high_2 = low_2 * splat16(lane16(inverses, 8)), high_2 * splat16(lane16(inverses, 8))
        low_3, high_3 = low_3 * splat16(lane16(inverses, 12)), high_3 * splat16(lane16(inverses, 12))
        for plane in range(2 if form == TWO_BYTES else 1):
            if form in (WORDS, WIDE_WORDS):
                at = numbers_at(form, rows) + 2 * GROUP_LEN * r
            else:
                at = numbers_at(form, rows) + GROUP_LEN * (rows * plane + r)
            steps = sum16_of_four(
                _store_steps(to_0 + at, low_0, high_0, form),
                _store_steps(to_1 + at, low_1, high_1, form),
                _store_steps(to_2 + at, low_2, high_2, form),
                _store_steps(to_3 + at, low_3, high_3, form),
            )
            at = (8 + 4 * plane) * rows
            put_i32(to_0 + at, r, -centre * int(lane16(steps, 0)))
            put_i32(to_1 + at, r, -centre * int(lane16(steps, 4)))
            put_i32(to_2 + at, r, -centre * int(lane16(steps, 8)))
            put_i32(to_3 + at, r, -centre * int(lane16(steps, 12)))
            if form == TWO_BYTES:
                low_0, high_0 = _rest(low_0), _rest(high_0)
                low_1, high_1 = _rest(low_1), _rest(high_1)
                low_2, high_2 = _rest(low_2), _rest(high_2)
                low_3, high_3 = _rest(low_3), _rest(high_3)


@inlined
def _rest(value: Any) -> Any:
    """What rounding leaves, in finer steps."""
    return (value - round16(value)) * splat16(np.float32(FINER))


@inlined
def _load_group(x: int, kind: int, start: int, group: int) -> Any:
    at = start + GROUP_LEN * group
    return load16(x, at, kind), load16(x, at + LANES, kind)


@inlined
def _sizes(low: Any, high: Any) -> Any:
    nothing = splat16(0.0)
    return max16(max16(low, nothing - low), max16(high, nothing - high))


@inlined
def _put_floats(to_0: int, to_1: int, to_2: int, to_3: int, at: int, r: int, values: Any) -> None:
    put_f32(to_0 + at, r, lane16(values, 0))
    put_f32(to_1 + at, r, lane16(values, 4))
    put_f32(to_2 + at, r, lane16(values, 8))
    put_f32(to_3 + at, r, lane16(values, 12))


@inlined
def _store_steps(to: int, low: Any, high: Any, form: int) -> Any:
    """Rounds the 32 numbers and stores them at ``to`` in their form; returns the sum of both halves, lane by lane."""
    low_steps, high_steps = round16(low), round16(high)
    if form == WIDE_WORDS:
        finer = splat16(np.float32(FINER))
        low_steps, high_steps = low_steps * finer + round16(_rest(low)), high_steps * finer + round16(_rest(high))
    if form in (WORDS, WIDE_WORDS):
        store16_i16_in_pairs(to, 0, low_steps)
        store16_i16_in_pairs(to, LANES, high_steps)
    else:
        store16_i8(to, 0, low_steps)
        store16_i8(to, LANES, high_steps)
    return low_steps + high_steps


@inlined
def _num_tasks(call: IntegerCall) -> int:
    return (_num_blocks(call) + call.blocks_a_task - 1) // call.blocks_a_task


@inlined
def _num_blocks(call: IntegerCall) -> int:
    return call.num_blocks if call.counted == 0 else get_i64(call.counted, 0)


@inlined
def _multiply_blocks(
    call: IntegerCall,
    rounded: int,
    weight_record: int,
    form: int,
    multiply_block: Any,
    multiply_wide: Any,
) -> None:
    num_rows, num_groups, packed, num_outputs = call.num_rows, call.width // GROUP_LEN, call.packed, call.num_outputs
    bias, out, out_kind, out_step = call.bias, call.out, call.out_kind, call.out_step
    blocks_a_task, picked, num_blocks = call.blocks_a_task, call.blocks, _num_blocks(call)
    tile, tile_rows, record = _local_tile(), _tile_rows(), x_record_len(form, _tile_rows())
    num_tasks, regions = _num_tasks(call), call.regions
    is_wide = _has_wide_tiles() != 0 and num_rows >= call.wide_from and picked == 0
    # Each tile of rows fetches its share of the next blocks' weights.
    pair_len, num_tiles = WIDE_BLOCKS * num_groups * weight_record, (num_rows + WIDE_ROWS - 1) // WIDE_ROWS
    later_step = (WIDE_BLOCKS * weight_record + 64 * num_tiles - 1) // (64 * num_tiles) * 64
    number = take_number(counters(call), TASK)
    while number < end_of_numbers(num_tasks, regions):
        task = task_of(number, num_tasks, regions)
        end = min((task + 1) * blocks_a_task, num_blocks)
        for first in range(task * blocks_a_task, end, _BLOCKS_AT_ONCE):
            x = rounded
            if is_wide and first + WIDE_BLOCKS <= end:
                weights = packed + first * num_groups * weight_record
                later = weights + pair_len
                for row in range(0, num_rows, WIDE_ROWS):
                    first_row = row % tile_rows
                    multiply_wide(weights, x, num_groups, tile, first_row, later, later_step)
                    later += num_groups * later_step
                    for r in range(min(WIDE_ROWS, num_rows - row)):
                        for i in range(WIDE_BLOCKS):
                            at, column = (r * WIDE_BLOCKS + i) * LANES, (first + i) * LANES
                            put_outputs(tile, at, bias, out, out_kind, row + r, out_step, column, num_outputs)
                    if first_row + WIDE_ROWS == tile_rows:
                        x += num_groups * record
                continue
            for row in range(0, num_rows, tile_rows):
                rows = min(tile_rows, num_rows - row)
                for i in range(first, min(first + _BLOCKS_AT_ONCE, end)):
                    block = i if picked == 0 else get_i32(picked, i)
                    multiply_block(packed + block * num_groups * weight_record, x, num_groups, tile, rows)
                    for r in range(rows):
                        put_outputs(tile, r * LANES, bias, out, out_kind, row + r, out_step, block * LANES, num_outputs)
                x += num_groups * record
        number = take_number(counters(call), TASK)
