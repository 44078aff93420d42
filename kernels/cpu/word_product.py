"""Products of 4- and 8-bit weights in groups of 32 with activations, both in bfloat16, by AMX (see ``word_block``).

Sums are float32. A row's result is the same to the bit however many rows there are.
"""

from typing import Any, Literal, NamedTuple

import torch
from numba import types
from torch import Tensor

from ...cpu_isa import isa
from . import amx, word_block
from .activation import gated16, gated_each, sigmoid_of
from .amx import TILE_BYTES, TILE_ROWS
from .entry import FIRST_DONE, FIRST_TASK, TASK, THREAD, counters, end_of_numbers, entry, task_of
from .llvm import LANES, V16, load_at, number
from .machine_code import helper, inlined
from .packing import GROUP_LEN, record_len
from .recording import scratch
from .tensors import ALONE_THREADS, KINDS, readable, task_len, team_size
from .vector import (
    BFLOAT16,
    compiled,
    fetch,
    get_f32,
    get_i32,
    load16_f32,
    local_floats,
    put,
    put_f32,
    splat16,
    store16,
    store16_f32,
    take_number,
    vector16,
    watch,
)
from .word_block import BLOCKS, BUFFER_BYTES, FACTOR_BYTES, MAX_TILES

Gate = Literal["silu", "gelu_tanh"]
_GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}
_GELU = _GATES["gelu_tanh"]

_MIN_SHARE = 1 << 20  # products of a tile of rows worth a second thread
_PANEL_GROUPS = 9  # whose lines, 18 KB of two blocks of outputs, stay in the first cache
_PIECE_BYTES = 1_300_000  # of x in tiles, which stay in the second cache
_BAND_TILES = 16  # of rows, at least as far as there are so many, for which weights are unpacked once
_ALIGNMENT = 64
_LINES_AT_ONCE = 4
_RUN = 4  # groups of 16 rows that one thread lays out at a time
_LAID_OUT = -1
_ALONE_BYTES = 32_000_000  # of all threads' own columns, see ALONE_THREADS


class Columns(NamedTuple):
    """What a product reads of x, as another product has laid it out."""

    tiles: Tensor  # bfloat16 [row tiles, groups, 16 words, 16 rows, 2]; of one row [K]
    num_rows: int
    width: int  # K


