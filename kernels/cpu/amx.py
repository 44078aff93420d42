"""LLVM code for AMX: eight registers of 16 rows x 64 bytes, and products of two, in bfloat16 with float32 sums.

A tile of x is [16 rows, 32 neighbours of k]; a tile of weights [16 pairs of neighbours, 16 outputs, 2]. One
instruction adds their product to a tile of float32 [16 rows, 16 outputs]. For each row and output, the products of the
pairs' first numbers are added one after the other to a sum that starts at 0, those of the second numbers to another, and
then both sums to what was there (Intel's Software Developer's Manual, TDPBF16PS). Each step rounds to nearest, and
numbers below the smallest normal float32 become 0. So a row's result depends on its own numbers alone.

Weights of 4 and 8 bits (``packing``) become bfloat16 on the way into a tile: ``q * scale + zero`` in float16, in one
rounding, then rounded to the 8 bits of bfloat16, halves away from 0. A float16's bits moved right by three are those of
a bfloat16 2^112 times smaller, so ``OUT_EXPONENT`` and ``X_EXPONENT`` move results and x.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .llvm import F16, I8, I16, I32, LANES, V16, V16_I16, V16_I32, carry, constant, declared, load_at, number
from .packing import GROUP_LEN, record_len

TILE_ROWS = 16
TILE_BYTES = 1024
X_EXPONENT = 64  # x is rounded as x * 2^64, far from the numbers that the instruction takes for 0
OUT_EXPONENT = 112 - X_EXPONENT  # a sum is 2^-48 of what it stands for, times the weights' factor
K_ORDER = (0, 2, 1, 3)  # of each four neighbours: 16-bit masks unpack the first and third of four bytes together

_WORDS = ir.VectorType(I16, 2 * LANES)
_HALVES = ir.VectorType(F16, 2 * LANES)


def open_tiles(builder: Any) -> None:
    """Lays out this thread's tile registers, all of 16 rows x 64 bytes. Every use ends with ``close_tiles``."""
    palette, columns, rows = [1] + [0] * 15, [64, 0] * 8 + [0] * 16, [TILE_ROWS] * 8 + [0] * 8
    data = ir.Constant(ir.ArrayType(I8, 64), bytearray(palette + columns + rows))
    found = builder.module.globals.get("tile_layout")
    if found is None:
        found = ir.GlobalVariable(builder.module, data.type, "tile_layout")
        found.initializer, found.global_constant, found.linkage = data, True, "internal"
    builder.call(declared(builder, "llvm.x86.ldtilecfg", ir.VoidType(), I8.as_pointer()), [_bytes(builder, found)])


def close_tiles(builder: Any) -> None:
    """Frees the registers: a thread that holds them makes every switch between threads slower."""
    builder.call(declared(builder, "llvm.x86.tilerelease", ir.VoidType()), [])


def multiply_tiles(row_tiles: int, blocks: int) -> Callable[..., None]:
    """``emit(builder, x, x_step, weights, weights_step, num_tiles, sums, adds)``.

    Multiplies ``num_tiles`` neighbouring tiles of x and of weights, and adds the products to ``sums``, float32
    [16 * row_tiles, 32], of which 16 * blocks columns are written; with ``adds`` 0, sums start at 0. The next 16 rows
    of x begin ``x_step`` bytes further, the next 16 outputs' weights ``weights_step``.
    """

    def emit(builder: Any, x: Any, x_step: Any, w: Any, w_step: Any, num_tiles: Any, sums: Any, adds: Any) -> None:
        sums_of = {(i, j): 2 * i + j for i in range(row_tiles) for j in range(blocks)}
        places = {(i, j): builder.add(sums, number(4 * (TILE_ROWS * 2 * LANES * i + LANES * j))) for i, j in sums_of}
        line = number(4 * 2 * LANES)
        first, more, start = (builder.append_basic_block(f"tiles.{name}") for name in ("first", "more", "start"))
        builder.cbranch(builder.icmp_signed("==", adds, number(0)), first, more)
        builder.position_at_end(first)
        for tile in sums_of.values():
            builder.call(declared(builder, "llvm.x86.tilezero", ir.VoidType(), I8), [_tile(tile)])
        builder.branch(start)
        builder.position_at_end(more)
        for key, tile in sums_of.items():
            _move_tile(builder, "llvm.x86.tileloadd64", tile, places[key], line)
        builder.branch(start)
        builder.position_at_end(start)

        def step(_: Any, state: list[Any]) -> list[Any]:
            x, w = state
            for j in range(blocks):
                at = w if j == 0 else builder.add(w, w_step)
                _move_tile(builder, "llvm.x86.tileloadd64", 6 + j, at, number(64))
            for i in range(row_tiles):
                at = x if i == 0 else builder.add(x, x_step)
                _move_tile(builder, "llvm.x86.tileloadd64", 4 + i, at, number(64))
                for j in range(blocks):
                    multiply = declared(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), I8, I8, I8)
                    builder.call(multiply, [_tile(sums_of[i, j]), _tile(4 + i), _tile(6 + j)])
            return [builder.add(x, number(TILE_BYTES)), builder.add(w, number(TILE_BYTES))]

        carry(builder, num_tiles, [x, w], step)
        for key, tile in sums_of.items():
            _move_tile(builder, "llvm.x86.tilestored64", tile, places[key], line)

    emit.__name__ = f"multiply_tiles_{row_tiles}x{blocks}"
    return emit


