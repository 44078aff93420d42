"""From logits to tokens: bitmask, biases and penalties, cuts and the draw.

Logits are float32 [R, V]. The order is apply_bitmask, apply_edits, sample. All but sample write
into the logits. Where few tokens are allowed, giving the mask to sample is cheaper.
"""

import numpy as np
import torch
from torch import Tensor

from .backend import backend_of
from .batch import SampleBatch, Sampled
from .cpu import sampling as cpu_sampling


def apply_bitmask(logits: Tensor, mask: Tensor | np.ndarray, *, rows: Tensor | None = None) -> Tensor:
    """Sets tokens whose bit is 0 to minus infinity, in place, and returns the logits.

    Bit ``t & 31`` of word ``t >> 5`` is token t. Row m of ``mask`` (32-bit words, [M, W]) belongs to row ``rows[m]`` of
    the logits (int64 [M]), or to row m.
    """
    return backend_of(logits).apply_bitmask(logits, _words_of(logits, mask, rows), rows=rows)


def sample(
    logits: Tensor,
    batch: SampleBatch,
    *,
    mask: Tensor | np.ndarray | None = None,
    rows: Tensor | None = None,
    ids: np.ndarray | None = None,
) -> Sampled:
    """One token per row, which depends on that row's logits and parameters alone.

    ``mask`` and ``rows`` are as for ``apply_bitmask``, or row ``rows[m]`` has the mask ``ids[m]`` (int64 [M]); the
    logits may be changed in place.

    temperature 0:  the highest logit, the lowest id among equals. Else, with w = exp((logit - highest) / temperature)
    and tokens ordered by w, lower ids first among equals:
    top_k:  keep the first top_k
    top_p:  of those, keep a token while the tokens before it have less than top_p of their weight (so at least one)
    min_p:  of those, keep w >= min_p * the highest w
    draw:   the first token, in the order of ids, at which the kept weight so far exceeds draw * all the kept weight
    """
    backend = backend_of(logits)
    if mask is None:
        return backend.sample(logits, batch)
    words = _words_of(logits, mask, rows, ids)
    if backend.sample_masked is not None:
        return backend.sample_masked(logits, batch, mask=words, rows=rows, ids=ids)
    words = words if ids is None else words[torch.from_numpy(ids).to(words.device)]
    return backend.sample(backend.apply_bitmask(logits, words, rows=rows), batch)


def _words_of(logits: Tensor, mask: Tensor | np.ndarray, rows: Tensor | None, ids: np.ndarray | None = None) -> Tensor:
    """The mask as int32 on the logits' device; raises ValueError if its shape does not fit."""
    words = torch.from_numpy(mask.view(np.int32)) if isinstance(mask, np.ndarray) else mask
    if words.dtype != torch.int32:
        words = words.view(torch.int32)
    num_words = (logits.shape[-1] + 31) // 32
    if words.ndim != 2 or words.shape[1] < num_words:
        raise ValueError(
            f"bitmask of shape {tuple(words.shape)}: {logits.shape[-1]} tokens need {num_words} words a row"
        )
    num_rows = logits.shape[0] if rows is None else rows.shape[0]
    num_masks = words.shape[0] if ids is None else len(ids)
    if num_masks != num_rows:
        raise ValueError(f"bitmask of {num_masks} rows for {num_rows} rows of logits")
    if ids is not None and num_masks and not 0 <= ids.min() <= ids.max() < words.shape[0]:
        raise ValueError(f"mask {ids.max() if ids.min() >= 0 else ids.min()} of {words.shape[0]} masks")
    return words.to(logits.device)


def uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float64 [R] in [0, 1): the draw of each seed and position, both int64 [R], independent of the batch.

    Two rounds of the splitmix64 finaliser (Steele, Lea and Flood 2014), one keyed by the seed, one by the position.
    """
    return cpu_sampling.uniform(seed, position)  # the host's, whatever the device
