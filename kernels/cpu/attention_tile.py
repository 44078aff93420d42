"""One tile of attention: lays out 64 keys and values for products, and makes weights of scores.

Everything lies at addresses that ``attention`` gives. Words are pairs of bfloat16 (``tiles``).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...cpu_isa import isa
from .tiles import WORDS, multiply_tile, pair_rows, store_weights, transpose_tile
from .vector import (
    BFLOAT16,
    FLOAT32,
    LANES,
    choose16,
    exp2,
    exp2_16,
    exp16,
    fused16,
    get,
    get_f32,
    get_i32,
    get_i64,
    highest16,
    load16,
    load16_f32,
    max16,
    prefetch,
    put_f32,
    put_i64,
    splat16,
    store16_f32,
    sum16,
    when_compiled,
)

KEYS = 64  # of a tile
LOWEST = np.float32(-1.0e37)  # the highest score of no keys: finite, so that the difference of two is a number
_MINUS_INF = np.float32(-np.inf)
_LOG2_E = np.float32(1.44269504)

_transpose_f32, _transpose_bf16, _transpose_words = (transpose_tile(kind) for kind in (FLOAT32, BFLOAT16, WORDS))


class Queries(NamedTuple):
    """All queries, and the form in which a tile reads them."""

    q: int  # [T, Hq, D]
    q_step: int  # numbers from one token to the next
    kind: int
    group: int  # query heads of one KV head
    head_dim: int
    padded: int  # head_dim up to a multiple of 16
    scale: np.float32
    in_words: bool


class Context(NamedTuple):
    """Keys or values of one KV head, in the order of one row's slots."""

    cache: int  # [S, Hkv, D]
    kind: int
    table: int  # int32: the row's slots
    num_kv_heads: int
    head: int
    head_dim: int


class Softmax(NamedTuple):
    """How scores become weights."""

    group: int
    window: int  # 0: none
    scale: np.float32
    soft_cap: np.float32  # 0: none
    in_words: bool


