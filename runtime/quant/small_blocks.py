"""ggml's block formats of few bits and of tables, decoded as in ``block_decoding``: results equal ggml's to the bit.

The codebook formats (IQ1, IQ2, IQ3) are decoded by ggml's own Python package, which has their tables of 256 to 2,048
points: some 20 times slower than a compiled loop, once, when a file is loaded.
"""

import numpy as np

from .block_decoding import Array, Decoder, compiled, halves

# The values of IQ4's 16 numbers, and of MXFP4's (e2m1, doubled).
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], dtype=np.uint8)


def decode_q2_k(blocks: Array, out: Array) -> None:
    _k_twos(blocks, halves(blocks, 80), halves(blocks, 82), out)


def decode_q3_k(blocks: Array, out: Array) -> None:
    _k_threes(blocks, halves(blocks, 108), out)


def decode_iq4_nl(blocks: Array, out: Array) -> None:
    _nibbles_of_table(blocks, 2, halves(blocks, 0), _IQ4, out)


def decode_iq4_xs(blocks: Array, out: Array) -> None:
    _nibbles_of_iq4_xs(blocks, halves(blocks, 0), _IQ4, out)


def decode_mxfp4(blocks: Array, out: Array) -> None:
    exponent = blocks[:, 0].astype(np.uint32)
    # 2^(exponent - 128); the two lowest are no normal float32.
    bits = np.where(exponent < 2, np.uint32(0x200000) << exponent, (np.maximum(exponent, 1) - 1) << np.uint32(23))
    _nibbles_of_table(blocks, 1, bits.astype(np.uint32).view(np.float32), _E2M1, out)


def decode_tq1_0(blocks: Array, out: Array) -> None:
    _threes(blocks, halves(blocks, 52), _POWERS_OF_3, out)


def decode_tq2_0(blocks: Array, out: Array) -> None:
    _pairs_of_bits(blocks, halves(blocks, 64), out)


def by_package(kind: str) -> Decoder:
    """The decoder of ggml's Python package."""

    def decode(blocks: Array, out: Array) -> None:
        import gguf

        out[:] = gguf.quants.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[kind])

    return decode


@compiled
def _nibbles_of_table(blocks: Array, start: int, scale: Array, table: Array, out: Array) -> None:
    for b in range(blocks.shape[0]):
        for i in range(16):
            pair = np.int32(blocks[b, start + i])
            out[b, i] = scale[b] * table[pair & 15]
            out[b, i + 16] = scale[b] * table[pair >> 4]


@compiled
def _nibbles_of_iq4_xs(blocks: Array, scale: Array, table: Array, out: Array) -> None:
    # Bytes 2, 3: the top two bits of eight scales; 4 to 7: their low four bits; then 16 bytes of nibbles a group.
    for b in range(blocks.shape[0]):
        tops = np.int32(blocks[b, 2]) | np.int32(blocks[b, 3]) << 8
        for group in range(8):
            low = (np.int32(blocks[b, 4 + group // 2]) >> (4 * (group % 2))) & 15
            scaled = scale[b] * np.float32((low | ((tops >> (2 * group)) & 3) << 4) - 32)
            for i in range(16):
                pair = np.int32(blocks[b, 8 + 16 * group + i])
                out[b, 32 * group + i] = scaled * table[pair & 15]
                out[b, 32 * group + i + 16] = scaled * table[pair >> 4]


@compiled
def _k_twos(blocks: Array, scale: Array, minimum: Array, out: Array) -> None:
    # 16 bytes with a scale and a minimum for 16 weights each; then bit pairs, those of 128 weights in 32 bytes.
    for b in range(blocks.shape[0]):
        for group in range(16):
            factors = np.int32(blocks[b, group])
            scaled = scale[b] * np.float32(factors & 15)
            offset = minimum[b] * np.float32(factors >> 4)
            half, quarter = group // 8, group % 8 // 2
            start = 16 + 32 * half + 16 * (group % 2)
            for i in range(16):
                q = (np.int32(blocks[b, start + i]) >> (2 * quarter)) & 3
                out[b, 16 * group + i] = scaled * np.float32(q) - offset


@compiled
def _k_threes(blocks: Array, scale: Array, out: Array) -> None:
    # 32 bytes of third bits, bit g those of the 32 weights from 32 g on; bit pairs as above; 16 scales of 6 bits:
    # bytes 96 to 103 hold their low halves, 104 to 107 their top two bits.
    for b in range(blocks.shape[0]):
        for group in range(16):
            low = (np.int32(blocks[b, 96 + group % 8]) >> (4 * (group // 8))) & 15
            top = (np.int32(blocks[b, 104 + group % 4]) >> (2 * (group // 4))) & 3
            scaled = scale[b] * np.float32((low | top << 4) - 32)
            half, quarter = group // 8, group % 8 // 2
            start = 32 + 32 * half + 16 * (group % 2)
            for i in range(16):
                q = (np.int32(blocks[b, start + i]) >> (2 * quarter)) & 3
                third = (np.int32(blocks[b, 16 * (group % 2) + i]) >> (group // 2)) & 1
                out[b, 16 * group + i] = scaled * np.float32(q - 4 * (1 - third))


@compiled
def _threes(blocks: Array, scale: Array, powers: Array, out: Array) -> None:
    # A byte holds five numbers of 0, 1, 2 as a fraction of 256 in base 3; the last four bytes hold four each.
    for b in range(blocks.shape[0]):
        to = 0
        for start, length, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
            for digit in range(digits):
                for i in range(length):
                    rest = np.uint8(blocks[b, start + i] * powers[digit])
                    number = (np.int32(rest) * 3) >> 8
                    out[b, to] = scale[b] * np.float32(number - 1)
                    to += 1


@compiled
def _pairs_of_bits(blocks: Array, scale: Array, out: Array) -> None:
    for b in range(blocks.shape[0]):
        for half in range(2):
            for quarter in range(4):
                for i in range(32):
                    q = (np.int32(blocks[b, 32 * half + i]) >> (2 * quarter)) & 3
                    out[b, 128 * half + 32 * quarter + i] = scale[b] * np.float32(q - 1)
