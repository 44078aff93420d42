"""Products of 4- and 8-bit weights in groups of 32 with activations in bfloat16, by AMX.

Weights are rounded to bfloat16 as they are unpacked, x before; sums are float32. Of two blocks of 16 outputs as many
groups as stay in the first cache are unpacked, and then multiplied with all rows. One row takes as long as 16, which is
the time of unpacking. A row's result is the same to the bit however many rows there are.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from . import amx
from .amx import OUT_EXPONENT, TILE_BYTES, TILE_ROWS
from .entry import FIRST_DONE, FIRST_TASK, TASK, THREAD, counters, entry
from .llvm import LANES
from .packing import GROUP_LEN, record_len
from .recording import scratch
from .tensors import KINDS, readable, task_len, team_size
from .vector import (
    compiled,
    get_f32,
    get_i32,
    load16,
    load16_f32,
    local_floats,
    put,
    splat16,
    store16,
    take_number,
    vector16,
    watch,
)

_BLOCKS_AT_ONCE = 2
_ROW_TILES = 2
_CHUNK = 20  # groups whose tiles of two blocks, 40 KB, stay in the first cache
_MIN_SHARE = 200_000  # products worth a second thread
_RUN = 16  # groups of 16 rows that one thread rounds
_LINE = _BLOCKS_AT_ONCE * LANES  # float32 sums of a row
_LARGEST = 60_000.0  # weights times their factor stay below, within float16


class TileProduct:
    """``x [T, K] -> [T, N]`` for weights packed by ``packing``; bias float32 [N]. Only where ``isa().has_tiles``."""

    def __init__(self, packed: Tensor, num_outputs: int, *, bits: Literal[4, 8], bias: Tensor | None) -> None:
        self.packed, self.num_outputs, self.bias = packed, num_outputs, bias
        self._factor = _factor_for(_largest(packed, bits))
        self._run = _run_4 if bits == 4 else _run_8
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
        num_tiles, num_groups = -(-num_rows // TILE_ROWS), width // GROUP_LEN
        num_blocks = -(-self.num_outputs // LANES) if blocks is None else len(blocks)
        work = num_tiles * TILE_ROWS * width * num_blocks * LANES
        threads = team_size(work, min_share=_MIN_SHARE)
        rounded = scratch("rounded", num_tiles * num_groups * TILE_BYTES + _ALIGNMENT, torch.uint8)
        sums_len = -(-num_tiles // _ROW_TILES) * _ROW_TILES * TILE_ROWS * _LINE
        sums = scratch("sums", threads * sums_len + _ALIGNMENT // 4, torch.float32)
        call = TileCall(
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
            _aligned(rounded.data_ptr()),
            _aligned(sums.data_ptr()),
            4 * sums_len,
            task_len(num_blocks, threads, _BLOCKS_AT_ONCE),
            0 if blocks is None else blocks.data_ptr(),
            num_blocks,
            int(np.float16(self._factor).view(np.uint16)),
            2.0**OUT_EXPONENT / self._factor,
        )
        self._run(call, threads=threads)
        return out


class TileCall(NamedTuple):
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
    rounded: int  # tiles of x [row tiles, groups], written in the first phase
    sums: int  # float32 [threads, rows, 32]
    sums_len: int  # bytes of a thread's sums
    blocks_a_task: int
    blocks: int  # int32 [num_blocks]: the blocks of 16 outputs to compute, or 0: all
    num_blocks: int
    factor: int  # of the weights, see ``unpack_tiles``
    out_factor: float  # of the sums


_ALIGNMENT = 64
_RECORD_4, _RECORD_8 = record_len(4), record_len(8)
_open_tiles, _close_tiles = compiled(types.void)(amx.open_tiles), compiled(types.void)(amx.close_tiles)
_store_x = compiled(types.void, types.int64, vector16, vector16)(amx.store_x)
_unpack_4, _unpack_8 = (compiled(types.void, *(types.int64,) * 4)(amx.unpack_tiles(bits)) for bits in (4, 8))
_multiply_1x1, _multiply_1x2, _multiply_2x1, _multiply_2x2 = (
    compiled(types.void, *(types.int64,) * 7)(amx.multiply_tiles(i, j)) for i in (1, 2) for j in (1, 2)
)
_local_panel = local_floats((_BLOCKS_AT_ONCE * _CHUNK * TILE_BYTES + _ALIGNMENT) // 4)


def _aligned(address: int) -> int:
    return -(-address // _ALIGNMENT) * _ALIGNMENT


def _largest(packed: Tensor, bits: int) -> float:
    """No weight is larger. ``packed``: [blocks, groups, record]."""
    tail = packed[..., LANES * GROUP_LEN * bits // 8 :].contiguous().view(torch.float16).float().abs()
    if bits == 8:
        return 128 * float(tail.max()) if tail.numel() else 0.0
    scale, zero = tail[..., :LANES], tail[..., LANES:]
    return float((8 * scale + zero).max()) if tail.numel() else 0.0


def _factor_for(largest: float) -> float:
    """The largest power of two, up to 2^15, that keeps the weights below ``_LARGEST``."""
    if largest == 0:
        return 1.0
    return 2.0 ** min(15, math.floor(math.log2(_LARGEST / largest)))


@njit
def _unpack_groups_4(records: int, num_groups: int, factor: int, to: int) -> None:
    _unpack_4(records, num_groups, factor, to)


@njit
def _unpack_groups_8(records: int, num_groups: int, factor: int, to: int) -> None:
    _unpack_8(records, num_groups, factor, to)


@entry
def _run_4(call: TileCall) -> None:
    _round_rows(call)
    _multiply_blocks(call, _RECORD_4, _unpack_groups_4)


@entry
def _run_8(call: TileCall) -> None:
    _round_rows(call)
    _multiply_blocks(call, _RECORD_8, _unpack_groups_8)


@njit
def _round_rows(call: TileCall) -> None:
    """The first phase: rounds the rows of x, shared by the team. Returns when all are done."""
    x, kind, num_rows, width, rounded = call.x, call.kind, call.num_rows, call.width, call.rounded
    num_groups = width // GROUP_LEN
    runs = (num_groups + _RUN - 1) // _RUN
    num_tasks = (num_rows + TILE_ROWS - 1) // TILE_ROWS * runs
    task = take_number(counters(call), FIRST_TASK)
    while task < num_tasks:
        tile, first = task // runs, task % runs * _RUN
        for row in range(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, num_rows)):
            for group in range(first, min(first + _RUN, num_groups)):
                at = row * width + group * GROUP_LEN
                to = rounded + (tile * num_groups + group) * TILE_BYTES + 2 * GROUP_LEN * (row - tile * TILE_ROWS)
                _store_x(to, load16(x, at, kind), load16(x, at + LANES, kind))
        take_number(counters(call), FIRST_DONE)
        task = take_number(counters(call), FIRST_TASK)
    while watch(counters(call), FIRST_DONE) < num_tasks:
        pass


@njit(forceinline=True)
def _multiply_blocks(call: TileCall, weight_record: int, unpack: Any) -> None:
    num_groups, packed = call.width // GROUP_LEN, call.packed
    blocks_a_task, picked, num_blocks, factor = call.blocks_a_task, call.blocks, call.num_blocks, call.factor
    panel = (_local_panel() + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    sums = call.sums + take_number(counters(call), THREAD) * call.sums_len
    num_chunks = (num_groups + _CHUNK - 1) // _CHUNK
    chunk_len = (num_groups + num_chunks - 1) // num_chunks
    _open_tiles()
    task = take_number(counters(call), TASK)
    while task * blocks_a_task < num_blocks:
        end = min((task + 1) * blocks_a_task, num_blocks)
        for first in range(task * blocks_a_task, end, _BLOCKS_AT_ONCE):
            count = min(_BLOCKS_AT_ONCE, end - first)
            for start in range(0, num_groups, chunk_len):
                groups = min(chunk_len, num_groups - start)
                for i in range(count):
                    block = first + i if picked == 0 else get_i32(picked, first + i)
                    records = packed + (block * num_groups + start) * weight_record
                    unpack(records, groups, factor, panel + i * _CHUNK * TILE_BYTES)
                _multiply_chunk(call, panel, count, start, groups, sums)
            for i in range(count):
                block = first + i if picked == 0 else get_i32(picked, first + i)
                _put_block(call, sums, LANES * i, block * LANES)
        task = take_number(counters(call), TASK)
    _close_tiles()


@njit
def _multiply_chunk(call: TileCall, panel: int, count: int, start: int, groups: int, sums: int) -> None:
    """Adds one or two blocks' products of some groups to the sums of all rows."""
    num_tiles, x_step = (call.num_rows + TILE_ROWS - 1) // TILE_ROWS, call.width // GROUP_LEN * TILE_BYTES
    x, w_step = call.rounded + start * TILE_BYTES, _CHUNK * TILE_BYTES
    for tile in range(0, num_tiles, _ROW_TILES):
        to = sums + 4 * _LINE * TILE_ROWS * tile
        if tile + 1 < num_tiles:
            if count == 1:
                _multiply_2x1(x, x_step, panel, w_step, groups, to, start)
            else:
                _multiply_2x2(x, x_step, panel, w_step, groups, to, start)
        elif count == 1:
            _multiply_1x1(x, x_step, panel, w_step, groups, to, start)
        else:
            _multiply_1x2(x, x_step, panel, w_step, groups, to, start)
        x += _ROW_TILES * x_step


@njit
def _put_block(call: TileCall, sums: int, at: int, column: int) -> None:
    """Outputs ``column`` and following of all rows, from column ``at`` of the sums."""
    bias, out, out_kind, out_step, num_outputs = call.bias, call.out, call.out_kind, call.out_step, call.num_outputs
    factor = np.float32(call.out_factor)
    if column + LANES <= num_outputs:
        factors, offset = splat16(factor), splat16(np.float32(0.0))
        if bias != 0:
            offset = load16_f32(bias, column)
        for row in range(call.num_rows):
            values = load16_f32(sums, row * _LINE + at) * factors
            if bias != 0:
                values = values + offset
            store16(out, row * out_step + column, out_kind, values)
        return
    for row in range(call.num_rows):
        for i in range(num_outputs - column):
            value = get_f32(sums, row * _LINE + at + i) * factor
            if bias != 0:
                value += get_f32(bias, column + i)
            put(out, row * out_step + column + i, out_kind, value)
