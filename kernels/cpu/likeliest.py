"""Where each row's highest logit may be, found with half the arithmetic of the logits.

A head rounds its inputs to 16 bits, which takes two products of bytes; rounded to 8 bits they take one. By how much a
logit then differs is bounded by Cauchy and Schwarz: by the length of what rounding took from x, times the length of the
token's weights. So a token whose rough logit plus its bound lies below another token's less that one's bound cannot
have the highest logit. Mostly a few tokens of a row are left; their logits are then computed as always.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .entry import TASK, counters, entry
from .group_tile import FINER
from .integer import IntegerProduct
from .llvm import LANES
from .machine_code import helper, inlined
from .packing import GROUP_LEN, record_len
from .sampling import Row, bits16
from .tensors import KINDS, readable, team_size
from .vector import (
    above16,
    choose16,
    get_f16,
    get_f32,
    get_i8,
    get_i32,
    get_i64,
    highest16,
    load16,
    load16_f32,
    max16,
    put_f32,
    put_i8,
    put_i32,
    put_i64,
    round16,
    splat16,
    sum16,
    take_number,
)

WIDE_FROM = 9  # rows, of the rough product; see ``integer``
FEW = 0.25  # of the blocks; with more, computing them takes longer than all at once
_MINUS_INF = np.float32(-np.inf)
_RECORD, _CENTRE = record_len(8), 128
_ROUNDING = 2.0**-23  # twice what one operation of float32 may lose of its result


class LikeliestOutputs:
    """The highest outputs of a head with 8-bit weights [N, K] packed by ``packing``, and its bias float32 [N].

    Outputs from ``num_tokens`` on do not count. It keeps memory between its calls: one may run at a time.
    """

    def __init__(self, packed: Tensor, num_outputs: int, *, bias: Tensor | None, num_tokens: int) -> None:
        self._exact = IntegerProduct(packed, num_outputs, bits=8, x_bits=16, bias=bias)
        self._rough = IntegerProduct(packed, num_outputs, bits=8, x_bits=8, bias=bias, wide_from=WIDE_FROM)
        self._num_tokens = num_tokens
        self._norms = row_norms(packed, num_outputs)
        num_blocks = len(packed)
        self._marks = torch.zeros(num_blocks, dtype=torch.uint8)
        self._blocks = torch.zeros(max(1, int(FEW * num_blocks)), dtype=torch.int32)
        self._found = torch.zeros(3, dtype=torch.int64)  # see ``RankCall``
        for one in (_mark_blocks, _list_blocks, _take_highest):
            one.compile()

    def __call__(self, x: Tensor, masks: Tensor) -> Tensor:
        """int64 [T]: each row's output that ``sample`` with temperature 0 takes from ``x [T, K] -> [T, N]`` rounded to
        16 bits; -1 where a row allows none, where its results are no numbers, or where too many are near the highest.

        ``masks`` (int64 [T]): the address of each row's bitmask (uint32 [W]), 0: it allows all. Kernel calls alone.
        """
        x = readable(x)
        num_rows, width = x.shape
        blocks, found = self._blocks, self._found
        results = torch.empty((num_rows, len(self._marks) * LANES))[:, : len(self._norms)]
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        self._rough(x, torch.float32, out=results)
        call = RankCall(
            x.data_ptr(),
            KINDS[x.dtype],
            num_rows,
            width,
            results.data_ptr(),
            results.stride(0),
            self._num_tokens,
            self._norms.data_ptr(),
            masks.data_ptr(),
            self._marks.data_ptr(),
            len(self._marks),
            blocks.data_ptr(),
            len(blocks),
            found.data_ptr(),
            token_ids.data_ptr(),
        )
        threads = team_size(results.numel(), min_share=1 << 15)
        _mark_blocks(call, threads=threads)
        _list_blocks(call)
        self._exact(x, torch.float32, out=results, blocks=blocks, count=found)
        _take_highest(call, threads=min(threads, 2))
        return token_ids


def row_norms(packed: Tensor, num_outputs: int) -> Tensor:
    """float32 [N]: the length of each output's weights of 8 bits, packed by ``packing``, rounded up."""
    num_blocks, num_groups, _ = packed.shape
    norms = torch.empty(num_blocks * LANES, dtype=torch.float32)
    call = NormCall(packed.data_ptr(), num_blocks, num_groups, norms.data_ptr())
    _row_norms(call, threads=team_size(packed.numel(), min_share=1 << 18))
    return norms[:num_outputs]


class NormCall(NamedTuple):
    packed: int  # uint8 [num_blocks, num_groups, record]
    num_blocks: int
    num_groups: int
    norms: int  # float32 [num_blocks, 16], written


