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
from .tiles import turn_columns
from .vector import compiled, when_compiled

_SUMS, _ROWS, _COLUMNS = ((0, 1), (2, 3)), (4, 5), (6, 7)  # registers: of whole blocks and of the last
_WORD_BYTES = 4

has_word_tiles = when_compiled("has_word_tiles", lambda: int(isa().has_tiles))


def _with_tiles(name: str, num_arguments: int, emit: Any) -> Any:
    """What ``emit`` writes, to be called where there are tiles."""

    def with_tiles(builder: Any, *values: Any) -> None:
        if isa().has_tiles:
            emit(builder, *values)

    with_tiles.__name__ = f"word_tiles_{name}"
    return compiled(types.void, *(types.int64,) * num_arguments)(with_tiles)


_open = _with_tiles("open", 1, lambda builder, rows: amx.open_uneven_tiles(builder, rows, (*_SUMS[1], _ROWS[1])))
close_word_tiles = _with_tiles("close", 0, amx.close_tiles)


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


def multiply_two_blocks(*, adds: bool) -> Any:
    """``multiply_block`` of 32 rows: a tile of columns is loaded once for both blocks, and four sums grow at a time."""
    pairs = [(i, j) for i in range(2) for j in range(2)]

    def emit(builder: Any, a: Any, a_step: Any, b: Any, b_step: Any, c: Any, c_step: Any, count: Any) -> None:
        line = amx.TILE_LEN
        a_block, c_block = (builder.mul(step, number(TILE_ROWS)) for step in (a_step, c_step))
        places = [
            builder.add(c, builder.add(builder.mul(c_block, number(i)), number(line * j)) if i else number(line * j))
            for i, j in pairs
        ]
        for (i, j), place in zip(pairs, places, strict=True):
            if adds:
                amx.load_tile(builder, _SUMS[i][j], place, c_step)
            else:
                amx.clear_tile(builder, _SUMS[i][j])

        def step(_: Any, state: list[Any]) -> list[Any]:
            a, b = state
            for j in range(2):
                amx.load_tile(builder, _COLUMNS[j], builder.add(b, number(line * j)), b_step)
            for i, block in enumerate((a, builder.add(a, a_block))):
                amx.load_tile(builder, _ROWS[i], block, a_step)
                for j in range(2):
                    amx.add_word_products(builder, _SUMS[i][j], _ROWS[i], _COLUMNS[j])
            return [builder.add(a, number(line)), builder.add(b, builder.mul(b_step, number(LANES)))]

        carry(builder, count, [a, b], step)
        for (i, j), place in zip(pairs, places, strict=True):
            amx.store_tile(builder, _SUMS[i][j], place, c_step)

    return emit


def multiply_keys_block(builder: Any, keys: Any, key_bytes: Any, queries: Any, to: Any, count: Any) -> None:
    """Scores of 32 keys, rows of words, with 16 queries, columns of words: float32 [32 keys, 16 queries] at ``to``.

    ``count`` is how many times 16 words are multiplied. A score has the bits that it has in ``multiply_block``.
    """
    sums, columns, rows = _SUMS[0], _ROWS[0], _COLUMNS
    for tile in sums:
        amx.clear_tile(builder, tile)
    block_bytes = builder.mul(key_bytes, number(TILE_ROWS))

    def step(_: Any, state: list[Any]) -> list[Any]:
        keys, queries = state
        amx.load_tile(builder, columns, queries)
        for tile, block, address in zip(sums, rows, (keys, builder.add(keys, block_bytes)), strict=True):
            amx.load_tile(builder, block, address, key_bytes)
            amx.add_word_products(builder, tile, block, columns)
        return [builder.add(keys, number(amx.TILE_LEN)), builder.add(queries, number(amx.TILE_BYTES))]

    carry(builder, count, [keys, queries], step)
    for i, tile in enumerate(sums):
        amx.store_tile(builder, tile, builder.add(to, number(amx.TILE_BYTES * i)))


def _multiplier(*, adds: bool) -> Any:
    """``f(a, a_step, b, b_step, c, c_step, num_rows, num_vectors, count)``, as ``attention_tile.multiply_words``.

    Columns are computed in pairs of vectors, and ``count``, words, goes up to a multiple of 16: what lies in b and, at
    the same place of a row, in a must then be numbers, of which one is 0.
    """
    whole, last = (
        _with_tiles(
            f"{'last' if is_last else 'whole'}{'_add' if adds else ''}", 7, multiply_block(last=is_last, adds=adds)
        )
        for is_last in (False, True)
    )
    both = _with_tiles(f"both{'_add' if adds else ''}", 7, multiply_two_blocks(adds=adds))

    @helper
    def product(
        a: int, a_step: int, b: int, b_step: int, c: int, c_step: int, num_rows: int, num_vectors: int, count: int
    ) -> None:
        a_bytes, b_bytes, c_bytes = _WORD_BYTES * a_step, _WORD_BYTES * b_step, _WORD_BYTES * c_step
        turns = (count + LANES - 1) // LANES
        for v in range(0, num_vectors, 2):
            left, right, to = a, b + _WORD_BYTES * LANES * v, c + _WORD_BYTES * LANES * v
            if num_rows % (2 * TILE_ROWS) == 0:  # the last block is whole
                for _ in range(0, num_rows, 2 * TILE_ROWS):
                    both(left, a_bytes, right, b_bytes, to, c_bytes, turns)
                    left += 2 * TILE_ROWS * a_bytes
                    to += 2 * TILE_ROWS * c_bytes
                continue
            for _ in range(TILE_ROWS, num_rows, TILE_ROWS):
                whole(left, a_bytes, right, b_bytes, to, c_bytes, turns)
                left += TILE_ROWS * a_bytes
                to += TILE_ROWS * c_bytes
            last(left, a_bytes, right, b_bytes, to, c_bytes, turns)

    return product


multiply_word_tiles, add_word_tiles = (_multiplier(adds=adds) for adds in (False, True))
_multiply_keys = _with_tiles("keys", 5, multiply_keys_block)


@helper
def score_few(
    queries: int, keys: int, head_dim: int, scores: int, step: int, vectors: int, columns: int, room: int
) -> None:
    """Scores of at most 16 vectors with 16 keys of each column: rows of ``scores``, ``step`` numbers apart.

    ``queries``: words [head_dim / 2, 16], a vector in each column; ``keys``: rows of ``head_dim`` bfloat16, for which
    nothing is laid out. Columns go up to an even number. ``room``: 2,048 bytes.
    """
    key_bytes = 2 * head_dim
    for v in range(0, columns, 2):
        _multiply_keys(keys + TILE_ROWS * v * key_bytes, key_bytes, queries, room, head_dim // (2 * LANES))
        for block in range(2):
            for first in range(0, vectors, 4):
                lines = room + amx.TILE_BYTES * block + _WORD_BYTES * first
                turn_columns(lines, scores + _WORD_BYTES * (first * step + LANES * (v + block)), step)
