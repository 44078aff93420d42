"""ggml's block formats, decoded on the CPU by compiled loops.

Every function fills the caller's ``out`` from ``blocks`` (uint8 [B, bytes of a block]). Decoders write float32 [B,
weights of a block] and multiply in ggml's order, so results equal ggml's to the bit. Float16 scales become float32.
"""

from collections.abc import Callable

import numpy as np
from numba import njit

Array = np.ndarray
Decoder = Callable[[Array, Array], None]

compiled = njit(nogil=True, cache=True)


def halves(blocks: Array, start: int) -> Array:
    """The float16 at byte ``start`` of every block, as float32 [B]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)[:, 0].astype(np.float32)


def decode_q4_0(blocks: Array, out: Array) -> None:
    _nibbles_around_8(blocks, halves(blocks, 0), out)


def decode_q4_1(blocks: Array, out: Array) -> None:
    _nibbles_from_minimum(blocks, halves(blocks, 0), halves(blocks, 2), out)


def decode_q5_0(blocks: Array, out: Array) -> None:
    _fives_around_16(blocks, halves(blocks, 0), out)


def decode_q5_1(blocks: Array, out: Array) -> None:
    _fives_from_minimum(blocks, halves(blocks, 0), halves(blocks, 2), out)


def decode_q8_0(blocks: Array, out: Array) -> None:
    _bytes(blocks.view(np.int8), halves(blocks, 0), out)


def decode_q4_k(blocks: Array, out: Array) -> None:
    _k_fours(blocks, halves(blocks, 0), halves(blocks, 2), out)


def decode_q5_k(blocks: Array, out: Array) -> None:
    _k_fives(blocks, halves(blocks, 0), halves(blocks, 2), out)


def decode_q6_k(blocks: Array, out: Array) -> None:
    _k_sixes(blocks, blocks.view(np.int8), halves(blocks, 208), out)


@compiled
def _nibbles_around_8(blocks: Array, scale: Array, out: Array) -> None:
    for b in range(blocks.shape[0]):
        for i in range(16):
            pair = np.int32(blocks[b, 2 + i])
            out[b, i] = scale[b] * np.float32((pair & 15) - 8)
            out[b, i + 16] = scale[b] * np.float32((pair >> 4) - 8)


@compiled
def _nibbles_from_minimum(blocks: Array, scale: Array, minimum: Array, out: Array) -> None:
    for b in range(blocks.shape[0]):
        for i in range(16):
            pair = np.int32(blocks[b, 4 + i])
            out[b, i] = scale[b] * np.float32(pair & 15) + minimum[b]
            out[b, i + 16] = scale[b] * np.float32(pair >> 4) + minimum[b]


@compiled
def _word(blocks: Array, b: int, start: int) -> np.uint32:
    """Four bytes, the first one lowest."""
    word = np.uint32(0)
    for i in range(4):
        word |= np.uint32(blocks[b, start + i]) << np.uint32(8 * i)
    return word


@compiled
def _fives_around_16(blocks: Array, scale: Array, out: Array) -> None:
    for b in range(blocks.shape[0]):
        fifth = _word(blocks, b, 2)
        for i in range(16):
            pair = np.int32(blocks[b, 6 + i])
            low = (pair & 15) | np.int32((fifth >> np.uint32(i)) & np.uint32(1)) << 4
            high = (pair >> 4) | np.int32((fifth >> np.uint32(i + 16)) & np.uint32(1)) << 4
            out[b, i] = scale[b] * np.float32(low - 16)
            out[b, i + 16] = scale[b] * np.float32(high - 16)


@compiled
def _fives_from_minimum(blocks: Array, scale: Array, minimum: Array, out: Array) -> None:
    for b in range(blocks.shape[0]):
        fifth = _word(blocks, b, 4)
        for i in range(16):
            pair = np.int32(blocks[b, 8 + i])
            low = (pair & 15) | np.int32((fifth >> np.uint32(i)) & np.uint32(1)) << 4
            high = (pair >> 4) | np.int32((fifth >> np.uint32(i + 16)) & np.uint32(1)) << 4
            out[b, i] = scale[b] * np.float32(low) + minimum[b]
            out[b, i + 16] = scale[b] * np.float32(high) + minimum[b]


@compiled
def _bytes(blocks: Array, scale: Array, out: Array) -> None:
    for b in range(blocks.shape[0]):
        for i in range(32):
            out[b, i] = scale[b] * np.float32(blocks[b, 2 + i])


@compiled
def _k_scale(blocks: Array, b: int, group: int) -> tuple[np.int32, np.int32]:
    """The 6-bit scale and minimum of one of a K super-block's eight groups, from bytes 4 to 15.

    bytes 4..7: scales 0-3 and, in their top two bits, those of scales 4-7; bytes 8..11: minima likewise;
    bytes 12..15: the low four bits of scales 4-7, and above them those of minima 4-7.
    """
    if group < 4:
        return np.int32(blocks[b, 4 + group] & 63), np.int32(blocks[b, 8 + group] & 63)
    low = np.int32(blocks[b, 8 + group])
    top_scale, top_minimum = np.int32(blocks[b, group] >> 6), np.int32(blocks[b, 4 + group] >> 6)
    return (low & 15) | top_scale << 4, (low >> 4) | top_minimum << 4


@compiled
def _k_fours(blocks: Array, scale: Array, minimum: Array, out: Array) -> None:
    # Bytes 16.. hold groups two by two: 32 bytes, the even group in the low nibbles, the odd one in the high.
    for b in range(blocks.shape[0]):
        for group in range(8):
            step, below = _k_scale(blocks, b, group)
            scaled, offset = scale[b] * np.float32(step), minimum[b] * np.float32(below)
            start, shift = 16 + group // 2 * 32, 4 * (group % 2)
            for i in range(32):
                q = (np.int32(blocks[b, start + i]) >> shift) & 15
                out[b, group * 32 + i] = scaled * np.float32(q) - offset


@compiled
def _k_fives(blocks: Array, scale: Array, minimum: Array, out: Array) -> None:
    # As above from byte 48 on; bit g of the bytes 16..47 is the fifth bit of group g.
    for b in range(blocks.shape[0]):
        for group in range(8):
            step, below = _k_scale(blocks, b, group)
            scaled, offset = scale[b] * np.float32(step), minimum[b] * np.float32(below)
            start, shift = 48 + group // 2 * 32, 4 * (group % 2)
            for i in range(32):
                fifth = (np.int32(blocks[b, 16 + i]) >> group) & 1
                q = (np.int32(blocks[b, start + i]) >> shift) & 15 | fifth << 4
                out[b, group * 32 + i] = scaled * np.float32(q) - offset


@compiled
def _k_sixes(blocks: Array, signed: Array, scale: Array, out: Array) -> None:
    # Two halves of 128 weights: 64 bytes of nibbles, 32 bytes of bit pairs; a scale (int8) for every 16 weights.
    for b in range(blocks.shape[0]):
        for run in range(8):
            half, quarter = run // 4, run % 4
            start, shift = half * 64 + quarter % 2 * 32, quarter // 2 * 4
            for i in range(32):
                low = (np.int32(blocks[b, start + i]) >> shift) & 15
                top = (np.int32(blocks[b, 128 + half * 32 + i]) >> (2 * quarter)) & 3
                scaled = scale[b] * np.float32(signed[b, 192 + run * 2 + i // 16])
                out[b, run * 32 + i] = scaled * np.float32((low | top << 4) - 32)


@compiled
def split_nibbles(blocks: Array, start: int, out: Array) -> None:
    """The 32 nibbles from byte ``start`` of each block: uint8 [B, 32]."""
    for b in range(blocks.shape[0]):
        for i in range(16):
            pair = blocks[b, start + i]
            out[b, i] = pair & np.uint8(15)
            out[b, i + 16] = pair >> np.uint8(4)


@compiled
def split_k_fours(
    blocks: Array, scale: Array, minimum: Array, out: Array, group_scale: Array, group_offset: Array
) -> None:
    """A Q4_K block's nibbles (uint8 [B, 256]) and its groups' scales and offsets (float32 [B, 8])."""
    for b in range(blocks.shape[0]):
        for group in range(8):
            step, below = _k_scale(blocks, b, group)
            group_scale[b, group] = scale[b] * np.float32(step)
            group_offset[b, group] = minimum[b] * np.float32(below)
            start, shift = 16 + group // 2 * 32, np.uint8(4 * (group % 2))
            for i in range(32):
                out[b, group * 32 + i] = (blocks[b, start + i] >> shift) & np.uint8(15)


@compiled
def k_scales(blocks: Array, scale: Array, minimum: Array, group_scale: Array, group_offset: Array) -> None:
    """The groups' scales and offsets of Q4_K blocks (float32 [B, 8])."""
    for b in range(blocks.shape[0]):
        for group in range(8):
            step, below = _k_scale(blocks, b, group)
            group_scale[b, group] = scale[b] * np.float32(step)
            group_offset[b, group] = minimum[b] * np.float32(below)
