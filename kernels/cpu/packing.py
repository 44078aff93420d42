"""Weights in groups of 32, laid out for products, and rows of them back as floats. Never multiplies.

Packed weights are a stream of records, in the order in which they are used: for 16 outputs and one group, 8 vectors of
16 x 4 bytes (output by output four neighbouring weights; of 4 bits two vectors share one, low halves first), 16
scales, and of 4 bits 16 zeros, in float16. Bytes of 8 bits have 128 added.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from .entry import ARGS, TASK, entry
from .llvm import LANES
from .tensors import KINDS, check_range, team_size
from .vector import get_f16, get_i32, get_i64, put, put_i32, take_number

GROUP_LEN = 32
QUADS = GROUP_LEN // 4
_MIN_SHARE = 1 << 18  # weights worth a second thread
_SIGNS = -2139062144  # 0x80808080


def record_len(bits: int) -> int:
    """Bytes of 16 outputs' weights of one group, with their scales and zeros."""
    return LANES * GROUP_LEN * bits // 8 + 2 * LANES * (2 if bits == 4 else 1)


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """uint8 [blocks of 16 outputs, groups, 320] from q uint8 [N, K] of 0..15, scale and zero [N, K / 32]."""
    return _pack(q, torch.stack((_halves(scale), _halves(zero)), dim=-2), bits=4)


def pack_int8(q: Tensor, scale: Tensor) -> Tensor:
    """uint8 [blocks of 16 outputs, groups, 544] from q int8 [N, K] and scale [N, K / 32]."""
    return _pack(q, _halves(scale), bits=8)


def _pack(q: Tensor, halves: Tensor, *, bits: int) -> Tensor:
    num_outputs, width = q.shape
    num_blocks, num_groups = -(-num_outputs // LANES), width // GROUP_LEN
    packed = torch.empty((num_blocks, num_groups, record_len(bits)), dtype=torch.uint8)
    q, halves = q.contiguous(), halves.contiguous()
    run = _pack_4 if bits == 4 else _pack_8
    run(
        q.data_ptr(),
        num_outputs,
        num_groups,
        halves.data_ptr(),
        packed.data_ptr(),
        threads=team_size(q.numel(), min_share=_MIN_SHARE),
    )
    return packed


def _halves(scale: Tensor) -> Tensor:
    """[N, G] -> float16 [blocks, groups, 16]."""
    scale = torch.nn.functional.pad(scale.to(torch.float16), (0, 0, 0, -scale.shape[0] % LANES))
    return scale.view(-1, LANES, scale.shape[1]).transpose(1, 2)


@entry(ints=5)
def _pack_4(call: int) -> None:
    _pack_blocks(call, 4)


@entry(ints=5)
def _pack_8(call: int) -> None:
    _pack_blocks(call, 8)


@njit(forceinline=True)
def _pack_blocks(call: int, bits: int) -> None:
    q, num_outputs, num_groups = get_i64(call, ARGS), get_i64(call, ARGS + 1), get_i64(call, ARGS + 2)
    halves, packed = get_i64(call, ARGS + 3), get_i64(call, ARGS + 4)
    num_blocks = (num_outputs + LANES - 1) // LANES
    num_vectors = QUADS * bits // 8
    num_tail = LANES // 2 * (2 if bits == 4 else 1)  # words of scales and zeros
    record = LANES * num_vectors + num_tail  # words
    block = take_number(call, TASK)
    while block < num_blocks:
        for group in range(num_groups):
            to = packed + 4 * record * (block * num_groups + group)
            for lane in range(LANES):
                output = block * LANES + lane
                words = q + GROUP_LEN * (output * num_groups + group)
                for j in range(num_vectors):
                    word = 0
                    if output < num_outputs:
                        word = get_i32(words, j)
                        if bits == 4:
                            word |= get_i32(words, j + num_vectors) << 4
                        else:
                            word ^= _SIGNS
                    put_i32(to, LANES * j + lane, word)
            tail = halves + 4 * num_tail * (block * num_groups + group)
            for i in range(num_tail):
                put_i32(to, LANES * num_vectors + i, get_i32(tail, i))
        block = take_number(call, TASK)


def packed_rows(packed: Tensor, num_outputs: int, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [T, K] of outputs ``ids`` (int64 [T]) of what ``pack_int8`` gave, rounded once to ``dtype``."""
    ids = ids.long().contiguous()
    check_range("row", ids, num_outputs)
    num_groups = packed.shape[1]
    out = torch.empty((len(ids), num_groups * GROUP_LEN), dtype=dtype)
    _unpack_8(
        packed.data_ptr(),
        num_groups,
        ids.data_ptr(),
        len(ids),
        out.data_ptr(),
        KINDS[dtype],
        threads=team_size(out.numel()),
    )
    return out


@entry(ints=6)
def _unpack_8(call: int) -> None:
    packed, num_groups = get_i64(call, ARGS), get_i64(call, ARGS + 1)
    ids, count = get_i64(call, ARGS + 2), get_i64(call, ARGS + 3)
    out, kind = get_i64(call, ARGS + 4), get_i64(call, ARGS + 5)
    record = LANES * (GROUP_LEN + 2)
    i = take_number(call, TASK)
    while i < count:
        output = get_i64(ids, i)
        lane = output % LANES
        for group in range(num_groups):
            at = packed + record * (output // LANES * num_groups + group)
            scale = get_f16(at + LANES * GROUP_LEN, lane)
            to = GROUP_LEN * (i * num_groups + group)
            for j in range(QUADS):
                word = get_i32(at, LANES * j + lane)
                for byte in range(4):
                    put(out, to + 4 * j + byte, kind, scale * np.float32(((word >> (8 * byte)) & 255) - 128))
        i = take_number(call, TASK)
