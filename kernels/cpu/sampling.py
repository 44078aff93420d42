"""Cuts, draws and log-probabilities over rows of logits, one row a task. Never sorts a vocabulary.

What a bitmask forbids is read as minus infinity, sixteen tokens at a time, and where it forbids all of them nothing is
read: few tokens allowed are few tokens looked at.

Tokens far below the highest logit hardly ever take part, so the cuts look only at those within ``_REACH`` (divided by
the temperature) of it, the *candidates*, then farther, then at all, as far as it takes until they decide. Where a cut
falls is found by counting weight per leading bits of the logit, then per the next bits within the bin where it falls:
exact, in three passes over the candidates.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..batch import SampleBatch, Sampled
from .edits import check_range
from .entry import ARGS, TASK, THREAD, entry
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
_BINS = 2048


def sample(logits: Tensor, batch: SampleBatch, *, mask: Tensor | None = None, rows: Tensor | None = None) -> Sampled:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    logprobs = torch.empty(num_rows, dtype=torch.float32)
    floats = np.stack((batch.temperature, batch.top_p, batch.min_p)).astype(np.float32)  # [3, R]
    top_k = np.ascontiguousarray(batch.top_k, dtype=np.int32)
    draws = np.ascontiguousarray(batch.draw, dtype=np.float64)
    if not floats.shape[1] == len(top_k) == len(draws) == num_rows:
        raise ValueError(f"sampling parameters of {floats.shape[1]} rows for {num_rows} rows of logits")
    threads = team_size(num_rows * vocab_size, min_share=1 << 15)
    scratch_len = _scratch_len(vocab_size)
    scratch = torch.empty(threads * scratch_len, dtype=torch.float64)
    words = np.zeros(num_rows, dtype=np.int64)  # of each row where its mask lies; 0: it has none
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        masked = np.arange(len(mask)) if rows is None else rows.numpy()
        check_range("row", torch.from_numpy(masked), num_rows)
        words[masked] = mask.data_ptr() + 4 * mask.stride(0) * np.arange(len(mask))
    _sample(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        num_rows,
        floats.ctypes.data,
        top_k.ctypes.data,
        draws.ctypes.data,
        token_ids.data_ptr(),
        logprobs.data_ptr(),
        scratch.data_ptr(),
        scratch_len,
        words.ctypes.data,
        threads=threads,
    )
    return Sampled(token_ids, logprobs)


def _scratch_len(vocab_size: int) -> int:
    """float64 words of one thread: bins, then logits, weights and ids of the candidates."""
    return _BINS + 3 * (vocab_size // 2 + 1)


@entry(ints=12)
def _sample(call: int) -> None:
    logits, step = get_i64(call, ARGS), get_i64(call, ARGS + 1)
    vocab_size, num_rows = get_i64(call, ARGS + 2), get_i64(call, ARGS + 3)
    floats, top_ks, draws = get_i64(call, ARGS + 4), get_i64(call, ARGS + 5), get_i64(call, ARGS + 6)
    token_ids, logprobs = get_i64(call, ARGS + 7), get_i64(call, ARGS + 8)
    masks = get_i64(call, ARGS + 11)
    bins = get_i64(call, ARGS + 9) + 8 * get_i64(call, ARGS + 10) * take_number(call, THREAD)
    values = bins + 8 * _BINS
    weights = values + 8 * (vocab_size // 2 + 1)
    ids = weights + 8 * (vocab_size // 2 + 1)
    row = take_number(call, TASK)
    while row < num_rows:
        line, words = logits + 4 * step * row, get_i64(masks, row)
        best, token = _highest(line, words, vocab_size)
        if token < 0:
            put_i64(token_ids, row, -1)
            put_f32(logprobs, row, _MINUS_INF)
            row = take_number(call, TASK)
            continue
        total = _total_weight(line, words, vocab_size, best, np.float32(1.0))
        log_total = math.log(total)
        temperature = get_f32(floats, row)
        if temperature > 0:
            inverse = min(np.float32(1.0) / temperature, _STEEPEST)
            if temperature != 1.0:
                total = _total_weight(line, words, vocab_size, best, inverse)
            top_p, min_p = get_f32(floats, num_rows + row), get_f32(floats, 2 * num_rows + row)
            top_k = get_i32(top_ks, row)
            if top_k < 1 or top_k > vocab_size:
                top_k = vocab_size
            if top_k == vocab_size and top_p >= 1 and min_p <= 0:
                token = _draw(line, words, vocab_size, best, inverse, get_f64(draws, row) * total)
            else:
                reach, count = _REACH, -1
                while count < 0:
                    count = _cut(
                        line,
                        words,
                        vocab_size,
                        best,
                        inverse,
                        total,
                        top_k,
                        top_p,
                        min_p,
                        bins,
                        values,
                        weights,
                        ids,
                        reach,
                    )
                    reach = _FAR_REACH if reach < _FAR_REACH else np.float32(np.inf)
                token = get_i32(ids, _draw_candidate(weights, count, get_f64(draws, row)))
        put_i64(token_ids, row, token)
        put_f32(logprobs, row, np.float32(get_f32(line, token) - best - log_total))
        row = take_number(call, TASK)


@njit(forceinline=True)
def _bits16(words: int, i: int) -> int:
    """Which of the 16 tokens from ``i`` on, a multiple of 16, are allowed."""
    return 0xFFFF if words == 0 else (get_i32(words, i >> 5) >> (i & 16)) & 0xFFFF


@njit(forceinline=True)
def _value(line: int, words: int, i: int) -> np.float32:
    if words != 0 and (get_i32(words, i >> 5) >> (i & 31)) & 1 == 0:
        return _MINUS_INF
    return get_f32(line, i)


@njit
def _highest(line: int, words: int, count: int) -> tuple[np.float32, int]:
    """The highest value and its first place; -1 where none is above minus infinity."""
    best, at = _MINUS_INF, -1
    bound, forbidden = splat16(best), splat16(_MINUS_INF)
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        bits = _bits16(words, i)
        if bits != 0:
            part = choose16(bits, load16_f32(line, i), forbidden)
            if above16(part, bound) != 0:
                best, at = highest16(part), i
                bound = splat16(best)
    if at >= 0:
        while _value(line, words, at) != best:
            at += 1
    for i in range(whole, count):
        if _value(line, words, i) > best:
            best, at = _value(line, words, i), i
    return best, at


@njit
def _total_weight(line: int, words: int, count: int, best: np.float32, inverse: np.float32) -> float:
    """The sum of exp((value - best) * inverse), in the order and rounding of ``_draw``."""
    top, factor, forbidden = splat16(best), splat16(inverse), splat16(_MINUS_INF)
    whole = count - count % LANES
    total = 0.0
    for i in range(0, whole, LANES):
        bits = _bits16(words, i)
        if bits != 0:
            total += sum16(exp16((choose16(bits, load16_f32(line, i), forbidden) - top) * factor))
    for i in range(whole, count):
        total += exp((_value(line, words, i) - best) * inverse)
    return total


@njit
def _draw(line: int, words: int, count: int, best: np.float32, inverse: np.float32, target: float) -> int:
    """The first token at which the weight so far exceeds ``target``."""
    top, factor, forbidden = splat16(best), splat16(inverse), splat16(_MINUS_INF)
    whole = count - count % LANES
    before, last = 0.0, 0
    i = 0
    while i < whole:
        bits = _bits16(words, i)
        if bits != 0:
            after = before + sum16(exp16((choose16(bits, load16_f32(line, i), forbidden) - top) * factor))
            if after > target:
                break
            before = after
        i += LANES
    # Lane by lane the sum may round differently and never get there: then it is the vector's last token.
    stop = i + LANES if i < whole else count
    while i < stop:
        weight = exp((_value(line, words, i) - best) * inverse)
        if weight > 0:
            last = i
            before += weight
            if before > target:
                return i
        i += 1
    if last == 0:
        # All weight lies before: the rounding of draw * total. The last token that has any.
        for j in range(count):
            if exp((_value(line, words, j) - best) * inverse) > 0:
                last = j
    return last


@njit
def _draw_candidate(weights: int, count: int, draw: float) -> int:
    total = 0.0
    for i in range(count):
        total += get_f32(weights, i)
    target, so_far = draw * total, 0.0
    for i in range(count):
        so_far += get_f32(weights, i)
        if so_far > target:
            return i
    return count - 1


@njit
def _cut(
    line: int,
    words: int,
    vocab_size: int,
    best: np.float32,
    inverse: np.float32,
    total: float,
    top_k: int,
    top_p: np.float32,
    min_p: np.float32,
    bins: int,
    values: int,
    weights: int,
    ids: int,
    reach: np.float32,
) -> int:
    """What the cuts keep is left in ``weights`` and ``ids``, in the order of ids; -1: the candidates do not decide."""
    count = _gather(line, words, vocab_size, best, inverse, reach, values, weights, ids)
    all_here = reach == np.inf
    if top_k < vocab_size:
        if count < top_k and not all_here:
            return -1
        if count > top_k:
            _keep(values, weights, ids, count, *_find_cut(values, weights, count, bins, True, top_k))
            count = top_k
        total = 0.0
        for i in range(count):
            total += get_f32(weights, i)
        all_here = True
    if top_p < 1:
        target, held = float(top_p) * total, 0.0
        for i in range(count):
            held += get_f32(weights, i)
        if held < target and not all_here:
            return -1
        bound, ties = _find_cut(values, weights, count, bins, False, target)
        count = _keep(values, weights, ids, count, bound, ties)
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


@njit
def _gather(
    line: int,
    words: int,
    vocab_size: int,
    best: np.float32,
    inverse: np.float32,
    reach: np.float32,
    values: int,
    weights: int,
    ids: int,
) -> int:
    """The candidates: tokens with (best - value) * inverse < reach; where that is infinite, all not forbidden."""
    top, factor, least = splat16(best), splat16(inverse), splat16(-reach)
    forbidden = splat16(_MINUS_INF)
    whole = vocab_size - vocab_size % LANES
    count = 0
    for i in range(0, whole, LANES):
        bits = _bits16(words, i)
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
        away = (_value(line, words, i) - best) * inverse
        if away > -reach:
            put_f32(values, count, get_f32(line, i))
            put_f32(weights, count, exp(away))
            put_i32(ids, count, i)
            count += 1
    return count


@njit(forceinline=True)
def _rank(value: np.float32) -> int:
    """An integer of 32 bits that orders as the float does."""
    bits = bits_of(value + np.float32(0.0))  # minus zero becomes zero
    return bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000


@njit
def _find_cut(values: int, weights: int, count: int, bins: int, by_count: bool, target: float) -> tuple[int, int]:
    """With the candidates from the highest down, those before which less than ``target`` lies are kept: which are they?

    Answers (rank, ties): those of a higher rank, and the first ``ties`` of this rank.
    """
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


@njit
def _keep(values: int, weights: int, ids: int, count: int, bound: int, ties: int) -> int:
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
    _top_tokens(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        num_rows,
        k,
        ids.data_ptr(),
        scratch.data_ptr(),
        scratch_len,
        threads=threads,
    )
    # The rows are in the order of ids, so a stable sort leaves lower ids first among equals.
    ranked = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    values = ranked.values.double() - _log_weights(logits).unsqueeze(-1)
    return ids.gather(1, ranked.indices), values.float()


@entry(ints=8)
def _top_tokens(call: int) -> None:
    logits, step = get_i64(call, ARGS), get_i64(call, ARGS + 1)
    vocab_size, num_rows, k = get_i64(call, ARGS + 2), get_i64(call, ARGS + 3), get_i64(call, ARGS + 4)
    to = get_i64(call, ARGS + 5)
    bins = get_i64(call, ARGS + 6) + 8 * get_i64(call, ARGS + 7) * take_number(call, THREAD)
    values = bins + 8 * _BINS
    weights = values + 8 * (vocab_size // 2 + 1)
    ids = weights + 8 * (vocab_size // 2 + 1)
    row = take_number(call, TASK)
    while row < num_rows:
        line = logits + 4 * step * row
        best, _ = _highest(line, 0, vocab_size)
        count = _gather(line, 0, vocab_size, best, np.float32(1.0), _REACH, values, weights, ids)
        if count < k:
            # Forbidden tokens too, so that there are always k.
            for i in range(vocab_size):
                put_f32(values, i, get_f32(line, i))
                put_i32(ids, i, i)
            count = vocab_size
        if count > k:
            bound, ties = _find_cut(values, weights, count, bins, True, k)
            count = _keep(values, weights, ids, count, bound, ties)
        for i in range(k):
            put_i64(to, row * k + i, get_i32(ids, i))
        row = take_number(call, TASK)


def _log_weights(logits: Tensor) -> Tensor:
    """float64 [R]: log of the sum of exp over each row."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.float64)
    _log_sums(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        logits.shape[0],
        out.data_ptr(),
        threads=team_size(logits.numel(), min_share=1 << 15),
    )
    return out


@entry(ints=5)
def _log_sums(call: int) -> None:
    logits, step, vocab_size = get_i64(call, ARGS), get_i64(call, ARGS + 1), get_i64(call, ARGS + 2)
    num_rows, to = get_i64(call, ARGS + 3), get_i64(call, ARGS + 4)
    row = take_number(call, TASK)
    while row < num_rows:
        line = logits + 4 * step * row
        best, at = _highest(line, 0, vocab_size)
        if at < 0:
            put_f64(to, row, -np.inf)
        else:
            put_f64(to, row, best + math.log(_total_weight(line, 0, vocab_size, best, np.float32(1.0))))
        row = take_number(call, TASK)