class WordProduct:
    """``x [T, K] -> [T, N]`` for records of ``packing.to_words``; bias float32 [N]. Only with AMX."""

    def __init__(self, packed: Tensor, num_outputs: int, *, bits: Literal[4, 8], bias: Tensor | None) -> None:
        assert isa().has_tiles  # and asks the system for the tile registers
        self.packed, self.num_outputs, self.bias = packed, num_outputs, bias
        self._run = _run_4 if bits == 4 else _run_8
        self._run.compile()

    @property
    def can_gate(self) -> bool:
        """Whether half of the outputs are whole groups of another product."""
        return self.num_outputs % (2 * GROUP_LEN) == 0

    def gated(self, x: Tensor, gate: Gate) -> Columns:
        """The activations of the first half of the outputs times the second half, for another product. Only where
        ``can_gate``.
        """
        width = self.num_outputs // 2
        num_tiles = -(-x.shape[0] // TILE_ROWS)
        size = width if x.shape[0] == 1 else num_tiles * TILE_ROWS * width
        tiles = torch.empty(size, dtype=torch.bfloat16)
        self._multiply(x, tiles, width, num_blocks=width // LANES, gate=gate)
        return Columns(tiles, x.shape[0], width)

    def __call__(
        self,
        x: Tensor | Columns,
        out_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
        blocks: Tensor | None = None,
    ) -> Tensor:
        """``out`` [T, N], if given, receives the results; it may be columns of a larger tensor.

        With ``blocks`` (int32) only outputs [16 b, 16 b + 16) of each block b are written.
        """
        num_rows = x.num_rows if isinstance(x, Columns) else x.shape[0]
        if out is None:
            out = torch.empty((num_rows, self.num_outputs), dtype=out_dtype)
        assert out.dtype == out_dtype and out.shape == (num_rows, self.num_outputs) and out.stride(1) == 1
        num_blocks = -(-self.num_outputs // LANES) if blocks is None else len(blocks)
        self._multiply(x, out, out.stride(0), num_blocks=num_blocks, blocks=blocks)
        return out

    def _multiply(
        self,
        x: Tensor | Columns,
        out: Tensor,
        out_step: int,
        *,
        num_blocks: int,
        blocks: Tensor | None = None,
        gate: Gate | None = None,
    ) -> None:
        if isinstance(x, Columns):
            columns, num_rows, width = x
            x = columns
        else:
            x = readable(x)
            columns = None
            num_rows, width = x.shape
        num_tiles, num_groups = -(-num_rows // TILE_ROWS), width // GROUP_LEN
        work = num_tiles * TILE_ROWS * width * num_blocks * LANES * (1 if gate is None else 2)
        threads = team_size(work, min_share=_MIN_SHARE)
        own_len = 0
        if columns is None:
            columns_len = num_tiles * num_groups * TILE_BYTES
            if threads <= ALONE_THREADS and threads * columns_len <= _ALONE_BYTES:
                own_len = columns_len
            columns = scratch("columns", max(threads * own_len, columns_len) + _ALIGNMENT, torch.uint8)
            columns_at = _aligned(columns.data_ptr())
        else:
            own_len, columns_at = _LAID_OUT, columns.data_ptr()
        chunk_len = -(-num_groups // -(-num_groups // _PANEL_GROUPS))
        band_tiles = max(_BAND_TILES, _PIECE_BYTES // (num_groups * TILE_BYTES) // 2 * 2)
        piece = max(1, _PIECE_BYTES // (max(1, min(num_tiles, band_tiles)) * TILE_BYTES) // chunk_len) * chunk_len
        blocks_a_task = task_len(num_blocks, threads, 2 if gate is None else 1)
        sums_len = max(2 * MAX_TILES, (min(num_tiles, band_tiles) + 1) // 2 * 4) * TILE_BYTES
        pairs = blocks_a_task if gate is not None else -(-blocks_a_task // 2)
        thread_len = sums_len * (1 if piece >= num_groups else pairs)
        sums = scratch("sums", threads * thread_len + _ALIGNMENT, torch.uint8)
        call = WordCall(
            x.data_ptr(),
            KINDS[x.dtype],
            num_rows,
            width,
            self.packed.data_ptr(),
            self.num_outputs,
            0 if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            KINDS[out.dtype],
            out_step,
            columns_at,
            own_len,
            _aligned(sums.data_ptr()),
            sums_len,
            thread_len,
            band_tiles,
            chunk_len,
            piece,
            blocks_a_task,
            0 if blocks is None else blocks.data_ptr(),
            num_blocks,
            _GATES[gate],
            threads,
        )
        self._run(call, threads=threads)


class WordCall(NamedTuple):
    x: int  # [T, K]
    kind: int  # of x
    num_rows: int
    width: int  # K
    packed: int  # see ``packing.to_words``
    num_outputs: int
    bias: int  # float32 [N], or 0: there is none
    out: int  # [T, N]
    out_kind: int
    out_step: int  # numbers from one row of out to the next
    columns: int  # x in tiles [row tiles, groups, 16 words, 16 rows, 2], written in the first phase; one row as it is
    own_len: int  # bytes of a thread's own columns; 0: all threads share them; _LAID_OUT: x is Columns
    sums: int  # float32 [threads, pairs of blocks, pairs of row tiles of a band, 2, 2, 16 outputs, 16 rows]
    sums_len: int  # bytes of a pair's sums
    thread_len: int  # bytes of a thread's sums: of all pairs of a task, or of one if there is one piece
    band_tiles: int  # an even number of row tiles
    chunk_len: int  # groups that are unpacked at a time
    piece_len: int  # groups whose columns of a band stay in the second cache; a number of chunks
    blocks_a_task: int  # of those of out
    blocks: int  # int32 [num_blocks]: the blocks of 16 outputs to compute, or 0: all
    num_blocks: int  # of 16 columns of out
    gate: int  # see ``_GATES``
    regions: int  # of tasks, see ``entry``


_RECORD_4, _RECORD_8 = record_len(4), record_len(8)
_ints = (types.int64,) * 8
_close_tiles = compiled(types.void)(amx.close_tiles)
_panel_1x1, _panel_2x1, _panel_1x2, _panel_2x2 = (
    compiled(types.void, *_ints)(word_block.multiply_panel(blocks=blocks, column_blocks=columns))
    for blocks, columns in ((1, 1), (2, 1), (1, 2), (2, 2))
)
_lay_columns, _lay_columns_of_words = (
    compiled(types.void, *_ints[:4])(word_block.lay_columns(words=words)) for words in (False, True)
)
_lay_row, _lay_row_of_words = (
    compiled(types.void, *_ints[:2])(word_block.lay_row(words=words)) for words in (False, True)
)
_put_floats, _put_words = (
    compiled(types.void, *_ints[:3])(word_block.put_tile(words=words)) for words in (False, True)
)
_put_columns = compiled(types.void, *_ints[:2])(word_block.put_columns)
_local_buffer = local_floats((BUFFER_BYTES + _ALIGNMENT) // 4)
_local_panel = local_floats((_PANEL_GROUPS * (BLOCKS * TILE_BYTES + FACTOR_BYTES) + _ALIGNMENT) // 4)
_local_tile = local_floats(17 * LANES)


@compiled(types.void, types.int64, types.int64, vector16, vector16)
def _join_lines(builder: Any, gates: Any, ups: Any, slopes: Any, cubics: Any) -> None:
    """``gated_each`` of 16 lines, some at a time, since each step waits for the one before."""
    for first in range(0, LANES, _LINES_AT_ONCE):
        offsets = [4 * LANES * (first + i) for i in range(_LINES_AT_ONCE)]
        left, right = ([load_at(builder, V16, address, offset) for offset in offsets] for address in (gates, ups))
        for offset, value in zip(offsets, gated_each(builder, left, right, slopes, cubics), strict=True):
            place = builder.inttoptr(builder.add(gates, number(offset)), V16.as_pointer())
            builder.store(value, place, align=4)


@compiled(types.void, types.int64)
def _fetch(builder: Any, address: Any) -> None:
    fetch(builder, address, 64, level=1)


@compiled(types.void, types.int64)
def _open_columns(builder: Any, is_narrow: Any) -> None:
    amx.open_columns(builder, is_narrow, word_block.NARROW)


def _block_product(bits: int) -> Any:
    """``f(records, num_groups, x, x_step, line, buffer, sums, tiles)``: ``multiply_block`` of 1 to 4 tiles."""
    one, two, three, four = (
        compiled(types.void, *_ints[:7])(word_block.multiply_block(bits=bits, num_tiles=tiles))
        for tiles in (1, 2, 3, 4)
    )

    @helper
    def product(
        records: int, num_groups: int, x: int, x_step: int, line: int, buffer: int, sums: int, tiles: int
    ) -> None:
        if tiles == 1:
            one(records, num_groups, x, x_step, line, buffer, sums)
        elif tiles == 2:
            two(records, num_groups, x, x_step, line, buffer, sums)
        elif tiles == 3:
            three(records, num_groups, x, x_step, line, buffer, sums)
        else:
            four(records, num_groups, x, x_step, line, buffer, sums)

    return product


def _unpacker(bits: int) -> Any:
    """``f(records, to, factors, num_groups)``: ``unpack_groups``, as an argument of compiled code."""
    unpack_groups = compiled(types.void, *_ints[:4])(word_block.unpack_groups(bits))

    @helper
    def unpack(records: int, to: int, factors: int, num_groups: int) -> None:
        unpack_groups(records, to, factors, num_groups)

    return unpack


_block_of_4, _block_of_8 = _block_product(4), _block_product(8)
_unpack_4, _unpack_8 = _unpacker(4), _unpacker(8)


def _aligned(address: int) -> int:
    return -(-address // _ALIGNMENT) * _ALIGNMENT


@inlined
def _aligned_here(address: int) -> int:
    return (address + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


@entry
def _run_4(call: WordCall) -> None:
    thread = take_number(counters(call), THREAD)
    _multiply(call, _laid_out(call, thread), thread, _RECORD_4, _block_of_4, _unpack_4)


@entry
def _run_8(call: WordCall) -> None:
    thread = take_number(counters(call), THREAD)
    _multiply(call, _laid_out(call, thread), thread, _RECORD_8, _block_of_8, _unpack_8)


@helper
def _laid_out(call: WordCall, thread: int) -> int:
    """The first phase: x in tiles. Returns where this thread finds them."""
    if call.own_len == _LAID_OUT:
        return call.columns
    if call.own_len == 0:
        _lay_out(call)
        return call.columns
    columns = call.columns + thread * call.own_len
    if watch(counters(call), TASK) >= end_of_numbers(_num_tasks(call), call.regions):
        return columns  # this thread came too late
    num_tiles, num_groups = (call.num_rows + TILE_ROWS - 1) // TILE_ROWS, call.width // GROUP_LEN
    if call.num_rows == 1:
        _lay_one(call, columns, num_groups)
    else:
        for tile in range(num_tiles):
            _lay_tile(call, columns, tile, 0, num_groups, num_groups)
    return columns


@helper
def _lay_out(call: WordCall) -> None:
    """Lays out x for all threads. Returns when all is done."""
    num_tiles, num_groups = (call.num_rows + TILE_ROWS - 1) // TILE_ROWS, call.width // GROUP_LEN
    runs = (num_groups + _RUN - 1) // _RUN if call.num_rows > 1 else 1
    num_tasks = num_tiles * runs
    task = take_number(counters(call), FIRST_TASK)
    while task < num_tasks:
        if call.num_rows == 1:
            _lay_one(call, call.columns, num_groups)
        else:
            tile, first = task // runs, task % runs * _RUN
            _lay_tile(call, call.columns, tile, first, min(first + _RUN, num_groups), num_groups)
        take_number(counters(call), FIRST_DONE)
        task = take_number(counters(call), FIRST_TASK)
    while watch(counters(call), FIRST_DONE) < num_tasks:
        pass


@inlined
def _lay_one(call: WordCall, columns: int, num_groups: int) -> None:
    x, kind = call.x, call.kind
    for group in range(num_groups):
        if kind == BFLOAT16:
            _lay_row_of_words(x + 2 * GROUP_LEN * group, columns + 2 * GROUP_LEN * group)
        else:
            _lay_row(x + 4 * GROUP_LEN * group, columns + 2 * GROUP_LEN * group)


@inlined
def _lay_tile(call: WordCall, columns: int, tile: int, first: int, end: int, num_groups: int) -> None:
    x, kind, width = call.x, call.kind, call.width
    size = 2 if kind == BFLOAT16 else 4
    row = tile * TILE_ROWS
    count = min(TILE_ROWS, call.num_rows - row)
    to = columns + (tile * num_groups + first) * TILE_BYTES
    for group in range(first, end):
        at = x + size * (row * width + GROUP_LEN * group)
        if kind == BFLOAT16:
            _lay_columns_of_words(at, size * width, count, to)
        else:
            _lay_columns(at, size * width, count, to)
        to += TILE_BYTES


@inlined
def _multiply(
    call: WordCall, columns: int, thread: int, record_bytes: int, multiply_block: Any, unpack_groups: Any
) -> None:
    sums = call.sums + thread * call.thread_len
    if call.num_rows <= MAX_TILES * TILE_ROWS:
        _multiply_blocks(call, columns, sums, record_bytes, multiply_block)
    else:
        _multiply_panels(call, columns, sums, record_bytes, unpack_groups)


@inlined
def _multiply_blocks(call: WordCall, columns: int, sums: int, record_bytes: int, multiply_block: Any) -> None:
    """The way for few rows."""
    num_groups, num_rows, blocks_a_task, num_blocks = (
        call.width // GROUP_LEN,
        call.num_rows,
        call.blocks_a_task,
        call.num_blocks,
    )
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    line = 4 if num_rows == 1 else 4 * TILE_ROWS
    x_step, sums_step = num_groups * TILE_ROWS * line, MAX_TILES * TILE_BYTES
    buffer = _aligned_here(_local_buffer())
    _open_columns(1 if num_rows == 1 else 0)
    num_tasks, regions = _num_tasks(call), call.regions
    number = take_number(counters(call), TASK)
    while number < end_of_numbers(num_tasks, regions):
        task = task_of(number, num_tasks, regions)
        for i in range(task * blocks_a_task, min((task + 1) * blocks_a_task, num_blocks)):
            block = i if call.blocks == 0 else get_i32(call.blocks, i)
            records = call.packed + block * num_groups * record_bytes
            for part in range(2 if call.gate != 0 else 1):
                at = sums + part * sums_step
                multiply_block(records, num_groups, columns, x_step, line, buffer, at, num_tiles)
                records += num_blocks * num_groups * record_bytes
            for tile in range(num_tiles):
                at, row = sums + tile * TILE_BYTES, tile * TILE_ROWS
                _put_sums(call, at, at + sums_step, row, min(TILE_ROWS, num_rows - row), block)
        number = take_number(counters(call), TASK)
    _close_tiles()


@inlined
def _multiply_panels(call: WordCall, columns: int, sums: int, record_bytes: int, unpack_groups: Any) -> None:
    """The way for many rows."""
    num_groups, packed = call.width // GROUP_LEN, call.packed
    blocks_a_task, num_blocks = call.blocks_a_task, call.num_blocks
    num_tiles, band_tiles = (call.num_rows + TILE_ROWS - 1) // TILE_ROWS, call.band_tiles
    chunk_len, piece_len, sums_len, thread_len = call.chunk_len, call.piece_len, call.sums_len, call.thread_len
    panel_step = chunk_len * TILE_BYTES
    panel = _aligned_here(_local_panel())
    factors = panel + BLOCKS * _PANEL_GROUPS * TILE_BYTES
    pair_len = sums_len if thread_len > sums_len else 0
    parts = 2 if call.gate != 0 else 1  # blocks that make one block of out
    step = BLOCKS // parts
    _open_columns(0)
    num_tasks, regions = _num_tasks(call), call.regions
    number = take_number(counters(call), TASK)
    while number < end_of_numbers(num_tasks, regions):
        task = task_of(number, num_tasks, regions)
        begin, end = task * blocks_a_task, min((task + 1) * blocks_a_task, num_blocks)
        for band in range(0, num_tiles, band_tiles):
            tiles = min(band_tiles, num_tiles - band)
            for piece in range(0, num_groups, piece_len):
                piece_end = min(piece + piece_len, num_groups)
                to = sums
                for first in range(begin, end, step):
                    count = parts * min(step, end - first)
                    for start in range(piece, piece_end, chunk_len):
                        groups = min(chunk_len, piece_end - start)
                        for i in range(count):
                            records = packed + (_block_of(call, first, i) * num_groups + start) * record_bytes
                            unpack_groups(records, panel + i * panel_step, factors, groups)
                        # Where the next records are that go to the same place: they arrive while these are multiplied.
                        ahead = start + chunk_len if start + groups < piece_end else step * num_groups + piece
                        _multiply_band(
                            call,
                            columns,
                            panel,
                            panel_step,
                            start,
                            groups,
                            to,
                            band,
                            tiles,
                            first,
                            count,
                            ahead,
                            record_bytes,
                        )
                    to += pair_len
        number = take_number(counters(call), TASK)
    _close_tiles()


@inlined
def _num_tasks(call: WordCall) -> int:
    return (call.num_blocks + call.blocks_a_task - 1) // call.blocks_a_task


@inlined
def _block_of(call: WordCall, first: int, i: int) -> int:
    """Block i of those that are multiplied at a time: of gates each is followed by that of what they multiply."""
    if call.gate != 0:
        return first + i // 2 + i % 2 * call.num_blocks
    if call.blocks != 0:
        return get_i32(call.blocks, first + i)
    return first + i


@helper
def _multiply_band(
    call: WordCall,
    columns: int,
    panel: int,
    panel_step: int,
    start: int,
    groups: int,
    sums: int,
    band: int,
    tiles: int,
    first: int,
    count: int,
    ahead: int,
    record_bytes: int,
) -> None:
    """Adds the products of ``count`` blocks' groups to the sums of a band of rows; stores outputs after the last.

    Fetches the records that are ``ahead`` groups after the blocks' first.
    """
    line = 4 * TILE_ROWS
    num_groups = call.width // GROUP_LEN
    is_last = start + groups == num_groups
    x_step = num_groups * TILE_ROWS * line
    x = columns + band * x_step + start * TILE_ROWS * line
    turns = (tiles + 1) // 2
    num_lines = (groups * record_bytes + 63) // 64
    for turn in range(turns):
        for i in range(count):
            records = call.packed + (_block_of(call, first, i) * num_groups + ahead) * record_bytes
            for k in range(num_lines * turn // turns, num_lines * (turn + 1) // turns):
                _fetch(records + 64 * k)
        row = (band + 2 * turn) * TILE_ROWS
        rows = min(2 * TILE_ROWS, call.num_rows - row)
        if rows > TILE_ROWS:
            if count == 2:
                _panel_2x2(panel, panel_step, x, x_step, line, groups, sums, start)
            else:
                _panel_1x2(panel, panel_step, x, x_step, line, groups, sums, start)
        elif count == 2:
            _panel_2x1(panel, panel_step, x, x_step, line, groups, sums, start)
        else:
            _panel_1x1(panel, panel_step, x, x_step, line, groups, sums, start)
        if is_last:
            _put_pair(call, sums, row, rows, first, count)
        x += 2 * x_step
        sums += 4 * TILE_BYTES


@helper
def _put_pair(call: WordCall, sums: int, row: int, rows: int, first: int, count: int) -> None:
    """Stores the outputs of one or two blocks, of up to 32 rows from ``row`` on."""
    for r in range(0, rows, TILE_ROWS):
        for i in range(count if call.gate == 0 else 1):
            block = first if call.gate != 0 else _block_of(call, first, i)
            at = sums + i * TILE_BYTES
            _put_sums(call, at, at + TILE_BYTES, row + r, min(TILE_ROWS, rows - r), block)
        sums += count * TILE_BYTES


@helper
def _put_sums(call: WordCall, sums: int, others: int, row: int, rows: int, block: int) -> None:
    """Stores a block's outputs of up to 16 rows; ``others``: the sums of what gates multiply."""
    if call.gate != 0:
        _join_gates(call, sums, others, block)
        if call.num_rows > 1:
            groups = call.num_blocks * LANES // GROUP_LEN
            tile = call.out + (row // TILE_ROWS * groups + block // 2) * TILE_BYTES
            _put_columns(sums, tile + block % 2 * (TILE_BYTES // 2))
        else:
            store16(call.out, LANES * block, BFLOAT16, load16_f32(sums, 0))
        return
    if call.bias != 0:
        _add_bias(call, sums, block)
    _put_tile(call, sums, row, rows, block)


@inlined
def _join_gates(call: WordCall, gates: int, ups: int, block: int) -> None:
    """The activations of sums of gates [16 outputs, rows] times the other sums, in the place of the gates."""
    slope, cubic = sigmoid_of(call.gate == _GELU)
    slopes, cubics, bias = splat16(slope), splat16(cubic), call.bias
    other = call.num_blocks * LANES
    if call.num_rows == 1:
        gate, up = load16_f32(gates, 0), load16_f32(ups, 0)
        if bias != 0:
            gate = gate + load16_f32(bias, LANES * block)
            up = up + load16_f32(bias, LANES * block + other)
        store16_f32(gates, 0, gated16(gate, up, slopes, cubics))
        return
    if bias != 0:
        for output in range(LANES):
            gate, up = load16_f32(gates, LANES * output), load16_f32(ups, LANES * output)
            store16_f32(gates, LANES * output, gate + splat16(get_f32(bias, LANES * block + output)))
            store16_f32(ups, LANES * output, up + splat16(get_f32(bias, LANES * block + output + other)))
    _join_lines(gates, ups, slopes, cubics)


@inlined
def _add_bias(call: WordCall, sums: int, block: int) -> None:
    """To sums [16 outputs, rows]."""
    bias, column = call.bias, LANES * block
    count = min(LANES, call.num_outputs - column)
    if call.num_rows == 1:
        for output in range(count):
            put_f32(sums, output, get_f32(sums, output) + get_f32(bias, column + output))
        return
    for output in range(count):
        offset = splat16(get_f32(bias, column + output))
        store16_f32(sums, LANES * output, load16_f32(sums, LANES * output) + offset)


@inlined
def _put_tile(call: WordCall, sums: int, first: int, rows: int, block: int) -> None:
    """Stores sums [16 outputs, rows] of some rows. Outputs from the last on are left out."""
    column = block * LANES
    width = call.num_outputs
    is_words = call.out_kind == BFLOAT16
    size = 2 if is_words else 4
    out, step = call.out + size * (first * call.out_step + column), size * call.out_step
    if call.num_rows == 1:
        if column + LANES <= width:
            store16(out, 0, call.out_kind, load16_f32(sums, 0))
        else:
            for i in range(width - column):
                put(out, i, call.out_kind, get_f32(sums, i))
        return
    if rows == TILE_ROWS and column + LANES <= width:
        if is_words:
            _put_words(sums, out, step)
        else:
            _put_floats(sums, out, step)
        return
    lines = _aligned_here(_local_tile())
    _put_floats(sums, lines, 4 * LANES)
    for r in range(rows):
        if column + LANES <= width:
            store16(out, 0, call.out_kind, load16_f32(lines, LANES * r))
        else:
            for i in range(width - column):
                put(out, i, call.out_kind, get_f32(lines, LANES * r + i))
        out += step
