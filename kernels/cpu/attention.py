"""Causal attention over slots, for decoding and prefill alike. Never copies a context: 64 keys at a time, laid out.

A task is one KV head, a block of neighbouring queries of one row with all the query heads of that KV head (its
*vectors*), and one chunk of 512 keys. Threads take tasks by number; of a block with several chunks, each leaves its
part (sums, highest score, weight) and the last to finish joins them, so a long context is shared by all threads
whatever the number of rows. Tiles and chunks begin at multiples of their length, sums run in the order of positions,
and keys that a query may not see weigh exactly nothing: a query's result depends on its own row alone, to the bit,
however rows are batched and prompts are cut.

Rows whose first chunks lie in the same slots, children of one prompt, have those chunks computed together: keys and
values are read and widened once, and their queries make one matrix product. It changes no bit of any of them.

Where queries, keys and values are bfloat16, so are the factors of both products: two of them are multiplied and added
by one instruction. Scores, weights and sums are float32; a weight is rounded for its product with a value alone.

The running softmax is Milakov and Gimelshein's (2018), the joining of chunks Dao's Flash-Decoding (2023).
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..threads import team
from .attention_plan import (
    BEGIN,
    CHUNK,
    CHUNK_OF_PIECE,
    CHUNKS,
    END,
    FIELDS,
    FIRST_CHUNK,
    FIRST_PART,
    FIRST_TASK,
    HEADER,
    MEMBERS,
    NUM_BLOCKS,
    NUM_SHARED,
    NUM_TASKS,
    OWN,
    PIECE_FIELDS,
    ROW,
    SHARED,
    plan_attention,
)
from .bfloat import has_bfloat16_pairs
from .entry import ARGS, TASK, THREAD, entry
from .recording import open_recording, scratch
from .tensors import KINDS, readable, team_size
from .tiles import WORDS, multiply_tile, pair_rows, store_weights, transpose_tile
from .vector import (
    BFLOAT16,
    FLOAT32,
    LANES,
    choose16,
    exp,
    exp16,
    get,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    highest16,
    load16,
    load16_f32,
    max16,
    prefetch,
    put,
    put_f32,
    put_i64,
    splat16,
    store16,
    store16_f32,
    sum16,
    take_number,
)

_KEYS = 64  # of a tile
_VECTORS = 64  # of a task, or the query heads of one KV head where those are more
_LOWEST = np.float32(-3.0e38)  # of no score: finite, so that the difference of two is a number
_MINUS_INF = np.float32(-np.inf)

_MIN_WORK = 200_000  # products of a context worth a second thread

_tile_4x4, _tile_3x4, _tile_2x4, _tile_1x4 = (multiply_tile(rows, 4) for rows in (4, 3, 2, 1))
_tile_4x1, _tile_3x1, _tile_2x1, _tile_1x1 = (multiply_tile(rows, 1) for rows in (4, 3, 2, 1))
_words_4x4, _words_3x4, _words_2x4, _words_1x4 = (multiply_tile(rows, 4, words=True) for rows in (4, 3, 2, 1))
_words_4x1, _words_3x1, _words_2x1, _words_1x1 = (multiply_tile(rows, 1, words=True) for rows in (4, 3, 2, 1))
_transpose_f32, _transpose_bf16, _transpose_words = (transpose_tile(kind) for kind in (FLOAT32, BFLOAT16, WORDS))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    row_ids: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = row_ids.shape[0], k_cache.shape[1]
    group = num_heads // num_kv_heads
    assert k_cache.shape == v_cache.shape and k_cache.shape[2] == head_dim, (q.shape, k_cache.shape, v_cache.shape)
    assert num_heads == group * num_kv_heads, (num_heads, num_kv_heads)
    assert len(query_starts) == num_rows + 1 and len(kv_lens) == num_rows, (row_ids.shape, query_starts.shape)
    if q.stride(2) != 1 or (num_heads > 1 and q.stride(1) != head_dim):
        q = q.contiguous()
    k_cache, v_cache, slot_table = readable(k_cache), readable(v_cache), slot_table.int()
    row_ids, query_starts, kv_lens = row_ids.int(), query_starts.int(), kv_lens.int()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
    in_words = has_bfloat16_pairs() and q.dtype == k_cache.dtype == torch.bfloat16 and head_dim % (2 * LANES) == 0

    block = max(1, min(_VECTORS // group, num_tokens - num_rows + 1))
    max_blocks = num_rows + num_tokens // block
    max_pieces = num_rows * (slot_table.shape[1] // CHUNK) * (PIECE_FIELDS + 1)
    plan = scratch(
        "attention plan", HEADER + max_blocks * (FIELDS + num_kv_heads) + 2 * num_rows + max_pieces, torch.int64
    )
    plan_attention(
        query_starts.data_ptr(),
        kv_lens.data_ptr(),
        num_rows,
        num_kv_heads,
        group,
        block,
        head_dim,
        sliding_window,
        plan.data_ptr(),
        slot_table.data_ptr(),
        slot_table.stride(0),
        row_ids.data_ptr(),
        max(1, _VECTORS // group),
    )
    if open_recording() is None:
        _, num_tasks, num_parts, work, *_ = plan[:HEADER].tolist()
        threads = min(team_size(work, min_share=_MIN_WORK), max(num_tasks, 1))
    else:  # contexts will grow up to what the table holds
        num_parts = max_blocks * num_kv_heads * -(-slot_table.shape[1] // CHUNK)
        threads = team().size
    vectors, padded = block * group, -(-head_dim // LANES) * LANES
    part_len = vectors * (padded + 2)
    if num_rows > 1:  # that may share
        vectors = max(vectors, max(1, _VECTORS // group) * group)
    parts = scratch("attention parts", num_parts * part_len, torch.float32)
    scratch_len = -(-(vectors * (2 * padded + _KEYS + 2) + 2 * _KEYS * padded + 4 * _KEYS) // LANES) * LANES
    tiles = scratch("attention tiles", threads * scratch_len, torch.float32)
    _attend(
        q.data_ptr(),
        q.stride(0),
        KINDS[q.dtype],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        KINDS[k_cache.dtype],
        slot_table.data_ptr(),
        slot_table.stride(0),
        row_ids.data_ptr(),
        query_starts.data_ptr(),
        kv_lens.data_ptr(),
        out.data_ptr(),
        num_kv_heads,
        group,
        head_dim,
        vectors,
        sliding_window,
        plan.data_ptr(),
        parts.data_ptr(),
        tiles.data_ptr(),
        scratch_len,
        part_len,
        in_words,
        scale,
        soft_cap,
        threads=threads,
    )
    return out


@entry(ints=23, floats=2)
def _attend(call: int) -> None:
    q, q_step, q_kind = get_i64(call, ARGS), get_i64(call, ARGS + 1), get_i64(call, ARGS + 2)
    k_cache, v_cache, kv_kind = get_i64(call, ARGS + 3), get_i64(call, ARGS + 4), get_i64(call, ARGS + 5)
    slot_table, table_step = get_i64(call, ARGS + 6), get_i64(call, ARGS + 7)
    row_ids, starts, kv_lens = get_i64(call, ARGS + 8), get_i64(call, ARGS + 9), get_i64(call, ARGS + 10)
    out, num_kv_heads, group = get_i64(call, ARGS + 11), get_i64(call, ARGS + 12), get_i64(call, ARGS + 13)
    head_dim, max_vectors, window = get_i64(call, ARGS + 14), get_i64(call, ARGS + 15), get_i64(call, ARGS + 16)
    plan, parts = get_i64(call, ARGS + 17), get_i64(call, ARGS + 18)
    scratch = get_i64(call, ARGS + 19) + 4 * get_i64(call, ARGS + 20) * take_number(call, THREAD)
    in_words = get_i64(call, ARGS + 22) != 0
    scale, soft_cap = np.float32(get_f64(call, ARGS + 23)), np.float32(get_f64(call, ARGS + 24))
    score_scale = scale if in_words else np.float32(1.0)  # else queries have it

    padded = (head_dim + LANES - 1) // LANES * LANES
    part_len = get_i64(call, ARGS + 21)
    addresses = scratch  # int64 [64]: of the tile's keys
    queries = addresses + 8 * _KEYS  # [vectors, padded], scaled; or words [vectors, padded], half of each row used
    keys = queries + 4 * max_vectors * padded  # [padded, 64]; or words [padded / 2, 64]
    values = keys + 4 * _KEYS * padded  # [64, padded]; or words [32, padded]
    scores = values + 4 * _KEYS * padded  # [vectors, 64], then weights; or weights as words, half of each row used
    sums = scores + 4 * max_vectors * _KEYS  # [vectors, padded], then highest [vectors], weight [vectors]
    num_blocks, num_tasks = get_i64(plan, NUM_BLOCKS), get_i64(plan, NUM_TASKS)
    num_shared = get_i64(plan, NUM_SHARED)
    finished = plan + 8 * (HEADER + num_blocks * FIELDS)
    num_heads = num_kv_heads * group

    block, at = 0, HEADER
    piece, piece_number = get_i64(plan, SHARED), 0
    task = take_number(call, TASK)
    while task < num_tasks:
        is_shared = task < num_shared
        if is_shared:
            while piece_number < task // num_kv_heads:
                piece += 8 * (PIECE_FIELDS + get_i64(piece, MEMBERS))
                piece_number += 1
            head, num_members = task % num_kv_heads, get_i64(piece, MEMBERS)
            at = HEADER + get_i64(piece, PIECE_FIELDS) * FIELDS
            row, chunks = get_i64(plan, at + ROW), 0
            first_key = get_i64(piece, CHUNK_OF_PIECE) * CHUNK
            end_key, vectors = first_key + CHUNK, 0
            for member in range(num_members):
                member_at = HEADER + get_i64(piece, PIECE_FIELDS + member) * FIELDS
                begin, end = get_i64(plan, member_at + BEGIN), get_i64(plan, member_at + END)
                to = queries + 4 * vectors * padded
                _load_queries(q, q_step, q_kind, begin, end, head * group, group, head_dim, padded, scale, to, in_words)
                vectors += (end - begin) * group
            first_position = end_key  # all queries lie behind the chunk
            chunk = begin = 0
        else:
            own = task - num_shared
            at = HEADER + block * FIELDS
            while own >= get_i64(plan, at + FIRST_TASK) + get_i64(plan, at + OWN) * num_kv_heads:
                block += 1
                at += FIELDS
            chunks = get_i64(plan, at + CHUNKS)
            chunk = (own - get_i64(plan, at + FIRST_TASK)) // num_kv_heads
            head = own - get_i64(plan, at + FIRST_TASK) - chunk * num_kv_heads
            chunk += chunks - get_i64(plan, at + OWN)
            row, begin, end = get_i64(plan, at + ROW), get_i64(plan, at + BEGIN), get_i64(plan, at + END)
            before = get_i32(kv_lens, row) - get_i32(starts, row + 1)
            vectors = (end - begin) * group
            first_key = (get_i64(plan, at + FIRST_CHUNK) + chunk) * CHUNK
            end_key = min(first_key + CHUNK, before + end)
            first_position = before + begin
            if window > 0:
                first_key = max(first_key, (first_position - window + 1) // _KEYS * _KEYS)
            _load_queries(
                q, q_step, q_kind, begin, end, head * group, group, head_dim, padded, scale, queries, in_words
            )
        table = slot_table + 4 * get_i32(row_ids, row) * table_step
        count = min(_KEYS, end_key - first_key)
        _ask_for(k_cache, kv_kind, table, first_key, count, num_kv_heads, head, head_dim)
        _ask_for(v_cache, kv_kind, table, first_key, count, num_kv_heads, head, head_dim)
        _clear(sums, vectors, padded)
        for tile in range(first_key, end_key, _KEYS):
            count = min(_KEYS, end_key - tile)
            columns = (count + LANES - 1) // LANES
            _find_keys(k_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim, addresses)
            _zero(scores, vectors * _KEYS)
            if in_words:
                _load_key_words(addresses, count, head_dim, keys)
                _ask_for(v_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim)
                _multiply_words(queries, padded, keys, _KEYS, scores, _KEYS, vectors, columns, head_dim // 2)
            else:
                _load_keys(addresses, kv_kind, count, head_dim, keys)
                _ask_for(v_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim)
                _multiply(queries, padded, keys, _KEYS, scores, _KEYS, vectors, columns, head_dim)
            offset = first_position - tile
            _weigh(scores, sums, vectors, padded, columns, group, offset, window, score_scale, soft_cap, in_words)
            following = min(_KEYS, end_key - tile - _KEYS)
            _ask_for(k_cache, kv_kind, table, tile + _KEYS, following, num_kv_heads, head, head_dim)
            if in_words:
                _load_value_words(v_cache, table, tile, count, num_kv_heads, head, head_dim, values)
                pairs = (count + 1) // 2
                _multiply_words(scores, _KEYS, values, padded, sums, padded, vectors, padded // LANES, pairs)
            else:
                _load_values(v_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim, padded, values)
                _multiply(scores, _KEYS, values, padded, sums, padded, vectors, padded // LANES, count)
        if is_shared:
            first_vector = 0
            for member in range(num_members):
                other = get_i64(piece, PIECE_FIELDS + member)
                to = _part(plan, other, get_i64(piece, CHUNK_OF_PIECE), num_kv_heads, head, parts, part_len)
                first_vector += _leave_part(plan, other, group, padded, sums, vectors, first_vector, to)
            for member in range(num_members):
                other = get_i64(piece, PIECE_FIELDS + member)
                if (
                    take_number(finished, other * num_kv_heads + head)
                    == get_i64(plan, HEADER + other * FIELDS + CHUNKS) - 1
                ):
                    _join_parts(plan, other, num_kv_heads, head, group, padded, parts, part_len, sums)
                    begin = get_i64(plan, HEADER + other * FIELDS + BEGIN)
                    rows = (get_i64(plan, HEADER + other * FIELDS + END) - begin) * group
                    _finish(sums, rows, padded, out, q_kind, begin, head * group, group, num_heads, head_dim)
        elif chunks == 1:
            _finish(sums, vectors, padded, out, q_kind, begin, head * group, group, num_heads, head_dim)
        else:
            to = _part(plan, block, chunk, num_kv_heads, head, parts, part_len)
            _leave_part(plan, block, group, padded, sums, vectors, 0, to)
            if take_number(finished, block * num_kv_heads + head) == chunks - 1:
                _join_parts(plan, block, num_kv_heads, head, group, padded, parts, part_len, sums)
                _finish(sums, vectors, padded, out, q_kind, begin, head * group, group, num_heads, head_dim)
        task = take_number(call, TASK)


@njit(forceinline=True)
def _part(plan: int, block: int, chunk: int, num_kv_heads: int, head: int, parts: int, part_len: int) -> int:
    """Where a block's sums over one chunk lie."""
    first = get_i64(plan, HEADER + block * FIELDS + FIRST_PART)
    return parts + 4 * part_len * (first + chunk * num_kv_heads + head)


