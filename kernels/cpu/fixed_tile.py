"""The inner loops of fixed-point products: weights and x as whole numbers of 16 bits, each in two bytes.

With ``x = x_scale * (FINER * upper + lower)`` of a row and ``w = w_scale * w_int`` of an output, a result is

    y = x_scale * w_scale * (FINER * sum(w_int * upper) + sum(w_int * lower))

and both sums are exact: ``packing.pack_fixed`` chooses the scale of an output so that they stay below 2^31 whatever x
is. Of 4 bits ``w_int = s * (q - 8) + z``, of 8 bits ``s * (q - 128)``. Sums become float32 at the end, so there are two
ways to the same bits. For few rows the bytes of x are multiplied with q, and each group's sums with s and z. For many,
``w_int`` is unpacked to two planes of bytes, and AMX multiplies each with
each plane of x.

Rounded x lies in tiles of 16 rows: for each two groups (64 neighbours) ``upper`` [16, 64] and then ``lower`` [16, 64].
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ...cpu_isa import Isa
from . import amx
from .group_tile import FINER, dot4, quads
from .llvm import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    V16,
    V16_I16,
    V16_I32,
    at,
    carry,
    constant,
    declared,
    fused,
    load_at,
    number,
    splat,
)
from .packing import GROUP_LEN, record_len

PAIR_BYTES = 2 * amx.TILE_BYTES  # of x, and of weights: two planes of 64 neighbours
SUM_TILES = 4  # tiles of sums of 16 rows and 16 outputs: for each plane of x, each plane of weights
PLANES = 2
_WORDS = ir.VectorType(I16, 2 * LANES)
_AHEAD = 4096  # bytes of records


def few_rows(one: Isa, num_rows: int, bits: int) -> Callable[..., None]:
    """``emit(builder, records, x, x_sums, num_groups, out)``: 16 outputs of the first rows, to float32 [rows, 16].

    The results lack both scales. ``x_sums`` int32 [groups, rows, 2]: sums of upper and lower numbers of a group.
    """
    assert one.lanes == LANES

    def emit(builder: Any, records: Any, x: Any, x_sums: Any, num_groups: Any, out: Any) -> None:
        def step(i: Any, state: list[Any]) -> list[Any]:
            record, x_sums, *totals = state
            group = builder.and_(i, number(1))
            start = builder.add(x, builder.mul(builder.lshr(i, number(1)), number(PAIR_BYTES)))
            start = builder.add(start, builder.mul(group, number(GROUP_LEN)))
            _fetch(builder, record, _AHEAD, record_len(bits))
            weights = [quad for (quad,) in quads(builder, one, bits, record)]
            factors = _factors(builder, record, bits)
            for r in range(num_rows):
                for plane in range(PLANES):
                    x_sum = load_at(builder, I32, x_sums, 4 * (PLANES * r + plane))
                    count = splat(builder, builder.mul(x_sum, ir.Constant(I32, -_centre(bits))))
                    for j, quad in enumerate(weights):
                        four = load_at(builder, I32, start, amx.TILE_BYTES * plane + amx.TILE_LEN * r + 4 * j)
                        count = dot4(builder, one, count, quad, splat(builder, four))
                    at_total = PLANES * r + plane
                    if bits == 8:
                        totals[at_total] = builder.add(totals[at_total], builder.mul(count, factors))
                        continue
                    upper = splat(builder, builder.shl(x_sum, ir.Constant(I32, 16)))
                    pairs = builder.or_(builder.and_(count, constant(V16_I32, 0xFFFF)), upper)
                    totals[at_total] = _add_pairs(builder, totals[at_total], pairs, factors)
            x_sums = builder.add(x_sums, number(4 * PLANES * num_rows))
            return [builder.add(record, number(record_len(bits))), x_sums, *totals]

        zeros = [constant(V16_I32, 0)] * (PLANES * num_rows)
        _, _, *totals = carry(builder, num_groups, [records, x_sums, *zeros], step)
        for r in range(num_rows):
            value = joined(builder, *totals[PLANES * r : PLANES * (r + 1)])
            place = at(builder, F32, out, number(LANES * r))
            builder.store(value, builder.bitcast(place, V16.as_pointer()), align=4)

    return emit


def unpack_group(bits: int) -> Callable[..., None]:
    """``emit(builder, record, to)``: 16 outputs' group as bytes, 8 rows of the tile of upper bytes at ``to`` and 8 of
    that of lower bytes behind it.
    """

    def emit(builder: Any, record: Any, to: Any) -> None:
        _fetch(builder, record, _AHEAD, record_len(bits))
        s, z = _factors_of_words(builder, record, bits)
        z = builder.sub(z, builder.mul(s, constant(_WORDS, _centre(bits))))  # its excess over 16 bits goes again with s
        eight, even, odd = constant(_WORDS, 8), constant(_WORDS, 0x00FF), constant(_WORDS, 0xFF00 - (1 << 16))
        for i in range(_quads_len(bits) // 64):
            packed = load_at(builder, V16_I32, record, 64 * i)
            for half in range(8 // bits):
                first, second = (
                    builder.add(builder.mul(_bits_of_words(builder, packed, bits, bits * half + shift), s), z)
                    for shift in (0, 8)
                )  # the first and third of four neighbours, the second and fourth
                upper = builder.or_(builder.lshr(first, eight), builder.and_(second, odd))
                lower = builder.or_(builder.and_(first, even), builder.shl(second, eight))
                for plane, value in enumerate((upper, lower)):
                    place = builder.add(to, number(amx.TILE_BYTES * plane + 64 * (4 * half + i)))
                    builder.store(value, builder.inttoptr(place, _WORDS.as_pointer()), align=64)

    emit.__name__ = f"unpack_group_{bits}"
    return emit


def multiply_tiles(builder: Any, x: Any, weights: Any, num_pairs: Any, sums: Any, adds: Any) -> None:
    """The products of 16 rows of rounded x and 16 outputs' planes, to int32 [4 tiles, 16, 16] at ``sums``.

    They are added to what was there, unless ``adds`` is 0. Tile 2 i + j: plane i of x times plane j of weights.
    """
    first, more, start = (builder.append_basic_block(f"tiles.{name}") for name in ("first", "more", "start"))
    places = [builder.add(sums, number(amx.TILE_BYTES * i)) for i in range(SUM_TILES)]
    builder.cbranch(builder.icmp_signed("==", adds, number(0)), first, more)
    builder.position_at_end(first)
    for i in range(SUM_TILES):
        amx.clear_tile(builder, i)
    builder.branch(start)
    builder.position_at_end(more)
    for i, place in enumerate(places):
        amx.load_tile(builder, i, place)
    builder.branch(start)
    builder.position_at_end(start)

    def step(_: Any, state: list[Any]) -> list[Any]:
        x, w = state
        for plane in range(PLANES):
            amx.load_tile(builder, 6 + plane, builder.add(w, number(amx.TILE_BYTES * plane)))
        for i in range(PLANES):
            amx.load_tile(builder, 4 + i, builder.add(x, number(amx.TILE_BYTES * i)))
            for j in range(PLANES):
                amx.add_products(builder, PLANES * i + j, 4 + i, 6 + j, signed=j == 0)
        return [builder.add(x, number(PAIR_BYTES)), builder.add(w, number(PAIR_BYTES))]

    carry(builder, num_pairs, [x, weights], step)
    for i, place in enumerate(places):
        amx.store_tile(builder, i, place)


def joined_sums(builder: Any, sums: Any, row: Any) -> Any:
    """What ``few_rows`` computes of a row, from ``multiply_tiles``'s sums."""
    line = builder.add(sums, builder.mul(row, number(4 * LANES)))
    tiles = [load_at(builder, V16_I32, line, amx.TILE_BYTES * i) for i in range(SUM_TILES)]
    eight = constant(V16_I32, 8)
    return joined(builder, *(builder.add(builder.shl(tiles[i], eight), tiles[i + 1]) for i in (0, 2)))


