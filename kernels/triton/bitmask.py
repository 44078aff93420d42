"""Grammar masks, packed, applied to logits in place. Never reads a logit: forbidden ones are overwritten."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import config_of


@triton.jit
def apply_bitmask_kernel(logits, mask, rows, vocab_size, num_words, logits_stride, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    row = tl.load(rows + line).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(mask + line.to(tl.int64) * num_words + token // 32, mask=inside, other=-1)
    allowed = (word >> (token % 32)) & 1
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=inside & (allowed == 0))


def apply_bitmask(logits: Tensor, mask: Tensor, *, rows: Tensor | None = None) -> Tensor:
    """``mask`` int32 [M, W] for the rows ``rows`` int [M] of logits [R, V], or for the first M."""
    assert logits.stride(1) == 1, "a row of logits is dense"
    if rows is None:
        rows = torch.arange(mask.shape[0], device=logits.device)
    vocab_size = logits.shape[1]
    if mask.shape[0] and vocab_size:
        config = config_of(logits.device)
        grid = (mask.shape[0], triton.cdiv(vocab_size, config.elementwise_block))
        apply_bitmask_kernel[grid](
            logits,
            mask.contiguous(),
            rows,
            vocab_size,
            mask.shape[1],
            logits.stride(0),
            BLOCK=config.elementwise_block,
            num_warps=config.elementwise_warps,
        )
    return logits