@entry
def _row_norms(call: NormCall) -> None:
    packed, num_blocks, num_groups, norms = call.packed, call.num_blocks, call.num_groups, call.norms
    block = take_number(counters(call), TASK)
    while block < num_blocks:
        for output in range(LANES):
            total = 0.0
            for group in range(num_groups):
                record = packed + (block * num_groups + group) * _RECORD
                squares = 0
                for quad in range(GROUP_LEN // 4):
                    for i in range(4):
                        q = (get_i8(record, 4 * (quad * LANES + output) + i) & 0xFF) - _CENTRE
                        squares += q * q
                scale = float(get_f16(record + LANES * GROUP_LEN, output))
                total += scale * scale * squares
            put_f32(norms, block * LANES + output, np.float32(math.sqrt(total) * (1.0 + _ROUNDING)))
        block = take_number(counters(call), TASK)


class RankCall(NamedTuple):
    x: int  # [T, K]
    kind: int  # of x
    num_rows: int
    width: int  # K
    results: int  # float32 [T, N]: with x rounded to 8 bits, and then in the listed blocks to 16
    results_step: int  # numbers from one row to the next
    num_tokens: int
    norms: int  # float32 [N]
    masks: int  # int64 [T]: the address of each row's bitmask, 0: it has none
    marks: int  # uint8 [num_blocks], all 0 before and after: set where a row's highest result may be
    num_blocks: int
    blocks: int  # int32 [most]: the marked ones, ascending
    most: int
    found: int  # int64 [3]: how many they are; whether a row is unsure, 0 before and after; whether that or too many
    token_ids: int  # int64 [T], written


@inlined
def _row(call: RankCall, row: int) -> Row:
    return Row(call.results + 4 * call.results_step * row, get_i64(call.masks, row), call.num_tokens)


@entry
def _mark_blocks(call: RankCall) -> None:
    num_rows, num_tokens, norms, marks = call.num_rows, call.num_tokens, call.norms, call.marks
    whole = num_tokens - num_tokens % LANES
    forbidden = splat16(_MINUS_INF)
    row = take_number(counters(call), TASK)
    while row < num_rows:
        one = _row(call, row)
        reach = splat16(_reach(call.x, call.kind, call.width, row))
        best = forbidden
        for i in range(0, whole, LANES):
            bits = bits16(one, i)
            if bits != 0:
                least = load16_f32(one.line, i) - load16_f32(norms, i) * reach
                best = max16(best, choose16(bits, least, forbidden))
        highest = highest16(best)
        if not highest > _MINUS_INF:
            put_i64(call.found, 1, 1)
        bound = splat16(np.float32(highest - abs(highest) * np.float32(_ROUNDING) - np.float32(1e-30)))
        for i in range(0, whole, LANES):
            bits = bits16(one, i)
            if bits != 0:
                most = load16_f32(one.line, i) + load16_f32(norms, i) * reach
                if above16(choose16(bits, most, forbidden), bound) != 0:
                    put_i8(marks, i // LANES, 1)
        if whole < num_tokens:  # the last few are not looked at, and so computed
            put_i8(marks, whole // LANES, 1)
        row = take_number(counters(call), TASK)


@entry
def _list_blocks(call: RankCall) -> None:
    blocks, marks, most = call.blocks, call.marks, call.most
    count = 0
    for block in range(call.num_blocks):
        if get_i8(marks, block) != 0:
            put_i8(marks, block, 0)
            if count < most:
                put_i32(blocks, count, block)
            count += 1
    is_unsure = 1 if count > most or get_i64(call.found, 1) != 0 else 0
    put_i64(call.found, 0, 0 if is_unsure else count)
    put_i64(call.found, 1, 0)
    put_i64(call.found, 2, is_unsure)


@entry
def _take_highest(call: RankCall) -> None:
    num_rows, num_tokens, blocks = call.num_rows, call.num_tokens, call.blocks
    count, is_unsure = get_i64(call.found, 0), get_i64(call.found, 2) != 0
    row = take_number(counters(call), TASK)
    while row < num_rows:
        one = _row(call, row)
        best, token = _MINUS_INF, -1
        for i in range(count):
            at = LANES * get_i32(blocks, i)
            bits = bits16(one, at)
            if at + LANES > num_tokens:
                bits &= (1 << (num_tokens - at)) - 1
            for lane in range(LANES if bits != 0 else 0):
                if (bits >> lane) & 1 and get_f32(one.line, at + lane) > best:
                    best, token = get_f32(one.line, at + lane), at + lane
        put_i64(call.token_ids, row, -1 if is_unsure else token)
        row = take_number(counters(call), TASK)


@helper
def _reach(x: int, kind: int, width: int, row: int) -> np.float32:
    """By how much a row's product with weights of length 1 may differ between x rounded to 8 and to 16 bits."""
    nothing = splat16(0.0)
    taken, squares = nothing, nothing
    left = 0.0
    for at in range(row * width, (row + 1) * width, GROUP_LEN):
        low, high = load16(x, at, kind), load16(x, at + LANES, kind)
        squares = squares + low * low + high * high
        largest = highest16(max16(max16(low, nothing - low), max16(high, nothing - high)))
        step = largest / np.float32(127.0)
        inverse = np.float32(1.0) / step if step > 0 else np.float32(0.0)
        low, high = low * splat16(inverse), high * splat16(inverse)
        low, high = (low - round16(low)) * splat16(step), (high - round16(high)) * splat16(step)
        taken = taken + low * low + high * high
        left += GROUP_LEN * (float(step) / (2.0 * FINER)) ** 2
    sums = _ROUNDING * (2 * width // GROUP_LEN + 16) * math.sqrt(float(sum16(squares)))
    return np.float32(1.001 * math.sqrt(float(sum16(taken))) + math.sqrt(left) + sums)
