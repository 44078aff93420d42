"""The inner loops of products of unpacked weights with x, both bfloat16, in AMX's tiles. A word is a pair of bfloat16.

Weights lie in the rows of a tile: of 16 outputs, 32 neighbours each. x lies across, a *column* for each of its rows: a
line of a tile has one word of every column. So an output's group is unpacked to one line, in the order of the file.
There are 16 columns, or one: a line is then 4 bytes, and x and the results lie as in any array.

A weight of 4 bits is looked up: 16 lanes compute the values of all 16 numbers, ``scale * (q - 8) + zero``, and round
them to bfloat16; a permutation by 32 neighbours' numbers makes the line.
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
    I8,
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

BLOCKS = 2  # of 16 outputs, and as many of 16 columns, that are multiplied at a time
SUMS, WEIGHTS, COLUMNS = (0, 1, 2, 3), (4, 5), (6, 7)  # registers
NARROW = (*SUMS, *COLUMNS)  # those whose lines have one number for each column
_WORDS = ir.VectorType(I16, 2 * LANES)
FACTOR_BYTES = 2 * TILE_LEN
_TIE = 0x8000  # half of bfloat16's last place, in float32's bits


def unpack_groups(bits: int) -> Callable[..., None]:
    """``emit(builder, records, to, factors, ahead, num_groups)``: 16 lines of 32 bfloat16 for each record.

    The records are those of ``packing.to_words``; ``factors``: memory for 32 float32 for each. Rounds to the nearest
    bfloat16, ties away from zero. Fetches the records that lie ``ahead`` bytes further on into the cache.
    """
    count = 2 if bits == 4 else 1
    size, tail = record_len(bits), 2 * LANES * count

    def widen(builder: Any, i: Any, state: list[Any]) -> list[Any]:
        record, to = state
        for part in range(count):
            halves = load_at(builder, ir.VectorType(F16, LANES), record, size - tail + 2 * LANES * part)
            place = vector_at(builder, F32, to, number(LANES * part))
            builder.store(builder.fpext(halves, V16), place, align=64)
        return [builder.add(record, number(size)), builder.add(to, number(FACTOR_BYTES))]

    def emit(builder: Any, records: Any, to: Any, factors: Any, ahead: Any, num_groups: Any) -> None:
        carry(builder, num_groups, [records, factors], lambda i, state: widen(builder, i, state))
        unpack = _line_of_4 if bits == 4 else _line_of_8

        def step(_: Any, state: list[Any]) -> list[Any]:
            record, to, factors = state
            for line in range(0, size, 64):
                fetch(builder, builder.add(builder.add(record, ahead), number(line)))
            for output in range(LANES):
                # One load from memory makes 16 equal lanes.
                scale, *zero = (
                    splat(builder, load_at(builder, F32, factors, 64 * i + 4 * output)) for i in range(count)
                )
                place = builder.add(to, number(TILE_LEN * output))
                line = unpack(builder, record, output, scale, *zero)
                builder.store(line, builder.inttoptr(place, _WORDS.as_pointer()), align=64)
            steps = (size, TILE_BYTES, FACTOR_BYTES)
            return [builder.add(value, number(step)) for value, step in zip(state, steps, strict=True)]

        carry(builder, num_groups, [records, to, factors], step)

    emit.__name__ = f"unpack_groups_{bits}"
    return emit


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
            amx.clear_tile(builder, SUMS[k])
        builder.branch(start)
        builder.position_at_end(more)
        for k, place in enumerate(places):
            amx.load_tile(builder, SUMS[k], place, line)
        builder.branch(start)
        builder.position_at_end(start)

        def step(_: Any, state: list[Any]) -> list[Any]:
            weights, columns = state
            for j in range(column_blocks):
                amx.load_tile(builder, COLUMNS[j], builder.add(columns, builder.mul(x_step, number(j))), line)
            for i in range(blocks):
                amx.load_tile(builder, WEIGHTS[i], builder.add(weights, builder.mul(panel_step, number(i))))
            for k, (i, j) in enumerate(pairs):
                amx.add_word_products(builder, SUMS[k], WEIGHTS[i], COLUMNS[j])
            return [builder.add(weights, number(TILE_BYTES)), builder.add(columns, size)]

        carry(builder, num_groups, [panel, x], step)
        for k, place in enumerate(places):
            amx.store_tile(builder, SUMS[k], place, line)

    emit.__name__ = f"multiply_panel_{blocks}x{column_blocks}"
    return emit


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


def transpose_sums(builder: Any, sums: Any, to: Any) -> None:
    """float32 [16 outputs, 16 columns] to [16 columns, 16 outputs]."""
    lines = [load_at(builder, V16_I32, sums, TILE_LEN * i) for i in range(LANES)]
    _store_lines(builder, _transposed(builder, lines), to)


def _neighbours(builder: Any, address: Any, *, words: bool) -> Any:
    """16 words: 32 numbers rounded to the nearest bfloat16, ties to even; denormal numbers become 0."""
    if words:
        return load_at(builder, V16_I32, address, 0)
    low, high = (load_at(builder, V16, address, TILE_LEN * i) for i in range(2))
    kind = ir.VectorType(BF16, 2 * LANES)
    narrow = declared(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, V16, V16)
    return builder.bitcast(builder.call(narrow, [high, low]), V16_I32)


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


def fetch(builder: Any, address: Any) -> None:
    """Fetches a cache line that will be read."""
    function = declared(builder, "llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (0, 3, 1)]
    builder.call(function, [builder.inttoptr(address, I8.as_pointer()), *how])
