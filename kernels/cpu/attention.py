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

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..shared import SharedPrefixes
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
from .attention_tile import (
    KEYS,
    LOWEST,
    add_product,
    add_words_product,
    ask_for,
    find_keys,
    load_key_words,
    load_keys,
    load_queries,
    load_value_words,
    load_values,
    multiply,
    multiply_words,
    weigh,
)
from .bfloat import has_bfloat16_pairs
from .entry import ARGS, TASK, THREAD, entry
from .recording import open_recording, scratch
from .tensors import KINDS, readable, team_size
from .vector import (
    LANES,
    exp2,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    load16_f32,
    put,
    put_f32,
    splat16,
    store16,
    store16_f32,
    take_number,
)

_VECTORS = 64  # of a task, or the query heads of one KV head where those are more

_MIN_WORK = 200_000  # products of a context worth a second thread


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
    scratch_len = -(-(vectors * (2 * padded + KEYS + 2) + 2 * KEYS * padded + 4 * KEYS) // LANES) * LANES
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


def shared_prefix_attention(q: Tensor, *inputs: Tensor, shared: SharedPrefixes, **how: Any) -> Tensor:
    """Rows that share a prefix are found by their slots: nothing needs to be told."""
    return paged_attention(q, *inputs, **how)


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
    queries = addresses + 8 * KEYS  # [vectors, padded], scaled; or words [vectors, padded], half of each row used
    keys = queries + 4 * max_vectors * padded  # [padded, 64]; or words [padded / 2, 64]
    values = keys + 4 * KEYS * padded  # [64, padded]; or words [32, padded]
    scores = values + 4 * KEYS * padded  # [vectors, 64], then weights; or weights as words, half of each row used
    sums = scores + 4 * max_vectors * KEYS  # [vectors, padded], then highest [vectors], weight [vectors]
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
                load_queries(q, q_step, q_kind, begin, end, head * group, group, head_dim, padded, scale, to, in_words)
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
                first_key = max(first_key, (first_position - window + 1) // KEYS * KEYS)
            load_queries(q, q_step, q_kind, begin, end, head * group, group, head_dim, padded, scale, queries, in_words)
        table = slot_table + 4 * get_i32(row_ids, row) * table_step
        count = min(KEYS, end_key - first_key)
        ask_for(k_cache, kv_kind, table, first_key, count, num_kv_heads, head, head_dim)
        ask_for(v_cache, kv_kind, table, first_key, count, num_kv_heads, head, head_dim)
        _clear(sums, vectors, padded)
        for tile in range(first_key, end_key, KEYS):
            count = min(KEYS, end_key - tile)
            columns = (count + LANES - 1) // LANES
            find_keys(k_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim, addresses)
            if in_words:
                load_key_words(addresses, count, head_dim, keys)
                ask_for(v_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim)
                multiply_words(queries, padded, keys, KEYS, scores, KEYS, vectors, columns, head_dim // 2)
            else:
                load_keys(addresses, kv_kind, count, head_dim, keys)
                ask_for(v_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim)
                multiply(queries, padded, keys, KEYS, scores, KEYS, vectors, columns, head_dim)
            offset = first_position - tile
            weigh(scores, sums, vectors, padded, columns, group, offset, window, score_scale, soft_cap, in_words)
            following = min(KEYS, end_key - tile - KEYS)
            ask_for(k_cache, kv_kind, table, tile + KEYS, following, num_kv_heads, head, head_dim)
            if in_words:
                load_value_words(v_cache, table, tile, count, num_kv_heads, head, head_dim, values)
                pairs = (count + 1) // 2
                add_words_product(scores, KEYS, values, padded, sums, padded, vectors, padded // LANES, pairs)
            else:
                load_values(v_cache, kv_kind, table, tile, count, num_kv_heads, head, head_dim, padded, values)
                add_product(scores, KEYS, values, padded, sums, padded, vectors, padded // LANES, count)
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
def _join(part: int, sums: int, vectors: int, padded: int) -> None:
    """Adds a later chunk's sums to those of the chunks before it."""
    highest_at, weight_at = vectors * padded, vectors * (padded + 1)
    for vector in range(vectors):
        old, other = get_f32(sums, highest_at + vector), get_f32(part, highest_at + vector)
        new = max(old, other)
        keep, scale = exp2(old - new), exp2(other - new)
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
    for i in range(vectors * (padded + 2)):
        put_f32(sums, i, np.float32(0.0))
    for vector in range(vectors):
        put_f32(sums, vectors * padded + vector, LOWEST)
