"""Cuts, draws and log-probabilities over rows of logits, one row a task, without sorting a vocabulary.

Tokens are read 16 at a time. A token that the bitmask forbids counts as minus infinity; where the mask forbids all 16,
their logits are not read.

Tokens far below the highest logit hardly ever survive top-k, top-p or min-p. The cuts therefore look only at the
*candidates*: tokens within ``_REACH`` (times the temperature) of the highest logit. Where these do not decide, the
reach grows, at last to all tokens. The place of a cut is found exactly in three passes over the candidates: each sums
their weight in bins of the logits' next 11, 11 and 10 bits.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch import SampleBatch, Sampled
from .edits import check_range
from .entry import TASK, THREAD, counters, entry
from .machine_code import helper, inlined
from .recording import forbid_replay
from .tensors import team_size
from .vector import (
    LANES,
    above16,
    bits_of,
    choose16,
    exp,
    exp16,
    get_f32,
    get_f64,
    get_i8,
    get_i32,
    get_i64,
    highest16,
    lane16,
    load16_f32,
    put_f32,
    put_f64,
    put_i32,
    put_i64,
    splat16,
    sum16,
    take_number,
)

_MINUS_INF = np.float32(-np.inf)
_REACH = np.float32(5.0)  # a candidate weighs at least exp(-5) = 0.7% of the likeliest
_FAR_REACH = np.float32(12.0)
_STEEPEST = np.float32(1e30)  # of 1 / temperature: finite, so that the highest logit keeps the weight 1
_LEAST_WEIGHT = 1e-30  # above zero, so that top-p keeps the likeliest token
_BINS = 2048


def sample(
    logits: Tensor,
    batch: SampleBatch,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    ids: np.ndarray | None = None,
) -> Sampled:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    logprobs = torch.empty(num_rows, dtype=torch.float32)
    temperature = np.ascontiguousarray(batch.temperature, np.float32)
    top_p, min_p = np.ascontiguousarray(batch.top_p, np.float32), np.ascontiguousarray(batch.min_p, np.float32)
    top_k, draws = np.ascontiguousarray(batch.top_k, np.int32), np.ascontiguousarray(batch.draw, np.float64)
    if not len(temperature) == len(top_k) == len(top_p) == len(min_p) == len(draws) == num_rows:
        raise ValueError(f"sampling parameters of {len(temperature)} rows for {num_rows} rows of logits")
    threads = team_size(num_rows * vocab_size, min_share=1 << 15)
    scratch_len = _scratch_len(vocab_size)
    scratch = torch.empty(threads * scratch_len, dtype=torch.float64)
    wants = np.ones(num_rows, np.uint8) if batch.wants_logprob is None else batch.wants_logprob.astype(np.uint8)
    if len(wants) != num_rows:
        raise ValueError(f"wants_logprob of {len(wants)} rows for {num_rows} rows of logits")
    words = np.zeros(num_rows, dtype=np.int64)  # the address of each row's mask, 0: it has none
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        addresses = mask.data_ptr() + 4 * mask.stride(0) * (np.arange(len(mask)) if ids is None else ids)
        if rows is None:
            words[:] = addresses
        else:
            check_range("row", rows, num_rows)
            words[rows.numpy()] = addresses
    forbid_replay("sample")  # a tape does not keep numpy's arrays
    call = SampleCall(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        num_rows,
        temperature.ctypes.data,
        top_p.ctypes.data,
        min_p.ctypes.data,
        top_k.ctypes.data,
        draws.ctypes.data,
        wants.ctypes.data,
        token_ids.data_ptr(),
        logprobs.data_ptr(),
        scratch.data_ptr(),
        scratch_len,
        words.ctypes.data,
    )
    _sample(call, threads=threads)
    return Sampled(token_ids, logprobs)


def _scratch_len(vocab_size: int) -> int:
    """float64 words of one thread: bins, then logits, weights and ids of the candidates."""
    return _BINS + 3 * (vocab_size // 2 + 1)


class SampleCall(NamedTuple):
    logits: int  # float32 [R, V]
    logits_step: int  # numbers from one row to the next
    vocab_size: int
    num_rows: int
    temperature: int  # float32 [R]
    top_p: int  # float32 [R]
    min_p: int  # float32 [R]
    top_k: int  # int32 [R]
    draws: int  # float64 [R]
    wants_logprob: int  # uint8 [R]
    token_ids: int  # int64 [R], written
    logprobs: int  # float32 [R], written where it is wanted
    scratch: int  # float64 [threads, scratch_len]
    scratch_len: int
    masks: int  # int64 [R]: the address of each row's bitmask, 0: it has none


class Row(NamedTuple):
    """One row of logits."""

    line: int  # address of float32 [V]
    words: int  # address of its bitmask; 0: everything is allowed
    size: int  # V


class Candidates(NamedTuple):
    """One thread's scratch memory: addresses."""

    bins: int  # float64 [_BINS]
    values: int  # float32 [V]: the candidates' logits
    weights: int  # float32 [V]: exp((logit - highest) / temperature)
    ids: int  # int32 [V]


