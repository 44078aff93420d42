"""Attention's products of words in AMX's tiles. A word is a pair of bfloat16 (``tiles``).

They take the arrays that ``attention_tile`` lays out for the other instruction sets: a row of 16 words is a line of a
tile. Each block of 16 rows has the same instructions, the last one fewer rows, so a row's result does not depend on
how many there are.
"""

from typing import Any

from numba import types

from ...cpu_isa import isa
from . import amx
from .amx import TILE_ROWS
from .llvm import LANES, carry, number
from .machine_code import helper
from .vector import compiled, when_compiled

_SUMS, _ROWS, _COLUMNS = ((0, 1), (2, 3)), (4, 5), (6, 7)  # registers: of whole blocks and of the last
_WORD_BYTES = 4

has_word_tiles = when_compiled("has_word_tiles", lambda: int(isa().has_tiles))
close_word_tiles = compiled(types.void)(lambda builder: amx.close_tiles(builder) if isa().has_tiles else None)


@compiled(types.void, types.int64)
def _open(builder: Any, last_rows: Any) -> None:
    if isa().has_tiles:
        amx.open_uneven_tiles(builder, last_rows, (*_SUMS[1], _ROWS[1]))


@helper
def open_word_tiles(num_rows: int) -> None:
    """Before products of so many rows. After the last of them come ``close_word_tiles``."""
    _open((num_rows - 1) % TILE_ROWS + 1)


def multiply_block(*, last: bool, adds: bool) -> Any:
    """``emit(builder, a, a_step, b, b_step, c, c_step, count)``: 16 rows, or those of the last block, by 32 columns.

    Steps are bytes from one row to the next; ``count`` is how many times 16 words are multiplied.
    """

    def emit(builder: Any, a: Any, a_step: Any, b: Any, b_step: Any, c: Any, c_step: Any, count: Any) -> None:
        sums, rows = _SUMS[last], _ROWS[last]
        line = amx.TILE_LEN
        places = [builder.add(c, number(line * i)) for i in range(2)]
        for tile, place in zip(sums, places, strict=True):
            if adds:
                amx.load_tile(builder, tile, place, c_step)
            else:
                amx.clear_tile(builder, tile)

        def step(_: Any, state: list[Any]) -> list[Any]:
            a, b = state
            amx.load_tile(builder, rows, a, a_step)
            for i, (tile, columns) in enumerate(zip(sums, _COLUMNS, strict=True)):
                amx.load_tile(builder, columns, builder.add(b, number(line * i)), b_step)
                amx.add_word_products(builder, tile, rows, columns)
            return [builder.add(a, number(line)), builder.add(b, builder.mul(b_step, number(LANES)))]

        carry(builder, count, [a, b], step)
        for tile, place in zip(sums, places, strict=True):
            amx.store_tile(builder, tile, place, c_step)

    return emit


def _block(*, last: bool, adds: bool) -> Any:
    """``multiply_block``, to be called where there are tiles."""
    emit = multiply_block(last=last, adds=adds)

    def with_tiles(builder: Any, *values: Any) -> None:
        if isa().has_tiles:
            emit(builder, *values)

    with_tiles.__name__ = f"word_tiles_{'last' if last else 'whole'}{'_add' if adds else ''}"
    return compiled(types.void, *(types.int64,) * 7)(with_tiles)


def _multiplier(*, adds: bool) -> Any:
    """``f(a, a_step, b, b_step, c, c_step, num_rows, num_vectors, count)``, as ``attention_tile.multiply_words``.

    Columns are computed in pairs of vectors, and ``count``, words, goes up to a multiple of 16: what lies in b and, at
    the same place of a row, in a must then be numbers, of which one is 0.
    """
    whole, last = (_block(last=is_last, adds=adds) for is_last in (False, True))

    @helper
    def product(
        a: int, a_step: int, b: int, b_step: int, c: int, c_step: int, num_rows: int, num_vectors: int, count: int
    ) -> None:
        a_bytes, b_bytes, c_bytes = _WORD_BYTES * a_step, _WORD_BYTES * b_step, _WORD_BYTES * c_step
        turns = (count + LANES - 1) // LANES
        for v in range(0, num_vectors, 2):
            left, right, to = a, b + _WORD_BYTES * LANES * v, c + _WORD_BYTES * LANES * v
            for _ in range(TILE_ROWS, num_rows, TILE_ROWS):
                whole(left, a_bytes, right, b_bytes, to, c_bytes, turns)
                left += TILE_ROWS * a_bytes
                to += TILE_ROWS * c_bytes
            last(left, a_bytes, right, b_bytes, to, c_bytes, turns)

    return product


multiply_word_tiles, add_word_tiles = (_multiplier(adds=adds) for adds in (False, True))