@njit
def _leave_part(plan: int, block: int, group: int, padded: int, sums: int, vectors: int, first: int, to: int) -> int:
    """Copies a block's vectors, from ``first`` on of so many, to its part; their number."""
    at = HEADER + block * FIELDS
    count = (get_i64(plan, at + END) - get_i64(plan, at + BEGIN)) * group
    for i in range(0, count * padded, LANES):
        store16_f32(to, i, load16_f32(sums, first * padded + i))
    for i in range(count):
        put_f32(to, count * padded + i, get_f32(sums, vectors * padded + first + i))
        put_f32(to, count * (padded + 1) + i, get_f32(sums, vectors * (padded + 1) + first + i))
    return count


@njit
def _join_parts(
    plan: int, block: int, num_kv_heads: int, head: int, group: int, padded: int, parts: int, part_len: int, sums: int
) -> None:
    """All of a block's parts, chunk by chunk, into ``sums``."""
    at = HEADER + block * FIELDS
    vectors = (get_i64(plan, at + END) - get_i64(plan, at + BEGIN)) * group
    _clear(sums, vectors, padded)
    for chunk in range(get_i64(plan, at + CHUNKS)):
        _join(_part(plan, block, chunk, num_kv_heads, head, parts, part_len), sums, vectors, padded)


