"""The inner loops of attention, written in LLVM code so that their sums stay in registers. They check no bounds.

A *word* is two neighbouring bfloat16 in 32 bits, the first of them lower.
"""

from typing import Any

from llvmlite import ir
from numba import types

from ...cpu_isa import isa
from .bfloat import dot2, rounded
from .llvm import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    V16,
    at,
    carry,
    concatenated,
    constant,
    fused,
    number,
    splat,
    vector_at,
    widen,
)
from .vector import BFLOAT16, compiled, exp2_each, exp2_near_each, vector16

WORDS = 2  # a kind of array: pairs of bfloat16, moved without widening


def multiply_tile(num_rows: int, num_vectors: int, *, words: bool = False, adds: bool = True) -> Any:
    """The inner loop of every product here, its sums in registers: ``f(a, a_step, b, b_step, c, c_step, n)`` does

    for r in range(num_rows), v in range(16 * num_vectors):  c[r * c_step + v] += sum of a[r * a_step + i] *
    b[i * b_step + v] for i in range(n), added one by one in this order. With ``words``, a and b hold words, and both
    products of two words are added. Unless the tile ``adds``, c's earlier contents are overwritten.
    """
    kind = I32 if words else F32

    def emit(builder: Any, a: Any, a_step: Any, b: Any, b_step: Any, c: Any, c_step: Any, count: Any) -> None:
        lanes = [(r, v) for r in range(num_rows) for v in range(num_vectors)]

        def place(r: int, v: int) -> Any:
            return vector_at(builder, F32, c, builder.add(builder.mul(c_step, number(r)), number(LANES * v)))

        def step(i: Any, sums: list[Any]) -> list[Any]:
            line = builder.mul(i, b_step)
            starts = [builder.add(line, number(LANES * v)) for v in range(num_vectors)]
            columns = [builder.load(vector_at(builder, kind, b, start), align=4) for start in starts]
            rows = [builder.add(builder.mul(a_step, number(r)), i) for r in range(num_rows)]
            factors = [splat(builder, builder.load(at(builder, kind, a, row), align=4)) for row in rows]
            add = dot2 if words else fused
            return [add(builder, total, factors[r], columns[v]) for total, (r, v) in zip(sums, lanes, strict=True)]

        before = [builder.load(place(r, v), align=4) if adds else constant(V16, 0.0) for r, v in lanes]
        sums = carry(builder, count, before, step)
        for total, (r, v) in zip(sums, lanes, strict=True):
            builder.store(total, place(r, v), align=4)

    emit.__name__ = f"multiply_{'words' if words else 'tile'}_{num_rows}x{num_vectors}{'_add' if adds else ''}"
    return compiled(types.void, *(types.int64,) * 7)(emit)


def transpose_tile(kind: int) -> Any:
    """``f(rows, start, to, step)``: 16 elements from ``start`` on of each of the 16 arrays of this kind whose addresses
    lie at ``rows`` become 16 columns: element i of array j goes to float32 ``to[i * step + j]``. Words stay words.
    """

    def emit(builder: Any, rows: Any, start: Any, to: Any, step: Any) -> None:
        size = isa().lanes  # of the square blocks that fit in registers
        stored = I32 if kind == WORDS else F32
        for first_row in range(0, LANES, size):
            addresses = [builder.load(at(builder, I64, rows, number(first_row + j))) for j in range(size)]
            for first in range(0, LANES, size):
                place = builder.add(start, number(first))
                lines = _transposed(builder, [_line(builder, kind, row, place, size) for row in addresses])
                for i, line in enumerate(lines):
                    index = builder.add(builder.mul(step, number(first + i)), number(first_row))
                    builder.store(line, vector_at(builder, stored, to, index, size), align=4)

    emit.__name__ = f"transpose_tile_{kind}"
    return compiled(types.void, *(types.int64,) * 4)(emit)


