"""Weights in groups of 32: packed for products, and rows of them unpacked to floats.

Packed weights are a stream of records in the order in which a product reads them. A record is one group of 32 weights
of 16 outputs: 8 vectors of 16 x 4 bytes (four neighbouring weights of each output), then 16 scales in float16. At 4
bits, two vectors share the bytes of one (the first in the low halves), and 16 zeros in float16 follow the scales. At 8
bits, 128 is added to each byte.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .entry import TASK, counters, entry
from .llvm import LANES
from .machine_code import inlined
from .tensors import KINDS, check_range, team_size
from .vector import (
    fused16,
    get_f16,
    get_f32,
    get_i32,
    get_i64,
    load16_i8,
    max16,
    put,
    put_f32,
    put_i32,
    splat16,
    sum16,
    take_number,
)

GROUP_LEN = 32
QUADS = GROUP_LEN // 4
_MIN_SHARE = 1 << 18  # weights worth a second thread
_SIGNS = -2139062144  # 0x80808080


def record_len(bits: int) -> int:
    """Bytes of a record: one group of 16 outputs, with scales and zeros."""
    return LANES * GROUP_LEN * bits // 8 + 2 * LANES * (2 if bits == 4 else 1)


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """uint8 [blocks of 16 outputs, groups, 320] from q uint8 [N, K] of 0..15, scale and zero [N, K / 32]."""
    return _pack(q, torch.stack((_halves(scale), _halves(zero)), dim=-2), bits=4)


def pack_int8(q: Tensor, scale: Tensor) -> Tensor:
    """uint8 [blocks of 16 outputs, groups, 544] from q int8 [N, K] and scale [N, K / 32]."""
    return _pack(q, _halves(scale), bits=8)


_INT16 = 32_512  # 127 * 256: the upper byte of a fixed-point weight has a sign
_INT32 = 2**31 - 1


def pack_fixed(q: Tensor, scale: Tensor, zero: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``pack_int4``, or ``pack_int8`` without ``zero``, in fixed point: ``w = w_scale * (s * q + z)``, q without its
    centre, with whole numbers s and z of 16 bits.

    Returns (uint8 [blocks of 16 outputs, groups, record], w_scale float32 [blocks * 16]). In a record, 16 pairs of s
    and z follow the weights; of 8 bits, 16 s. An output's scale is the smallest that keeps its weights in 16 bits, and
    their sums with any numbers up to 127 in 32 bits.
    """
    bits = 8 if zero is None else 4
    num_outputs, width = q.shape
    largest = (1 << (bits - 1)) * scale.abs()
    if zero is not None:
        largest = largest + zero.abs()
    # Rounding s and z adds at most half of q and 1 / 2 to a weight.
    added = (1 << (bits - 2)) + 0.5
    w_scale = torch.maximum(
        largest.amax(dim=1) / (_INT16 - added), _sums_of_sizes(q, scale, zero) / (_INT32 / 127 - added * width)
    )
    steps = w_scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    factors = torch.stack(
        [(part / steps).round().to(torch.int16) for part in (scale, zero) if part is not None], dim=-1
    )
    factors = torch.nn.functional.pad(factors, (0, 0, 0, 0, 0, -num_outputs % LANES))
    factors = factors.view(-1, LANES, *factors.shape[1:]).transpose(1, 2)
    return _pack(q, factors, bits=bits), torch.nn.functional.pad(w_scale, (0, -num_outputs % LANES)).contiguous()


