"""One tile of attention: lays out 64 keys and values for products, and makes weights of scores.

Everything lies at addresses that ``attention`` gives. Words are pairs of bfloat16 (``tiles``).
"""

from typing import Any, NamedTuple

import numpy as np

from ...cpu_isa import isa
from .machine_code import helper, inlined
from .tiles import WORDS, multiply_tile, pair_rows, store_weights, transpose_tile, weigh_line
from .vector import (
    BFLOAT16,
    FLOAT32,
    LANES,
    above16,
    choose16,
    exp2,
    exp16,
    get,
    get_f32,
    get_i32,
    get_i64,
    highest16,
    highest16_of_four,
    lane16,
    load4_f32,
    load16,
    load16_f32,
    max16,
    prefetch,
    put_f32,
    put_i32,
    put_i64,
    splat16,
    store4_f32,
    store16_f32,
    sum16,
    sum16_of_four,
    when_compiled,
)
from .word_tiles import has_word_tiles

KEYS = 64  # of a tile
LOWEST = np.float32(-1.0e37)  # the highest score of no keys: finite, so that the difference of two is a number
RISE = np.float32(8.0)  # by which the highest score has to rise, as an exponent of 2, before sums are rescaled
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

    cache: int  # [S, Hkv, row_bytes]
    row_bytes: int  # of a vector
    table: int  # int32: the row's slots
    num_kv_heads: int
    head: int


class SeenKeys(NamedTuple):
    """Which keys of a tile the queries of a block see."""

    tile: int  # the position of the tile's first key
    offset: int  # of the block's first query, counted from there
    ends: int  # int32: how many keys of its row each query of the block may see; 0: those up to its own
    firsts: int  # int32: the first of these; 0: what the window leaves


class Softmax(NamedTuple):
    """How scores become weights."""

    group: int
    window: int  # 0: none
    scale: np.float32
    soft_cap: np.float32  # 0: none
    in_words: bool


@helper
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


