"""Causal attention over slots, for decoding and prefill alike. Keys and values are laid out 64 at a time.

A task is a block of neighbouring queries of one row, with all the query heads of one KV head (its *vectors*), and one
chunk of 512 keys. A thread takes the tasks of all KV heads together, or one at a time where tasks are few. Where a
block has several chunks, each task leaves its part (sums, highest score, weight), and the task that finishes last joins
them. So all threads share a long context, whatever the number of rows.

A query's result depends on its own row alone, to the bit, however rows are batched and prompts are cut: tiles and
chunks begin at multiples of their length, sums run in the order of positions, and masked keys weigh exactly 0.

Rows whose first tiles lie in the same slots, such as children of one prompt, have those tiles computed together: keys
and values are read and widened once, and all their queries make one matrix product. A row that shares a part of a chunk
goes on from its sums over that part. No bit of a result changes.

Where queries, keys and values are bfloat16, both products take bfloat16 factors, two of which are multiplied and added
by one instruction. Scores, weights and sums are float32; a weight is rounded only as a factor of a value.

Keys and values of 8 bits are unpacked a tile at a time, to bfloat16 where both products take that, else to float32. The
result has the bits of an unpacked pool's.

While a tile is computed, the next one is on its way from memory: of all KV heads, in the order in which it lies there,
and after a task's last tile the first of a task that may come next.

The running softmax is Milakov and Gimelshein's (2018), the joining of chunks Dao's Flash-Decoding (2023).
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...cpu_isa import isa
from ..quantized_kv import kv_row_len
from ..shared import SharedPrefixes
from ..threads import team
from .attention_plan import (
    BEGIN,
    CHUNK,
    CHUNKS,
    DONE,
    END,
    END_TILE,
    FIELDS,
    FIRST_CHUNK,
    FIRST_PART,
    FIRST_TASK,
    FIRST_TILE,
    HEADER,
    LAST_RUN,
    MEMBERS,
    NUM_BLOCKS,
    NUM_SHARED,
    NUM_TASKS,
    OWN,
    PIECE_FIELDS,
    PIECES,
    ROW,
    RUN_LEN,
    RUNS,
    SHARED_TILES,
    PlanCall,
    plan_attention,
    plan_words,
)
from .attention_tile import (
    KEYS,
    LOWEST,
    Context,
    Queries,
    SeenKeys,
    Softmax,
    add_product,
    add_words_product,
    find_rows,
    load_key_rows,
    load_key_words,
    load_keys,
    load_queries,
    load_query_columns,
    load_value_words,
    load_values,
    move_rows,
    multiply,
    multiply_words,
    prefetch_rows,
    weigh,
)
from .bfloat import has_bfloat16_pairs
from .entry import TASK, THREAD, counters, entry
from .machine_code import helper, inlined
from .quantized_kv import QUANTIZED, unpack_vectors
from .recording import open_recording, scratch
from .tensors import KINDS, readable, team_size
from .vector import (
    FLOAT32,
    LANES,
    exp2,
    get_f32,
    get_i32,
    get_i64,
    load16_f32,
    put,
    put_f32,
    splat16,
    store16,
    store16_f32,
    take_number,
    watch,
)
from .word_tiles import (
    add_word_tiles,
    close_word_tiles,
    has_word_tiles,
    multiply_word_tiles,
    open_word_tiles,
    score_few,
)

# Of a task, or the query heads of one KV head where those are more. Where tiles multiply, laying out keys and values
# takes as long as the products; so more queries share it, unless that leaves too few tasks for many threads.
_VECTORS, _TILE_VECTORS, _FEW_THREADS = 64, 96, 8

# Scores of so few vectors are products of keys in rows by queries in columns, for which no key is laid out. These
# queries take the room of half as many vectors.
_FEW, _FEW_ROOM = LANES, LANES // 2

_MIN_WORK = 200_000  # multiplications worth a second thread


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
    assert len(kv_lens) == len(row_ids), (kv_lens.shape, row_ids.shape)
    out = torch.empty(q.shape, dtype=q.dtype)
    rows = (slot_table, row_ids, query_starts)
    seen = (kv_lens.int(), None, None)
    _run(q, k_cache, v_cache, rows, seen, out, None, scale=scale, window=sliding_window, soft_cap=soft_cap)
    return out


def partial_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    row_ids: Tensor,
    query_starts: Tensor,
    ends: Tensor,
    *,
    scale: float,
    firsts: Tensor | None = None,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape, dtype=torch.float32)
    weights = torch.zeros((*q.shape[:2], 2), dtype=torch.float32)  # the reference as an exponent of 2, the weight
    rows = (slot_table, row_ids, query_starts)
    seen = (None, ends.int(), None if firsts is None else firsts.int())
    _run(q, k_cache, v_cache, rows, seen, out, weights, scale=scale, window=0, soft_cap=soft_cap)
    highest, weight = weights.unbind(2)
    return out, highest + weight.log2()


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    seen: tuple[Tensor | None, Tensor | None, Tensor | None],
    out: Tensor,
    weights: Tensor | None,
    *,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """Fills ``out`` and ``weights``, except for queries without keys. ``rows``: slot table, row ids, query starts.
    ``seen``: the rows' lengths, or the queries' ends and firsts.
    """
    slot_table, row_ids, query_starts = rows
    kv_lens, ends, firsts = seen
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = row_ids.shape[0], k_cache.shape[1]
    group = num_heads // num_kv_heads
    is_quantized = k_cache.dtype == torch.int8
    row_len = kv_row_len(head_dim, k_cache.dtype)
    assert k_cache.shape == v_cache.shape and k_cache.shape[2] == row_len, (q.shape, k_cache.shape, v_cache.shape)
    assert num_heads == group * num_kv_heads, (num_heads, num_kv_heads)
    assert len(query_starts) == num_rows + 1, (row_ids.shape, query_starts.shape)
    assert ends is None or len(ends) == num_tokens, (ends.shape, q.shape)
    if q.stride(2) != 1 or (num_heads > 1 and q.stride(1) != head_dim):
        q = q.contiguous()
    if is_quantized:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    else:
        k_cache, v_cache = readable(k_cache), readable(v_cache)
    slot_table = slot_table.int()
    row_ids, query_starts = row_ids.int(), query_starts.int()
    lens_at = query_starts.data_ptr() if kv_lens is None else kv_lens.data_ptr()  # not used where there are ends
    ends_at = 0 if ends is None else ends.data_ptr()
    firsts_at = 0 if firsts is None else firsts.data_ptr()
    is_in_words = q.dtype == torch.bfloat16 and (is_quantized or k_cache.dtype == torch.bfloat16)
    in_words = has_bfloat16_pairs() and is_in_words and head_dim % (2 * LANES) == 0

    most_vectors = _VECTORS
    if in_words and isa().has_tiles:
        most_vectors = _TILE_VECTORS * (2 if team().size <= _FEW_THREADS else 1)
    block = max(1, min(most_vectors // group, num_tokens - num_rows + 1))
    max_blocks = num_rows + num_tokens // block
    num_words = plan_words(num_rows, num_tokens, slot_table.shape[1], block=block, num_kv_heads=num_kv_heads)
    plan = scratch("attention plan", num_words, torch.int64)
    plan_call = PlanCall(
        query_starts.data_ptr(),
        lens_at,
        num_rows,
        num_kv_heads,
        group,
        block,
        head_dim,
        window,
        plan.data_ptr(),
        slot_table.data_ptr(),
        slot_table.stride(0),
        row_ids.data_ptr(),
        max(1, most_vectors // group),
        ends_at,
        firsts_at,
    )
    plan_attention(plan_call)
    if open_recording() is None:
        _, num_tasks, num_parts, work, *_ = plan[:HEADER].tolist()
        threads = min(team_size(work, min_share=_MIN_WORK), max(num_tasks, 1))
    else:  # a replay's contexts may be as long as the table is wide
        num_parts = max_blocks * num_kv_heads * -(-slot_table.shape[1] // CHUNK)
        threads = team().size
    vectors, padded = block * group, -(-head_dim // LANES) * LANES
    part_len = vectors * (padded + 2)
    vectors = max(vectors, num_heads)  # a task may have all heads of a query
    if num_rows > 1:  # rows may share tiles
        vectors = max(vectors, max(1, most_vectors // group) * group)
    vectors = -(-max(vectors, _FEW_ROOM) // 4) * 4  # ``score_few`` writes rows of scores four at a time
    parts = scratch("attention parts", num_parts * part_len, torch.float32)
    num_arrays = 3 if is_quantized else 2  # of a tile: keys, values, and either of them unpacked
    scratch_len = -(-(vectors * (2 * padded + KEYS + 2) + num_arrays * KEYS * padded + 6 * KEYS) // LANES) * LANES
    tiles = scratch("attention tiles", threads * scratch_len, torch.float32)
    call = AttendCall(
        q.data_ptr(),
        q.stride(0),
        KINDS[q.dtype],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        QUANTIZED if is_quantized else KINDS[k_cache.dtype],
        row_len * k_cache.element_size(),
        slot_table.data_ptr(),
        slot_table.stride(0),
        row_ids.data_ptr(),
        query_starts.data_ptr(),
        lens_at,
        ends_at,
        firsts_at,
        out.data_ptr(),
        KINDS[out.dtype],
        0 if weights is None else weights.data_ptr(),
        num_kv_heads,
        group,
        head_dim,
        vectors,
        window,
        plan.data_ptr(),
        parts.data_ptr(),
        part_len,
        tiles.data_ptr(),
        scratch_len,
        in_words,
        threads,
        scale,
        soft_cap,
    )
    _attend(call, threads=threads)


def shared_prefix_attention(
    q: Tensor, *inputs: Tensor, shared: SharedPrefixes, scale: float, soft_cap: float = 0.0
) -> Tensor:
    """``paged_attention``, which finds shared prefixes by their slots."""
    return paged_attention(q, *inputs, scale=scale, soft_cap=soft_cap)


class AttendCall(NamedTuple):
    """A step counts numbers from one row, or token, to the next."""

    q: int  # [T, Hq, D]
    q_step: int
    q_kind: int
    k_cache: int  # [S, Hkv, row_bytes]
    v_cache: int  # [S, Hkv, row_bytes]
    kv_kind: int
    row_bytes: int  # of a key or value: those of its D numbers, and of its scales if it is QUANTIZED
    table: int  # int32 [rows, table_step]
    table_step: int
    row_ids: int  # int32 [R]
    starts: int  # int32 [R + 1]
    kv_lens: int  # int32 [R]
    ends: int  # int32 [T], see ``PlanCall``
    firsts: int  # int32 [T]
    out: int  # [T, Hq, D]
    out_kind: int
    weights: int  # float32 [T, Hq, 2], written: the reference (see ``weigh``) as an exponent of 2, the weight; or 0
    num_kv_heads: int
    group: int  # query heads of one KV head
    head_dim: int
    max_vectors: int  # of a task
    window: int  # 0: none
    plan: int  # see ``attention_plan``
    parts: int  # float32 [parts, part_len]
    part_len: int
    scratch: int  # float32 [threads, scratch_len]
    scratch_len: int
    in_words: int  # 1: queries, keys and values are bfloat16, or unpacked to it, and are multiplied two at a time
    threads: int  # at most
    scale: float
    soft_cap: float  # 0: none


class Parts(NamedTuple):
    """Where tasks leave their sums over one chunk: for each block with several chunks, chunk and KV head."""

    plan: int
    parts: int
    part_len: int
    num_kv_heads: int
    group: int
    padded: int


class Output(NamedTuple):
    out: int
    kind: int
    weights: int
    group: int
    num_heads: int
    head_dim: int
    padded: int


@entry
def _attend(call: AttendCall) -> None:
    num_kv_heads, group, head_dim, max_vectors = call.num_kv_heads, call.group, call.head_dim, call.max_vectors
    row_bytes, window, plan = call.row_bytes, call.window, call.plan
    is_quantized = call.kv_kind == QUANTIZED
    kind = FLOAT32 if is_quantized else call.kv_kind  # of what is laid out, unless that is in words
    starts, kv_lens, ends, firsts = call.starts, call.kv_lens, call.ends, call.firsts
    in_words, scale = call.in_words != 0, np.float32(call.scale)
    padded = (head_dim + LANES - 1) // LANES * LANES
    source = Queries(call.q, call.q_step, call.q_kind, group, head_dim, padded, scale, in_words)
    # Queries that are not words are scaled when they are loaded.
    softmax = Softmax(group, window, scale if in_words else np.float32(1.0), np.float32(call.soft_cap), in_words)
    kept = Parts(plan, call.parts, call.part_len, num_kv_heads, group, padded)
    output = Output(call.out, call.out_kind, call.weights, group, num_kv_heads * group, head_dim, padded)

    scratch = call.scratch + 4 * call.scratch_len * take_number(counters(call), THREAD)
    found = scratch  # int64 [64]: addresses of the tile's keys, of its first head
    addresses = found + 8 * KEYS  # int64 [64]: of its keys or values
    # [vectors, padded], scaled; or words [vectors, padded], half of each row used; or words [head_dim / 2, 16]
    queries = addresses + 8 * KEYS
    keys = queries + 4 * max_vectors * padded  # [padded, 64]; or words [padded / 2, 64]; or words [64, padded / 2]
    values = keys + 4 * KEYS * padded  # [64, padded]; or words [32, padded]
    scores = values + 4 * KEYS * padded  # [vectors, 64], then weights; or weights as words, half of each row used
    sums = scores + 4 * max_vectors * KEYS  # [vectors, padded], then highest [vectors], weight [vectors]
    unpacked = sums + 4 * max_vectors * (padded + 2)  # [64, head_dim]: of QUANTIZED keys or values
    num_blocks, num_tasks = get_i64(plan, NUM_BLOCKS), get_i64(plan, NUM_TASKS)
    num_shared = get_i64(plan, NUM_SHARED)
    finished = plan + 8 * (HEADER + num_blocks * FIELDS)

    # Task numbers count what a thread takes: all KV heads, which lie side by side in memory, or one where the threads'
    # shares of the work would else differ by more than an eighth.
    num_whole, threads = num_tasks // num_kv_heads, call.threads
    span = num_kv_heads if (num_whole + threads - 1) // threads * threads * 8 <= num_whole * 9 else 1
    num_tasks, num_shared = num_tasks // span, num_shared // span

    block, at, piece = 0, HEADER, 0
    run, run_number = get_i64(plan, RUNS), 0
    task = take_number(counters(call), TASK)
    while task < num_tasks:
        is_shared = task < num_shared
        first_head = task * span % num_kv_heads
        num_pieces = 1
        if is_shared:
            while run_number < task * span // num_kv_heads:
                run += 8 * get_i64(run, RUN_LEN)
                run_number += 1
            num_pieces = get_i64(run, PIECES)
            piece = run + 8 * (DONE + num_kv_heads)
        for _ in range(num_pieces):
            own_ends = own_firsts = chunks = begin = vectors = num_members = 0
            next_row = next_key = next_end = 0  # keys [next_key, next_end) of a task that this thread may take next
            if is_shared:
                num_members = get_i64(piece, MEMBERS)
                at = HEADER + get_i64(piece, PIECE_FIELDS) * FIELDS
                row = get_i64(plan, at + ROW)
                first_key, end_key = get_i64(piece, FIRST_TILE) * KEYS, get_i64(piece, END_TILE) * KEYS
                chunk = first_key // CHUNK
                for member in range(num_members):
                    vectors += _num_vectors(kept, get_i64(piece, PIECE_FIELDS + member))
                first_position = end_key  # all queries come after the piece
                is_begun = first_key % CHUNK > 0
            else:
                own = task * span - num_shared * span
                at = HEADER + block * FIELDS
                while own >= get_i64(plan, at + FIRST_TASK) + get_i64(plan, at + OWN) * num_kv_heads:
                    block += 1
                    at += FIELDS
                chunks = get_i64(plan, at + CHUNKS)
                chunk = (own - get_i64(plan, at + FIRST_TASK)) // num_kv_heads + chunks - get_i64(plan, at + OWN)
                row, begin, end = get_i64(plan, at + ROW), get_i64(plan, at + BEGIN), get_i64(plan, at + END)
                before = get_i32(kv_lens, row) - get_i32(starts, row + 1)
                vectors = (end - begin) * group
                first_key = (get_i64(plan, at + FIRST_CHUNK) + chunk) * CHUNK
                end_key = min(first_key + CHUNK, before + end)
                first_position = before + begin
                if window > 0:
                    first_key = max(first_key, (first_position - window + 1) // KEYS * KEYS)
                if ends != 0:
                    own_ends = ends + 4 * begin
                    end_key = min((get_i64(plan, at + FIRST_CHUNK) + chunk + 1) * CHUNK, get_i32(ends, end - 1))
                if firsts != 0:
                    own_firsts = firsts + 4 * begin
                    first_key = max(first_key, get_i32(firsts, begin) // KEYS * KEYS)
                shared_keys = get_i64(plan, at + SHARED_TILES) * KEYS
                is_begun = shared_keys > first_key
                first_key = max(first_key, shared_keys)
                if span > 1 and ends == 0 and window == 0:
                    later = block
                    if chunk + threads < chunks:
                        next_key = (chunk + threads) * CHUNK
                    else:
                        later = block + threads
                    if later < num_blocks:
                        next_at = HEADER + later * FIELDS
                        next_row = get_i64(plan, next_at + ROW)
                        next_key = max(next_key, get_i64(plan, next_at + SHARED_TILES) * KEYS)
                        next_end = get_i32(kv_lens, next_row)
            table = call.table + 4 * get_i32(call.row_ids, row) * call.table_step
            # Heads whose queries and sums have room go through the tiles together.
            are_few = in_words and has_word_tiles() != 0 and vectors <= _FEW
            room = max(vectors, _FEW_ROOM) if are_few else vectors
            together = span if span * room <= max_vectors else 1
            queries_step, sums_step = 4 * room * padded, 4 * vectors * (padded + 2)
            for first in range(first_head, first_head + span, together):
                row_keys = Context(call.k_cache, row_bytes, table, num_kv_heads, first)
                row_values = Context(call.v_cache, row_bytes, table, num_kv_heads, first)
                count = min(KEYS, end_key - first_key)
                prefetch_rows(row_keys, first_key, count, together)
                prefetch_rows(row_values, first_key, count, together)
                for i in range(together):
                    head = first + i
                    own_queries, own_sums = queries + i * queries_step, sums + i * sums_step
                    if are_few and not is_shared:
                        load_query_columns(source, begin, end, head * group, 0, own_queries)
                    elif not is_shared:
                        load_queries(source, begin, end, head * group, own_queries)
                    if not is_begun:
                        _clear(own_sums, vectors, padded)
                    elif not is_shared:
                        last_run = get_i64(plan, at + LAST_RUN)
                        while watch(last_run, DONE + head) == 0:
                            pass
                        _take_part(kept, block, own_sums, vectors, 0, _part(kept, block, chunk, head))
                    if is_shared:
                        first_vector = 0
                        for member in range(num_members):
                            other = get_i64(piece, PIECE_FIELDS + member)
                            member_at = HEADER + other * FIELDS
                            from_token, to_token = get_i64(plan, member_at + BEGIN), get_i64(plan, member_at + END)
                            to = own_queries + 4 * first_vector * padded
                            if are_few:
                                load_query_columns(
                                    source, from_token, to_token, head * group, first_vector, own_queries
                                )
                            else:
                                load_queries(source, from_token, to_token, head * group, to)
                            if is_begun:
                                part = _part(kept, other, chunk, head)
                                _take_part(kept, other, own_sums, vectors, first_vector, part)
                            first_vector += (to_token - from_token) * group
                if in_words and has_word_tiles() != 0:
                    open_word_tiles(vectors)
                for tile in range(first_key, end_key, KEYS):
                    count = min(KEYS, end_key - tile)
                    columns = (count + LANES - 1) // LANES
                    seen = SeenKeys(tile, first_position - tile, own_ends, own_firsts)
                    ahead_row, ahead_key, ahead_end = row, tile + KEYS, end_key
                    if tile + KEYS >= end_key:
                        ahead_row, ahead_key, ahead_end = next_row, next_key, next_end
                    ahead_table = call.table + 4 * get_i32(call.row_ids, ahead_row) * call.table_step
                    ahead_keys = Context(call.k_cache, row_bytes, ahead_table, num_kv_heads, first)
                    ahead_values = Context(call.v_cache, row_bytes, ahead_table, num_kv_heads, first)
                    num_ahead = max(0, min(KEYS, ahead_end - ahead_key))
                    find_rows(row_keys, tile, count, found)
                    for i in range(together):
                        own_queries, own_sums = queries + i * queries_step, sums + i * sums_step
                        # Fetched beside this head's work: its share of the next tile's keys and values, of all heads.
                        ahead = ahead_key + num_ahead * i // together
                        part = ahead_key + num_ahead * (i + 1) // together - ahead
                        half = part // 2
                        move_rows(found, i * row_bytes, addresses)
                        if is_quantized:
                            unpack_vectors(addresses, count, head_dim, in_words, unpacked)
                        if are_few:
                            load_key_rows(addresses, count, head_dim, keys)
                        elif in_words:
                            load_key_words(addresses, count, head_dim, keys)
                        else:
                            load_keys(addresses, kind, count, head_dim, keys)
                        prefetch_rows(ahead_keys, ahead, half, together)
                        if in_words:
                            words = head_dim // 2
                            if are_few:
                                spare = keys + 2 * KEYS * padded
                                score_few(own_queries, keys, head_dim, scores, KEYS, vectors, columns, spare)
                            elif has_word_tiles() != 0:
                                multiply_word_tiles(
                                    own_queries, padded, keys, KEYS, scores, KEYS, vectors, columns, words
                                )
                            else:
                                multiply_words(own_queries, padded, keys, KEYS, scores, KEYS, vectors, columns, words)
                        else:
                            multiply(own_queries, padded, keys, KEYS, scores, KEYS, vectors, columns, head_dim)
                        prefetch_rows(ahead_keys, ahead + half, part - half, together)
                        weigh(softmax, seen, scores, own_sums, vectors, padded, columns)
                        prefetch_rows(ahead_values, ahead, half, together)
                        move_rows(found, i * row_bytes + call.v_cache - call.k_cache, addresses)
                        if is_quantized:
                            unpack_vectors(addresses, count, head_dim, in_words, unpacked)
                        pairs = 0
                        if in_words:
                            pairs = load_value_words(addresses, count, head_dim, values)
                        else:
                            load_values(addresses, kind, count, head_dim, padded, values)
                        prefetch_rows(ahead_values, ahead + half, part - half, together)
                        lines = padded // LANES
                        if in_words:
                            if has_word_tiles() != 0:
                                add_word_tiles(scores, KEYS, values, padded, own_sums, padded, vectors, lines, pairs)
                            else:
                                add_words_product(scores, KEYS, values, padded, own_sums, padded, vectors, lines, pairs)
                        else:
                            add_product(scores, KEYS, values, padded, own_sums, padded, vectors, lines, count)
                for i in range(together):
                    head, own_sums = first + i, sums + i * sums_step
                    if is_shared:
                        first_vector = 0
                        for member in range(num_members):
                            other = get_i64(piece, PIECE_FIELDS + member)
                            to = _part(kept, other, chunk, head)
                            first_vector += _leave_part(kept, other, own_sums, vectors, first_vector, to)
                        for member in range(num_members):
                            other = get_i64(piece, PIECE_FIELDS + member)
                            other_at = HEADER + other * FIELDS
                            if end_key % CHUNK > 0:  # the chunk goes on
                                continue
                            if (
                                take_number(finished, other * num_kv_heads + head)
                                == get_i64(plan, other_at + CHUNKS) - 1
                            ):
                                _join_parts(kept, other, head, own_sums)
                                begin = get_i64(plan, other_at + BEGIN)
                                rows = (get_i64(plan, other_at + END) - begin) * group
                                _finish(output, own_sums, rows, begin, head * group)
                    elif chunks == 1:
                        _finish(output, own_sums, vectors, begin, head * group)
                    else:
                        _leave_part(kept, block, own_sums, vectors, 0, _part(kept, block, chunk, head))
                        if take_number(finished, block * num_kv_heads + head) == chunks - 1:
                            _join_parts(kept, block, head, own_sums)
                            _finish(output, own_sums, vectors, begin, head * group)
            if is_shared:
                piece += 8 * (PIECE_FIELDS + num_members)
        if is_shared:
            for head in range(first_head, first_head + span):
                take_number(run, DONE + head)
        task = take_number(counters(call), TASK)
    if in_words and has_word_tiles() != 0:
        close_word_tiles()


@inlined
def _part(kept: Parts, block: int, chunk: int, head: int) -> int:
    """The address of a block's sums over one chunk."""
    first = get_i64(kept.plan, HEADER + block * FIELDS + FIRST_PART)
    return kept.parts + 4 * kept.part_len * (first + chunk * kept.num_kv_heads + head)


