"""Grammar masks, biases and penalties on logits, in place.

Penalties count a row's tokens in a table with one word for each token of the vocabulary: how often it was generated,
and bit 30 if it occurs at all. The table is cleared, filled by atomics and read with the logits: 8 bytes for each token
of the vocabulary and penalised row, and 8 bytes for the logits.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import LogitEdits
from .config import BlockConfig, config_of

BLOCK = 1024
_SEEN = 1 << 30


@triton.jit
def apply_bitmask_kernel(logits, mask, rows, vocab_size, num_words, logits_stride, mask_stride, BLOCK: tl.constexpr):
    """A program has BLOCK / 32 words.

    It skips words that allow all of their tokens, and does not read the logits of words that allow none. The logits of
    all other words are written whole, four a store.
    """
    line = tl.program_id(0).to(tl.int64)
    row = line
    if rows is not None:
        row = tl.load(rows + line).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    word = tl.load(mask + line * mask_stride + group, mask=group < num_words, other=-1)[:, None]
    bit = tl.arange(0, 32)[None, :]
    token = group[:, None] * 32 + bit
    inside = token < vocab_size
    at = logits + row * logits_stride + token
    logit = tl.load(at, mask=inside & (word != 0) & (word != -1), other=float("-inf"))
    tl.store(at, tl.where(((word >> bit) & 1) != 0, logit, float("-inf")), mask=inside & (word != -1))


def apply_bitmask(
    logits: Tensor, mask: Tensor, *, rows: Tensor | None = None, config: BlockConfig | None = None
) -> Tensor:
    """``mask`` int32 [M, W] for the rows ``rows`` int [M] of logits [R, V], or for the first M."""
    assert logits.stride(1) == 1, "a row of logits is dense"
    vocab_size = logits.shape[1]
    if mask.shape[0] and vocab_size:
        mask = mask if mask.stride(1) == 1 else mask.contiguous()
        config = config_of(logits.device).bitmask if config is None else config
        grid = (mask.shape[0], triton.cdiv(vocab_size, config.block_len))
        apply_bitmask_kernel[grid](
            logits,
            mask,
            rows,
            vocab_size,
            mask.shape[1],
            logits.stride(0),
            mask.stride(0),
            BLOCK=config.block_len,
            num_warps=config.num_warps,
        )
    return logits


@triton.jit(do_not_specialize=["count"])
def add_bias_kernel(logits, rows, ids, values, count, logits_stride, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    at = tl.load(rows + entry, mask=inside, other=0) * logits_stride + tl.load(ids + entry, mask=inside, other=0)
    biased = tl.load(logits + at, mask=inside, other=0.0) + tl.load(values + entry, mask=inside, other=0.0)
    tl.store(logits + at, biased, mask=inside)


@triton.jit
def count_tokens_kernel(counts, ids, starts, prompt_lens, vocab_size, SEEN: tl.constexpr, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + line)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.load(starts + line + 1) - first
    token = tl.load(ids + first + place, mask=inside, other=0)
    generated = inside & (place >= tl.load(prompt_lens + line))
    tl.atomic_or(counts + line * vocab_size + token, SEEN, mask=inside)
    tl.atomic_add(counts + line * vocab_size + token, 1, mask=generated)


@triton.jit(do_not_specialize=["num_lines"])
def penalise_kernel(
    logits,
    counts,
    rows,
    penalties,  # float32 [3, P]: frequency, presence, repetition
    num_lines,
    vocab_size,
    logits_stride,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(counts + line * vocab_size + token, mask=token < vocab_size, other=0)
    seen = word != 0
    at = logits + tl.load(rows + line) * logits_stride + token
    logit = tl.load(at, mask=seen, other=0.0)
    frequency = tl.load(penalties + line)
    presence = tl.load(penalties + num_lines + line)
    repetition = tl.load(penalties + 2 * num_lines + line)
    times = (word & (SEEN - 1)).to(tl.float32)
    logit = tl.where(logit > 0.0, logit / repetition, logit * repetition)
    logit -= tl.where(times > 0.0, frequency * times + presence, 0.0)
    tl.store(at, logit, mask=seen)


def apply_edits(logits: Tensor, edits: LogitEdits) -> Tensor:
    assert logits.stride(1) == 1, "a row of logits is dense"
    vocab_size, device = logits.shape[1], logits.device
    for what, ids in (("bias of token", edits.bias_ids), ("penalty of token", edits.ids)):
        if len(ids) and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocab_size:
            raise ValueError(f"{what} {low if low < 0 else high}: must be between 0 and {vocab_size - 1}")
    if num_biases := len(edits.bias_rows):
        add_bias_kernel[(triton.cdiv(num_biases, BLOCK),)](
            logits,
            upload(edits.bias_rows, device),
            upload(edits.bias_ids, device),
            upload(edits.bias_values, device),
            num_biases,
            logits.stride(0),
            BLOCK=BLOCK,
        )
    longest = int(np.diff(edits.starts).max(initial=0))
    if longest:
        num_lines = len(edits.rows)
        counts = torch.zeros((num_lines, vocab_size), dtype=torch.int32, device=device)
        count_tokens_kernel[(num_lines, triton.cdiv(longest, BLOCK))](
            counts,
            upload(edits.ids, device),
            upload(edits.starts, device),
            upload(edits.prompt_lens, device),
            vocab_size,
            SEEN=_SEEN,
            BLOCK=BLOCK,
        )
        penalise_kernel[(num_lines, triton.cdiv(vocab_size, BLOCK))](
            logits,
            counts,
            upload(edits.rows, device),
            upload(np.stack((edits.frequency, edits.presence, edits.repetition)).astype(np.float32), device),
            num_lines,
            vocab_size,
            logits.stride(0),
            SEEN=_SEEN,
            BLOCK=BLOCK,
        )
    return logits


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, made before later work of the current stream. The host does not wait."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
