"""Cuts and draws over rows of logits, without sorting and without waiting for the device. Masks are read, not applied.

``part_kernel`` reads the logits once, a part of a row for each program: the part's highest logit, its weight, and the
highest logit of each group of 32 tokens. ``draw_kernel`` has a program for each row, which joins the parts. Without
cuts the draw falls into one part, and only that part is read again. With cuts the groups' highest logits tell which
logits are *candidates*: top-k keeps none below the k-th highest of them, and top-p's cut is guessed from their weight
and checked. Candidates, a few logits of a row, are listed. A cut is a threshold on the logits' bits in sorted order,
found by passes over the list; each pass weighs a few pivots. If the list overflows or the guess fails, the passes read
the whole row.
The draw inverts the distribution at the row's uniform number, as on the CPU: a seed gives the same tokens on both.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import SampleBatch, Sampled
from .config import DrawConfig, config_of
from .edits import upload

_GROUP = tl.constexpr(32)  # a word of the mask
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _key(logit):
    """int32 keys in the order of the logits."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """The logit of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scale(temperature):
    """A weight is 2 ** (scale * (logit - highest)); finite, as the highest logit's weight is 1 at any temperature."""
    return tl.minimum(_LOG2_E / temperature, 3e38)


@triton.jit
def _line_of(lines, row):
    """The mask's line of a row; -1: it has none."""
    line = row
    if lines is not None:
        line = tl.load(lines + row).to(tl.int64)
    return line