@helper
def _leave_part(kept: Parts, block: int, sums: int, vectors: int, first: int, to: int) -> int:
    """Copies a block's vectors, which begin at ``first`` of ``vectors`` in ``sums``, to ``to``; their number."""
    padded = kept.padded
    count = _num_vectors(kept, block)
    for i in range(0, count * padded, LANES):
        store16_f32(to, i, load16_f32(sums, first * padded + i))
    for i in range(count):
        put_f32(to, count * padded + i, get_f32(sums, vectors * padded + first + i))
        put_f32(to, count * (padded + 1) + i, get_f32(sums, vectors * (padded + 1) + first + i))
    return count


@helper
def _take_part(kept: Parts, block: int, sums: int, vectors: int, first: int, part: int) -> int:
    """Copies a block's vectors from where ``_leave_part`` left them; their number."""
    padded = kept.padded
    count = _num_vectors(kept, block)
    for i in range(0, count * padded, LANES):
        store16_f32(sums, first * padded + i, load16_f32(part, i))
    for i in range(count):
        put_f32(sums, vectors * padded + first + i, get_f32(part, count * padded + i))
        put_f32(sums, vectors * (padded + 1) + first + i, get_f32(part, count * (padded + 1) + i))
    return count


@helper
def _join_parts(kept: Parts, block: int, head: int, sums: int) -> None:
    """Joins all of a block's parts, chunk by chunk, in ``sums``."""
    vectors = _num_vectors(kept, block)
    _clear(sums, vectors, kept.padded)
    for chunk in range(get_i64(kept.plan, HEADER + block * FIELDS + CHUNKS)):
        _join(_part(kept, block, chunk, head), sums, vectors, kept.padded)


