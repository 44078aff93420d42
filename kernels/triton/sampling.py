"""Cuts and draws over rows of logits, one program for each row, without sorting and without waiting for the device.

A cut is a threshold on the logits' bits in sorted order. One pass weighs 16 pivots, which settles 4 of the 32 bits, so
top-k and top-p take eight passes each, and only for rows that use them. Without them there are three passes: highest
logit and normaliser, kept weight, place of the draw. After the first pass, a row is in the L2 cache.
The draw inverts the distribution at the row's uniform number, as on the CPU: a seed gives the same tokens on both.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import SampleBatch, Sampled
from .edits import upload

BLOCK = 1024  # smaller ones spill on sm_90
NUM_WARPS = 8


@triton.jit
def _key(logit):
    """int32 keys that order as the logits do."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(line, vocab_size, highest, temperature, goal, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """``(cut, above)``: the highest key with ``goal`` weight, or tokens, at or above it, and how much lies above."""
    pivot = tl.arange(0, 16).to(tl.int64)
    base = tl.full([], -(1 << 31), tl.int64)
    above = tl.full([], 0.0, tl.float64)
    for round_ in range(8):
        width = (tl.full([], 1, tl.int64) << (28 - 4 * round_)).to(tl.int64)
        found = tl.zeros([16], dtype=tl.float64)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            logit = tl.load(line + token, mask=inside, other=float("-inf"))
            if BY_WEIGHT:
                each = tl.exp((logit - highest) / temperature)
            else:
                each = tl.where(inside, 1.0, 0.0)
            key = _key(logit).to(tl.int64)
            reached = key[:, None] >= (base + pivot * width)[None, :]
            found += tl.sum(tl.where(reached, each[:, None], 0.0), 0).to(tl.float64)
        digit = tl.max(tl.where((found >= goal) | (pivot == 0), pivot, 0), 0)
        above = tl.where(digit < 15, tl.sum(tl.where(pivot == digit + 1, found, 0.0), 0), above)
        base = base + digit * width
    return base, above


@triton.jit
def sample_kernel(
    logits,
    parameters,  # float64 [5, R]: temperature, top_k, top_p, min_p, draw
    token_ids,
    logprobs,
    num_rows,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * logits_stride
    temperature = tl.load(parameters + row).to(tl.float32)
    top_k = tl.load(parameters + num_rows + row)
    top_p = tl.load(parameters + 2 * num_rows + row)
    min_p = tl.load(parameters + 3 * num_rows + row)
    draw = tl.load(parameters + 4 * num_rows + row)

    # The highest logit, its lowest token and the sum of exp(logit - highest), in one pass.
    highest = float("-inf")
    best = 0
    sums = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(line + token, mask=token < vocab_size, other=float("-inf"))
        top = tl.max(logit, 0)
        best = tl.where(top > highest, start + tl.argmax(logit, 0, tie_break_left=True), best)
        higher = tl.maximum(highest, top)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(highest - shift).to(tl.float64) + tl.sum(tl.exp(logit - shift), 0).to(tl.float64)
        highest = higher

    chosen = tl.where(highest == float("-inf"), -1, best)
    if (temperature > 0.0) & (highest > float("-inf")):
        cut = tl.full([], -(1 << 31), tl.int64)  # keys above it are kept, and of those equal to it the first `ties`
        ties = tl.full([], vocab_size, tl.float64)
        if (top_k > 0) & (top_k < vocab_size):
            cut, above = _threshold(line, vocab_size, highest, temperature, top_k, False, BLOCK)
            ties = top_k - above
        if top_p < 1.0:
            kept = tl.full([], 0.0, tl.float64)
            equal = tl.full([], 0.0, tl.float64)
            each = tl.full([], 0.0, tl.float64)
            for start in range(0, vocab_size, BLOCK):
                token = start + tl.arange(0, BLOCK)
                logit = tl.load(line + token, mask=token < vocab_size, other=float("-inf"))
                weight = tl.exp((logit - highest) / temperature)
                key = _key(logit).to(tl.int64)
                kept += tl.sum(tl.where(key > cut, weight, 0.0), 0).to(tl.float64)
                equal += tl.sum(tl.where((key == cut) & (token < vocab_size), 1.0, 0.0), 0).to(tl.float64)
                each = tl.maximum(each, tl.max(tl.where(key == cut, weight, 0.0), 0).to(tl.float64))
            goal = top_p * (kept + tl.minimum(ties, equal) * each)
            nucleus, above = _threshold(line, vocab_size, highest, temperature, goal, True, BLOCK)
            each = tl.full([], 0.0, tl.float64)
            for start in range(0, vocab_size, BLOCK):
                token = start + tl.arange(0, BLOCK)
                logit = tl.load(line + token, mask=token < vocab_size, other=float("-inf"))
                weight = tl.exp((logit - highest) / temperature)
                each = tl.maximum(
                    each, tl.max(tl.where(_key(logit).to(tl.int64) == nucleus, weight, 0.0), 0).to(tl.float64)
                )
            room = tl.where(each > 0.0, tl.maximum(tl.ceil((goal - above) / tl.where(each > 0.0, each, 1.0)), 1.0), 1.0)
            ties = tl.where(nucleus > cut, room, tl.where(nucleus == cut, tl.minimum(room, ties), ties))
            cut = tl.maximum(nucleus, cut)

        total = tl.full([], 0.0, tl.float64)
        for _ in range(2):  # the kept weight; then where the draw falls
            goal = draw * total
            run = tl.full([], 0.0, tl.float64)
            equal_before = 0
            found = -1
            last = best
            for start in range(0, vocab_size, BLOCK):
                token = start + tl.arange(0, BLOCK)
                inside = token < vocab_size
                logit = tl.load(line + token, mask=inside, other=float("-inf"))
                weight = tl.exp((logit - highest) / temperature)
                key = _key(logit).to(tl.int64)
                is_equal = ((key == cut) & inside).to(tl.int32)
                rank = equal_before + tl.cumsum(is_equal, 0) - is_equal
                kept = inside & ((key > cut) | ((is_equal == 1) & (rank.to(tl.float64) < ties)))
                kept = kept & (weight.to(tl.float64) >= min_p) & (weight > 0.0)
                mass = tl.where(kept, weight, 0.0).to(tl.float64)
                so_far = run + tl.cumsum(mass, 0)
                first = tl.min(tl.where(kept & (so_far > goal), token, vocab_size), 0)
                found = tl.where((found < 0) & (first < vocab_size), first, found)
                last = tl.maximum(last, tl.max(tl.where(kept, token, -1), 0))
                run = run + tl.sum(mass, 0)
                equal_before = equal_before + tl.sum(is_equal, 0)
            total = run
            chosen = tl.where(found >= 0, found, last)

    logit = tl.load(line + chosen, mask=chosen >= 0, other=float("-inf"))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    normal = tl.log(tl.where(sums > 0.0, sums, 1.0).to(tl.float32))
    tl.store(token_ids + row, chosen.to(tl.int64))
    tl.store(logprobs + row, tl.where(chosen >= 0, logit - shift - normal, float("-inf")))


def sample(logits: Tensor, batch: SampleBatch) -> Sampled:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.draw)
    if any(len(column) != num_rows for column in columns):
        raise ValueError(f"sampling parameters of {len(batch.draw)} rows for {num_rows} rows of logits")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            logits,
            upload(np.stack([np.asarray(column, np.float64) for column in columns]), logits.device),
            token_ids,
            logprobs,
            num_rows,
            vocab_size,
            logits.stride(0),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return Sampled(token_ids, logprobs)
