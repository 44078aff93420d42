"""Products of 4- and 8-bit weights in groups of 32 with activations in 16 bits, in fixed point (see ``fixed_tile``).

x is rounded to 16 bits with a scale for each row. Weights keep 16 bits, so both are nearly exact. Up to four rows take
integer products of bytes. More rows take AMX: the groups of a block of 16 outputs that stay in the first cache are
unpacked once and multiplied with all rows. A row's result is the same to the bit however many rows there are.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from ...cpu_isa import isa
from . import amx, fixed_tile
from .activation import gated16, sigmoid_of
from .amx import TILE_BYTES, TILE_LEN, TILE_ROWS
from .entry import FIRST_DONE, FIRST_TASK, TASK, THREAD, counters, entry
from .fixed_tile import PAIR_BYTES, PLANES, SUM_TILES
from .group_tile import FINER
from .llvm import LANES
from .machine_code import helper, inlined
from .packing import GROUP_LEN, record_len
from .recording import scratch
from .tensors import KINDS, readable, task_len, team_size
from .vector import (
    BFLOAT16,
    above16,
    choose16,
    compiled,
    fused16,
    get_f32,
    get_i32,
    highest16,
    load16,
    load16_f32,
    local_floats,
    max16,
    put,
    put_f32,
    put_i32,
    round16,
    splat16,
    store16,
    store16_f32,
    store16_i8,
    sum16,
    take_number,
    vector16,
    watch,
)

Gate = Literal["silu", "gelu_tanh"]
_GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}
_GELU = _GATES["gelu_tanh"]

_FEW = 4  # rows that byte products multiply sooner than AMX
_MIN_SHARE = 200_000  # products worth a second thread
_MAX_PAIRS = 18  # of groups, whose tiles, 36 KB, stay in the first cache
_BAND_BYTES = 700_000  # of rounded x, which stay in the second cache
_ALIGNMENT = 64
_RUN = 4  # pairs of groups of 16 rows that one thread rounds


class FixedProduct:
    """``x [T, K] -> [T, N]`` for weights packed by ``packing.pack_fixed``; bias float32 [N]. Only with AMX."""

    def __init__(
        self, packed: Tensor, w_scale: Tensor, num_outputs: int, *, bits: Literal[4, 8], bias: Tensor | None
    ) -> None:
        assert isa().has_tiles  # and asks the system for the tile registers
        self.packed, self.w_scale, self.num_outputs, self.bias = packed, w_scale, num_outputs, bias
        self._run = _run_4 if bits == 4 else _run_8
        self._run.compile()

    @property
    def can_gate(self) -> bool:
        return self.num_outputs % (2 * LANES) == 0

    def __call__(
        self,
        x: Tensor,
        out_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
        blocks: Tensor | None = None,
        gate: Gate | None = None,
    ) -> Tensor:
        """``out`` [T, N], if given, receives the results; it may be columns of a larger tensor.

        With ``blocks`` (int32) only outputs [16 b, 16 b + 16) of each block b are written. With ``gate``, where
        ``can_gate``, the result is [T, N / 2]: the activations of the first half of the outputs times the second half.
        """
        x = readable(x)
        num_rows, width = x.shape
        assert gate is None or (blocks is None and self.can_gate)
        out_width = self.num_outputs if gate is None else self.num_outputs // 2
        if out is None:
            out = torch.empty((num_rows, out_width), dtype=out_dtype)
        assert out.dtype == out_dtype and out.shape == (num_rows, out_width) and out.stride(1) == 1
        num_blocks = -(-out_width // LANES) if blocks is None else len(blocks)
        work = max(num_rows, _FEW) * width * num_blocks * LANES * (1 if gate is None else 2)
        threads = team_size(work, min_share=_MIN_SHARE)
        num_tiles, num_groups = -(-num_rows // TILE_ROWS), width // GROUP_LEN
        num_pairs = -(-num_groups // 2)
        rounded = scratch("rounded", num_tiles * num_pairs * PAIR_BYTES + _ALIGNMENT, torch.uint8)
        of_rows = scratch("of rows", num_tiles * TILE_ROWS + num_groups * PLANES * _FEW, torch.float32)
        band_rows = max(4, _BAND_BYTES // (num_pairs * PAIR_BYTES)) * TILE_ROWS
        sums_len = min(num_tiles, band_rows // TILE_ROWS) * SUM_TILES * TILE_BYTES
        sums = scratch("sums", threads * sums_len + _ALIGNMENT, torch.uint8)
        gates_len = 0 if gate is None else min(num_rows, band_rows) * LANES
        gates = scratch("gates", threads * gates_len, torch.float32)
        call = FixedCall(
            x.data_ptr(),
            KINDS[x.dtype],
            num_rows,
            width,
            self.packed.data_ptr(),
            self.w_scale.data_ptr(),
            self.num_outputs,
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            KINDS[out_dtype],
            out.stride(0),
            _aligned(rounded.data_ptr()),
            of_rows.data_ptr(),
            of_rows.data_ptr() + 4 * num_tiles * TILE_ROWS,
            _aligned(sums.data_ptr()),
            sums_len,
            band_rows,
            task_len(num_blocks, threads, 1),
            0 if blocks is None else blocks.data_ptr(),
            num_blocks,
            _GATES[gate],
            gates.data_ptr(),
            gates_len,
        )
        self._run(call, threads=threads)
        return out


class FixedCall(NamedTuple):
    x: int  # [T, K]
    kind: int  # of x
    num_rows: int
    width: int  # K
    packed: int  # see ``packing.pack_fixed``
    w_scale: int  # float32 [N]
    num_outputs: int
    bias: int  # float32 [N], or 0: there is none
    out: int  # [T, N]
    out_kind: int
    out_step: int  # numbers from one row of out to the next
    rounded: int  # tiles of x [row tiles, pairs of groups, 2, 16, 64], written in the first phase
    x_scale: int  # float32 [T]
    x_sums: int  # int32 [groups, rows, 2], for few rows
    sums: int  # [threads, row tiles of a band], tiles of sums
    sums_len: int  # bytes of a thread's sums
    band_rows: int  # whose rounded x stays in the second cache
    blocks_a_task: int
    blocks: int  # int32 [num_blocks]: the blocks of 16 outputs to compute, or 0: all
    num_blocks: int  # of 16 columns of out
    gate: int  # see ``_GATES``
    gates: int  # float32 [threads, rows of a band, 16]
    gates_len: int  # of a thread


_RECORD_4, _RECORD_8 = record_len(4), record_len(8)
_open_tiles, _close_tiles = compiled(types.void)(amx.open_tiles), compiled(types.void)(amx.close_tiles)
_unpack_group_4, _unpack_group_8 = (
    compiled(types.void, types.int64, types.int64)(fixed_tile.unpack_group(bits)) for bits in (4, 8)
)
_multiply_tiles = compiled(types.void, *(types.int64,) * 5)(fixed_tile.multiply_tiles)
_fetch_outputs = compiled(types.void, types.int64)(fixed_tile.fetch_outputs)
_joined_sums = compiled(vector16, types.int64, types.int64)(fixed_tile.joined_sums)
_local_panel = local_floats((_MAX_PAIRS * PAIR_BYTES + _ALIGNMENT) // 4)
_local_rows, _local_gates, _local_last = local_floats(_FEW * LANES), local_floats(_FEW * LANES), local_floats(LANES)


def _few_rows(num_rows: int, bits: int) -> Any:
    def emit(builder: Any, *values: Any) -> None:
        fixed_tile.few_rows(isa(), num_rows, bits)(builder, *values)

    emit.__name__ = f"few_rows_{num_rows}x{bits}"
    return compiled(types.void, *(types.int64,) * 5)(emit)


_row_1x4, _rows_2x4, _rows_4x4, _row_1x8, _rows_2x8, _rows_4x8 = (
    _few_rows(rows, bits) for bits in (4, 8) for rows in (1, 2, 4)
)


@helper
def _multiply_few_4(records: int, x: int, x_sums: int, num_groups: int, out: int, num_rows: int) -> None:
    if num_rows == 1:
        _row_1x4(records, x, x_sums, num_groups, out)
    elif num_rows == 2:
        _rows_2x4(records, x, x_sums, num_groups, out)
    else:
        _rows_4x4(records, x, x_sums, num_groups, out)


@helper
def _multiply_few_8(records: int, x: int, x_sums: int, num_groups: int, out: int, num_rows: int) -> None:
    if num_rows == 1:
        _row_1x8(records, x, x_sums, num_groups, out)
    elif num_rows == 2:
        _rows_2x8(records, x, x_sums, num_groups, out)
    else:
        _rows_4x8(records, x, x_sums, num_groups, out)


@helper
def _unpack_4(record: int, to: int) -> None:
    _unpack_group_4(record, to)


@helper
def _unpack_8(record: int, to: int) -> None:
    _unpack_group_8(record, to)


def _aligned(address: int) -> int:
    return -(-address // _ALIGNMENT) * _ALIGNMENT


@entry
def _run_4(call: FixedCall) -> None:
    _round_rows(call)
    if call.num_rows <= _FEW:
        _multiply_few(call, _RECORD_4, _multiply_few_4)
    else:
        _multiply_many(call, _RECORD_4, _unpack_4)


@entry
def _run_8(call: FixedCall) -> None:
    _round_rows(call)
    if call.num_rows <= _FEW:
        _multiply_few(call, _RECORD_8, _multiply_few_8)
    else:
        _multiply_many(call, _RECORD_8, _unpack_8)


@helper
def _round_rows(call: FixedCall) -> None:
    """The first phase: rounds the rows of x, shared by the team. Returns when all are done.

    The first tasks find the rows' scales, the others round some pairs of groups of a tile's rows.
    """
    num_rows = call.num_rows
    num_pairs = (call.width // GROUP_LEN + 1) // 2
    runs = (num_pairs + _RUN - 1) // _RUN
    num_tasks = num_rows + (num_rows + TILE_ROWS - 1) // TILE_ROWS * runs
    task = take_number(counters(call), FIRST_TASK)
    while task < num_tasks:
        if task < num_rows:
            _find_scale(call, task)
        else:
            while watch(counters(call), FIRST_DONE) < num_rows:
                pass
            tile, first = (task - num_rows) // runs, (task - num_rows) % runs * _RUN
            for pair in range(first, min(first + _RUN, num_pairs)):
                for row in range(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, num_rows)):
                    _round_pair(call, row, pair, num_pairs)
        take_number(counters(call), FIRST_DONE)
        task = take_number(counters(call), FIRST_TASK)
    while watch(counters(call), FIRST_DONE) < num_tasks:
        pass


@helper
def _find_scale(call: FixedCall, row: int) -> None:
    x, kind, width = call.x, call.kind, call.width
    nothing = splat16(0.0)
    largest, other = nothing, nothing
    for i in range(row * width, (row + 1) * width, 2 * LANES):
        value, second = load16(x, i, kind), load16(x, i + LANES, kind)
        largest = max16(largest, max16(value, nothing - value))
        other = max16(other, max16(second, nothing - second))
    put_f32(call.x_scale, row, highest16(max16(largest, other)) / np.float32(127.0 * FINER))


@inlined
def _round_pair(call: FixedCall, row: int, pair: int, num_pairs: int) -> None:
    x, kind, width, num_rows, rounded = call.x, call.kind, call.width, call.num_rows, call.rounded
    nothing, one, finer = splat16(0.0), splat16(1.0), splat16(np.float32(FINER))
    scale = splat16(get_f32(call.x_scale, row)) * finer
    inverse = choose16(above16(scale, nothing), one / scale, nothing)
    rows = 1 if num_rows == 1 else 2 if num_rows == 2 else _FEW  # of the tile for few rows
    to = rounded + (row // TILE_ROWS * num_pairs + pair) * PAIR_BYTES + TILE_LEN * (row % TILE_ROWS)
    for group in range(2 * pair, min(2 * pair + 2, width // GROUP_LEN)):
        at = row * width + group * GROUP_LEN
        low, high = load16(x, at, kind) * inverse, load16(x, at + LANES, kind) * inverse
        upper_low, upper_high = round16(low), round16(high)
        lower_low, lower_high = round16((low - upper_low) * finer), round16((high - upper_high) * finer)
        store16_i8(to, 0, upper_low)
        store16_i8(to, LANES, upper_high)
        store16_i8(to + TILE_BYTES, 0, lower_low)
        store16_i8(to + TILE_BYTES, LANES, lower_high)
        to += GROUP_LEN
        if num_rows <= _FEW:
            at = PLANES * (group * rows + row)
            put_i32(call.x_sums, at, int(sum16(upper_low + upper_high)))
            put_i32(call.x_sums, at + 1, int(sum16(lower_low + lower_high)))


@inlined
def _multiply_few(call: FixedCall, record_bytes: int, multiply_block: Any) -> None:
    num_rows, num_groups, packed = call.num_rows, call.width // GROUP_LEN, call.packed
    blocks_a_task, picked, num_blocks = call.blocks_a_task, call.blocks, call.num_blocks
    out, gates = _local_rows(), _local_gates()
    task = take_number(counters(call), TASK)
    while task * blocks_a_task < num_blocks:
        for i in range(task * blocks_a_task, min((task + 1) * blocks_a_task, num_blocks)):
            for part in range(2 if call.gate != 0 else 1):
                block = i if picked == 0 else get_i32(picked, i)
                records = packed + (block + part * num_blocks) * num_groups * record_bytes
                multiply_block(records, call.rounded, call.x_sums, num_groups, out, num_rows)
                for row in range(num_rows):
                    sums = load16_f32(out, row * LANES)
                    if call.gate == 0:
                        _put_outputs(call, sums, row, block * LANES)
                    else:
                        _put_gated(call, sums, row, block, part, gates, row)
        task = take_number(counters(call), TASK)


@inlined
def _multiply_many(call: FixedCall, record_bytes: int, unpack_group: Any) -> None:
    num_rows, num_groups, packed = call.num_rows, call.width // GROUP_LEN, call.packed
    blocks_a_task, picked, num_blocks = call.blocks_a_task, call.blocks, call.num_blocks
    num_pairs = (num_groups + 1) // 2
    num_chunks = (num_pairs + _MAX_PAIRS - 1) // _MAX_PAIRS
    chunk_len = (num_pairs + num_chunks - 1) // num_chunks
    panel = (_local_panel() + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    thread = take_number(counters(call), THREAD)
    sums, gates = call.sums + thread * call.sums_len, call.gates + 4 * thread * call.gates_len
    band_rows = call.band_rows
    _open_tiles()
    task = take_number(counters(call), TASK)
    while task * blocks_a_task < num_blocks:
        end = min((task + 1) * blocks_a_task, num_blocks)
        for band in range(0, num_rows, band_rows):
            rows = min(band_rows, num_rows - band)
            for i in range(task * blocks_a_task, end):
                for part in range(2 if call.gate != 0 else 1):
                    block = i if picked == 0 else get_i32(picked, i)
                    for start in range(0, num_pairs, chunk_len):
                        pairs = min(chunk_len, num_pairs - start)
                        records = packed + ((block + part * num_blocks) * num_groups + 2 * start) * record_bytes
                        for group in range(min(2 * pairs, num_groups - 2 * start)):
                            to = panel + group // 2 * PAIR_BYTES + group % 2 * (TILE_BYTES // 2)
                            unpack_group(records + group * record_bytes, to)
                        if num_groups - 2 * start < 2 * pairs:
                            _clear_last(panel + (pairs - 1) * PAIR_BYTES + TILE_BYTES // 2)
                        _multiply_band(call, panel, start, pairs, sums, band, rows, block, part, gates)
        task = take_number(counters(call), TASK)
    _close_tiles()


@helper
def _multiply_band(
    call: FixedCall,
    panel: int,
    start: int,
    pairs: int,
    sums: int,
    band: int,
    rows: int,
    block: int,
    part: int,
    gates: int,
) -> None:
    """Adds a block's products of some pairs of groups to the rows' sums; after the last, stores the outputs."""
    num_pairs = (call.width // GROUP_LEN + 1) // 2
    x = call.rounded + (band // TILE_ROWS * num_pairs + start) * PAIR_BYTES
    is_last, is_only = start + pairs == num_pairs, pairs == num_pairs
    for row in range(band, band + rows, TILE_ROWS):
        count = min(TILE_ROWS, band + rows - row)
        if is_last:
            _fetch_rows(call, row, count, block * LANES)
        _multiply_tiles(x, panel, pairs, sums, start)
        if is_last and call.gate == 0:
            _put_rows(call, sums, row, count, block * LANES)
        elif is_last:
            for r in range(count):
                _put_gated(call, _joined_sums(sums, r), row + r, block, part, gates, row - band + r)
        x += num_pairs * PAIR_BYTES
        if not is_only:
            sums += SUM_TILES * TILE_BYTES


@inlined
def _fetch_rows(call: FixedCall, first: int, count: int, column: int) -> None:
    size = 2 if call.out_kind == BFLOAT16 else 4
    for row in range(first, first + count):
        _fetch_outputs(call.out + size * (row * call.out_step + column))


@helper
def _clear_last(to: int) -> None:
    """An odd last group has no neighbour: zeros in both planes."""
    nothing = splat16(0.0)
    for plane in range(PLANES):
        for i in range(0, TILE_BYTES // 2 // 4, LANES):
            store16_f32(to + plane * TILE_BYTES, i, nothing)


@inlined
def _put_rows(call: FixedCall, sums: int, first: int, count: int, column: int) -> None:
    """Outputs ``column`` and following of ``count`` rows from ``first`` on."""
    if column + LANES > call.num_outputs:
        for r in range(count):
            _put_outputs(call, _joined_sums(sums, r), first + r, column)
        return
    out, kind, step, x_scale = call.out, call.out_kind, call.out_step, call.x_scale
    w_scale, offset = load16_f32(call.w_scale, column), splat16(0.0)
    if call.bias != 0:
        offset = load16_f32(call.bias, column)
    for r in range(count):
        row = first + r
        values = fused16(offset, _joined_sums(sums, r), w_scale * splat16(get_f32(x_scale, row)))
        store16(out, row * step + column, kind, values)


@inlined
def _put_gated(call: FixedCall, sums: Any, row: int, block: int, part: int, gates: int, at: int) -> None:
    """Scales 16 outputs of a row: of part 0 gates, kept in line ``at`` of ``gates``; of part 1 what they multiply."""
    column = (block + part * call.num_blocks) * LANES
    offset = splat16(0.0)
    if call.bias != 0:
        offset = load16_f32(call.bias, column)
    values = fused16(offset, sums, load16_f32(call.w_scale, column) * splat16(get_f32(call.x_scale, row)))
    if part == 0:
        store16_f32(gates, at * LANES, values)
        return
    slope, cubic = sigmoid_of(call.gate == _GELU)
    values = gated16(load16_f32(gates, at * LANES), values, splat16(slope), splat16(cubic))
    store16(call.out, row * call.out_step + block * LANES, call.out_kind, values)


@inlined
def _put_outputs(call: FixedCall, sums: Any, row: int, column: int) -> None:
    """Scales 16 outputs of a row, from ``column`` on, and stores them. Those from ``num_outputs`` on are left out."""
    scale = load16_f32(call.w_scale, column) * splat16(get_f32(call.x_scale, row))
    to, bias, num_outputs = row * call.out_step + column, call.bias, call.num_outputs
    if column + LANES <= num_outputs:
        offset = splat16(0.0)
        if bias != 0:
            offset = load16_f32(bias, column)
        store16(call.out, to, call.out_kind, fused16(offset, sums, scale))
    else:
        last = _local_last()
        for i in range(LANES):
            put_f32(last, i, get_f32(bias, column + i) if bias != 0 and column + i < num_outputs else np.float32(0.0))
        store16_f32(last, 0, fused16(load16_f32(last, 0), sums, scale))
        for i in range(num_outputs - column):
            put(call.out, to + i, call.out_kind, get_f32(last, i))
