"""The inner loops of products of unpacked weights with x, both bfloat16, in AMX's tiles. A word is a pair of bfloat16.

Weights lie in the rows of a tile: of 16 outputs, 32 neighbours each. x lies across, a *column* for each of its rows: a
line of a tile has one word of every column. So an output's group is unpacked to one line, in the order of the file.
There are 16 columns, or one: a line is then 4 bytes, and x and the results lie as in any array.

A weight of 4 bits is looked up: 16 lanes compute the values of all 16 numbers, ``scale * (q - 8) + zero``, and round
them to bfloat16; a permutation by 32 neighbours' numbers makes the line.

There are two ways to the same sums. Up to 64 columns a group is unpacked while the one before is multiplied, and all
sums stay in registers. For more columns some groups of 32 outputs, which stay in the first cache, are unpacked and
multiplied with all columns, 32 at a time: so a tile of x that is loaded is multiplied twice.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from . import amx
from .amx import TILE_BYTES, TILE_LEN
from .llvm import (
    BF16,
    F16,
    F32,
    I16,
    I32,
    LANES,
    V16,
    V16_I8,
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
from .packing import GROUP_LEN, record_len
from .vector import fetch

MAX_TILES = 4  # of 16 columns that are multiplied while weights are unpacked
NARROW = (0, 1, 2, 3, 5, 6, 7)  # registers whose lines have one number for each column, where there is one
_SUMS, _WEIGHTS, _COLUMNS = (0, 1, 2, 3), 4, (5, 6, 7)  # registers
_SLOTS = 4  # of unpacked groups, by turns
BLOCKS = 2  # of 16 outputs, and as many of 16 columns, that are multiplied at a time with many columns
_WEIGHTS_OF_TWO, _COLUMNS_OF_TWO = (4, 5), (6, 7)  # registers
FACTOR_BYTES = 2 * TILE_LEN  # of a group's scales and zeros as float32
BUFFER_BYTES = _SLOTS * (TILE_BYTES + FACTOR_BYTES)
_AHEAD = 10_240  # bytes of records that are fetched ahead
_WORDS = ir.VectorType(I16, 2 * LANES)
_TIE = 0x8000  # half of bfloat16's last place, in float32's bits


def multiply_block(*, bits: int, num_tiles: int) -> Callable[..., None]:
    """``emit(builder, records, num_groups, x, x_step, line, buffer, sums)``: 16 outputs of so many tiles of columns.

    ``records``: those of ``packing.to_words``. x: [tiles, groups, 16 words, columns, 2], ``x_step`` bytes from one tile
    to the next; ``line`` bytes are those of one word of all columns. ``sums``: float32 [tiles, 16 outputs, columns].
    ``buffer``: BUFFER_BYTES, aligned to cache lines. Weights are rounded to the nearest bfloat16, ties away from zero.
    """
    size = record_len(bits)

    def emit(
        builder: Any, records: Any, num_groups: Any, x: Any, x_step: Any, line: Any, buffer: Any, sums: Any
    ) -> None:
        group_bytes = builder.mul(line, number(LANES))
        last = builder.sub(num_groups, number(1))

        def slot(i: Any, kind_bytes: int, start: int) -> Any:
            turn = builder.and_(i, number(_SLOTS - 1))
            return builder.add(buffer, builder.add(builder.mul(turn, number(kind_bytes)), number(start)))

        def lines_of(i: Any) -> Any:
            return slot(i, TILE_BYTES, 0)

        def factors_of(i: Any) -> Any:
            return slot(i, FACTOR_BYTES, _SLOTS * TILE_BYTES)

        def unpack(i: Any) -> None:
            following = builder.add(i, number(1))
            following = builder.select(builder.icmp_signed("<", following, last), following, last)
            _widen_factors(
                builder, builder.add(records, builder.mul(following, number(size))), bits, factors_of(following)
            )
            record = builder.add(records, builder.mul(i, number(size)))
            fetch(builder, builder.add(record, number(_AHEAD)), size)
            _unpack(builder, record, bits, lines_of(i), factors_of(i))

        def multiply(i: Any) -> None:
            amx.load_tile(builder, _WEIGHTS, lines_of(i))
            at = builder.add(x, builder.mul(i, group_bytes))
            for tile in range(num_tiles):
                columns = _COLUMNS[tile % len(_COLUMNS)]
                amx.load_tile(builder, columns, builder.add(at, builder.mul(x_step, number(tile))), line)
                amx.add_word_products(builder, _SUMS[tile], _WEIGHTS, columns)

        def step(i: Any, state: list[Any]) -> list[Any]:
            unpack(builder.add(i, number(1)))
            multiply(i)
            return state

        for tile in range(num_tiles):
            amx.clear_tile(builder, _SUMS[tile])
        _widen_factors(builder, records, bits, factors_of(number(0)))
        unpack(number(0))
        carry(builder, last, [number(0)], step)
        multiply(last)
        for tile in range(num_tiles):
            amx.store_tile(builder, _SUMS[tile], builder.add(sums, builder.mul(group_bytes, number(tile))), line)

    emit.__name__ = f"multiply_block_{bits}x{num_tiles}"
    return emit


def unpack_groups(bits: int) -> Callable[..., None]:
    """``emit(builder, records, to, factors, num_groups)``: each record to a tile of 16 lines of 32 bfloat16.

    ``factors``: memory for FACTOR_BYTES of each, aligned as ``to`` is.
    """
    size = record_len(bits)

    def widen(builder: Any, state: list[Any]) -> list[Any]:
        _widen_factors(builder, state[0], bits, state[1])
        return [builder.add(state[0], number(size)), builder.add(state[1], number(FACTOR_BYTES))]

    def unpack(builder: Any, state: list[Any]) -> list[Any]:
        record, to, factors = state
        _unpack(builder, record, bits, to, factors)
        steps = (size, TILE_BYTES, FACTOR_BYTES)
        return [builder.add(value, number(step)) for value, step in zip(state, steps, strict=True)]

    def emit(builder: Any, records: Any, to: Any, factors: Any, num_groups: Any) -> None:
        carry(builder, num_groups, [records, factors], lambda _, state: widen(builder, state))
        carry(builder, num_groups, [records, to, factors], lambda _, state: unpack(builder, state))

    emit.__name__ = f"unpack_groups_{bits}"
    return emit


def multiply_panel(*, blocks: int, column_blocks: int) -> Callable[..., None]:
    """``emit(builder, panel, panel_step, x, x_step, line, num_groups, sums, adds)``.

    Multiplies so many blocks of 16 outputs at ``panel`` and of columns at ``x``, ``*_step`` bytes from one block to the
    next, to float32 [column blocks, blocks, 16 outputs, columns] at ``sums``. A line of x and of sums has ``line``
    bytes. They are added to what was there, unless ``adds`` is 0.
    """
    pairs = [(i, j) for j in range(column_blocks) for i in range(blocks)]

    def emit(
        builder: Any, panel: Any, panel_step: Any, x: Any, x_step: Any, line: Any, num_groups: Any, sums: Any, adds: Any
    ) -> None:
        size = builder.mul(line, number(LANES))
        places = [builder.add(sums, builder.mul(size, number(k))) for k in range(len(pairs))]
        first, more, start = (builder.append_basic_block(f"panel.{name}") for name in ("first", "more", "start"))
        builder.cbranch(builder.icmp_signed("==", adds, number(0)), first, more)
        builder.position_at_end(first)
        for k in range(len(pairs)):
            amx.clear_tile(builder, _SUMS[k])
        builder.branch(start)
        builder.position_at_end(more)
        for k, place in enumerate(places):
            amx.load_tile(builder, _SUMS[k], place, line)
        builder.branch(start)
        builder.position_at_end(start)

        def step(_: Any, state: list[Any]) -> list[Any]:
            weights, columns = state
            for j in range(column_blocks):
                amx.load_tile(builder, _COLUMNS_OF_TWO[j], builder.add(columns, builder.mul(x_step, number(j))), line)
            for i in range(blocks):
                amx.load_tile(builder, _WEIGHTS_OF_TWO[i], builder.add(weights, builder.mul(panel_step, number(i))))
            for k, (i, j) in enumerate(pairs):
                amx.add_word_products(builder, _SUMS[k], _WEIGHTS_OF_TWO[i], _COLUMNS_OF_TWO[j])
            return [builder.add(weights, number(TILE_BYTES)), builder.add(columns, size)]

        carry(builder, num_groups, [panel, x], step)
        for k, place in enumerate(places):
            amx.store_tile(builder, _SUMS[k], place, line)

    emit.__name__ = f"multiply_panel_{blocks}x{column_blocks}"
    return emit


def _widen_factors(builder: Any, record: Any, bits: int, to: Any) -> None:
    """A group's scales, and then zeros, as float32."""
    size, count = record_len(bits), 2 if bits == 4 else 1
    for part in range(count):
        halves = load_at(builder, ir.VectorType(F16, LANES), record, size - 2 * LANES * (count - part))
        builder.store(builder.fpext(halves, V16), vector_at(builder, F32, to, number(LANES * part)), align=64)