def _line(builder: Any, kind: int, row: Any, start: Any, size: int) -> Any:
    """``size`` elements of an array, floats or words."""
    if kind == BFLOAT16:
        return widen(
            builder, builder.load(vector_at(builder, I16, row, start, size), align=2), ir.VectorType(F32, size)
        )
    return builder.load(vector_at(builder, I32 if kind == WORDS else F32, row, start, size), align=2)


@compiled(types.void, *(types.int64,) * 3)
def turn_columns(builder: Any, lines: Any, to: Any, step: Any) -> None:
    """The first 4 of the 16 float32 of 16 lines become 4 rows of 16 float32, ``step`` numbers apart."""

    def four(line: int) -> Any:
        return builder.load(vector_at(builder, F32, lines, number(LANES * line), 4), align=4)

    found = [concatenated(builder, [four(j + first) for first in range(0, LANES, 4)]) for j in range(4)]
    for i, row in enumerate(_transposed(builder, found)):
        builder.store(row, vector_at(builder, F32, to, builder.mul(step, number(i))), align=4)


def _transposed(builder: Any, lines: list[Any]) -> list[Any]:
    """Swaps blocks of half the size, a quarter, ..., 1: lane bit and line bit change places. Of longer lines each
    square is turned for itself.
    """
    size, lanes = len(lines), lines[0].type.count
    distance = size // 2
    while distance:
        low = [i if not i & distance else lanes + i - distance for i in range(lanes)]
        high = [i + distance if not i & distance else lanes + i for i in range(lanes)]
        picks = [ir.Constant(ir.VectorType(I32, lanes), pick) for pick in (low, high)]
        for j in range(size):
            if not j & distance:
                pair = lines[j], lines[j + distance]
                lines[j], lines[j + distance] = (builder.shuffle_vector(*pair, pick) for pick in picks)
        distance //= 2
    return lines


@compiled(types.void, types.int64, types.int64, types.int64)
def pair_rows(builder: Any, first: Any, second: Any, to: Any) -> None:
    """Stores 32 words at ``to``, each of a bfloat16 from ``first`` and one from ``second``."""
    lanes = 2 * LANES
    low, high = (builder.load(vector_at(builder, I16, row, number(0), lanes), align=2) for row in (first, second))
    for start in (0, LANES):
        pick = [i + other for i in range(start, start + LANES) for other in (0, lanes)]
        pairs = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, lanes), pick))
        builder.store(pairs, vector_at(builder, I16, to, number(2 * start), lanes), align=4)


@compiled(types.void, types.int64, vector16)
def store_weights(builder: Any, to: Any, value: Any) -> None:
    """Stores 16 bfloat16, rounded to nearest; numbers below the smallest normal one may become 0."""
    builder.store(rounded(builder, value), vector_at(builder, I16, to, number(0)), align=2)


def weigh_line(num_vectors: int, *, words: bool) -> Any:
    """``f(line, to, base, exponents)``: scores s at ``line``, 16 in a vector, become weights 2^(base + s * exponents)
    at ``to``, which may be the same place; with ``words`` bfloat16. Returns the weights' sums by lane.
    """

    def emit(builder: Any, line: Any, to: Any, base: Any, exponents: Any) -> Any:
        # Of short vectors' registers one vector fills enough, and four would not fit.
        at_once, weights = num_vectors if isa().lanes > 4 else 1, []
        for first in range(0, num_vectors, at_once):
            places = [vector_at(builder, F32, line, number(LANES * v)) for v in range(first, first + at_once)]
            scores = [builder.load(place, align=4) for place in places]
            powers = [fused(builder, base, score, exponents) for score in scores]
            found = exp2_near_each(builder, powers) if words else exp2_each(builder, powers, V16)
            for v, stored in enumerate([rounded(builder, w) for w in found] if words else found, first):
                place = vector_at(builder, I16 if words else F32, to, number(LANES * v))
                builder.store(stored, place, align=2)
            weights += found
        total = weights[0]
        for weight in weights[1:]:
            total = builder.fadd(total, weight)
        return total

    emit.__name__ = f"weigh_line_{num_vectors}{'_words' if words else ''}"
    return compiled(vector16, types.int64, types.int64, vector16, vector16)(emit)
