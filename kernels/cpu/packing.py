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
    get,
    get_f16,
    get_i32,
    get_i64,
    local_floats,
    put,
    put_f32,
    put_i32,
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


def to_words(records: Tensor) -> Tensor:
    """Rearranges records of ``pack_int4`` or ``pack_int8`` in place, for products of bfloat16 (``word_panel``).

    Of 4 bits: four runs of 32 numbers of 16 bits, one for each neighbour, each with those of four outputs in its bits 1
    to 4, 5 to 8, 9 to 12, and 13 to 0. Of 8 bits: 16 outputs' runs of 32 bytes with a sign. Scales and zeros stay.
    """
    call = WordsCall(records.data_ptr(), records[..., 0].numel())
    run = _words_4 if records.shape[-1] == record_len(4) else _words_8
    run(call, threads=team_size(records.numel(), min_share=_MIN_SHARE))
    return records


class WordsCall(NamedTuple):
    records: int  # uint8 [num_records, record]
    num_records: int


_RUN = 64  # records that one thread rearranges at a time
_RECORD_4, _RECORD_8 = record_len(4), record_len(8)
_local_record = local_floats(LANES * QUADS)


@entry
def _words_4(call: WordsCall) -> None:
    records, num_records, copy = call.records, call.num_records, _local_record()
    run = take_number(counters(call), TASK)
    while run * _RUN < num_records:
        for i in range(run * _RUN, min((run + 1) * _RUN, num_records)):
            at = records + _RECORD_4 * i
            for j in range(LANES * QUADS // 2):
                put_i32(copy, j, get_i32(at, j))
            for j in range(4):
                for k in range(0, GROUP_LEN, 2):
                    word = 0
                    for odd in range(2):
                        quad, byte = (k + odd) // 4, (k + odd) % 4
                        four = 0
                        for output in range(4):
                            bits = get_i32(copy, LANES * (quad % 4) + 4 * j + output) >> (8 * byte + 4 * (quad // 4))
                            four |= (bits & 15) << (4 * output)
                        word |= ((four << 1 | four >> 15) & 0xFFFF) << (16 * odd)
                    put_i32(at, (GROUP_LEN * j + k) // 2, word)
        run = take_number(counters(call), TASK)


@entry
def _words_8(call: WordsCall) -> None:
    records, num_records, copy = call.records, call.num_records, _local_record()
    run = take_number(counters(call), TASK)
    while run * _RUN < num_records:
        for i in range(run * _RUN, min((run + 1) * _RUN, num_records)):
            at = records + _RECORD_8 * i
            for j in range(LANES * QUADS):
                put_i32(copy, j, get_i32(at, j) ^ _SIGNS)
            for j in range(LANES * QUADS):
                put_i32(at, j, get_i32(copy, LANES * (j % QUADS) + j // QUADS))
        run = take_number(counters(call), TASK)


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


def packed_rows(
    packed: Tensor,
    num_outputs: int,
    ids: Tensor,
    dtype: torch.dtype,
    *,
    words: bool = False,
    out: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Weights [T, K] of outputs ``ids`` (int64 [T]) of ``pack_int8``'s result, rounded once to ``dtype``.

    ``words``: the records are those of ``to_words``. ``out``, dense, receives them if given, and ``also`` (float32,
    dense) the same numbers.
    """
    ids = ids.long().contiguous()
    check_range("row", ids, num_outputs)
    num_groups = packed.shape[1]
    if out is None:
        out = torch.empty((len(ids), num_groups * GROUP_LEN), dtype=dtype)
    for given in (out, also):
        assert given is None or (given.shape == (len(ids), num_groups * GROUP_LEN) and given.is_contiguous())
    call = UnpackCall(
        packed.data_ptr(),
        num_groups,
        ids.data_ptr(),
        len(ids),
        out.data_ptr(),
        KINDS[out.dtype],
        words,
        0 if also is None else also.data_ptr(),
    )
    _unpack_8(call, threads=team_size(out.numel()))
    return out


class UnpackCall(NamedTuple):
    packed: int  # of 8 bits, see ``PackCall``
    num_groups: int
    ids: int  # int64 [num_ids]
    num_ids: int
    out: int  # [num_ids, groups * 32]
    kind: int  # of out
    words: int  # 1: records of ``to_words``
    also: int  # float32 [num_ids, groups * 32], or 0


@entry
def _unpack_8(call: UnpackCall) -> None:
    packed, num_groups, ids, num_ids = call.packed, call.num_groups, call.ids, call.num_ids
    out, kind, also = call.out, call.kind, call.also
    # Words from one four of an output's neighbours to the next, and from one output to the next.
    step, lane_step, flip = (1, QUADS, _SIGNS) if call.words != 0 else (LANES, 1, 0)
    i = take_number(counters(call), TASK)
    while i < num_ids:
        output = get_i64(ids, i)
        lane = output % LANES
        for group in range(num_groups):
            at = packed + _RECORD_8 * (output // LANES * num_groups + group)
            scale = get_f16(at + LANES * GROUP_LEN, lane)
            to = GROUP_LEN * (i * num_groups + group)
            for j in range(QUADS):
                word = get_i32(at, step * j + lane_step * lane) ^ flip
                for byte in range(4):
                    place = to + 4 * j + byte
                    put(out, place, kind, scale * np.float32(((word >> (8 * byte)) & 255) - 128))
                    if also != 0:
                        put_f32(also, place, get(out, place, kind))
        i = take_number(counters(call), TASK)