def unpack_tiles(bits: int) -> Callable[..., None]:
    """``emit(builder, records, num_groups, factor, to)``: a block's groups as tiles of bfloat16, 1,024 bytes each.

    ``factor``: a power of two as the bits of a float16, by which the weights are multiplied.
    """

    def emit(builder: Any, records: Any, num_groups: Any, factor: Any, to: Any) -> None:
        factors = _in_pairs(builder, builder.bitcast(builder.trunc(factor, I16), F16))
        numbers_len = LANES * GROUP_LEN * bits // 8

        def step(_: Any, state: list[Any]) -> list[Any]:
            record, to = state
            scale = builder.fmul(_pairs_at(builder, record, numbers_len), factors)
            zero = None
            if bits == 4:
                zero = builder.fmul(_pairs_at(builder, record, numbers_len + 2 * LANES), factors)
            for i in range(numbers_len // 64):
                packed = load_at(builder, V16_I32, record, 64 * i)
                for shift in range(0, 8, bits):
                    for second in range(2):
                        q = _unpacked(builder, packed, bits, shift + 8 * second)
                        value = builder.fmul(q, scale) if zero is None else _fused(builder, q, scale, zero)
                        place = builder.add(to, number(64 * (2 * i + second) + 128 * shift))
                        place = builder.inttoptr(place, _WORDS.as_pointer())
                        builder.store(_to_bfloat16(builder, value), place, align=64)
            return [builder.add(record, number(record_len(bits))), builder.add(to, number(TILE_BYTES))]

        carry(builder, num_groups, [records, to], step)

    emit.__name__ = f"unpack_tiles_{bits}"
    return emit


def store_x(builder: Any, to: Any, low: Any, high: Any) -> None:
    """32 neighbours of a row of x, times 2^X_EXPONENT, as the 64 bytes of a tile's row."""
    convert = declared(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", V16_I16, V16)
    order = ir.Constant(V16_I32, [4 * (i // 4) + K_ORDER[i % 4] for i in range(LANES)])
    for i, half in enumerate((low, high)):
        moved = builder.fmul(half, constant(V16, 2.0**X_EXPONENT))
        words = builder.call(convert, [builder.shuffle_vector(moved, moved, order)])
        place = builder.inttoptr(builder.add(to, number(2 * LANES * i)), V16_I16.as_pointer())
        builder.store(words, place, align=32)


def _tile(index: int) -> Any:
    return ir.Constant(I8, index)


def _bytes(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, I8.as_pointer())


def _move_tile(builder: Any, name: str, tile: int, address: Any, step: Any) -> None:
    """Loads or stores a tile whose rows lie ``step`` bytes apart."""
    move = declared(builder, name, ir.VoidType(), I8, I8.as_pointer(), step.type)
    builder.call(move, [_tile(tile), builder.inttoptr(address, I8.as_pointer()), step])


def _in_pairs(builder: Any, half: Any) -> Any:
    """The float16 in all 32 lanes."""
    first = builder.insert_element(ir.Constant(_HALVES, ir.Undefined), half, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, constant(ir.VectorType(I32, 2 * LANES), 0))


def _pairs_at(builder: Any, record: Any, offset: int) -> Any:
    """16 float16, each twice."""
    halves = load_at(builder, ir.VectorType(F16, LANES), record, offset)
    return builder.shuffle_vector(
        halves, halves, ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 for i in range(32)])
    )


def _unpacked(builder: Any, packed: Any, bits: int, shift: int) -> Any:
    """Bits [shift, shift + bits) of each 16-bit word, without their centre, as float16: 1024 + n has n's bits below."""
    if shift:
        packed = builder.lshr(packed, constant(V16_I32, shift))
    words = builder.bitcast(builder.and_(packed, constant(V16_I32, 0x10001 * ((1 << bits) - 1))), _WORDS)
    words = builder.or_(words, constant(_WORDS, 0x6400))
    return builder.fsub(builder.bitcast(words, _HALVES), constant(_HALVES, 1024.0 + (1 << (bits - 1))))


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.call(declared(builder, "llvm.fma.v32f16", _HALVES, _HALVES, _HALVES, _HALVES), [a, b, c])


def _to_bfloat16(builder: Any, value: Any) -> Any:
    """Three bits less, rounded, and the sign back in its place."""
    rounded = declared(builder, "llvm.x86.avx512.pmul.hr.sw.512", _WORDS, _WORDS, _WORDS)
    moved = builder.call(rounded, [builder.bitcast(value, _WORDS), constant(_WORDS, 1 << 12)])
    return builder.and_(moved, constant(_WORDS, 0x8FFF))
