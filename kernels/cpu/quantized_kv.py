"""Vectors of 8-bit keys and values at addresses, in the form of ``kernels.quantized_kv``."""

import numpy as np

from ..quantized_kv import GREATEST, KV_GROUP_LEN, LEAST_SCALE
from .machine_code import helper
from .tiles import store_weights
from .vector import (
    LANES,
    get_bf16,
    get_i8,
    get_i64,
    highest16,
    load16_f32,
    load16_i8,
    max16,
    put_bf16,
    put_f32,
    put_i8,
    put_i64,
    round16,
    splat16,
    store16_f32,
    store16_i8,
    sum16,
)

QUANTIZED = 3  # a kind of array: 8-bit vectors with their scales

_GREATEST, _LEAST_SCALE = np.float32(GREATEST), np.float32(LEAST_SCALE)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
assert KV_GROUP_LEN == LANES  # a group is one vector of the CPU kernels


@helper
def pack_vector(vector: int, head_dim: int, row: int) -> None:
    """``quantize_kv`` of float32 ``vector`` [head_dim, with room up to a multiple of 16], which is overwritten."""
    scales = row + head_dim
    for i in range(head_dim, (head_dim + LANES - 1) // LANES * LANES):
        put_f32(vector, i, _ZERO)
    zeros = splat16(_ZERO)
    for start in range(0, head_dim, LANES):
        numbers = load16_f32(vector, start)
        greatest = highest16(max16(numbers, zeros - numbers))
        greatest += sum16(numbers * zeros)  # NaN, unless all numbers are finite
        scale = greatest / _GREATEST
        put_bf16(scales, start // LANES, _ZERO if scale < _LEAST_SCALE else scale)
        scale = get_bf16(scales, start // LANES)
        whole = round16(numbers * splat16(_ONE / scale if scale > _ZERO else _ZERO))
        if start + LANES <= head_dim:
            store16_i8(row, start, whole)
        else:
            store16_i8(vector, 0, whole)
            for i in range(head_dim - start):
                put_i8(row, start + i, get_i8(vector, i))


@helper
def unpack_vectors(addresses: int, count: int, head_dim: int, as_words: bool, to: int) -> None:
    """The first ``count`` vectors of those at ``addresses`` as float32 [count, head_dim] at ``to``, or as bfloat16.

    The addresses, up to a multiple of 32 of them, become those of the vectors there; the last one is repeated.
    """
    whole = head_dim - head_dim % LANES
    step = head_dim * (2 if as_words else 4)
    for j in range(count):
        row, place = get_i64(addresses, j), to + j * step
        scales = row + head_dim
        for start in range(0, whole, LANES):
            numbers = load16_i8(row, start) * splat16(get_bf16(scales, start // LANES))
            if as_words:
                store_weights(place + 2 * start, numbers)
            else:
                store16_f32(place, start, numbers)
        for i in range(whole, head_dim):  # never of words
            put_f32(place, i, np.float32(get_i8(row, i)) * get_bf16(scales, i // LANES))
        put_i64(addresses, j, place)
    for j in range(count, (count + 2 * LANES - 1) // (2 * LANES) * 2 * LANES):
        put_i64(addresses, j, to + (count - 1) * step)
