"""Blocks of any format as bytes in groups of 32: ``w = q * scale``, converted a cacheful at a time.

``q`` is int8 [N, K], ``scale`` float32 [N, K / 32]. Q8_0 is exact; formats of fewer bits lose almost nothing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit

from ...processor import num_cores
from .block_decoding import halves
from .quant_tensor import CHUNK, QuantTensor, format_of

GROUP_LEN = 32
_TINY = np.finfo(np.float32).tiny

Bytes32 = tuple[torch.Tensor, torch.Tensor]


def round_to_bytes(weight: QuantTensor) -> Bytes32:
    """Each group's scale is 1/127 of its greatest weight. Blocks that are such groups already come back exactly."""
    num_rows, row_len = weight.shape
    if weight.kind == "Q8_0":
        scale = torch.from_numpy(halves(weight.blocks.reshape(-1, weight.blocks.shape[-1]).numpy(), 0))
        q = weight.blocks[..., 2:].contiguous().view(torch.int8)
        return q.view(num_rows, row_len), scale.view(num_rows, row_len // GROUP_LEN)
    form = format_of(weight.kind)
    blocks = weight.blocks.reshape(-1, form.block_bytes).numpy()
    groups_a_block = form.block_len // GROUP_LEN
    q8 = np.empty((len(blocks) * groups_a_block, GROUP_LEN), dtype=np.int8)
    scales = np.empty(len(q8), dtype=np.float32)
    step = CHUNK // form.block_len

    def convert(first: int, last: int) -> None:
        floats = np.empty((step, form.block_len), dtype=np.float32)
        for at in range(first, last, step):
            end = min(at + step, last)
            part = floats[: end - at]
            form.decode(blocks[at:end], part)
            groups = slice(at * groups_a_block, end * groups_a_block)
            _round_groups(part.reshape(-1, GROUP_LEN), q8[groups], scales[groups])

    _share(convert, len(blocks), step)
    return torch.from_numpy(q8).view(num_rows, row_len), torch.from_numpy(scales).view(num_rows, row_len // GROUP_LEN)


def _share(convert: Callable[[int, int], None], count: int, step: int) -> None:
    """Calls ``convert(first, end)`` for parts of ``count`` items, one on each core: compiled loops hold no lock."""
    cores = num_cores()
    part = max(step, -(-count // cores))
    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(lambda first: convert(first, min(first + part, count)), range(0, count, part)))


@njit(nogil=True, cache=True)
def _round_groups(values: np.ndarray, q: np.ndarray, scale: np.ndarray) -> None:
    for group in range(values.shape[0]):
        greatest = np.float32(0.0)
        for i in range(GROUP_LEN):
            greatest = max(greatest, abs(values[group, i]))
        step = greatest / np.float32(127.0)
        scale[group] = step
        step = max(step, _TINY)
        for i in range(GROUP_LEN):
            q[group, i] = np.int8(np.rint(values[group, i] / step))
