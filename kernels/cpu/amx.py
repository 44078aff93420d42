"""LLVM code for AMX: eight registers of 16 rows x 64 bytes, and products of bytes of two of them.

A tile of x is [16 rows, 64 neighbours of k]; a tile of weights [16 quads of neighbours, 16 outputs, 4]. One instruction
adds their product to a tile of int32 [16 rows, 16 outputs], exactly (Intel's Software Developer's Manual, TDPBSSD).
"""

from typing import Any

from llvmlite import ir

from .llvm import I8, declared, number

TILE_ROWS = 16
TILE_LEN = 64  # neighbours of k
TILE_BYTES = 1024


def open_tiles(builder: Any) -> None:
    """Lays out this thread's tile registers, all of 16 rows x 64 bytes. Every use ends with ``close_tiles``."""
    palette, columns, rows = [1] + [0] * 15, [64, 0] * 8 + [0] * 16, [TILE_ROWS] * 8 + [0] * 8
    data = ir.Constant(ir.ArrayType(I8, 64), bytearray(palette + columns + rows))
    found = builder.module.globals.get("tile_layout")
    if found is None:
        found = ir.GlobalVariable(builder.module, data.type, "tile_layout")
        found.initializer, found.global_constant, found.linkage = data, True, "internal"
    load = declared(builder, "llvm.x86.ldtilecfg", ir.VoidType(), I8.as_pointer())
    builder.call(load, [builder.bitcast(found, I8.as_pointer())])


def close_tiles(builder: Any) -> None:
    """Frees the registers: a thread that holds them makes every switch between threads slower."""
    builder.call(declared(builder, "llvm.x86.tilerelease", ir.VoidType()), [])


def clear_tile(builder: Any, tile: int) -> None:
    builder.call(declared(builder, "llvm.x86.tilezero", ir.VoidType(), I8), [_index(tile)])


def load_tile(builder: Any, tile: int, address: Any) -> None:
    """From 1,024 neighbouring bytes."""
    _move(builder, "llvm.x86.tileloadd64", tile, address)


def store_tile(builder: Any, tile: int, address: Any) -> None:
    _move(builder, "llvm.x86.tilestored64", tile, address)


def add_products(builder: Any, total: int, x: int, weights: int, *, signed: bool) -> None:
    """Adds the products of two tiles to a third. Bytes of x have a sign; those of weights if ``signed``."""
    name = "llvm.x86.tdpbssd" if signed else "llvm.x86.tdpbsud"
    builder.call(declared(builder, name, ir.VoidType(), I8, I8, I8), [_index(tile) for tile in (total, x, weights)])


def _move(builder: Any, name: str, tile: int, address: Any) -> None:
    move = declared(builder, name, ir.VoidType(), I8, I8.as_pointer(), number(0).type)
    builder.call(move, [_index(tile), builder.inttoptr(address, I8.as_pointer()), number(64)])


def _index(tile: int) -> Any:
    return ir.Constant(I8, tile)