def joined(builder: Any, upper: Any, lower: Any) -> Any:
    """FINER * upper + lower, each rounded to float32."""
    upper, lower = (builder.sitofp(total, V16) for total in (upper, lower))
    return fused(builder, lower, upper, constant(V16, float(FINER)))


def fetch_outputs(builder: Any, address: Any) -> None:
    """Fetches a cache line that will be written."""
    _fetch(builder, address, 0, 64, writes=True)


def _fetch(builder: Any, address: Any, ahead: int, size: int, *, writes: bool = False) -> None:
    """Fetches ``size`` bytes from ``address + ahead`` on into the cache."""
    function = declared(builder, "llvm.prefetch.p0", ir.VoidType(), I8.as_pointer(), I32, I32, I32)
    how = [ir.Constant(I32, value) for value in (int(writes), 3, 1)]
    for line in range(0, size, 64):
        place = builder.inttoptr(builder.add(address, number(ahead + line)), I8.as_pointer())
        builder.call(function, [place, *how])


def _centre(bits: int) -> int:
    return 1 << (bits - 1)


def _quads_len(bits: int) -> int:
    """Bytes of a record before its factors."""
    return LANES * GROUP_LEN * bits // 8


def _factors(builder: Any, record: Any, bits: int) -> Any:
    """The 16 outputs' s and z as pairs of 16 bits, or, of 8 bits, s alone in 32."""
    if bits == 4:
        return load_at(builder, V16_I32, record, _quads_len(bits))
    return builder.sext(load_at(builder, V16_I16, record, _quads_len(bits)), V16_I32)


def _factors_of_words(builder: Any, record: Any, bits: int) -> tuple[Any, Any]:
    """s and z of the 16 outputs, each twice."""
    factors = _factors(builder, record, bits)
    low, high, sixteen = (constant(V16_I32, value) for value in (0xFFFF, 0xFFFF0000 - (1 << 32), 16))
    s = builder.or_(builder.and_(factors, low), builder.shl(factors, sixteen))
    z = builder.or_(builder.and_(factors, high), builder.lshr(factors, sixteen)) if bits == 4 else constant(V16_I32, 0)
    return builder.bitcast(s, _WORDS), builder.bitcast(z, _WORDS)


def _bits_of_words(builder: Any, packed: Any, bits: int, shift: int) -> Any:
    """Bits [shift, shift + bits) of each 16-bit word."""
    if shift:
        packed = builder.lshr(packed, constant(V16_I32, shift))
    packed = builder.and_(packed, constant(V16_I32, 0x10001 * ((1 << bits) - 1)))
    return builder.bitcast(packed, _WORDS)


def _add_pairs(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + the products of each lane's two signed 16-bit numbers."""
    function = declared(builder, "llvm.x86.avx512.vpdpwssd.512", V16_I32, V16_I32, V16_I32, V16_I32)
    return builder.call(function, [total, left, right])
