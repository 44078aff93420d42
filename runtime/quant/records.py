"""ggml's blocks of 4 bits as the records that the CPU's products of bytes read, in one pass over the file's bytes.

``kernels.cpu.packing`` describes the records, and makes the same ones of unpacked groups. A record has the nibbles of
32 weights in the order of a ``Q4_0`` block, those of 16 outputs interleaved by words: nothing is unpacked here.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from ...kernels.cpu.packing import GROUP_LEN, record_len
from ...kernels.linear import BLOCK_LEN
from ...processor import num_cores
from .block_decoding import Array, compiled, halves, k_scales
from .group32 import GROUP32_KINDS
from .quant_tensor import QuantTensor

_CHUNK = 1 << 20  # weights packed at a time by a thread
_STARTS = {"Q4_0": 2, "Q4_1": 4, "Q4_K": 16}  # the byte of a block at which its nibbles begin
_RECORD = record_len(4)


def pack_records(weights: Sequence[QuantTensor], *, gain: float = 1.0) -> torch.Tensor | None:
    """uint8 [blocks of 16 outputs, groups, 320]: ``packing.pack_int4`` of the weights, one below the other, times
    ``gain``. None where they are no blocks of 4 bits, cut a block of 16 outputs, or have scales that float16 does not
    hold.
    """
    if not all(weight.kind in GROUP32_KINDS for weight in weights):
        return None
    if any(weight.shape[0] % BLOCK_LEN for weight in weights[:-1]):
        return None
    num_rows, num_groups = sum(weight.shape[0] for weight in weights), weights[0].shape[1] // GROUP_LEN
    out = torch.empty((-(-num_rows // BLOCK_LEN), num_groups, _RECORD), dtype=torch.uint8)
    records = out.numpy().view(np.uint16)
    step = max(1, _CHUNK // (BLOCK_LEN * num_groups * GROUP_LEN)) * BLOCK_LEN
    jobs: list[tuple[str, Array, Array]] = []
    start = 0
    for weight in weights:
        blocks = weight.blocks.numpy()
        for first in range(0, len(blocks), step):
            rows = np.ascontiguousarray(blocks[first : first + step])
            jobs.append((weight.kind, rows, records[(start + first) // BLOCK_LEN :][: -(-len(rows) // BLOCK_LEN)]))
        start += len(blocks)
    with ThreadPoolExecutor(num_cores()) as threads:
        fits = list(threads.map(lambda job: _pack(*job, gain=gain), jobs))
    return out if all(fits) else None


def _pack(kind: str, blocks: Array, records: Array, *, gain: float) -> bool:
    """``blocks`` uint8 [N, blocks of a row, bytes]; False where a factor is too large for float16."""
    num_rows = len(blocks)
    flat = blocks.reshape(-1, blocks.shape[-1])
    if kind == "Q4_K":
        scale, offset = np.empty((2, len(flat), 8), dtype=np.float32)
        k_scales(flat, halves(flat, 0), halves(flat, 2), scale, offset)
        zero = 8 * scale - offset
    else:
        scale = halves(flat, 0)
        zero = np.zeros_like(scale) if kind == "Q4_0" else halves(flat, 2) + 8 * scale
    factors = torch.from_numpy(np.stack([scale.reshape(num_rows, -1), zero.reshape(num_rows, -1)], axis=-1))
    if gain != 1.0:
        factors *= gain
    if not float(factors.abs().max()) < torch.finfo(torch.float16).max:
        return False
    words, tail = blocks.view(np.uint16), factors.half().numpy().view(np.uint16)
    if kind == "Q4_K":
        _interleave_k(words, _STARTS[kind] // 2, tail, records)
    else:
        _interleave(words, _STARTS[kind] // 2, tail, records)
    return True


@compiled
def _interleave(blocks: Array, start: int, factors: Array, records: Array) -> None:
    """Halves of words: blocks [N, G, n], factors [N, G, 2], records [blocks of 16, G, 160]."""
    num_rows, num_groups = blocks.shape[0], blocks.shape[1]
    for block in range(records.shape[0]):
        for group in range(num_groups):
            for lane in range(16):
                row = 16 * block + lane
                inside = row < num_rows
                for i in range(8):
                    at = 32 * (i // 2) + 2 * lane + i % 2
                    records[block, group, at] = blocks[row, group, start + i] if inside else 0
                for part in range(2):
                    records[block, group, 128 + 16 * part + lane] = factors[row, group, part] if inside else 0


@compiled
def _interleave_k(blocks: Array, start: int, factors: Array, records: Array) -> None:
    """``Q4_K``: 16 halves of words have the nibbles of an even group below and those of the odd one above."""
    num_rows, num_pairs = blocks.shape[0], records.shape[1] // 2
    low, high = np.uint16(0x0F0F), np.uint16(0xF0F0)
    for block in range(records.shape[0]):
        for pair in range(num_pairs):
            for lane in range(16):
                row = 16 * block + lane
                inside = row < num_rows
                first = start + 16 * (pair % 4)
                for i in range(8):
                    one = blocks[row, pair // 4, first + i] if inside else np.uint16(0)
                    two = blocks[row, pair // 4, first + 8 + i] if inside else np.uint16(0)
                    at = 32 * (i // 2) + 2 * lane + i % 2
                    records[block, 2 * pair, at] = (one & low) | (two & low) << 4
                    records[block, 2 * pair + 1, at] = (one & high) >> 4 | (two & high)
                for odd in range(2):
                    for part in range(2):
                        value = factors[row, 2 * pair + odd, part] if inside else np.uint16(0)
                        records[block, 2 * pair + odd, 128 + 16 * part + lane] = value
