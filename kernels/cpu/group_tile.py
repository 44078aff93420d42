"""The inner loops of integer products, for each instruction set: one group of 32 weights of 16 outputs at a time.

The rounded x is a stream of records, one for each group of the rows of a tile, in the order in which the tile reads
them. With R rows in a tile: scales [R] and sums of x [R] (float32); then, for each plane of x, minus the centre times
the sum of its numbers (int32 [R]); then for each plane its numbers [R, 32]. The form of the numbers is the one that the
instruction set multiplies:

- ``BYTES``: one plane of bytes. ``TWO_BYTES``: the upper 8 bits and the rounding error in ``FINER`` steps of them.
- ``WORDS`` and ``WIDE_WORDS``: one plane of 16-bit numbers, of 8 bits and of ``FINER`` times as many steps. Of four
  neighbours, the first and third come before the second and fourth, as two masks unpack four bytes of weights.

All forms give the same sums, which are integers below 2^31, so the results are equal to the bit.
"""

from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import register_jitable

from ...cpu_isa import Isa, isa
from .llvm import (
    F16,
    F32,
    FUSED,
    I8,
    I16,
    I32,
    LANES,
    at,
    carry,
    constant,
    declared,
    fused,
    in_this_order,
    is_arm,
    load_at,
    number,
    opaque,
    splat,
    widen_half,
)
from .packing import GROUP_LEN, QUADS, record_len
from .vector import compiled, fetch

BYTES, TWO_BYTES, WORDS, WIDE_WORDS = 1, 2, 3, 4
WIDE_ROWS, WIDE_BLOCKS = 4, 2
MOST_LATER = 256
_AHEAD = 8192  # bytes from the weights of a group to those that are fetched into the cache meanwhile
FINER = 254  # steps of the lower part in one of the upper: a rounding error is at most half a step


class Wide(NamedTuple):
    """What a wide tile gets beside its weights. It computes the record's rows from ``first`` on. With each group it
    fetches MOST_LATER bytes at the address ``later`` into the cache; the address then moves on by ``step`` bytes. The
    tiles of all rows read the same weights, so each of them fetches a share of the weights that come next.
    """

    first: Any
    later: Any
    step: Any


Rows = list[Any]  # a value for each row of a tile
Grid = list[list[Any]]  # for each row of a tile, one for each register of its 16 outputs


def x_form(one: Isa, bits: int, x_bits: int) -> int:
    """The form in which products of ``bits`` by ``x_bits`` read x."""
    if one.byte_products == "none" or (one.byte_products == "pmaddubsw" and (bits, x_bits) != (4, 8)):
        return WORDS if x_bits == 8 else WIDE_WORDS
    return BYTES if x_bits == 8 else TWO_BYTES


@register_jitable
def numbers_at(form: int, rows: int) -> int:
    """Where in a record the numbers begin, in bytes."""
    return (16 if form == TWO_BYTES else 12) * rows


@register_jitable
def x_record_len(form: int, rows: int) -> int:
    """Bytes of a record."""
    return numbers_at(form, rows) + (1 if form == BYTES else 2) * GROUP_LEN * rows


