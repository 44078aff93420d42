"""The machine's peaks, to compare kernels with: byte products that registers alone feed, and bytes read from memory."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types
from phloem.cpu_isa import isa
from phloem.kernels.cpu import amx
from phloem.kernels.cpu.entry import TASK, Entry, counters, entry
from phloem.kernels.cpu.group_tile import dot4
from phloem.kernels.cpu.llvm import I8, I16, I32, LANES, carry, declared, load_at, number
from phloem.kernels.cpu.vector import compiled, load16_f32, max16, splat16, store16_f32, take_number
from phloem.kernels.threads import team

_SUMS = 12  # independent sums, more than an instruction's latency needs
_TURNS = 1_000_000
_PIECE = 1 << 20  # bytes that a thread reads at a time


class PeakCall(NamedTuple):
    turns: int
    data: int  # 64 KB of bytes, which the products read once


class ReadCall(NamedTuple):
    data: int
    num_pieces: int
    out: int


def _vector_turns(builder: Any, turns: Any, data: Any) -> None:
    one = isa()
    ints = ir.VectorType(I32, one.lanes)
    left, right = (load_at(builder, ints, data, 4 * one.lanes * i) for i in range(2))
    starts = [load_at(builder, ints, data, 4 * one.lanes * (2 + i)) for i in range(_SUMS)]
    sums = carry(
        builder, turns, starts, lambda _, state: [_product(builder, one, total, left, right) for total in state]
    )
    for i, total in enumerate(sums):
        place = builder.inttoptr(builder.add(data, number(4 * one.lanes * (2 + i))), ints.as_pointer())
        builder.store(total, place, align=4)


def _product(builder: Any, one: Any, total: Any, left: Any, right: Any) -> Any:
    if one.byte_products != "pmaddubsw":
        return dot4(builder, one, total, left, right)
    bytes_, words = ir.VectorType(I8, 4 * one.lanes), ir.VectorType(I16, 2 * one.lanes)
    multiply = declared(builder, "llvm.x86.avx2.pmadd.ub.sw", words, bytes_, bytes_)
    # The sum is an operand, so that no product is the one before.
    products = builder.call(multiply, [builder.bitcast(total, bytes_), builder.bitcast(right, bytes_)])
    return builder.bitcast(builder.add(builder.bitcast(total, words), products), total.type)


def _tile_turns(builder: Any, turns: Any, data: Any) -> None:
    amx.open_tiles(builder)
    for i in range(8):
        amx.load_tile(builder, i, builder.add(data, number(amx.TILE_BYTES * i)))

    def step(_: Any, state: list[Any]) -> list[Any]:
        for i in range(4):
            amx.add_products(builder, i, 4 + i // 2, 6 + i % 2, signed=i % 2 == 0)
        return state

    carry(builder, turns, [number(0)], step)
    for i in range(4):
        amx.store_tile(builder, i, builder.add(data, number(amx.TILE_BYTES * i)))
    amx.close_tiles(builder)


_run_vectors = compiled(types.void, types.int64, types.int64)(_vector_turns)
_run_tiles = compiled(types.void, types.int64, types.int64)(_tile_turns)


@entry
def _multiply_vectors(call: PeakCall) -> None:
    _run_vectors(call.turns, call.data)


@entry
def _multiply_tiles(call: PeakCall) -> None:
    _run_tiles(call.turns, call.data)


@entry
def _read(call: ReadCall) -> None:
    data, num_pieces = call.data, call.num_pieces
    largest, other = splat16(0.0), splat16(0.0)
    piece = take_number(counters(call), TASK)
    while piece < num_pieces:
        at = data + piece * _PIECE
        for i in range(0, _PIECE // 4, 4 * LANES):
            largest = max16(largest, max16(load16_f32(at, i), load16_f32(at, i + LANES)))
            other = max16(other, max16(load16_f32(at, i + 2 * LANES), load16_f32(at, i + 3 * LANES)))
        piece = take_number(counters(call), TASK)
    store16_f32(call.out, 0, max16(largest, other))


Clock = Callable[[], float]


def vector_products_per_s(clock: Clock = time.perf_counter) -> float:
    """Of one thread; 0 where the instruction set has no byte products."""
    return _products_per_s(_multiply_vectors, _SUMS * 4 * isa().lanes, clock) if isa().byte_products != "none" else 0.0


def tile_products_per_s(clock: Clock = time.perf_counter) -> float:
    """Of one thread; 0 without AMX."""
    products = 4 * amx.TILE_ROWS * LANES * amx.TILE_LEN
    return _products_per_s(_multiply_tiles, products, clock) if isa().has_tiles else 0.0


def _products_per_s(kernel: Entry[PeakCall], products_a_turn: int, clock: Clock) -> float:
    data = torch.randint(-127, 128, (1 << 16,), dtype=torch.int8)  # zeros would take less power, and so less time
    call = PeakCall(_TURNS, data.data_ptr())
    return _TURNS * products_a_turn / _best(lambda: kernel(call), clock)


def bytes_per_s(clock: Clock = time.perf_counter) -> float:
    """Read from memory by the whole team."""
    data, out = torch.zeros(1 << 26), torch.empty(LANES)
    size = 4 * len(data)
    call = ReadCall(data.data_ptr(), size // _PIECE, out.data_ptr())
    return size / _best(lambda: _read(call, threads=team().size), clock)


def _best(work: Callable[[], object], clock: Clock) -> float:
    work()
    found = []
    for _ in range(5):
        start = clock()
        work()
        found.append(clock() - start)
    return min(found)
