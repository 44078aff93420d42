"""LLVM code for AMX: eight registers of 16 rows x 64 bytes, and products of two of them.

A tile of x is [16 rows, 64 neighbours of k]; a tile of weights [16 quads of neighbours, 16 outputs, 4]. One instruction
adds their product to a tile of int32 [16 rows, 16 outputs], exactly (Intel's Software Developer's Manual, TDPBSSD).

Pairs of bfloat16 lie in tiles likewise, 32 neighbours by 16 pairs; their product is added to a tile of float32
(TDPBF16PS): the products of first and of second neighbours are summed one by one, each for itself, then both sums are
joined and added to the tile. So a result depends on its own row and column alone.
"""

from typing import Any

from llvmlite import ir

from .llvm import I8, declared, number

TILE_ROWS = 16
TILE_LEN = 64  # neighbours of k
TILE_BYTES = 1024
_LINE = number(TILE_LEN)


def open_tiles(builder: Any) -> None:
    """Lays out this thread's tile registers, all of 16 rows x 64 bytes. Every use ends with ``close_tiles``."""
    open_uneven_tiles(builder, number(TILE_ROWS), ())


def open_uneven_tiles(builder: Any, rows: Any, uneven: tuple[int, ...]) -> None:
    """``open_tiles``, but the tiles ``uneven`` have 1 to 16 ``rows``: no more are loaded, multiplied and stored."""
    layouts = [_layout(rows=dict.fromkeys(uneven, count)) for count in range(1, TILE_ROWS + 1)]
    _open(builder, "_".join(map(str, ("tile_rows", *uneven))), layouts, builder.sub(rows, number(1)))


def open_columns(builder: Any, is_narrow: Any, narrow: tuple[int, ...]) -> None:
    """``open_tiles``, but with ``is_narrow``, 0 or 1, the tiles ``narrow`` have lines of 4 bytes."""
    layouts = [_layout(), _layout(line_bytes=dict.fromkeys(narrow, 4))]
    _open(builder, "_".join(map(str, ("tile_columns", *narrow))), layouts, is_narrow)


def _open(builder: Any, name: str, layouts: list[Any], index: Any) -> None:
    found = builder.module.globals.get(name)
    if found is None:
        kind = ir.ArrayType(layouts[0].type, len(layouts))
        found = ir.GlobalVariable(builder.module, kind, name)
        found.initializer, found.global_constant, found.linkage = ir.Constant(kind, layouts), True, "internal"
    load = declared(builder, "llvm.x86.ldtilecfg", ir.VoidType(), I8.as_pointer())
    chosen = builder.gep(found, [number(0), index])
    builder.call(load, [builder.bitcast(chosen, I8.as_pointer())])


def close_tiles(builder: Any) -> None:
    """Frees the registers: a thread that holds them makes every switch between threads slower."""
    builder.call(declared(builder, "llvm.x86.tilerelease", ir.VoidType()), [])


def clear_tile(builder: Any, tile: int) -> None:
    builder.call(declared(builder, "llvm.x86.tilezero", ir.VoidType(), I8), [_index(tile)])


def load_tile(builder: Any, tile: int, address: Any, step: Any = _LINE) -> None:
    """From lines of 64 bytes, ``step`` bytes from one to the next."""
    _move(builder, "llvm.x86.tileloadd64", tile, address, step)


def store_tile(builder: Any, tile: int, address: Any, step: Any = _LINE) -> None:
    _move(builder, "llvm.x86.tilestored64", tile, address, step)


def add_products(builder: Any, total: int, x: int, weights: int, *, signed: bool) -> None:
    """Adds the products of two tiles to a third. Bytes of x have a sign; those of weights if ``signed``."""
    name = "llvm.x86.tdpbssd" if signed else "llvm.x86.tdpbsud"
    builder.call(declared(builder, name, ir.VoidType(), I8, I8, I8), [_index(tile) for tile in (total, x, weights)])


def add_word_products(builder: Any, total: int, x: int, weights: int) -> None:
    """Adds the products of two tiles of pairs of bfloat16 to a tile of float32."""
    name = "llvm.x86.tdpbf16ps"
    builder.call(declared(builder, name, ir.VoidType(), I8, I8, I8), [_index(tile) for tile in (total, x, weights)])


def _layout(*, rows: dict[int, int] | None = None, line_bytes: dict[int, int] | None = None) -> Any:
    """What LDTILECFG reads: the palette, the bytes of a line (64 unless given) and the rows (16) of each register."""
    counts = [(rows or {}).get(tile, TILE_ROWS) for tile in range(8)]
    lines = [byte for tile in range(8) for byte in ((line_bytes or {}).get(tile, TILE_LEN), 0)]
    data = [1] + [0] * 15 + lines + [0] * 16 + counts + [0] * 8
    return ir.Constant(ir.ArrayType(I8, len(data)), bytearray(data))


def _move(builder: Any, name: str, tile: int, address: Any, step: Any) -> None:
    move = declared(builder, name, ir.VoidType(), I8, I8.as_pointer(), step.type)
    builder.call(move, [_index(tile), builder.inttoptr(address, I8.as_pointer()), step])


def _index(tile: int) -> Any:
    return ir.Constant(I8, tile)