@njit
def _load_queries(
    q: int,
    q_step: int,
    kind: int,
    begin: int,
    end: int,
    first_head: int,
    group: int,
    head_dim: int,
    padded: int,
    scale: np.float32,
    queries: int,
    in_words: bool,
) -> None:
    if in_words:
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
def _find_keys(
    cache: int, kind: int, table: int, first: int, count: int, num_kv_heads: int, head: int, head_dim: int, to: int
) -> None:
    """Addresses of ``count`` rows, and again of the last up to a multiple of 16."""
    size = 2 if kind == BFLOAT16 else 4
    for j in range((count + LANES - 1) // LANES * LANES):
        slot = get_i32(table, first + min(j, count - 1))
        put_i64(to, j, cache + (slot * num_kv_heads + head) * head_dim * size)


@njit
def _load_keys(addresses: int, kind: int, count: int, head_dim: int, keys: int) -> None:
    """Columns 0 to ``count`` of ``keys``, filled up to a multiple of 16 with copies of the last key."""
    whole = head_dim - head_dim % LANES
    for j in range(0, count, LANES):
        for d in range(0, whole, LANES):
            to = keys + 4 * (d * _KEYS + j)
            if kind == BFLOAT16:
                _transpose_bf16(addresses + 8 * j, d, to, _KEYS)
            else:
                _transpose_f32(addresses + 8 * j, d, to, _KEYS)
        for i in range(j, j + LANES):
            for d in range(whole, head_dim):
                put_f32(keys, d * _KEYS + i, get(get_i64(addresses, i), d, kind))


@njit
def _load_key_words(addresses: int, count: int, head_dim: int, keys: int) -> None:
    """The same with two neighbouring numbers of a key in each word."""
    for j in range(0, count, LANES):
        for d in range(0, head_dim // 2, LANES):
            _transpose_words(addresses + 8 * j, d, keys + 4 * (d * _KEYS + j), _KEYS)


@njit
def _load_values(
    cache: int,
    kind: int,
    table: int,
    first: int,
    count: int,
    num_kv_heads: int,
    head: int,
    head_dim: int,
    padded: int,
    values: int,
) -> None:
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
def _load_value_words(
    cache: int, table: int, first: int, count: int, num_kv_heads: int, head: int, head_dim: int, values: int
) -> None:
    """Words of two neighbouring keys' values; after the last of an odd number, whose weight is 0, itself again."""
    for j in range(0, count, 2):
        at = cache + 2 * (get_i32(table, first + j) * num_kv_heads + head) * head_dim
        other = cache + 2 * (get_i32(table, first + min(j + 1, count - 1)) * num_kv_heads + head) * head_dim
        to = values + 2 * j * head_dim
        for d in range(0, head_dim, LANES):
            pair_rows(at + 2 * d, other + 2 * d, to + 4 * d)


@njit
def _ask_for(
    cache: int, kind: int, table: int, first: int, count: int, num_kv_heads: int, head: int, head_dim: int
) -> None:
    """Has the rows of a tile fetched from memory while something else is computed."""
    row_bytes = head_dim * (2 if kind == BFLOAT16 else 4)
    for j in range(count):
        at = cache + (get_i32(table, first + j) * num_kv_heads + head) * row_bytes
        for offset in range(0, row_bytes, 64):
            prefetch(at + offset)


@njit
def _multiply(
    a: int, a_step: int, b: int, b_step: int, c: int, c_step: int, num_rows: int, num_vectors: int, count: int
) -> None:
    """c [rows, 16 * vectors] += a [rows, count] @ b [count, 16 * vectors]."""
    row = 0
    while row < num_rows:
        rows = min(4, num_rows - row)
        left, to = a + 4 * row * a_step, c + 4 * row * c_step
        v = 0
        while v + 4 <= num_vectors:
            right, at = b + 4 * LANES * v, to + 4 * LANES * v
            if rows == 4:
                _tile_4x4(left, a_step, right, b_step, at, c_step, count)
            elif rows == 3:
                _tile_3x4(left, a_step, right, b_step, at, c_step, count)
            elif rows == 2:
                _tile_2x4(left, a_step, right, b_step, at, c_step, count)
            else:
                _tile_1x4(left, a_step, right, b_step, at, c_step, count)
            v += 4
        while v < num_vectors:
            right, at = b + 4 * LANES * v, to + 4 * LANES * v
            if rows == 4:
                _tile_4x1(left, a_step, right, b_step, at, c_step, count)
            elif rows == 3:
                _tile_3x1(left, a_step, right, b_step, at, c_step, count)
            elif rows == 2:
                _tile_2x1(left, a_step, right, b_step, at, c_step, count)
            else:
                _tile_1x1(left, a_step, right, b_step, at, c_step, count)
            v += 1
        row += rows


@njit
def _multiply_words(
    a: int, a_step: int, b: int, b_step: int, c: int, c_step: int, num_rows: int, num_vectors: int, count: int
) -> None:
    """The same of words: ``count`` of them in a row of a."""
    row = 0
    while row < num_rows:
        rows = min(4, num_rows - row)
        left, to = a + 4 * row * a_step, c + 4 * row * c_step
        v = 0
        while v + 4 <= num_vectors:
            right, at = b + 4 * LANES * v, to + 4 * LANES * v
            if rows == 4:
                _words_4x4(left, a_step, right, b_step, at, c_step, count)
            elif rows == 3:
                _words_3x4(left, a_step, right, b_step, at, c_step, count)
            elif rows == 2:
                _words_2x4(left, a_step, right, b_step, at, c_step, count)
            else:
                _words_1x4(left, a_step, right, b_step, at, c_step, count)
            v += 4
        while v < num_vectors:
            right, at = b + 4 * LANES * v, to + 4 * LANES * v
            if rows == 4:
                _words_4x1(left, a_step, right, b_step, at, c_step, count)
            elif rows == 3:
                _words_3x1(left, a_step, right, b_step, at, c_step, count)
            elif rows == 2:
                _words_2x1(left, a_step, right, b_step, at, c_step, count)
            else:
                _words_1x1(left, a_step, right, b_step, at, c_step, count)
            v += 1
        row += rows


@njit
def _weigh(
    scores: int,
    sums: int,
    vectors: int,
    padded: int,
    columns: int,
    group: int,
    offset: int,
    window: int,
    scale: np.float32,
    soft_cap: np.float32,
    in_words: bool,
) -> None:
    """Scaled scores become weights against the highest so far; what was summed against a lower one is scaled down.

    ``offset`` is the position of the block's first query, counted from the tile's first key.
    """
    highests = sums + 4 * vectors * padded
    weights = highests + 4 * vectors
    cap, one, two, inf = splat16(soft_cap), splat16(1.0), splat16(2.0), splat16(_MINUS_INF)
    scales = splat16(scale)
    for vector in range(vectors):
        position = offset + vector // group
        line = vector * _KEYS
        # Bit j: the query sees key j of the tile.
        stop = min(max(position + 1, 0), _KEYS)
        start = min(max(position - window + 1, 0), _KEYS) if window > 0 else 0
        top = splat16(_LOWEST)
        for v in range(columns):
            first = LANES * v
            score = load16_f32(scores, line + first) * scales
            if soft_cap != 0.0:
                score = cap * (one - two / (exp16(two * (score / cap)) + one))
            if start > first or stop < first + LANES:
                seen = (1 << min(max(stop - first, 0), LANES)) - 1
                seen &= ~((1 << min(max(start - first, 0), LANES)) - 1)
                score = choose16(seen, score, inf)
            store16_f32(scores, line + first, score)
            top = max16(score, top)
        old = get_f32(highests, vector)
        new = max(old, highest16(top))
        if new > old:
            keep = exp(old - new)
            put_f32(highests, vector, new)
            put_f32(weights, vector, get_f32(weights, vector) * keep)
            factor = splat16(keep)
            for d in range(0, padded, LANES):
                store16_f32(sums, vector * padded + d, load16_f32(sums, vector * padded + d) * factor)
        total, base = splat16(0.0), splat16(new)
        for v in range(columns):
            weight = exp16(load16_f32(scores, line + LANES * v) - base)
            if in_words:
                store_weights(scores + 4 * line + 2 * LANES * v, weight)
            else:
                store16_f32(scores, line + LANES * v, weight)
            total = total + weight
        put_f32(weights, vector, get_f32(weights, vector) + sum16(total))


@njit
def _join(part: int, sums: int, vectors: int, padded: int) -> None:
    """Adds a later chunk's sums to those of the chunks before it."""
    highest_at, weight_at = vectors * padded, vectors * (padded + 1)
    for vector in range(vectors):
        old, other = get_f32(sums, highest_at + vector), get_f32(part, highest_at + vector)
        new = max(old, other)
        keep, scale = exp(old - new), exp(other - new)
        put_f32(sums, highest_at + vector, new)
        weight = get_f32(sums, weight_at + vector) * keep + get_f32(part, weight_at + vector) * scale
        put_f32(sums, weight_at + vector, weight)
        keeps, scales = splat16(keep), splat16(scale)
        for d in range(vector * padded, (vector + 1) * padded, LANES):
            store16_f32(sums, d, load16_f32(sums, d) * keeps + load16_f32(part, d) * scales)


@njit
def _finish(
    sums: int,
    vectors: int,
    padded: int,
    out: int,
    kind: int,
    begin: int,
    first_head: int,
    group: int,
    num_heads: int,
    head_dim: int,
) -> None:
    whole = head_dim - head_dim % LANES
    weights = sums + 4 * vectors * (padded + 1)
    for vector in range(vectors):
        scale = np.float32(1.0) / get_f32(weights, vector)
        factor = splat16(scale)
        at, to = vector * padded, ((begin + vector // group) * num_heads + first_head + vector % group) * head_dim
        for d in range(0, whole, LANES):
            store16(out, to + d, kind, load16_f32(sums, at + d) * factor)
        for d in range(whole, head_dim):
            put(out, to + d, kind, get_f32(sums, at + d) * scale)


@njit
def _clear(sums: int, vectors: int, padded: int) -> None:
    _zero(sums, vectors * (padded + 2))
    for vector in range(vectors):
        put_f32(sums, vectors * padded + vector, _LOWEST)


@njit
def _zero(to: int, count: int) -> None:
    for i in range(count):
        put_f32(to, i, np.float32(0.0))