@triton.jit
def _load(source, words, is_masked, token, inside, HAS_MASK: tl.constexpr):
    """The logits of ``token``, minus infinity where the mask forbids it."""
    if HAS_MASK:
        word = tl.load(words + token // 32, mask=inside & is_masked, other=-1)
        inside = inside & (((word >> (token % 32)) & 1) != 0)
    return tl.load(source + token, mask=inside, other=float("-inf"))


@triton.jit(do_not_specialize=["num_rows"])
def part_kernel(
    logits,
    mask,  # int32 [M, num_words], or None
    lines,  # int32 [R]: the mask's line of each row, -1: none; None: line r for row r
    parameters,  # float64 [5, R]: temperature, top_k, top_p, min_p, draw; None: all rows are greedy
    stats,  # float32 [R, 3, num_parts]: highest logit, sum of exp(logit - highest), the same at the row's temperature
    bests,  # int32 [R, num_parts]: the lowest token of the highest logit
    maxima,  # float32 [R, num_groups]: of rows with cuts; None: no row has cuts
    num_rows,
    vocab_size,
    num_words,
    logits_stride,
    num_parts,
    num_groups,
    PART: tl.constexpr,
):
    row = (tl.program_id(0) // num_parts).to(tl.int64)
    part = tl.program_id(0) % num_parts
    group = part * (PART // _GROUP) + tl.arange(0, PART // _GROUP)
    bit = tl.arange(0, _GROUP)[None, :]
    token = group[:, None] * _GROUP + bit
    inside = token < vocab_size
    if mask is not None:
        at_line = _line_of(lines, row)
        word = tl.load(mask + at_line * num_words + group, mask=(group < num_groups) & (at_line >= 0), other=-1)
        inside = inside & (word != 0)[:, None]
    logit = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf"))
    if mask is not None:
        logit = tl.where(((word[:, None] >> bit) & 1) != 0, logit, float("-inf"))

    if maxima is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if _has_cuts(parameters, row, num_rows, vocab_size):
            tl.store(maxima + row * num_groups + group, tl.max(logit, 1), mask=group < num_groups)
    flat = tl.reshape(logit, [PART], can_reorder=True)  # in any order, so a logit's token is not known
    highest = tl.max(flat, 0)
    best = tl.min(tl.min(tl.where(logit == highest, token, vocab_size), 1), 0)
    below = flat - tl.where(highest == float("-inf"), 0.0, highest)
    at = stats + row * 3 * num_parts + part
    tl.store(at, highest)
    tl.store(at + num_parts, tl.sum(tl.exp2(below * _LOG2_E), 0))
    tl.store(bests + row * num_parts + part, best)
    if parameters is not None:
        temperature = tl.load(parameters + row).to(tl.float32)
        if temperature > 0.0:
            tl.store(at + 2 * num_parts, tl.sum(tl.exp2(below * _scale(temperature)), 0))


@triton.jit
def _has_cuts(parameters, row, num_rows, vocab_size):
    temperature = tl.load(parameters + row).to(tl.float32)
    top_k = tl.load(parameters + num_rows + row)
    top_p = tl.load(parameters + 2 * num_rows + row)
    min_p = tl.load(parameters + 3 * num_rows + row)
    return (temperature > 0.0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _threshold(
    source,
    words,
    is_masked,
    count,
    low,
    highest,
    scale,
    goal,
    BY_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """``(cut, above)``: the highest key with ``goal`` weight, or items, at or above it, and how much lies above.

    ``low``: a key with that much at or above it. ``highest``: the highest logit.
    """
    low = low.to(tl.int64)
    high = _key(highest).to(tl.int64) + 1
    above = tl.full([], 0.0, tl.float64)
    place = tl.arange(0, PIVOTS) + 1
    while high - low > 1:
        pivot = tl.minimum(low + place * ((high - low + PIVOTS) // (PIVOTS + 1)), high)
        narrow = pivot.to(tl.int32)
        reached = tl.zeros([BLOCK, PIVOTS], dtype=tl.float32)
        for start in range(0, count, BLOCK):
            item = start + tl.arange(0, BLOCK)
            inside = item < count
            logit = _load(source, words, is_masked, item, inside, HAS_MASK)
            if BY_WEIGHT:
                each = tl.exp2((logit - highest) * scale)
            else:
                each = tl.where(inside, 1.0, 0.0)
            reached += tl.where(_key(logit)[:, None] >= narrow[None, :], each[:, None], 0.0)
        found = tl.sum(reached, 0).to(tl.float64)
        is_low = (found >= goal) & (pivot < high)
        next_high = tl.min(tl.where(is_low, high, pivot), 0)
        low = tl.max(tl.where(is_low, pivot, low), 0)
        above = tl.where(next_high < high, tl.max(tl.where(pivot == next_high, found, 0.0), 0), above)
        high = next_high
    return low, above


@triton.jit(do_not_specialize=["num_rows"])
def draw_kernel(
    logits,
    mask,
    lines,
    parameters,
    stats,
    bests,
    maxima,
    listed_groups,  # int32 [R, num_groups]: scratch of rows with cuts
    listed_tokens,  # int32 [R, CAPACITY]
    listed_logits,  # float32 [R, CAPACITY]
    token_ids,
    logprobs,
    num_rows,
    vocab_size,
    num_words,
    logits_stride,
    num_parts,
    num_groups,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # at least num_parts, a power of two
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * logits_stride
    HAS_MASK: tl.constexpr = mask is not None
    words = line  # not read without a mask
    is_masked = row < 0
    if HAS_MASK:
        at_line = _line_of(lines, row)
        words = mask + at_line * num_words
        is_masked = at_line >= 0

    part = tl.arange(0, PARTS)
    at = stats + row * 3 * num_parts + part
    high = tl.load(at, mask=part < num_parts, other=float("-inf"))
    highest = tl.max(high, 0)
    bests += row * num_parts
    best = tl.min(tl.where(high == highest, tl.load(bests + part, mask=part < num_parts, other=0), vocab_size), 0)
    best = tl.minimum(best, vocab_size - 1)  # a row of NaN has no highest logit
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.load(at + num_parts, mask=part < num_parts, other=0.0)
    sums = tl.sum((sums * tl.exp2((high - shift) * _LOG2_E)).to(tl.float64), 0)
    chosen = tl.where(highest == float("-inf"), -1, best)

    if parameters is not None:
        temperature = tl.load(parameters + row).to(tl.float32)
        if (temperature > 0.0) & (highest > float("-inf")):
            scale = _scale(temperature)
            draw = tl.load(parameters + 4 * num_rows + row)
            unit = tl.exp2((high - highest) * scale).to(tl.float64)
            weight = tl.load(at + 2 * num_parts, mask=part < num_parts, other=0.0).to(tl.float64) * unit
            is_cut = False
            if maxima is not None:
                is_cut = _has_cuts(parameters, row, num_rows, vocab_size)
            if is_cut:
                if maxima is not None:
                    chosen = _cut_and_draw(
                        line,
                        words,
                        is_masked,
                        parameters + row,
                        maxima + row * num_groups,
                        listed_groups + row * num_groups,
                        listed_tokens + row * CAPACITY,
                        listed_logits + row * CAPACITY,
                        num_rows,
                        vocab_size,
                        num_groups,
                        highest,
                        best,
                        tl.sum(weight, 0),
                        scale,
                        draw,
                        HAS_MASK,
                        BLOCK,
                        PIVOTS,
                        CAPACITY,
                    )
            else:
                # The part in which the draw falls, then the token in it.
                so_far = tl.cumsum(weight, 0)
                goal = draw * tl.sum(weight, 0)
                at_part = tl.min(tl.where((weight > 0.0) & (so_far > goal), part, PARTS), 0)
                at_part = tl.where(at_part < PARTS, at_part, tl.max(tl.where(weight > 0.0, part, 0), 0))
                is_it = part == at_part
                before = tl.sum(tl.where(is_it, so_far - weight, 0.0), 0)
                goal = (goal - before) / tl.sum(tl.where(is_it, unit, 0.0), 0)
                part_highest = tl.max(tl.where(is_it, high, float("-inf")), 0)
                token = at_part * PART + tl.arange(0, PART)
                logit = _load(line, words, is_masked, token, token < vocab_size, HAS_MASK)
                each = tl.exp2((logit - part_highest) * scale).to(tl.float64)
                past = (each > 0.0) & (tl.cumsum(each, 0) > goal)
                first = tl.min(tl.where(past, token, vocab_size), 0)
                last = tl.max(tl.where(each > 0.0, token, -1), 0)
                chosen = tl.where(first < vocab_size, first, tl.where(last >= 0, last, best))

    logit = tl.load(line + chosen, mask=chosen >= 0, other=float("-inf"))
    normal = tl.log(tl.where(sums > 0.0, sums, 1.0).to(tl.float32))
    tl.store(token_ids + row, chosen.to(tl.int64))
    tl.store(logprobs + row, tl.where(chosen >= 0, logit - shift - normal, float("-inf")))


@triton.jit
def _cut_and_draw(
    line,
    words,
    is_masked,
    parameters,
    maxima,
    listed_groups,
    listed_tokens,
    listed_logits,
    num_rows,
    vocab_size,
    num_groups,
    highest,
    best,
    weight_of_all,
    scale,
    draw,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The token of a row with cuts."""
    top_k = tl.load(parameters + num_rows)
    top_p = tl.load(parameters + 2 * num_rows)
    min_p = tl.load(parameters + 3 * num_rows)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    needed = tl.where(has_top_k | (top_p >= 1.0), 0.0, top_p * weight_of_all)  # the candidates' least weight

    # Candidates are the logits from `low` on.
    low = highest + (tl.log2(tl.maximum(min_p, 1e-37).to(tl.float32)) - 0.01) / scale
    lowest = tl.full([], _LOWEST, tl.int64)
    if has_top_k:
        reached, _ = _threshold(
            maxima, maxima, False, num_groups, lowest, highest, scale, top_k, False, False, BLOCK, PIVOTS
        )
        low = _logit(reached.to(tl.int32))
        low = tl.where(top_k > num_groups, float("-inf"), low)
    elif top_p < 1.0:
        weight = tl.full([], 0.0, tl.float64)
        for start in range(0, num_groups, BLOCK):
            group = start + tl.arange(0, BLOCK)
            top = tl.load(maxima + group, mask=group < num_groups, other=float("-inf"))
            weight += tl.sum(tl.exp2((top - highest) * scale), 0).to(tl.float64)
        goal = tl.minimum(needed, (0.75 + 0.25 * top_p) * weight)
        reached, _ = _threshold(
            maxima, maxima, False, num_groups, lowest, highest, scale, goal, True, False, BLOCK, PIVOTS
        )
        low = _logit(reached.to(tl.int32))

    num_listed = 0
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        top = tl.load(maxima + group, mask=group < num_groups, other=float("-inf"))
        is_listed = ((top >= low) & (top > float("-inf"))).to(tl.int32)
        place = num_listed + tl.cumsum(is_listed, 0) - is_listed
        tl.store(listed_groups + place, group, mask=is_listed == 1)
        num_listed += tl.sum(is_listed, 0)
    tl.debug_barrier()
    count = 0
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, num_listed * _GROUP, BLOCK):
        item = start + tl.arange(0, BLOCK)
        group = tl.load(listed_groups + item // _GROUP, mask=item < num_listed * _GROUP, other=0)
        token = group * _GROUP + item % _GROUP
        logit = _load(line, words, is_masked, token, (item < num_listed * _GROUP) & (token < vocab_size), HAS_MASK)
        is_listed = ((logit >= low) & (logit > float("-inf"))).to(tl.int32)
        place = count + tl.cumsum(is_listed, 0) - is_listed
        tl.store(listed_tokens + place, token, mask=(is_listed == 1) & (place < CAPACITY))
        tl.store(listed_logits + place, logit, mask=(is_listed == 1) & (place < CAPACITY))
        mass += tl.sum(tl.where(is_listed == 1, tl.exp2((logit - highest) * scale), 0.0), 0).to(tl.float64)
        count += tl.sum(is_listed, 0)
    tl.debug_barrier()
    source = line
    low_key = lowest
    is_list = (count <= CAPACITY) & (mass >= needed)
    if is_list:
        source = listed_logits
        low_key = _key(low).to(tl.int64)
        is_masked = count < 0
    else:
        count = vocab_size

    cut = lowest  # keys above it are kept, and of those equal to it the first `ties`
    ties = tl.full([], 0.0, tl.float64) + count
    if has_top_k & (top_k < count):
        cut, above = _threshold(
            source, words, is_masked, count, low_key, highest, scale, top_k, False, HAS_MASK, BLOCK, PIVOTS
        )
        ties = top_k - above
    if top_p < 1.0:
        goal = top_p * weight_of_all
        if has_top_k:
            kept = tl.full([], 0.0, tl.float64)
            equal = tl.full([], 0.0, tl.float64)
            highest_equal = tl.full([], 0.0, tl.float64)
            for start in range(0, count, BLOCK):
                item = start + tl.arange(0, BLOCK)
                logit = _load(source, words, is_masked, item, item < count, HAS_MASK)
                weight = tl.exp2((logit - highest) * scale)
                key = _key(logit)
                kept += tl.sum(tl.where(key > cut, weight, 0.0), 0).to(tl.float64)
                equal += tl.sum(tl.where((key == cut) & (item < count), 1.0, 0.0), 0).to(tl.float64)
                highest_equal = tl.maximum(highest_equal, tl.max(tl.where(key == cut, weight, 0.0), 0).to(tl.float64))
            goal = top_p * (kept + tl.minimum(ties, equal) * highest_equal)
        nucleus, above = _threshold(
            source,
            words,
            is_masked,
            count,
            tl.maximum(low_key, cut),
            highest,
            scale,
            goal,
            True,
            HAS_MASK,
            BLOCK,
            PIVOTS,
        )
        one = tl.exp2((_logit(nucleus.to(tl.int32)) - highest) * scale).to(tl.float64)
        room = tl.where(one > 0.0, tl.maximum(tl.ceil((goal - above) / tl.where(one > 0.0, one, 1.0)), 1.0), 1.0)
        ties = tl.where(nucleus > cut, room, tl.where(nucleus == cut, tl.minimum(room, ties), ties))
        cut = tl.maximum(nucleus, cut)

    total = tl.full([], 0.0, tl.float64)
    found = -1
    last = -1
    for _ in range(2):  # the kept weight; then where the draw falls
        goal = draw * total
        run = tl.full([], 0.0, tl.float64)
        equal_before = 0
        found = -1
        for start in range(0, count, BLOCK):
            item = start + tl.arange(0, BLOCK)
            inside = item < count
            logit = _load(source, words, is_masked, item, inside, HAS_MASK)
            weight = tl.exp2((logit - highest) * scale)
            key = _key(logit)
            is_equal = ((key == cut) & inside).to(tl.int32)
            rank = equal_before + tl.cumsum(is_equal, 0) - is_equal
            kept = inside & ((key > cut) | ((is_equal == 1) & (rank.to(tl.float64) < ties)))
            kept = kept & (weight.to(tl.float64) >= min_p) & (weight > 0.0)
            each = tl.where(kept, weight, 0.0).to(tl.float64)
            so_far = run + tl.cumsum(each, 0)
            first = tl.min(tl.where(kept & (so_far > goal), item, vocab_size), 0)
            found = tl.where((found < 0) & (first < vocab_size), first, found)
            last = tl.maximum(last, tl.max(tl.where(kept, item, -1), 0))
            run = run + tl.sum(each, 0)
            equal_before = equal_before + tl.sum(is_equal, 0)
        total = run
    found = tl.where(found >= 0, found, last)
    token = tl.load(listed_tokens + found, mask=is_list & (found >= 0), other=0)
    return tl.where(found < 0, best, tl.where(is_list, token, found))


def sample(
    logits: Tensor,
    batch: SampleBatch,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    ids: np.ndarray | None = None,
    config: DrawConfig | None = None,
) -> Sampled:
    num_rows, vocab_size = logits.shape
    if mask is not None and ids is not None:
        mask = mask[upload(ids, logits.device)]
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.draw)
    if any(len(column) != num_rows for column in columns):
        raise ValueError(f"sampling parameters of {len(batch.draw)} rows for {num_rows} rows of logits")
    parameters = None
    has_cuts = False
    if (is_drawn := batch.temperature > 0).any():
        parameters = upload(np.stack([np.asarray(column, np.float64) for column in columns]), logits.device)
        top_k, top_p, min_p = (np.asarray(column)[is_drawn] for column in (batch.top_k, batch.top_p, batch.min_p))
        has_cuts = bool((((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)).any())
    return draw(logits, parameters, has_cuts=has_cuts, mask=mask, rows=rows, config=config)


def draw(
    logits: Tensor,
    parameters: Tensor | None,
    *,
    has_cuts: bool,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    config: DrawConfig | None = None,
) -> Sampled:
    """As ``sample``. ``parameters`` float64 [5, R] on the device: temperature, top_k, top_p, min_p, draw; None: all
    rows are greedy. ``has_cuts``: whether a drawn row has top-k, top-p or min-p.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    device = logits.device
    config = config_of(device).draw if config is None else config
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return Sampled(token_ids, logprobs)
    lines = None
    if mask is not None:
        mask = mask.contiguous()
        if rows is not None:
            lines = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
            lines[rows] = torch.arange(len(rows), dtype=torch.int32, device=device)
    num_parts, num_groups = triton.cdiv(vocab_size, config.part_len), triton.cdiv(vocab_size, _GROUP.value)
    stats = torch.empty(num_rows, 3, num_parts, dtype=torch.float32, device=device)
    bests = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    maxima = listed_groups = listed_tokens = listed_logits = None
    if has_cuts:
        maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
        listed_groups = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
        listed_tokens = torch.empty(num_rows, config.capacity, dtype=torch.int32, device=device)
        listed_logits = torch.empty(num_rows, config.capacity, dtype=torch.float32, device=device)
    sizes = (num_rows, vocab_size, 0 if mask is None else mask.shape[1], logits.stride(0), num_parts, num_groups)
    inputs = (logits, mask, lines, parameters, stats, bests, maxima)
    part_kernel[(num_rows * num_parts,)](*inputs, *sizes, PART=config.part_len, num_warps=config.part_warps)
    draw_kernel[(num_rows,)](
        *inputs,
        listed_groups,
        listed_tokens,
        listed_logits,
        token_ids,
        logprobs,
        *sizes,
        PART=config.part_len,
        PARTS=triton.next_power_of_2(num_parts),
        BLOCK=config.block_len,
        PIVOTS=config.num_pivots,
        CAPACITY=config.capacity,
        num_warps=config.row_warps,
    )
    return Sampled(token_ids, logprobs)