def _unpack(builder: Any, record: Any, bits: int, to: Any, factors: Any) -> None:
    """A record to 16 lines of 32 bfloat16."""
    for output in range(LANES):
        # One load from memory makes 16 equal lanes.
        places = (64 * i + 4 * output for i in range(2 if bits == 4 else 1))
        scale, *zero = (splat(builder, load_at(builder, F32, factors, place)) for place in places)
        line = (
            _line_of_4(builder, record, output, scale, *zero)
            if bits == 4
            else _line_of_8(builder, record, output, scale)
        )
        place = builder.add(to, number(TILE_LEN * output))
        builder.store(line, builder.inttoptr(place, _WORDS.as_pointer()), align=64)


def _line_of_4(builder: Any, record: Any, output: int, scale: Any, zero: Any) -> Any:
    """A word of the record has a neighbour's numbers of four outputs, in bits 1 to 4, 5 to 8, 9 to 12, and 13 to 0."""
    numbers = ir.Constant(V16, [float(q - 8) for q in range(16)])
    values = builder.bitcast(fused(builder, zero, numbers, scale), V16_I32)
    table = builder.bitcast(builder.add(values, constant(V16_I32, _TIE)), _WORDS)  # the odd ones are rounded values
    words = load_at(builder, _WORDS, record, 2 * GROUP_LEN * (output // 4))
    part = output % 4
    if part == 3:
        turn = declared(builder, "llvm.fshl.v32i16", _WORDS, _WORDS, _WORDS, _WORDS)
        words = builder.call(turn, [words, words, constant(_WORDS, 4)])
    elif part:
        words = builder.lshr(words, constant(_WORDS, 4 * part))
    pick = declared(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, _WORDS, _WORDS)  # by the lowest five bits
    return builder.call(pick, [table, builder.or_(words, constant(_WORDS, 1))])


def _line_of_8(builder: Any, record: Any, output: int, scale: Any) -> Any:
    halves = []
    for i in range(2):
        q = load_at(builder, V16_I8, record, GROUP_LEN * output + LANES * i)
        value = builder.bitcast(builder.fmul(builder.sitofp(q, V16), scale), V16_I32)
        halves.append(builder.bitcast(builder.add(value, constant(V16_I32, _TIE)), _WORDS))
    odd = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(1, 4 * LANES, 2)))
    return builder.shuffle_vector(*halves, odd)