@njit
def load_queries(source: Queries, begin: int, end: int, first_head: int, queries: int) -> None:
    """Tokens [begin, end), each with its ``group`` heads, to ``queries``: [vectors, padded], scaled; or as words."""
    q, q_step, kind, group = source.q, source.q_step, source.kind, source.group
    head_dim, padded, scale = source.head_dim, source.padded, source.scale
    if source.in_words:
        to = 0
        for token in range(begin, end):
            row = q + 2 * (token * q_step + first_head * head_dim)
            for _ in range(group):
                for d in range(0, head_dim // 2, LANES):
                    store16_f32(queries, to + d, load16_f32(row, d))
                row += 2 * head_dim
                to += padded
        return
    whole = head_dim - head_dim % LANES
    factor = splat16(scale)
    vector = 0
    for token in range(begin, end):
        for head in range(first_head, first_head + group):
            at = token * q_step + head * head_dim
            for d in range(0, whole, LANES):
                store16_f32(queries, vector + d, load16(q, at + d, kind) * factor)
            for d in range(whole, head_dim):
                put_f32(queries, vector + d, get(q, at + d, kind) * scale)
            vector += padded


@njit
def find_keys(context: Context, first: int, count: int, to: int) -> None:
    """Addresses of ``count`` keys; the last one is repeated up to a multiple of 16."""
    size = 2 if context.kind == BFLOAT16 else 4
    for j in range((count + LANES - 1) // LANES * LANES):
        slot = get_i32(context.table, first + min(j, count - 1))
        put_i64(to, j, context.cache + (slot * context.num_kv_heads + context.head) * context.head_dim * size)


@njit
def load_keys(addresses: int, kind: int, count: int, head_dim: int, keys: int) -> None:
    """Columns 0 to ``count`` of ``keys``, padded to a multiple of 16 with copies of the last key."""
    whole = head_dim - head_dim % LANES
    for j in range(0, count, LANES):
        for d in range(0, whole, LANES):
            to = keys + 4 * (d * KEYS + j)
            if kind == BFLOAT16:
                _transpose_bf16(addresses + 8 * j, d, to, KEYS)
            else:
                _transpose_f32(addresses + 8 * j, d, to, KEYS)
        for i in range(j, j + LANES):
            for d in range(whole, head_dim):
                put_f32(keys, d * KEYS + i, get(get_i64(addresses, i), d, kind))


@njit
def load_key_words(addresses: int, count: int, head_dim: int, keys: int) -> None:
    """``load_keys`` with two neighbouring numbers of a key in each word."""
    for j in range(0, count, LANES):
        for d in range(0, head_dim // 2, LANES):
            _transpose_words(addresses + 8 * j, d, keys + 4 * (d * KEYS + j), KEYS)


@njit
def load_values(context: Context, first: int, count: int, padded: int, values: int) -> None:
    cache, kind, table, head_dim = context.cache, context.kind, context.table, context.head_dim
    num_kv_heads, head = context.num_kv_heads, context.head
    whole = head_dim - head_dim % LANES
    for j in range(count):
        at, to = (get_i32(table, first + j) * num_kv_heads + head) * head_dim, j * padded
        for d in range(0, whole, LANES):
            store16_f32(values, to + d, load16(cache, at + d, kind))
        for d in range(whole, head_dim):
            put_f32(values, to + d, get(cache, at + d, kind))
        for d in range(head_dim, padded):
            put_f32(values, to + d, np.float32(0.0))


@njit
def load_value_words(context: Context, first: int, count: int, values: int) -> None:
    """Words of two neighbouring keys' values. The last of an odd number is paired with itself, at weight 0."""
    cache, table, head_dim = context.cache, context.table, context.head_dim
    num_kv_heads, head = context.num_kv_heads, context.head
    for j in range(0, count, 2):
        at = cache + 2 * (get_i32(table, first + j) * num_kv_heads + head) * head_dim
        other = cache + 2 * (get_i32(table, first + min(j + 1, count - 1)) * num_kv_heads + head) * head_dim
        to = values + 2 * j * head_dim
        for d in range(0, head_dim, LANES):
            pair_rows(at + 2 * d, other + 2 * d, to + 4 * d)


@njit
def prefetch_rows(context: Context, first: int, count: int) -> None:
    """Fetches the rows of a tile into the processor's cache while something else is computed."""
    row_bytes = context.head_dim * (2 if context.kind == BFLOAT16 else 4)
    for j in range(count):
        at = context.cache + (get_i32(context.table, first + j) * context.num_kv_heads + context.head) * row_bytes
        for offset in range(0, row_bytes, 64):
            prefetch(at + offset)


# Whether the sums of 4 rows by 64 columns fit in registers; where they do not, those of 4 by 16 do.
_has_wide_tiles = when_compiled("has_wide_tiles", lambda: int(isa().lanes * isa().num_registers >= 512))


def _tile_of_rows(num_vectors: int, *, words: bool, adds: bool) -> Any:
    """``f(rows, ...)``: the tile of 1 to 4 rows, each compiled for its number."""
    tile_4, tile_3, tile_2, tile_1 = (multiply_tile(rows, num_vectors, words=words, adds=adds) for rows in (4, 3, 2, 1))

    @njit
    def tile(rows: int, a: int, a_step: int, b: int, b_step: int, c: int, c_step: int, count: int) -> None:
        if rows == 4:
            tile_4(a, a_step, b, b_step, c, c_step, count)
        elif rows == 3:
            tile_3(a, a_step, b, b_step, c, c_step, count)
        elif rows == 2:
            tile_2(a, a_step, b, b_step, c, c_step, count)
        else:
            tile_1(a, a_step, b, b_step, c, c_step, count)

    return tile


def _multiplier(*, words: bool, adds: bool) -> Any:
    """``f(a, a_step, b, b_step, c, c_step, num_rows, num_vectors, count)``: c [rows, 16 * vectors] = a [rows, count] @
    b [count, 16 * vectors], added to c if ``adds``. ``count`` counts words where a and b hold words.
    """

    by_four, by_one = (_tile_of_rows(num_vectors, words=words, adds=adds) for num_vectors in (4, 1))

    @njit
    def product(
        a: int, a_step: int, b: int, b_step: int, c: int, c_step: int, num_rows: int, num_vectors: int, count: int
    ) -> None:
        row = 0
        while row < num_rows:
            rows = min(4, num_rows - row)
            left, to = a + 4 * row * a_step, c + 4 * row * c_step
            v = 0
            while _has_wide_tiles() != 0 and v + 4 <= num_vectors:
                by_four(rows, left, a_step, b + 4 * LANES * v, b_step, to + 4 * LANES * v, c_step, count)
                v += 4
            while v < num_vectors:
                by_one(rows, left, a_step, b + 4 * LANES * v, b_step, to + 4 * LANES * v, c_step, count)
                v += 1
            row += rows

    return product


multiply, multiply_words = (_multiplier(words=words, adds=False) for words in (False, True))
add_product, add_words_product = (_multiplier(words=words, adds=True) for words in (False, True))


@njit
def weigh(softmax: Softmax, scores: int, sums: int, vectors: int, padded: int, columns: int, offset: int) -> None:
    """Makes weights of scores, relative to the highest score so far; rescales earlier sums where it rises.

    ``offset`` is the position of the block's first query, counted from the tile's first key. The highest scores are
    kept as exponents of 2.
    """
    group, window, scale, soft_cap, in_words = (
        softmax.group,
        softmax.window,
        softmax.scale,
        softmax.soft_cap,
        softmax.in_words,
    )
    highests = sums + 4 * vectors * padded
    weights = highests + 4 * vectors
    exponent = scale * _LOG2_E
    exponents, one, two, inf = splat16(exponent), splat16(1.0), splat16(2.0), splat16(_MINUS_INF)
    cap, to_cap = splat16(soft_cap / scale), splat16(scale / soft_cap if soft_cap != 0 else np.float32(0.0))
    for vector in range(vectors):
        position = offset + vector // group
        line = vector * KEYS
        # Bit j: the query sees key j of the tile.
        stop = min(max(position + 1, 0), KEYS)
        start = min(max(position - window + 1, 0), KEYS) if window > 0 else 0
        top = splat16(LOWEST)
        for v in range(columns):
            first = LANES * v
            score = load16_f32(scores, line + first)
            if soft_cap != 0.0:
                score = cap * (one - two / (exp16(two * (score * to_cap)) + one))
                store16_f32(scores, line + first, score)
            if start > first or stop < first + LANES:
                seen = (1 << min(max(stop - first, 0), LANES)) - 1
                seen &= ~((1 << min(max(start - first, 0), LANES)) - 1)
                score = choose16(seen, score, inf)
                store16_f32(scores, line + first, score)
            top = max16(score, top)
        old = get_f32(highests, vector)
        new = max(old, highest16(top) * exponent)
        if new > old:
            keep = exp2(old - new)
            put_f32(highests, vector, new)
            put_f32(weights, vector, get_f32(weights, vector) * keep)
            factor = splat16(keep)
            for d in range(0, padded, LANES):
                store16_f32(sums, vector * padded + d, load16_f32(sums, vector * padded + d) * factor)
        total, base = splat16(0.0), splat16(-new)
        for v in range(columns):
            weight = exp2_16(fused16(base, load16_f32(scores, line + LANES * v), exponents))
            if in_words:
                store_weights(scores + 4 * line + 2 * LANES * v, weight)
            else:
                store16_f32(scores, line + LANES * v, weight)
            total = total + weight
        put_f32(weights, vector, get_f32(weights, vector) + sum16(total))