@inlined
def _num_vectors(kept: Parts, block: int) -> int:
    at = HEADER + block * FIELDS
    return (get_i64(kept.plan, at + END) - get_i64(kept.plan, at + BEGIN)) * kept.group


@helper
def _join(part: int, sums: int, vectors: int, padded: int) -> None:
    """Adds a later chunk's part to the sums of the chunks before it."""
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


@helper
def _finish(output: Output, sums: int, vectors: int, begin: int, first_head: int) -> None:
    """Divides the sums by their weights, writes them to ``output`` from token ``begin`` on; sums without keys are 0."""
    out, kind, group, num_heads = output.out, output.kind, output.group, output.num_heads
    head_dim, padded = output.head_dim, output.padded
    whole = head_dim - head_dim % LANES
    highests, weights = sums + 4 * vectors * padded, sums + 4 * vectors * (padded + 1)
    for vector in range(vectors):
        weight = get_f32(weights, vector)
        scale = np.float32(0.0) if weight == np.float32(0.0) else np.float32(1.0) / weight
        factor = splat16(scale)
        place = (begin + vector // group) * num_heads + first_head + vector % group
        at, to = vector * padded, place * head_dim
        if output.weights != 0:
            put_f32(output.weights, 2 * place, get_f32(highests, vector))
            put_f32(output.weights, 2 * place + 1, weight)
        for d in range(0, whole, LANES):
            store16(out, to + d, kind, load16_f32(sums, at + d) * factor)
        for d in range(whole, head_dim):
            put(out, to + d, kind, get_f32(sums, at + d) * scale)


@helper
def _clear(sums: int, vectors: int, padded: int) -> None:
    for i in range(vectors * (padded + 2)):
        put_f32(sums, i, np.float32(0.0))
    for vector in range(vectors):
        put_f32(sums, vectors * padded + vector, LOWEST)