def _sums_of_sizes(q: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """float32 [N]: the sum of |w| of each output, for q and its scales as ``pack_fixed`` takes them."""
    q, scale = q.contiguous(), scale.float().contiguous()
    num_outputs, num_groups = scale.shape
    sums = torch.empty(len(q), dtype=torch.float32)
    threads = team_size(q.numel(), min_share=_MIN_SHARE)
    if zero is None:
        call = SizesCall(q.data_ptr(), num_outputs, num_groups, scale.data_ptr(), 0, sums.data_ptr())
        _sum_sizes_8(call, threads=threads)
    else:
        zero = zero.float().contiguous()
        call = SizesCall(q.data_ptr(), num_outputs, num_groups, scale.data_ptr(), zero.data_ptr(), sums.data_ptr())
        _sum_sizes_4(call, threads=threads)
    return sums


class SizesCall(NamedTuple):
    q: int  # bytes [outputs, groups, 32]
    num_outputs: int
    num_groups: int
    scale: int  # float32 [outputs, groups]
    zero: int  # float32 [outputs, groups]; of 4 bits only
    sums: int  # float32 [outputs]


@entry
def _sum_sizes_4(call: SizesCall) -> None:
    _sum_sizes(call, 4)


@entry
def _sum_sizes_8(call: SizesCall) -> None:
    _sum_sizes(call, 8)


@inlined
def _sum_sizes(call: SizesCall, bits: int) -> None:
    num_outputs, num_groups, sums = call.num_outputs, call.num_groups, call.sums
    nothing, centre = splat16(np.float32(0)), splat16(np.float32(8))
    output = take_number(counters(call), TASK)
    while output < num_outputs:
        q, scales, zeros = call.q, call.scale, call.zero
        total = nothing
        for group in range(output * num_groups, (output + 1) * num_groups):
            scale = splat16(get_f32(scales, group))
            for half in range(2):
                w = load16_i8(q, GROUP_LEN * group + LANES * half)
                if bits == 4:
                    w = fused16(splat16(get_f32(zeros, group)), scale, w - centre)
                else:
                    w = scale * w
                total = total + max16(w, nothing - w)
        put_f32(sums, output, sum16(total))
        output = take_number(counters(call), TASK)


def _pack(q: Tensor, halves: Tensor, *, bits: int) -> Tensor:
    num_outputs, width = q.shape
    num_blocks, num_groups = -(-num_outputs // LANES), width // GROUP_LEN
    packed = torch.empty((num_blocks, num_groups, record_len(bits)), dtype=torch.uint8)
    q, halves = q.contiguous(), halves.contiguous()
    run = _pack_4 if bits == 4 else _pack_8
    call = PackCall(q.data_ptr(), num_outputs, num_groups, halves.data_ptr(), packed.data_ptr())
    run(call, threads=team_size(q.numel(), min_share=_MIN_SHARE))
    return packed


def _halves(scale: Tensor) -> Tensor:
    """[N, G] -> float16 [blocks, groups, 16]."""
    scale = torch.nn.functional.pad(scale.to(torch.float16), (0, 0, 0, -scale.shape[0] % LANES))
    return scale.view(-1, LANES, scale.shape[1]).transpose(1, 2)


class PackCall(NamedTuple):
    q: int  # bytes [outputs, groups, 32]
    num_outputs: int
    num_groups: int
    halves: int  # float16 [blocks, groups, 16 scales; of 4 bits 16 zeros too]
    packed: int  # uint8 [blocks, groups, record]


@entry
def _pack_4(call: PackCall) -> None:
    _pack_blocks(call, 4)


@entry
def _pack_8(call: PackCall) -> None:
    _pack_blocks(call, 8)


@inlined
def _pack_blocks(call: PackCall, bits: int) -> None:
    q, num_outputs, num_groups = call.q, call.num_outputs, call.num_groups
    halves, packed = call.halves, call.packed
    num_blocks = (num_outputs + LANES - 1) // LANES
    num_vectors = QUADS * bits // 8
    num_tail = LANES // 2 * (2 if bits == 4 else 1)  # words of scales and zeros
    record = LANES * num_vectors + num_tail  # words
    block = take_number(counters(call), TASK)
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
        block = take_number(counters(call), TASK)


def packed_rows(packed: Tensor, num_outputs: int, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [T, K] of outputs ``ids`` (int64 [T]) of ``pack_int8``'s result, rounded once to ``dtype``."""
    ids = ids.long().contiguous()
    check_range("row", ids, num_outputs)
    num_groups = packed.shape[1]
    out = torch.empty((len(ids), num_groups * GROUP_LEN), dtype=dtype)
    call = UnpackCall(packed.data_ptr(), num_groups, ids.data_ptr(), len(ids), out.data_ptr(), KINDS[dtype])
    _unpack_8(call, threads=team_size(out.numel()))
    return out


class UnpackCall(NamedTuple):
    packed: int  # of 8 bits, see ``PackCall``
    num_groups: int
    ids: int  # int64 [num_ids]
    num_ids: int
    out: int  # [num_ids, groups * 32]
    kind: int  # of out


@entry
def _unpack_8(call: UnpackCall) -> None:
    packed, num_groups, ids, num_ids = call.packed, call.num_groups, call.ids, call.num_ids
    out, kind = call.out, call.kind
    record = LANES * (GROUP_LEN + 2)
    i = take_number(counters(call), TASK)
    while i < num_ids:
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
        i = take_number(counters(call), TASK)