def group_tile(one: Isa, num_rows: int, bits: int, x_bits: int, *, num_blocks: int = 1) -> Callable[..., None]:
    """``emit(builder, weights, x, num_groups, out)``: the outputs of ``num_rows`` rows of a record, to float32
    [rows, 16 * blocks]. The neighbouring blocks of 16 outputs begin at ``weights``. With a ``Wide``, see there.

    The sum of a group is rounded to float32 once; scales are applied in the same order on every instruction set.
    """
    rows, form = one.tile_rows[-1], x_form(one, bits, x_bits)
    registers = range(LANES // one.lanes)
    floats, halves = ir.VectorType(F32, one.lanes), ir.VectorType(F16, one.lanes)
    weight_bytes = LANES * GROUP_LEN * bits // 8
    count = _counter(one, bits, form, rows)
    width = num_blocks * len(registers)  # registers of a row

    def emit(builder: Any, weights: Any, x: Any, num_groups: Any, out: Any, wide: Wide | None = None) -> None:
        block_len = builder.mul(num_groups, number(record_len(bits)))

        def each_row(record: Any, offset: int) -> Rows:
            return [splat(builder, load_at(builder, F32, record, offset + 4 * r), one.lanes) for r in range(num_rows)]

        def halves_at(blocks: list[Any], offset: int) -> list[Any]:
            return [
                _widen_halves(builder, one, load_at(builder, halves, w, offset + 2 * one.lanes * p))
                for w in blocks
                for p in registers
            ]

        def step(_: Any, state: list[Any]) -> list[Any]:
            w, record, numbers, later, *sums = state
            blocks = [w]
            while len(blocks) < num_blocks:
                blocks.append(builder.add(blocks[-1], block_len))
            if wide is not None:
                fetch(builder, later, MOST_LATER)
                later = builder.add(later, wide.step)
            elif one.has_tiles or num_rows == rows:  # without AMX fewer rows do not: on an AMD core one became slower
                fetch(builder, builder.add(w, number(_AHEAD)), record_len(bits))
            totals = count(builder, blocks, record, numbers, num_rows)
            scale, scales = halves_at(blocks, weight_bytes), each_row(record, 0)
            for r in range(num_rows):
                for p in range(width):
                    at_sum = r * width + p
                    product = builder.fmul(totals[r][p], scale[p], flags=FUSED)
                    sums[at_sum] = fused(builder, sums[at_sum], product, scales[r])
            if bits == 4:
                zero, x_sums = halves_at(blocks, weight_bytes + 2 * LANES), each_row(record, 4 * rows)
                for r in range(num_rows):
                    for p in range(width):
                        at_sum = r * width + p
                        sums[at_sum] = fused(builder, sums[at_sum], zero[p], x_sums[r])
            return [
                builder.add(w, number(record_len(bits))),
                builder.add(record, number(x_record_len(form, rows))),
                builder.add(numbers, number(x_record_len(form, rows))),
                later,
                *sums,
            ]

        record, numbers, later = x, x, number(0)
        if wide is not None:  # the rows' scalars are 4 bytes apart, their numbers as many as they take
            record = builder.add(x, builder.mul(wide.first, number(4)))
            numbers = builder.add(x, builder.mul(wide.first, number(GROUP_LEN)))
            later = wide.later
        zeros = [constant(floats, 0.0)] * (num_rows * width)
        _, _, _, _, *sums = carry(builder, num_groups, [weights, record, numbers, later, *zeros], step)
        for i, total in enumerate(sums):
            place = at(builder, F32, out, number(one.lanes * i))
            builder.store(total, builder.bitcast(place, floats.as_pointer()), align=4)

    return emit


def block_tiles(bits: int, x_bits: int) -> Any:
    """Compiled: ``f(weights, x, num_groups, out, rows)``, the smallest tile that holds ``rows`` rows.

    A tile may have more rows than are left: the rest is computed, and the caller does not read it.
    """

    def emit(builder: Any, weights: Any, x: Any, num_groups: Any, out: Any, rows: Any) -> None:
        *smaller, largest = isa().tile_rows
        done = builder.append_basic_block("tiles.done")
        for num_rows in smaller:
            fits, next_size = (builder.append_basic_block(name) for name in ("tiles.fits", "tiles.next"))
            builder.cbranch(builder.icmp_signed("<=", rows, number(num_rows)), fits, next_size)
            builder.position_at_end(fits)
            group_tile(isa(), num_rows, bits, x_bits)(builder, weights, x, num_groups, out)
            builder.branch(done)
            builder.position_at_end(next_size)
        group_tile(isa(), largest, bits, x_bits)(builder, weights, x, num_groups, out)
        builder.branch(done)
        builder.position_at_end(done)

    emit.__name__ = f"block_tiles_{bits}x{x_bits}"
    return compiled(types.void, *(types.int64,) * 5)(emit)


def has_wide_tiles(one: Isa) -> bool:
    """Whether the sums of a wide tile fit in registers: WIDE_ROWS by WIDE_BLOCKS blocks of outputs, for which each
    number of x is read once.
    """
    return one.byte_products == "vpdpbusd" and one.lanes * one.num_registers >= 512


def wide_tile(bits: int, x_bits: int) -> Any:
    """Compiled: ``f(weights, x, num_groups, out, first, later, step)``, WIDE_ROWS rows by WIDE_BLOCKS; see ``Wide``."""

    def emit(builder: Any, weights: Any, x: Any, num_groups: Any, out: Any, *wide: Any) -> None:
        if has_wide_tiles(isa()):
            tile = group_tile(isa(), WIDE_ROWS, bits, x_bits, num_blocks=WIDE_BLOCKS)
            tile(builder, weights, x, num_groups, out, Wide(*wide))

    emit.__name__ = f"wide_tile_{bits}x{x_bits}"
    return compiled(types.void, *(types.int64,) * 7)(emit)


# -- the exact sums of one group, as floats ----------------------------------------------------------------------------

# (builder, weights of each block, record, numbers, num_rows): numbers of x are counted from ``numbers``
Count = Callable[[Any, list[Any], Any, Any, int], Grid]


def _counter(one: Isa, bits: int, form: int, rows: int) -> Count:
    if form in (WORDS, WIDE_WORDS):
        return _words_counter(one, bits, form, rows)
    if one.byte_products == "pmaddubsw":
        return _saturating_counter(one, form, rows)
    return _bytes_counter(one, bits, form, rows)


def _bytes_counter(one: Isa, bits: int, form: int, rows: int) -> Count:
    """Four bytes of each output in one instruction, which adds them to a sum in 32 bits.

    The sums of two planes are joined after they became floats, or before where Arm's registers do not hold both; the
    result is rounded once either way.
    """
    ints, floats = ir.VectorType(I32, one.lanes), ir.VectorType(F32, one.lanes)
    registers = range(LANES // one.lanes)
    signed_weights = one.byte_products == "sdot" and bits == 8  # and then no centre
    is_short = one.lanes == 4
    # The lower half of each byte, and then its upper half: one register of packed weights at a time.
    order = [j for first in range(4) for j in range(first, QUADS, 4)] if is_short else range(QUADS)

    def count(builder: Any, blocks: list[Any], record: Any, numbers: Any, num_rows: int) -> Grid:
        each = [quads(builder, one, bits, w) for w in blocks]
        weights = [[quad for block in each for quad in block[j]] for j in range(QUADS)]
        if signed_weights:
            weights = [[builder.xor(quad, constant(ints, 0x80808080)) for quad in row] for row in weights]

        def add_plane(plane: int, counts: Grid) -> Grid:
            start = numbers_at(form, rows) + GROUP_LEN * rows * plane
            counts = list(counts)
            if not signed_weights:
                for r in range(num_rows):
                    first = load_at(builder, I32, record, (8 + 4 * plane) * rows + 4 * r)
                    counts[r] = [builder.add(total, splat(builder, first, one.lanes)) for total in counts[r]]
            x = [_x_quads(builder, one, numbers, start + GROUP_LEN * r) for r in range(num_rows)]
            for j in order:
                for r in range(num_rows):
                    four = x[r](j)
                    counts[r] = [dot4(builder, one, *each) for each in zip(counts[r], weights[j], repeat(four))]
            return counts

        joins_integers = is_short and 3 * num_rows * len(registers) > one.num_registers
        nothing = [[constant(ints, 0)] * (len(blocks) * len(registers))] * num_rows
        upper = add_plane(0, nothing)
        if form == TWO_BYTES and joins_integers:
            upper = add_plane(1, [[builder.mul(total, constant(ints, FINER)) for total in row] for row in upper])
        found = _as_floats(builder, upper, floats)
        if form == BYTES or joins_integers:
            return found
        lower, finer = _as_floats(builder, add_plane(1, nothing), floats), constant(floats, float(FINER))
        return [
            [fused(builder, low, high, finer) for high, low in zip(*both, strict=True)]
            for both in zip(found, lower, strict=True)
        ]

    return count


def _as_floats(builder: Any, counts: Grid, floats: Any) -> Grid:
    return [[builder.sitofp(total, floats) for total in row] for row in counts]


def _x_quads(builder: Any, one: Isa, record: Any, start: int) -> Callable[[int], Any]:
    """The x of a row's quad j in each lane. Arm's products take one lane of a register, x86's a place in memory."""
    if one.lanes > 4:
        return lambda j: splat(builder, load_at(builder, I32, record, start + 4 * j), one.lanes)
    ints = ir.VectorType(I32, one.lanes)
    fours = [load_at(builder, ints, record, start + 4 * j) for j in range(0, QUADS, one.lanes)]

    def quad(j: int) -> Any:
        four = fours[j // one.lanes]
        return builder.shuffle_vector(four, four, constant(ints, j % one.lanes))

    return quad


def _saturating_counter(one: Isa, form: int, rows: int) -> Count:
    """AVX2, 4 bits by 8: two products to a sum of 16 bits, and all of a group fit: 16 * 15 * 127 < 2^15.

    Unrolled and reordered, the sums would not stay in 16 registers.
    """
    bytes_, words = ir.VectorType(I8, 4 * one.lanes), ir.VectorType(I16, 2 * one.lanes)
    ints, floats = ir.VectorType(I32, one.lanes), ir.VectorType(F32, one.lanes)
    registers = range(LANES // one.lanes)

    def count(builder: Any, blocks: list[Any], record: Any, numbers: Any, num_rows: int) -> Grid:
        multiply = declared(builder, "llvm.x86.avx2.pmadd.ub.sw", words, bytes_, bytes_)
        add_pairs = declared(builder, "llvm.x86.avx2.pmadd.wd", ints, words, words)

        def step(_: Any, state: list[Any]) -> list[Any]:
            w, x, *sums = state
            packed = [_vector_at(builder, one, w, 0, p) for p in registers]
            for shift in (0, 4):
                quad = [builder.bitcast(_nibbles(builder, each, shift), bytes_) for each in packed]
                for r in range(num_rows):
                    four = load_at(builder, I32, x, numbers_at(form, rows) + GROUP_LEN * r + 4 * shift)
                    four = builder.bitcast(splat(builder, four, one.lanes), bytes_)
                    for p in registers:
                        i = r * len(registers) + p
                        sums[i] = builder.add(sums[i], builder.call(multiply, [quad[p], four]))
                sums = in_this_order(builder, sums)
            return [builder.add(w, number(4 * LANES)), builder.add(x, number(4)), *sums]

        zeros = [constant(words, 0)] * (num_rows * len(registers))
        _, _, *sums = carry(builder, opaque(builder, QUADS // 2), [*blocks, numbers, *zeros], step)
        totals: Grid = []
        for r in range(num_rows):
            first = splat(builder, load_at(builder, I32, record, 8 * rows + 4 * r), one.lanes)
            of_row = sums[r * len(registers) : (r + 1) * len(registers)]
            counts = [builder.add(first, builder.call(add_pairs, [each, constant(words, 1)])) for each in of_row]
            totals.append([builder.sitofp(total, floats) for total in counts])
        return totals

    return count


def _words_counter(one: Isa, bits: int, form: int, rows: int) -> Count:
    """Two 16-bit numbers of each output in one instruction. Weights are unpacked to 16 bits by masks."""
    floats, words = ir.VectorType(F32, one.lanes), ir.VectorType(I16, 2 * one.lanes)
    registers = range(LANES // one.lanes)

    def count(builder: Any, blocks: list[Any], record: Any, numbers: Any, num_rows: int) -> Grid:
        def step(_: Any, state: list[Any]) -> list[Any]:
            w, x, *counts = state
            packed = [builder.bitcast(_vector_at(builder, one, w, 0, p), words) for p in registers]
            for shift in range(0, 8, bits):
                for second in range(2):
                    pairs = [_unpack(builder, each, bits, shift + 8 * second) for each in packed]
                    for r in range(num_rows):
                        offset = numbers_at(form, rows) + 2 * GROUP_LEN * r + 8 * shift + 4 * second
                        two = builder.bitcast(splat(builder, load_at(builder, I32, x, offset), one.lanes), words)
                        for p in registers:
                            i = r * len(registers) + p
                            counts[i] = _dot2(builder, one, counts[i], pairs[p], two)
                    counts = in_this_order(builder, counts) if one.byte_products == "pmaddubsw" else counts
            return [builder.add(w, number(4 * LANES)), builder.add(x, number(8)), *counts]

        firsts = [splat(builder, load_at(builder, I32, record, 8 * rows + 4 * r), one.lanes) for r in range(num_rows)]
        counts = [first for first in firsts for _ in registers]
        _, _, *counts = carry(builder, opaque(builder, QUADS * bits // 8), [*blocks, numbers, *counts], step)
        totals = [builder.sitofp(total, floats) for total in counts]
        return [totals[r * len(registers) : (r + 1) * len(registers)] for r in range(num_rows)]

    return count


def quads(builder: Any, one: Isa, bits: int, w: Any) -> Grid:
    """For each four weights of the 16 outputs their registers, each byte a weight."""
    registers = range(LANES // one.lanes)
    packed = [[_vector_at(builder, one, w, j, p) for p in registers] for j in range(QUADS * bits // 8)]
    if bits == 8:
        return packed
    return [[_nibbles(builder, each, shift) for each in row] for shift in (0, 4) for row in packed]


def _nibbles(builder: Any, packed: Any, shift: int) -> Any:
    """The lower or upper half of each byte."""
    if shift:
        packed = builder.lshr(packed, constant(packed.type, shift))
    return builder.and_(packed, constant(packed.type, 0x0F0F0F0F))


def _vector_at(builder: Any, one: Isa, w: Any, j: int, register: int) -> Any:
    return load_at(builder, ir.VectorType(I32, one.lanes), w, 4 * (LANES * j + one.lanes * register))


def _unpack(builder: Any, packed: Any, bits: int, shift: int) -> Any:
    """Bits [shift, shift + bits) of each word."""
    if shift:
        packed = builder.lshr(packed, constant(packed.type, shift))
    return packed if shift + bits == 16 else builder.and_(packed, constant(packed.type, (1 << bits) - 1))


def dot4(builder: Any, one: Isa, total: Any, unsigned: Any, signed: Any) -> Any:
    """total + the products of each word's four bytes, lane by lane; with ``sdot`` both have a sign."""
    ints = total.type
    if one.byte_products == "vpdpbusd":
        function = declared(builder, f"llvm.x86.avx512.vpdpbusd.{32 * one.lanes}", ints, ints, ints, ints)
        return builder.call(function, [total, unsigned, signed])
    bytes_ = ir.VectorType(I8, 4 * one.lanes)
    name = f"llvm.aarch64.neon.{one.byte_products}.v{one.lanes}i32.v{4 * one.lanes}i8"
    function = declared(builder, name, ints, ints, bytes_, bytes_)
    return builder.call(function, [total, builder.bitcast(unsigned, bytes_), builder.bitcast(signed, bytes_)])


def _dot2(builder: Any, one: Isa, total: Any, left: Any, right: Any) -> Any:
    """total + the products of each lane's two 16-bit numbers."""
    if one.byte_products == "pmaddubsw":
        function = declared(builder, "llvm.x86.avx2.pmadd.wd", total.type, left.type, right.type)
        return builder.add(total, builder.call(function, [left, right]))
    wide = ir.VectorType(I32, 2 * one.lanes)
    products = builder.mul(builder.sext(left, wide), builder.sext(right, wide))
    if is_arm(builder):
        starts = [ir.Constant(total.type, list(range(first, first + one.lanes))) for first in (0, one.lanes)]
        halves = [builder.shuffle_vector(products, products, picks) for picks in starts]
        function = declared(builder, f"llvm.aarch64.neon.addp.v{one.lanes}i32", *(total.type,) * 3)
        return builder.add(total, builder.call(function, halves))
    for first in range(2):
        picks = ir.Constant(total.type, list(range(first, 2 * one.lanes, 2)))
        total = builder.add(total, builder.shuffle_vector(products, products, picks))
    return total


def _widen_halves(builder: Any, one: Isa, halves: Any) -> Any:
    floats = ir.VectorType(F32, one.lanes)
    if one.byte_products == "none":
        return widen_half(builder, builder.bitcast(halves, ir.VectorType(I16, one.lanes)), floats)
    return builder.fpext(halves, floats)
