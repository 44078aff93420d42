"""Grammar masks, biases and penalties, written into rows of logits."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch import LogitEdits
from .entry import TASK, counters, entry
from .tensors import check_range, team_size
from .vector import (
    LANES,
    choose16,
    get_f32,
    get_i32,
    get_i64,
    load16_f32,
    put_f32,
    put_i32,
    splat16,
    store16_f32,
    take_number,
)

_MINUS_INF = np.float32(-np.inf)
_MASK_SHARE = 4096  # tokens of one task


def apply_bitmask(logits: Tensor, mask: Tensor, *, rows: Tensor | None = None) -> Tensor:
    target = logits if logits.stride(-1) == 1 else logits.contiguous()
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    index = torch.arange(mask.shape[0]) if rows is None else rows.long().contiguous()
    check_range("row", index, logits.shape[0])
    call = BitmaskCall(
        target.data_ptr(),
        target.stride(0),
        logits.shape[1],
        mask.data_ptr(),
        mask.stride(0),
        mask.shape[0],
        index.data_ptr(),
    )
    _apply_bitmask(call, threads=team_size(mask.shape[0] * logits.shape[1], min_share=1 << 16))
    return logits if target is logits else logits.copy_(target)


class BitmaskCall(NamedTuple):
    """A step counts numbers, or words, from one row to the next."""

    logits: int  # float32 [R, V]
    logits_step: int
    vocab_size: int
    mask: int  # int32 [M, W]
    mask_step: int
    num_rows: int  # M
    rows: int  # int64 [M]: the row of logits for each row of the mask


@entry
def _apply_bitmask(call: BitmaskCall) -> None:
    logits, step, vocab_size = call.logits, call.logits_step, call.vocab_size
    mask, mask_step, num_rows, rows = call.mask, call.mask_step, call.num_rows, call.rows
    shares = (vocab_size + _MASK_SHARE - 1) // _MASK_SHARE
    forbidden = splat16(_MINUS_INF)
    task = take_number(counters(call), TASK)
    while task < num_rows * shares:
        row, share = task // shares, task % shares
        line, words = logits + 4 * step * get_i64(rows, row), mask + 4 * mask_step * row
        end = min((share + 1) * _MASK_SHARE, vocab_size)
        for token in range(share * _MASK_SHARE, end, 32):
            word = get_i32(words, token // 32)
            if word == -1:
                continue
            if token + 32 <= end:
                store16_f32(line, token, choose16(word, load16_f32(line, token), forbidden))
                second = token + LANES
                store16_f32(line, second, choose16(word >> LANES, load16_f32(line, second), forbidden))
            else:
                for i in range(token, end):
                    if not (word >> (i - token)) & 1:
                        put_f32(line, i, _MINUS_INF)
        task = take_number(counters(call), TASK)


def apply_edits(logits: Tensor, edits: LogitEdits) -> Tensor:
    if logits.stride(-1) != 1:
        return logits.copy_(apply_edits(logits.contiguous(), edits))
    num_rows, vocab_size = logits.shape
    for name, values, limit in (
        ("row", edits.bias_rows, num_rows),
        ("row", edits.rows, num_rows),
        ("token", edits.bias_ids, vocab_size),
        ("token", edits.ids, vocab_size),
    ):
        check_range(name, torch.from_numpy(values), limit)
    if len(edits.bias_rows):
        places = torch.from_numpy(edits.bias_rows), torch.from_numpy(edits.bias_ids)
        logits.index_put_(places, torch.from_numpy(edits.bias_values), accumulate=True)
    if len(edits.rows):
        rows, starts, prompt_lens = map(np.ascontiguousarray, (edits.rows, edits.starts, edits.prompt_lens))
        factors = np.stack((edits.frequency, edits.presence, edits.repetition)).astype(np.float32)
        ids32 = np.ascontiguousarray(edits.ids, dtype=np.int32)
        counts = torch.zeros(2 * vocab_size, dtype=torch.int32)
        call = PenaltyCall(
            logits.data_ptr(),
            logits.stride(0),
            vocab_size,
            len(edits.rows),
            rows.ctypes.data,
            starts.ctypes.data,
            prompt_lens.ctypes.data,
            ids32.ctypes.data,
            factors.ctypes.data,
            counts.data_ptr(),
        )
        _penalise(call)
    return logits


class PenaltyCall(NamedTuple):
    """P penalised rows, as ``LogitEdits`` describes them."""

    logits: int  # float32 [R, V]
    logits_step: int  # numbers from one row to the next
    vocab_size: int
    num_rows: int  # P
    rows: int  # int64 [P]
    starts: int  # int64 [P + 1]
    prompt_lens: int  # int64 [P]
    ids: int  # int32 [N]
    factors: int  # float32 [3, P]: frequency, presence, repetition
    seen: int  # int32 [2, V]: times a token occurs, and times it was generated; all zero before and after each row


@entry
def _penalise(call: PenaltyCall) -> None:
    logits, step, vocab_size, num_rows = call.logits, call.logits_step, call.vocab_size, call.num_rows
    rows, starts, prompt_lens, ids, factors = call.rows, call.starts, call.prompt_lens, call.ids, call.factors
    seen = call.seen
    generated = seen + 4 * vocab_size
    for p in range(num_rows):
        line = logits + 4 * step * get_i64(rows, p)
        begin, end = get_i64(starts, p), get_i64(starts, p + 1)
        first_generated = begin + get_i64(prompt_lens, p)
        frequency, presence = get_f32(factors, p), get_f32(factors, num_rows + p)
        repetition = get_f32(factors, 2 * num_rows + p)
        for i in range(begin, end):
            token = get_i32(ids, i)
            put_i32(seen, token, get_i32(seen, token) + 1)
            if i >= first_generated:
                put_i32(generated, token, get_i32(generated, token) + 1)
        for i in range(begin, end):
            token = get_i32(ids, i)
            if get_i32(seen, token) == 0:
                continue  # done at an earlier place
            value = get_f32(line, token)
            value = value / repetition if value > 0 else value * repetition
            times = get_i32(generated, token)
            if times > 0:
                value -= frequency * np.float32(times) + presence
            put_f32(line, token, value)
            put_i32(seen, token, 0)
            put_i32(generated, token, 0)