@inlined
def _candidates(scratch: int, vocab_size: int) -> Candidates:
    values = scratch + 8 * _BINS
    length = 8 * (vocab_size // 2 + 1)
    return Candidates(scratch, values, values + length, values + 2 * length)


@entry
def _sample(call: SampleCall) -> None:
    logits, step, vocab_size, num_rows = call.logits, call.logits_step, call.vocab_size, call.num_rows
    token_ids, logprobs = call.token_ids, call.logprobs
    scratch = call.scratch + 8 * call.scratch_len * take_number(counters(call), THREAD)
    found = _candidates(scratch, vocab_size)
    row = take_number(counters(call), TASK)
    while row < num_rows:
        one = Row(logits + 4 * step * row, get_i64(call.masks, row), vocab_size)
        best, token = _highest(one)
        if token < 0:
            put_i64(token_ids, row, -1)
            put_f32(logprobs, row, _MINUS_INF)
            row = take_number(counters(call), TASK)
            continue
        has_total = get_i8(call.wants_logprob, row) != 0
        total = _total_weight(one, best, np.float32(1.0)) if has_total else 1.0
        log_total = math.log(total)
        temperature = get_f32(call.temperature, row)
        if temperature > 0:
            inverse = min(np.float32(1.0) / temperature, _STEEPEST)
            if not has_total or temperature != 1.0:
                total = _total_weight(one, best, inverse)
            top_p, min_p = get_f32(call.top_p, row), get_f32(call.min_p, row)
            top_k = get_i32(call.top_k, row)
            if top_k < 1 or top_k > vocab_size:
                top_k = vocab_size
            if top_k == vocab_size and top_p >= 1 and min_p <= 0:
                token = _draw(one, best, inverse, get_f64(call.draws, row) * total)
            else:
                reach, count = _REACH, -1
                while count < 0:
                    count = _cut(one, best, inverse, total, top_k, top_p, min_p, found, reach)
                    reach = _FAR_REACH if reach < _FAR_REACH else np.float32(np.inf)
                if count > 0:  # logits that are no numbers leave none
                    token = get_i32(found.ids, _draw_candidate(found, count, get_f64(call.draws, row)))
        put_i64(token_ids, row, token)
        put_f32(logprobs, row, np.float32(get_f32(one.line, token) - best - log_total))
        row = take_number(counters(call), TASK)


@inlined
def bits16(row: Row, i: int) -> int:
    """Which of the 16 tokens from ``i`` on, a multiple of 16, are allowed."""
    return 0xFFFF if row.words == 0 else (get_i32(row.words, i >> 5) >> (i & 16)) & 0xFFFF


@inlined
def _value(row: Row, i: int) -> np.float32:
    if row.words != 0 and (get_i32(row.words, i >> 5) >> (i & 31)) & 1 == 0:
        return _MINUS_INF
    return get_f32(row.line, i)


@helper
def _highest(row: Row) -> tuple[np.float32, int]:
    """The highest value and its first place; -1 where none is above minus infinity."""
    line, count = row.line, row.size
    best, at = _MINUS_INF, -1
    bound, forbidden = splat16(best), splat16(_MINUS_INF)
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        bits = bits16(row, i)
        if bits != 0:
            part = choose16(bits, load16_f32(line, i), forbidden)
            if above16(part, bound) != 0:
                best, at = highest16(part), i
                bound = splat16(best)
    if at >= 0:
        last = at + LANES - 1
        while at < last and _value(row, at) != best:  # a best that is no number equals none
            at += 1
    for i in range(whole, count):
        if _value(row, i) > best:
            best, at = _value(row, i), i
    return best, at


@helper
def _total_weight(row: Row, best: np.float32, inverse: np.float32) -> float:
    """The sum of exp((value - best) * inverse), in the order and rounding of ``_draw``."""
    line, count = row.line, row.size
    top, factor, forbidden = splat16(best), splat16(inverse), splat16(_MINUS_INF)
    whole = count - count % LANES
    total = 0.0
    for i in range(0, whole, LANES):
        bits = bits16(row, i)
        if bits != 0:
            total += sum16(exp16((choose16(bits, load16_f32(line, i), forbidden) - top) * factor))
    for i in range(whole, count):
        total += exp((_value(row, i) - best) * inverse)
    return total


@helper
def _draw(row: Row, best: np.float32, inverse: np.float32, target: float) -> int:
    """The first token at which the weight so far exceeds ``target``."""
    line, count = row.line, row.size
    top, factor, forbidden = splat16(best), splat16(inverse), splat16(_MINUS_INF)
    whole = count - count % LANES
    before, last = 0.0, 0
    i = 0
    while i < whole:
        bits = bits16(row, i)
        if bits != 0:
            after = before + sum16(exp16((choose16(bits, load16_f32(line, i), forbidden) - top) * factor))
            if after > target:
                break
            before = after
        i += LANES
    # Summed lane by lane, the weight may round differently and stay below: then the vector's last token is drawn.
    stop = i + LANES if i < whole else count
    while i < stop:
        weight = exp((_value(row, i) - best) * inverse)
        if weight > 0:
            last = i
            before += weight
            if before > target:
                return i
        i += 1
    if last == 0:
        # draw * total was rounded up to all the weight: the last token that has any is drawn.
        for j in range(count):
            if exp((_value(row, j) - best) * inverse) > 0:
                last = j
    return last


@helper
def _draw_candidate(found: Candidates, count: int, draw: float) -> int:
    weights = found.weights
    total = 0.0
    for i in range(count):
        total += get_f32(weights, i)
    target, so_far = draw * total, 0.0
    for i in range(count):
        so_far += get_f32(weights, i)
        if so_far > target:
            return i
    return count - 1


@helper
def _cut(
    row: Row,
    best: np.float32,
    inverse: np.float32,
    total: float,
    top_k: int,
    top_p: np.float32,
    min_p: np.float32,
    found: Candidates,
    reach: np.float32,
) -> int:
    """The number of tokens that the cuts keep; -1: the candidates do not decide.

    The first so many ``weights`` and ``ids`` of ``found`` are theirs, in the order of ids.
    """
    count = _gather(row, best, inverse, reach, found)
    weights, ids = found.weights, found.ids
    all_here = reach == np.inf
    if top_k < row.size:
        if count < top_k and not all_here:
            return -1
        if count > top_k:
            _keep(found, count, *_find_cut(found, count, True, top_k))
            count = top_k
        total = 0.0
        for i in range(count):
            total += get_f32(weights, i)
        all_here = True
    if top_p < 1:
        target, held = max(float(top_p) * total, _LEAST_WEIGHT), 0.0
        for i in range(count):
            held += get_f32(weights, i)
        if held < target and not all_here:
            return -1
        bound, ties = _find_cut(found, count, False, target)
        count = _keep(found, count, bound, ties)
        all_here = True
    if min_p > 0:
        if not all_here and min_p < np.float32(1.01) * exp(-reach):
            return -1
        kept = 0
        for i in range(count):
            if get_f32(weights, i) >= min_p:
                put_f32(weights, kept, get_f32(weights, i))
                put_i32(ids, kept, get_i32(ids, i))
                kept += 1
        count = kept
    return count


@helper
def _gather(row: Row, best: np.float32, inverse: np.float32, reach: np.float32, found: Candidates) -> int:
    """Collects the candidates, tokens with (best - value) * inverse < reach, and returns their number.

    With an infinite reach they are all tokens whose logit is above minus infinity.
    """
    line, vocab_size = row.line, row.size
    values, weights, ids = found.values, found.weights, found.ids
    top, factor, least = splat16(best), splat16(inverse), splat16(-reach)
    forbidden = splat16(_MINUS_INF)
    whole = vocab_size - vocab_size % LANES
    count = 0
    for i in range(0, whole, LANES):
        bits = bits16(row, i)
        if bits == 0:
            continue
        scaled = (choose16(bits, load16_f32(line, i), forbidden) - top) * factor
        near = above16(scaled, least)
        if near != 0:
            part = exp16(scaled)
            for lane in range(LANES):
                if (near >> lane) & 1:
                    put_f32(values, count, get_f32(line, i + lane))
                    put_f32(weights, count, lane16(part, lane))
                    put_i32(ids, count, i + lane)
                    count += 1
    for i in range(whole, vocab_size):
        away = (_value(row, i) - best) * inverse
        if away > -reach:
            put_f32(values, count, get_f32(line, i))
            put_f32(weights, count, exp(away))
            put_i32(ids, count, i)
            count += 1
    return count


@inlined
def _rank(value: np.float32) -> int:
    """An integer of 32 bits that orders as the float does."""
    bits = bits_of(value + np.float32(0.0))  # minus zero becomes zero
    return bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000


@helper
def _find_cut(found: Candidates, count: int, by_count: bool, target: float) -> tuple[int, int]:
    """``(rank, ties)``: a cut keeps the candidates of a higher rank, and the first ``ties`` of this rank.

    From the highest candidate down, each is kept before which less than ``target`` lies: in tokens if ``by_count``,
    else in weight.
    """
    values, weights, bins = found.values, found.weights, found.bins
    prefix, known = 0, 32  # the ranks' leading bits found so far, and how many bits are yet to be found
    before = 0.0
    for width in (11, 11, 10):
        known -= width
        last = (1 << width) - 1
        for b in range(last + 1):
            put_f64(bins, b, 0.0)
        for i in range(count):
            rank = _rank(get_f32(values, i))
            if rank >> (known + width) == prefix:
                b = (rank >> known) & last
                put_f64(bins, b, get_f64(bins, b) + (1.0 if by_count else get_f32(weights, i)))
        b = last
        while b >= 0 and before + get_f64(bins, b) < target:
            before += get_f64(bins, b)
            b -= 1
        if b < 0:
            return 0, count  # everything
        prefix = (prefix << width) | b
    ties = 0
    for i in range(count):
        if _rank(get_f32(values, i)) == prefix:
            if before >= target:
                break
            before += 1.0 if by_count else get_f32(weights, i)
            ties += 1
    return prefix, ties


@helper
def _keep(found: Candidates, count: int, bound: int, ties: int) -> int:
    """Keeps the candidates of a rank above ``bound``, and the first ``ties`` of rank ``bound``; their number."""
    values, weights, ids = found.values, found.weights, found.ids
    kept = 0
    for i in range(count):
        rank = _rank(get_f32(values, i))
        if rank == bound and ties > 0:
            ties -= 1
        elif rank <= bound:
            continue
        put_f32(values, kept, get_f32(values, i))
        put_f32(weights, kept, get_f32(weights, i))
        put_i32(ids, kept, get_i32(ids, i))
        kept += 1
    return kept


def uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    seeds, positions = np.ascontiguousarray(seed, np.int64), np.ascontiguousarray(position, np.int64)
    if seeds.shape != positions.shape or seeds.ndim != 1:
        raise ValueError(f"seeds of shape {seeds.shape} for positions of shape {positions.shape}")
    out = np.empty(len(seeds), np.float64)
    forbid_replay("uniform")  # a tape does not keep numpy's arrays
    _uniform(UniformCall(seeds.ctypes.data, positions.ctypes.data, len(seeds), out.ctypes.data))
    return out


class UniformCall(NamedTuple):
    seeds: int  # int64 [R]
    positions: int  # int64 [R]
    num_rows: int
    out: int  # float64 [R]


_GAMMA, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@entry
def _uniform(call: UniformCall) -> None:
    for i in range(call.num_rows):
        state = _mix(get_i64(call.seeds, i) + _GAMMA)
        state = _mix(state + (get_i64(call.positions, i) + 1) * _GAMMA)
        put_f64(call.out, i, _shifted(state, 11) * 2.0**-53)


@inlined
def _mix(z: int) -> int:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


@inlined
def _shifted(z: int, count: int) -> int:
    """The 64 bits shifted to the right, with zeros from the left."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    check_range("token", token_ids, logits.shape[1])
    chosen = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return (chosen.double() - _log_weights(logits)).float()


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    ids = torch.empty((num_rows, k), dtype=torch.int64)
    threads = team_size(num_rows * vocab_size, min_share=1 << 15)
    scratch_len = _scratch_len(vocab_size)
    scratch = torch.empty(threads * scratch_len, dtype=torch.float64)
    call = TopTokensCall(
        logits.data_ptr(), logits.stride(0), vocab_size, num_rows, k, ids.data_ptr(), scratch.data_ptr(), scratch_len
    )
    _top_tokens(call, threads=threads)
    # The rows are in the order of ids, so a stable sort leaves lower ids first among equals.
    ranked = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    values = ranked.values.double() - _log_weights(logits).unsqueeze(-1)
    return ids.gather(1, ranked.indices), values.float()


class TopTokensCall(NamedTuple):
    logits: int  # float32 [R, V]
    logits_step: int  # numbers from one row to the next
    vocab_size: int
    num_rows: int
    k: int
    ids: int  # int64 [R, k], written in the order of ids
    scratch: int  # float64 [threads, scratch_len]
    scratch_len: int


@entry
def _top_tokens(call: TopTokensCall) -> None:
    logits, step, vocab_size, num_rows, k = call.logits, call.logits_step, call.vocab_size, call.num_rows, call.k
    scratch = call.scratch + 8 * call.scratch_len * take_number(counters(call), THREAD)
    found = _candidates(scratch, vocab_size)
    row = take_number(counters(call), TASK)
    while row < num_rows:
        one = Row(logits + 4 * step * row, 0, vocab_size)
        best, _ = _highest(one)
        count = _gather(one, best, np.float32(1.0), _REACH, found)
        if count < k:
            # Tokens at minus infinity too, so that there are always k.
            for i in range(vocab_size):
                put_f32(found.values, i, get_f32(one.line, i))
                put_i32(found.ids, i, i)
            count = vocab_size
        if count > k:
            bound, ties = _find_cut(found, count, True, k)
            count = _keep(found, count, bound, ties)
        for i in range(k):
            put_i64(call.ids, row * k + i, get_i32(found.ids, i))
        row = take_number(counters(call), TASK)


def _log_weights(logits: Tensor) -> Tensor:
    """float64 [R]: log of the sum of exp over each row."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.float64)
    call = LogSumsCall(logits.data_ptr(), logits.stride(0), logits.shape[1], logits.shape[0], out.data_ptr())
    _log_sums(call, threads=team_size(logits.numel(), min_share=1 << 15))
    return out


class LogSumsCall(NamedTuple):
    logits: int  # float32 [R, V]
    logits_step: int  # numbers from one row to the next
    vocab_size: int
    num_rows: int
    out: int  # float64 [R]


@entry
def _log_sums(call: LogSumsCall) -> None:
    logits, step, vocab_size, num_rows, to = call.logits, call.logits_step, call.vocab_size, call.num_rows, call.out
    row = take_number(counters(call), TASK)
    while row < num_rows:
        one = Row(logits + 4 * step * row, 0, vocab_size)
        best, at = _highest(one)
        if at < 0:
            put_f64(to, row, -np.inf)
        else:
            put_f64(to, row, best + math.log(_total_weight(one, best, np.float32(1.0))))
        row = take_number(counters(call), TASK)