def lay_columns(*, words: bool) -> Callable[..., None]:
    """``emit(builder, x, step, num_rows, to)``: 32 neighbours of up to 16 rows of x to the 16 lines of a tile.

    x is bfloat16 if ``words``, else float32; ``step`` bytes lie from one row to the next. Columns beyond ``num_rows``
    repeat the last row.
    """

    def emit(builder: Any, x: Any, step: Any, num_rows: Any, to: Any) -> None:
        last = builder.sub(num_rows, number(1))
        lines = []
        for i in range(LANES):
            row = builder.select(builder.icmp_signed("<", number(i), last), number(i), last)
            lines.append(_neighbours(builder, builder.add(x, builder.mul(step, row)), words=words))
        _store_lines(builder, _transposed(builder, lines), to)

    emit.__name__ = "lay_columns_of_words" if words else "lay_columns"
    return emit


def lay_row(*, words: bool) -> Callable[..., None]:
    """``emit(builder, x, to)``: 32 neighbours of one row of x to the lines of its only column."""

    def emit(builder: Any, x: Any, to: Any) -> None:
        _store_lines(builder, [_neighbours(builder, x, words=words)], to)

    emit.__name__ = "lay_row_of_words" if words else "lay_row"
    return emit


def put_tile(*, words: bool) -> Callable[..., None]:
    """``emit(builder, sums, to, step)``: float32 [16 outputs, 16 columns] to 16 rows of 16 outputs, ``step`` bytes from
    one to the next: of float32, or with ``words`` of bfloat16, rounded as x is.
    """

    def emit(builder: Any, sums: Any, to: Any, step: Any) -> None:
        if words:
            lines = _paired(builder, sums)
            lines += [ir.Constant(V16_I32, ir.Undefined)] * (LANES // 2)
        else:
            lines = [load_at(builder, V16_I32, sums, TILE_LEN * i) for i in range(LANES)]
        count = ir.Constant(ir.VectorType(I32, LANES // 2), list(range(LANES // 2)))
        for line in _transposed(builder, lines):
            row = builder.shuffle_vector(line, line, count) if words else line
            builder.store(row, builder.inttoptr(to, row.type.as_pointer()), align=4)
            to = builder.add(to, step)

    emit.__name__ = "put_words" if words else "put_floats"
    return emit


def put_columns(builder: Any, sums: Any, to: Any) -> None:
    """float32 [16 outputs, 16 columns] to half of a tile of x for another product, rounded as x is."""
    _store_lines(builder, _paired(builder, sums), to)


def _paired(builder: Any, sums: Any) -> list[Any]:
    """8 lines of words: each lane has a column's neighbouring outputs."""
    floats = [load_at(builder, V16, sums, TILE_LEN * i) for i in range(LANES)]
    turn = ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 + LANES * (i % 2) for i in range(2 * LANES)])
    halves = [_narrowed(builder, *floats[i : i + 2]) for i in range(0, LANES, 2)]
    return [builder.bitcast(builder.shuffle_vector(half, half, turn), V16_I32) for half in halves]


def _neighbours(builder: Any, address: Any, *, words: bool) -> Any:
    """16 words: 32 numbers rounded to the nearest bfloat16, ties to even; denormal numbers become 0."""
    if words:
        return load_at(builder, V16_I32, address, 0)
    low, high = (load_at(builder, V16, address, TILE_LEN * i) for i in range(2))
    return builder.bitcast(_narrowed(builder, low, high), V16_I32)


def _narrowed(builder: Any, low: Any, high: Any) -> Any:
    """32 bfloat16: those of the first vector, then those of the second."""
    kind = ir.VectorType(BF16, 2 * LANES)
    narrow = declared(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, V16, V16)
    return builder.bitcast(builder.call(narrow, [high, low]), _WORDS)


def _transposed(builder: Any, lines: list[Any]) -> list[Any]:
    """16 vectors of 16 lanes: lane j of vector i becomes lane i of vector j."""
    distance = LANES // 2
    while distance:
        # Of each two lines so far apart, the runs of lanes off the diagonal change places.
        kept = [lane if not lane & distance else LANES + (lane ^ distance) for lane in range(LANES)]
        other = [lane ^ distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & distance:
                a, b = lines[i], lines[i + distance]
                lines[i], lines[i + distance] = (
                    builder.shuffle_vector(a, b, ir.Constant(V16_I32, order)) for order in (kept, other)
                )
        distance //= 2
    return lines


def _store_lines(builder: Any, lines: list[Any], to: Any) -> None:
    for i, line in enumerate(lines):
        place = builder.inttoptr(builder.add(to, number(TILE_LEN * i)), line.type.as_pointer())
        builder.store(line, place, align=64)