@helper
def load_query_columns(source: Queries, begin: int, end: int, first_head: int, first: int, queries: int) -> None:
    """``load_queries`` as words, each vector in a column, from ``first`` on, of ``queries``: [head_dim / 2, 16]."""
    q_step, head_dim = source.q_step, source.head_dim
    column = first
    for token in range(begin, end):
        row = source.q + 2 * (token * q_step + first_head * head_dim)
        for _ in range(source.group):
            for word in range(head_dim // 2):
                put_i32(queries, LANES * word + column, get_i32(row, word))
            row += 2 * head_dim
            column += 1


@inlined
def _row(context: Context, position: int) -> int:
    """The address of a position's vector."""
    slot = get_i32(context.table, position)
    return context.cache + (slot * context.num_kv_heads + context.head) * context.row_bytes


@helper
def find_rows(context: Context, first: int, count: int, to: int) -> None:
    """Addresses of ``count`` vectors; the last one is repeated up to a tile's number of keys."""
    for j in range(count):
        put_i64(to, j, _row(context, first + j))
    last = get_i64(to, count - 1)
    for j in range(count, KEYS):
        put_i64(to, j, last)


@helper
def move_rows(addresses: int, by: int, to: int) -> None:
    """A tile's addresses ``by`` bytes on: of another head, or of values whose keys they are."""
    for j in range(KEYS):
        put_i64(to, j, get_i64(addresses, j) + by)


@helper
def load_key_rows(addresses: int, count: int, head_dim: int, keys: int) -> None:
    """The first ``count`` keys, up to a multiple of 16, as rows of ``head_dim`` bfloat16."""
    for j in range((count + LANES - 1) // LANES * LANES):
        row, to = get_i64(addresses, j), keys + 2 * j * head_dim
        for d in range(0, head_dim // 2, LANES):
            store16_f32(to, d, load16_f32(row, d))


@helper
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


@helper
def load_key_words(addresses: int, count: int, head_dim: int, keys: int) -> None:
    """``load_keys`` with two neighbouring numbers of a key in each word."""
    for j in range(0, count, LANES):
        for d in range(0, head_dim // 2, LANES):
            _transpose_words(addresses + 8 * j, d, keys + 4 * (d * KEYS + j), KEYS)


@helper
def load_values(addresses: int, kind: int, count: int, head_dim: int, padded: int, values: int) -> None:
    """``count`` rows of ``values``, each with zeros from ``head_dim`` to ``padded``."""
    whole = head_dim - head_dim % LANES
    for j in range(count):
        row, to = get_i64(addresses, j), j * padded
        for d in range(0, whole, LANES):
            store16_f32(values, to + d, load16(row, d, kind))
        for d in range(whole, head_dim):
            put_f32(values, to + d, get(row, d, kind))
        for d in range(head_dim, padded):
            put_f32(values, to + d, np.float32(0.0))


@helper
def load_value_words(addresses: int, count: int, head_dim: int, values: int) -> int:
    """Words of two neighbouring keys' values; their number, with AMX a multiple of 16. What is missing is the last
    value again, at weight 0.
    """
    multiple = LANES if has_word_tiles() != 0 else 1
    pairs = (count + 2 * multiple - 1) // (2 * multiple) * multiple
    for j in range(0, 2 * pairs, 2):
        row, other = get_i64(addresses, j), get_i64(addresses, j + 1)
        to = values + 2 * j * head_dim
        for d in range(0, head_dim, 2 * LANES):
            pair_rows(row + 2 * d, other + 2 * d, to + 4 * d)
    return pairs


@helper
def prefetch_rows(context: Context, first: int, count: int, num_heads: int) -> None:
    """Fetches a tile's rows of ``num_heads`` neighbouring heads into the processor's cache while something else is
    computed.
    """
    size = context.row_bytes * num_heads
    in_pairs = size - size % 128
    for j in range(count):
        at = _row(context, first + j)
        for offset in range(0, in_pairs, 128):  # one line a turn makes decoding's attention 4% slower
            prefetch(at + offset)
            prefetch(at + offset + 64)
        for offset in range(in_pairs, size, 64):
            prefetch(at + offset)


_weigh_vector, _weigh_line = (weigh_line(num_vectors, words=False) for num_vectors in (1, KEYS // LANES))
_weigh_words, _weigh_line_words = (weigh_line(num_vectors, words=True) for num_vectors in (1, KEYS // LANES))

# Whether the sums of 4 rows by 64 columns fit in registers; where they do not, those of 4 by 16 do.
_has_wide_tiles = when_compiled("has_wide_tiles", lambda: int(isa().lanes * isa().num_registers >= 512))


def _tile_of_rows(num_vectors: int, *, words: bool, adds: bool) -> Any:
    """``f(rows, ...)``: the tile of 1 to 4 rows, each compiled for its number."""
    tile_4, tile_3, tile_2, tile_1 = (multiply_tile(rows, num_vectors, words=words, adds=adds) for rows in (4, 3, 2, 1))

    @helper
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

    @helper
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


@helper
def weigh(softmax: Softmax, seen: SeenKeys, scores: int, sums: int, vectors: int, padded: int, columns: int) -> None:
    """Makes weights of scores, relative to a reference; raises it to the highest score where that is higher by
    ``RISE``, and rescales earlier sums then. So weights are at most 256, and most tiles rescale nothing: the way of
    FlashAttention-4 (Zadouri and others).

    References are kept as exponents of 2. Where four neighbouring vectors take one way together, each has the bits of
    its own way.
    """
    in_words = softmax.in_words
    vector = 0
    while vector < vectors:
        by_four = columns * LANES == KEYS and softmax.soft_cap == 0.0 and vector + 4 <= vectors
        if by_four and _end(softmax, seen, vector) >= KEYS and _start(softmax, seen, vector + 3) <= 0:
            _raise_four(softmax, scores, sums, vectors, padded, vector)
            vector += 4
        else:
            stop = min(max(_end(softmax, seen, vector), 0), KEYS)
            start = min(max(_start(softmax, seen, vector), 0), KEYS)
            _raise_one(softmax, scores, sums, vectors, padded, columns, vector, start, stop)
            vector += 1
    # In a loop of their own, which does not wait for the highest scores.
    exponents = splat16(softmax.scale * _LOG2_E)
    highests, weights = sums + 4 * vectors * padded, sums + 4 * vectors * (padded + 1)
    vector = 0
    while vector + 4 <= vectors:
        total = sum16_of_four(
            _to_weights(scores, vector, columns, highests, exponents, in_words),
            _to_weights(scores, vector + 1, columns, highests, exponents, in_words),
            _to_weights(scores, vector + 2, columns, highests, exponents, in_words),
            _to_weights(scores, vector + 3, columns, highests, exponents, in_words),
        )
        store4_f32(weights, vector, load4_f32(weights, vector) + total)
        vector += 4
    while vector < vectors:
        total = _to_weights(scores, vector, columns, highests, exponents, in_words)
        put_f32(weights, vector, get_f32(weights, vector) + sum16(total))
        vector += 1


@inlined
def _end(softmax: Softmax, seen: SeenKeys, vector: int) -> int:
    """The end of the keys that a vector sees, counted from the tile's first."""
    query = vector // softmax.group
    return get_i32(seen.ends, query) - seen.tile if seen.ends != 0 else seen.offset + query + 1


@inlined
def _start(softmax: Softmax, seen: SeenKeys, vector: int) -> int:
    """The first of these keys, or one before the tile."""
    query = vector // softmax.group
    if seen.firsts != 0:
        return get_i32(seen.firsts, query) - seen.tile
    return seen.offset + query - softmax.window + 1 if softmax.window > 0 else 0


@inlined
def _raise_four(softmax: Softmax, scores: int, sums: int, vectors: int, padded: int, vector: int) -> None:
    """``_raise_one`` of four neighbouring vectors that see all keys of the tile."""
    highests, line = sums + 4 * vectors * padded, vector * KEYS
    old = load4_f32(highests, vector)
    top = highest16_of_four(
        _highest(scores, line),
        _highest(scores, line + KEYS),
        _highest(scores, line + 2 * KEYS),
        _highest(scores, line + 3 * KEYS),
    )
    top = top * splat16(softmax.scale * _LOG2_E)
    rises = above16(top, old + splat16(RISE))
    if rises != 0:
        new = choose16(rises, top, old)
        store4_f32(highests, vector, new)
        for i in range(4):
            if rises >> (4 * i) & 1 != 0:
                _rescale(sums, vectors, padded, vector + i, lane16(old, 4 * i) - lane16(new, 4 * i))


@inlined
def _highest(scores: int, line: int) -> Any:
    """The highest of a vector's scores in each lane."""
    top = splat16(LOWEST)
    for first in range(0, KEYS, LANES):
        top = max16(load16_f32(scores, line + first), top)
    return top


@helper
def _raise_one(
    softmax: Softmax,
    scores: int,
    sums: int,
    vectors: int,
    padded: int,
    columns: int,
    vector: int,
    start: int,
    stop: int,
) -> None:
    """The highest score so far of a vector that sees keys [start, stop) of the tile; hides its other scores."""
    scale, soft_cap, highests, line = softmax.scale, softmax.soft_cap, sums + 4 * vectors * padded, vector * KEYS
    one, two, inf = splat16(1.0), splat16(2.0), splat16(_MINUS_INF)
    cap, to_cap = splat16(soft_cap / scale), splat16(scale / soft_cap if soft_cap != 0 else np.float32(0.0))
    top = splat16(LOWEST)
    for v in range(columns):
        first = LANES * v
        score = load16_f32(scores, line + first)
        if soft_cap != 0.0:
            score = cap * (one - two / (exp16(two * (score * to_cap)) + one))
            store16_f32(scores, line + first, score)
        if start > first or stop < first + LANES:
            seen = (1 << min(max(stop - first, 0), LANES)) - 1  # bit j: the query sees key j
            seen &= ~((1 << min(max(start - first, 0), LANES)) - 1)
            score = choose16(seen, score, inf)
            store16_f32(scores, line + first, score)
        top = max16(score, top)
    old = get_f32(highests, vector)
    new = highest16(top) * (scale * _LOG2_E)
    if new > old + RISE:
        put_f32(highests, vector, new)
        _rescale(sums, vectors, padded, vector, old - new)


@helper
def _rescale(sums: int, vectors: int, padded: int, vector: int, exponent: np.float32) -> None:
    keep, weights = exp2(exponent), sums + 4 * vectors * (padded + 1)
    put_f32(weights, vector, get_f32(weights, vector) * keep)
    factor = splat16(keep)
    for d in range(vector * padded, (vector + 1) * padded, LANES):
        store16_f32(sums, d, load16_f32(sums, d) * factor)


@inlined
def _to_weights(scores: int, vector: int, columns: int, highests: int, exponents: Any, in_words: bool) -> Any:
    """A vector's weights, in place of its scores; their sums by lane."""
    at, base = scores + 4 * KEYS * vector, splat16(-get_f32(highests, vector))
    if columns == KEYS // LANES:
        if in_words:
            return _weigh_line_words(at, at, base, exponents)
        return _weigh_line(at, at, base, exponents)
    total = splat16(0.0)
    for v in range(columns):
        first = at + 4 * LANES * v
        if in_words:
            total = total + _weigh_words(first, at + 2 * LANES * v, base, exponents)
        else:
            total = total + _weigh_vector(first, first, base, exponents)
    if in_words and columns % 2 == 1:
        store_weights(at + 2 * LANES * columns, splat16(0.0))  # tiles multiply pairs of vectors
    return total
