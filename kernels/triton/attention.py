"""Causal attention over slots: prefill of ragged rows and split-KV decoding by one kernel.

A program has one KV head, a block of neighbouring queries of one row with all the query heads of that KV head (GQA
packed: its *vectors*), and one split of the row's keys. Where a context has several splits, each program stores its
part (sums and log of the weight), and a second kernel joins the parts. Splits begin at multiples of their length, so a
query's result does not depend on its neighbours.

The running softmax is Milakov and Gimelshein's (2018), the splits Dao's Flash-Decoding (2023). Per query and key
4 * D flops a head; each program reads its keys' K and V once: 2 * Hkv * D elements a key for every block.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shared import PIECE_FIELDS, SharedPrefixes, Sharing
from .config import WIDE, AttentionConfig, BlockConfig, Config, config_of
from .fp8 import as_bytes, factor_of_fp8, has_fp8

FIELDS = tl.constexpr(PIECE_FIELDS)
UNSPLIT = 1 << 30  # keys of the only split; the same for every context, so that no kernel is built for its length
FLOAT32 = tl.constexpr("ieee")  # how factors in float32 are multiplied: as float32, not rounded to TF32


@triton.jit
def _add_keys(
    sums,
    weight,
    highest,
    queries,
    k_head,
    v_head,
    table,
    start,
    end_key,
    position,
    before,
    from_scores,
    to_capped,
    KEY_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """The running softmax after BLOCK_N more keys, of which a vector sees [before, position], or all unless IS_MASKED.

    ``highest`` is of the scores before they are scaled by ``from_scores``.
    """
    key = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, PADDED_DIM)
    there = key < end_key
    if IS_MASKED:
        slot = tl.load(table + key, mask=there, other=0)
    else:
        slot = tl.load(table + key)
    at = slot.to(tl.int64) * KEY_STRIDE
    keys = _factors(
        k_head + at[None, :] + d[:, None],
        there[None, :],
        (d < HEAD_DIM)[:, None],
        IS_MASKED,
        HEAD_DIM < PADDED_DIM,
        PRODUCTS,
        NATIVE_FP8,
    )
    scores = tl.dot(queries, keys, out_dtype=tl.float32, input_precision=FLOAT32)
    if HAS_SOFT_CAP:
        scores = 2.0 * tl.sigmoid(2.0 * to_capped * scores) - 1.0
    if IS_MASKED:
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (key[None, :] >= before[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    shift = higher * from_scores
    if IS_MASKED:
        shift = tl.where(higher == float("-inf"), 0.0, shift)  # a vector that has seen no key yet
    factor = tl.exp2(highest * from_scores - shift)
    probability = tl.exp2(scores * from_scores - shift[:, None])
    weight = weight * factor + tl.sum(probability, 1)
    values = _factors(
        v_head + at[:, None] + d[None, :],
        there[:, None],
        (d < HEAD_DIM)[None, :],
        IS_MASKED,
        HEAD_DIM < PADDED_DIM,
        PRODUCTS,
        NATIVE_FP8,
    )
    sums = tl.dot(probability.to(PRODUCTS), values, sums * factor[:, None], input_precision=FLOAT32)
    return sums, weight, higher


@triton.jit
def _factors(
    at,
    there,
    in_head,
    IS_MASKED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Keys or values as a product's factor."""
    if IS_MASKED and IS_PADDED:
        stored = tl.load(at, mask=there & in_head, other=0)
    elif IS_MASKED:
        stored = tl.load(at, mask=there, other=0)
    elif IS_PADDED:
        stored = tl.load(at, mask=in_head, other=0)
    else:
        stored = tl.load(at)
    if at.dtype.element_ty == tl.uint8:
        return factor_of_fp8(stored, PRODUCTS, NATIVE_FP8)
    else:
        return stored.to(PRODUCTS)


@triton.jit(do_not_specialize=["num_rows", "num_splits", "window"])  # no build for each number of rows
def attention_kernel(
    q,
    k_cache,
    v_cache,
    slot_table,
    row_ids,
    query_starts,
    kv_lens,
    num_rows,
    pieces,  # int32 [P, PIECE_FIELDS], see kernels.shared
    piece_order,
    own_from,
    ends,
    firsts,
    out,
    part_sums,
    part_logs,
    scale,
    soft_cap,
    window,
    q_stride,
    table_stride,
    num_splits,
    split_len,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_PARTS: tl.constexpr,  # programs that share a KV head, each with GROUP of its query heads
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_DECODE: tl.constexpr,  # each row has one query: a block is a row
    HAS_WHOLE: tl.constexpr,  # blocks of keys that all queries see take a loop without masks
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_PIECES: tl.constexpr,  # each block is a piece of a shared prefix
    IS_AFTER_PIECES: tl.constexpr,  # chunks that pieces read are skipped; the splits are equal shares of the rest
    IS_PARTIAL: tl.constexpr,  # each query has keys of its own; HAS_WINDOW: they do not begin with the row's first
    PRODUCTS: tl.constexpr,  # the type of the products' factors
    NATIVE_FP8: tl.constexpr,  # the device converts 8-bit floats
):
    """One program: the queries of one block, one KV head, and one split of the keys.

    | arguments                              | shape, content                                    | read if         |
    |----------------------------------------|---------------------------------------------------|-----------------|
    | q, q_stride                            | [T, H, D], elements from token to token           | always          |
    | k_cache, v_cache                       | [slots, Hkv, D], or bytes of fp8                  | always          |
    | slot_table, table_stride, row_ids      | int32 [lines, L]; the line of each row            | always          |
    | query_starts, kv_lens                  | int32 [R + 1], [R]                                | not HAS_PIECES  |
    | num_rows                               | R                                                 | not HAS_PIECES, |
    |                                        |                                                   | not IS_DECODE   |
    | pieces, piece_order                    | int32 [P, FIELDS], [tokens of all pieces]         | HAS_PIECES      |
    | own_from                               | int32 [T]: first chunk that pieces do not read    | IS_AFTER_PIECES |
    | ends, firsts                           | int32 [T]: the keys of each query                 | IS_PARTIAL      |
    | out                                    | [T, H, D]                                         | not IS_SPLIT    |
    | part_sums, part_logs, num_splits       | float32 [T, H, S, D], [T, H, S]                   | IS_SPLIT        |
    | split_len                              | keys of a split or of a piece's chunk             | IS_SPLIT or     |
    |                                        |                                                   | HAS_PIECES      |
    | scale, soft_cap, window                | of the scores                                     | see HAS_...     |

    The arguments are not grouped in tuples: ``benchmarks.kernel_resources`` compiles ahead of time with a type and an
    alignment for each argument by its name, and Triton specializes a launch in the same way.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_PARTS
    split = tl.program_id(2)
    vector = tl.arange(0, BLOCK_M)
    if HAS_PIECES:
        piece = pieces + block * FIELDS  # begin, end, row, first chunk, the one after the last
        if (split < tl.load(piece + 3)) | (split >= tl.load(piece + 4)):
            return
        row = tl.load(piece + 2)
        in_order = tl.load(piece) + vector // GROUP
        valid = (in_order < tl.load(piece + 1)) & (vector < (BLOCK_M // GROUP) * GROUP)
        token = tl.load(piece_order + in_order, mask=valid, other=0)
        first_key = split * split_len
        end_key = first_key + split_len
        position = tl.full([BLOCK_M], 0x7FFFFFFF, tl.int32)  # whole chunks, all before every token
        before = position
        seen_by_all = end_key
    else:
        row = block
        first = block
        if not IS_DECODE:
            # Row r has the blocks [r + starts[r] / len, r + 1 + starts[r + 1] / len): as many as it needs, or one more.
            block = tl.num_programs(0) - 1 - block  # the last queries have the most keys: they are the first to run
            row = -1
            for begin in range(0, num_rows, 128):
                rows = begin + tl.arange(0, 128)
                starts = tl.load(query_starts + rows, mask=rows < num_rows, other=0)
                row += tl.sum(((rows < num_rows) & (rows + starts // (BLOCK_M // GROUP) <= block)).to(tl.int32), 0)
            start_token = tl.load(query_starts + row)
            first = start_token + (block - row - start_token // (BLOCK_M // GROUP)) * (BLOCK_M // GROUP)
            if first >= tl.load(query_starts + row + 1):
                return
        end_token = tl.load(query_starts + row + 1)
        kv_len = tl.load(kv_lens + row)
        token = first + vector // GROUP
        valid = (token < end_token) & (vector < (BLOCK_M // GROUP) * GROUP)
        position = kv_len - end_token + token
        before = position - window + 1
        last_token = tl.minimum(first + BLOCK_M // GROUP, end_token) - 1
        end_key = kv_len - end_token + last_token + 1
        first_key = 0
        if HAS_WINDOW:
            first_key = tl.maximum(kv_len - end_token + first - window + 1, 0) // BLOCK_N * BLOCK_N
        if IS_PARTIAL:
            position = tl.load(ends + token, mask=valid, other=0) - 1
            end_key = tl.load(ends + last_token)
            if HAS_WINDOW:
                before = tl.load(firsts + token, mask=valid, other=0)
                first_key = tl.load(firsts + first) // BLOCK_N * BLOCK_N
        if IS_AFTER_PIECES:  # equal shares of the keys that pieces do not read
            own_split = tl.load(own_from + first)
            share = tl.cdiv(tl.maximum(end_key - own_split * split_len, 0), tl.num_programs(2) * BLOCK_N) * BLOCK_N
            first_key = own_split * split_len + split * share
            end_key = tl.minimum(end_key, first_key + share)
            split += own_split
        elif IS_SPLIT:
            first_key = tl.maximum(first_key, split * split_len)
            end_key = tl.minimum(end_key, (split + 1) * split_len)
        seen_by_all = tl.minimum(tl.min(tl.where(valid, position + 1, end_key), 0), end_key)
    num_heads = NUM_KV_HEADS * HEAD_PARTS * GROUP
    head = tl.program_id(1) * GROUP + vector % GROUP

    d = tl.arange(0, PADDED_DIM)
    in_head = d < HEAD_DIM
    q_at = token[:, None].to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(q + q_at, mask=valid[:, None] & in_head[None, :], other=0.0)
    if tl.float16 == PRODUCTS:  # its range is smaller than that of q's type; scaled queries fit
        queries = queries.to(tl.float32) * scale
        scale = 1.0
    queries = queries.to(PRODUCTS)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    table = slot_table + tl.load(row_ids + row).to(tl.int64) * table_stride
    k_head, v_head = k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM
    from_scores = scale * 1.4426950408889634  # to exponents of 2
    to_capped = scale
    if HAS_SOFT_CAP:
        to_capped = scale / soft_cap
        from_scores = soft_cap * 1.4426950408889634
    whole_end = first_key
    if HAS_WHOLE:  # [first_key, whole_from) some keys are too early   [whole_from, whole_end) every query sees all
        whole_from = first_key
        if HAS_WINDOW:
            whole_from += tl.cdiv(tl.maximum(tl.max(tl.where(valid, before, 0), 0) - first_key, 0), BLOCK_N) * BLOCK_N
            for start in tl.range(first_key, tl.minimum(whole_from, end_key), BLOCK_N, num_stages=1):
                sums, weight, highest = _add_keys(
                    sums,
                    weight,
                    highest,
                    queries,
                    k_head,
                    v_head,
                    table,
                    start,
                    end_key,
                    position,
                    before,
                    from_scores,
                    to_capped,
                    NUM_KV_HEADS * HEAD_DIM,
                    HEAD_DIM,
                    PADDED_DIM,
                    BLOCK_N,
                    True,
                    True,
                    HAS_SOFT_CAP,
                    PRODUCTS,
                    NATIVE_FP8,
                )
        whole_end = tl.maximum(seen_by_all - first_key, 0) // BLOCK_N * BLOCK_N + first_key
        for start in range(whole_from, whole_end, BLOCK_N):
            sums, weight, highest = _add_keys(
                sums,
                weight,
                highest,
                queries,
                k_head,
                v_head,
                table,
                start,
                end_key,
                position,
                before,
                from_scores,
                to_capped,
                NUM_KV_HEADS * HEAD_DIM,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_N,
                False,
                False,
                HAS_SOFT_CAP,
                PRODUCTS,
                NATIVE_FP8,
            )
        whole_end = tl.maximum(whole_from, whole_end)
    if not HAS_PIECES:
        for start in tl.range(whole_end, end_key, BLOCK_N, num_stages=1 if HAS_WHOLE else None):
            sums, weight, highest = _add_keys(
                sums,
                weight,
                highest,
                queries,
                k_head,
                v_head,
                table,
                start,
                end_key,
                position,
                before,
                from_scores,
                to_capped,
                NUM_KV_HEADS * HEAD_DIM,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_N,
                True,
                HAS_WINDOW,
                HAS_SOFT_CAP,
                PRODUCTS,
                NATIVE_FP8,
            )

    highest *= from_scores
    empty = weight == 0.0
    mixed = sums / tl.where(empty, 1.0, weight)[:, None]
    place = token.to(tl.int64) * num_heads + head
    stored = valid[:, None] & in_head[None, :]
    if IS_SPLIT:
        part = place * num_splits + split
        tl.store(part_sums + part[:, None] * HEAD_DIM + d[None, :], mixed, mask=stored)
        log = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, weight)))
        tl.store(part_logs + part, log, mask=valid)
    else:
        tl.store(out + place[:, None] * HEAD_DIM + d[None, :], mixed.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_splits"])
def join_kernel(
    part_sums,
    part_logs,
    out,
    own_from,  # int32 [T], read if NUM_OWN
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    NUM_OWN: tl.constexpr,  # a token has this many parts after those of its pieces; 0: it has num_splits parts
):
    place = tl.program_id(0).to(tl.int64)
    num_parts = num_splits
    if NUM_OWN > 0:
        num_parts = tl.load(own_from + tl.program_id(0) // NUM_HEADS) + NUM_OWN
    d = tl.arange(0, PADDED_DIM)
    in_head = d < HEAD_DIM
    sums = tl.zeros([PADDED_DIM], dtype=tl.float32)
    weight = 0.0
    highest = float("-inf")
    for start in range(0, num_parts, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        there = split < num_parts
        log = tl.load(part_logs + place * num_splits + split, mask=there, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(log, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(highest - shift)
        share = tl.exp2(log - shift)
        at = (place * num_splits + split) * HEAD_DIM
        used = (share > 0.0)[:, None] & in_head[None, :]  # parts of splits without a key were never written
        parts = tl.load(part_sums + at[:, None] + d[None, :], mask=used, other=0.0)
        sums = sums * factor + tl.sum(parts * share[:, None], 0)
        weight = weight * factor + tl.sum(share, 0)
        highest = higher
    tl.store(out + place * HEAD_DIM + d, (sums / weight).to(out.dtype.element_ty), mask=in_head)


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
    config: AttentionConfig | None = None,
) -> Tensor:
    """As ``kernels.paged_attention``; it reads pools of float8_e4m3fn too. Splits and blocks follow from shapes alone,
    so the host does not wait for the device.
    """
    num_tokens, num_rows = q.shape[0], row_ids.shape[0]
    if config is None:
        config = _config_of(q, is_decode=num_tokens == num_rows)
    q, out = _dense(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    num_splits = _num_splits(slot_table, config)
    parts = _parts(q, num_splits if num_splits > 1 else 0)
    rows = (slot_table, row_ids, query_starts, kv_lens)
    options = (scale, soft_cap, sliding_window)
    _attend(q, k_cache, v_cache, *rows, out, parts, *options, num_splits, config)
    if num_splits > 1:
        _join(parts, out, num_splits, config_of(q.device).join)
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
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``kernels.partial_attention``: the splits of ``paged_attention``, joined with the log of their weight."""
    num_tokens, num_heads, head_dim = q.shape
    if not num_tokens:
        return q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)
    if config is None:
        config = _config_of(q, is_decode=num_tokens == row_ids.shape[0])
    q = _dense(q)
    num_splits = _num_splits(slot_table, config)
    sums, logs = _parts(q, num_splits)
    rows = (slot_table, row_ids, query_starts, query_starts)
    options = (scale, soft_cap, 0 if firsts is None else 1)
    _attend(q, k_cache, v_cache, *rows, q, (sums, logs), *options, num_splits, config, seen=(ends, firsts))
    sums, logs = sums.view(num_tokens, num_heads, num_splits, head_dim), logs.view(num_tokens, num_heads, num_splits)
    if num_splits == 1:
        return sums.squeeze(2), logs.squeeze(2)
    highest = logs.amax(2, keepdim=True)
    shares = (logs - highest.clamp_min(torch.finfo(torch.float32).min)).exp2()  # of each split, 0 without keys
    weight = shares.sum(2)
    out = (sums * shares.unsqueeze(3)).sum(2) / weight.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)
    return out, highest.squeeze(2) + weight.log2()


def _config_of(q: Tensor, *, is_decode: bool) -> AttentionConfig:
    shapes = config_of(q.device).attention_of(q.shape[2], q.dtype)
    return shapes.decode if is_decode else shapes.prefill


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    row_ids: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    *,
    shared: SharedPrefixes,
    scale: float,
    soft_cap: float = 0.0,
    config: Config | None = None,
) -> Tensor:
    """``paged_attention`` that reads common keys once for each piece of ``shared``.

    The tokens of a piece see a chunk as one block of queries, each row sees the rest in equal shares, and all parts are
    joined by the log of their weight (as in Hydragen, Juravsky et al. 2024; with pieces of several depths a
    tree of prefixes, as in FlashInfer's cascades).
    """
    num_tokens = q.shape[0]
    table = config_of(q.device) if config is None else config
    q, out = _dense(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    shapes = table.attention_of(q.shape[2], q.dtype)
    assert shapes.shared.split_len % shapes.shared.block_n == 0, shapes.shared  # blocks of pieces are whole
    own = shapes.decode if num_tokens == row_ids.shape[0] else shapes.shared
    num_chunks = triton.cdiv(slot_table.shape[1], shapes.shared.split_len)
    num_own = max(1, min(num_chunks, triton.cdiv(table.busy_programs, num_tokens * k_cache.shape[1])))
    parts = _parts(q, num_chunks + num_own)
    rows = (slot_table, row_ids, query_starts, kv_lens)
    options = (scale, soft_cap, 0)
    own = replace(own, split_len=shapes.shared.split_len)  # of a chunk
    _attend(q, k_cache, v_cache, *rows, out, parts, *options, num_chunks, shapes.shared, pieces=shared, num_own=num_own)
    _attend(q, k_cache, v_cache, *rows, out, parts, *options, num_chunks, own, after=shared, num_own=num_own)
    _join(parts, out, num_chunks + num_own, table.join, own_from=shared.own_from, num_own=num_own)
    return out


def sharing_of(device: torch.device, group: int, head_dim: int, dtype: torch.dtype) -> Sharing:
    """``group``: query heads of a KV head; all of them are in one block of a piece."""
    table = config_of(device)
    shape = table.attention_of(head_dim, dtype).shared
    return Sharing(shape.split_len, max(shape.block_m // group, 1), table.shared_least_bytes)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_table: Tensor,
    row_ids: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    scale: float,
    soft_cap: float,
    sliding_window: int,
    num_splits: int,
    config: AttentionConfig,
    *,
    pieces: SharedPrefixes | None = None,
    after: SharedPrefixes | None = None,
    num_own: int = 0,
    seen: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """One launch. Writes ``out``; with several splits or ``seen`` it writes ``parts``.

    ``pieces``: only their chunks are read. ``after``: all chunks but those of its pieces, in ``num_own`` equal shares.
    ``seen``: where each query's keys end, and where they begin.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    assert num_heads == group * num_kv_heads, (num_heads, num_kv_heads)
    head_parts = head_parts_of(group, config.block_m) if head_dim > WIDE else 1
    group //= head_parts
    block_m = max(config.block_m, triton.next_power_of_2(group))
    # 8-bit floats become float16 in one instruction a pair, and bfloat16 in three and slower ones.
    is_native = k_cache.element_size() == 1 and q.dtype == torch.bfloat16 and has_fp8(q.device)
    is_decode = pieces is None and num_tokens == row_ids.shape[0]
    if pieces is not None:  # these are its blocks
        num_blocks = len(pieces.pieces)
    elif is_decode:
        num_blocks = num_tokens
    else:
        num_blocks = row_ids.shape[0] + num_tokens // (block_m // group)
    ends, firsts = (kv_lens, None) if seen is None else seen
    attention_kernel[(num_blocks, num_kv_heads * head_parts, num_splits if after is None else num_own)](
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        slot_table,
        row_ids,
        query_starts,
        kv_lens,
        row_ids.shape[0],
        kv_lens if pieces is None else pieces.pieces,
        kv_lens if pieces is None else pieces.order,
        kv_lens if after is None else after.own_from,
        ends,
        ends if firsts is None else firsts,
        out,
        *parts,
        scale,
        soft_cap,
        sliding_window,
        q.stride(0),
        slot_table.stride(0),
        num_splits + num_own,
        config.split_len or UNSPLIT,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_PARTS=head_parts,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(triton.next_power_of_2(head_dim), 16),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n_fp8 or config.block_n if k_cache.element_size() == 1 else config.block_n,
        IS_DECODE=is_decode,
        HAS_WHOLE=has_whole(config, is_decode=is_decode, has_pieces=pieces is not None),
        HAS_WINDOW=sliding_window > 0,
        HAS_SOFT_CAP=soft_cap > 0,
        IS_SPLIT=num_splits + num_own > 1 or seen is not None,
        HAS_PIECES=pieces is not None,
        IS_AFTER_PIECES=after is not None,
        IS_PARTIAL=seen is not None,
        PRODUCTS=tl.float16 if is_native else product_type(q),
        NATIVE_FP8=is_native,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers or None if k_cache.element_size() > 1 else None,
    )


def has_whole(config: AttentionConfig, *, is_decode: bool, has_pieces: bool) -> bool:
    """Whether keys that every query of a block sees have a loop of their own, without masks. Decoding is limited by
    memory, so it gains nothing.
    """
    return has_pieces or (not is_decode and config.two_loops)


def head_parts_of(group: int, block_m: int) -> int:
    """The least number of equal parts of a KV head's query heads of which each fits in a block."""
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= block_m)


def _join(
    parts: tuple[Tensor, Tensor],
    out: Tensor,
    num_splits: int,
    config: BlockConfig,
    *,
    own_from: Tensor | None = None,
    num_own: int = 0,
) -> None:
    head_dim = out.shape[2]
    join_kernel[(out.shape[0] * out.shape[1],)](
        *parts,
        out,
        parts[1] if own_from is None else own_from,
        num_splits,
        NUM_HEADS=out.shape[1],
        HEAD_DIM=head_dim,
        PADDED_DIM=max(triton.next_power_of_2(head_dim), 16),
        BLOCK_SPLITS=config.block_len,
        NUM_OWN=num_own,
        num_warps=config.num_warps,
    )


def _parts(q: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """(sums, logs of the weight) of each split of each query and head."""
    parts = q.shape[0] * q.shape[1] * num_splits
    sums = torch.empty((parts, q.shape[2]), dtype=torch.float32, device=q.device)
    return sums, torch.empty(parts, dtype=torch.float32, device=q.device)


def _num_splits(slot_table: Tensor, config: AttentionConfig) -> int:
    return triton.cdiv(slot_table.shape[1], config.split_len) if config.split_len else 1


def _dense(q: Tensor) -> Tensor:
    return q if q.stride(2) == 1 and (q.shape[1] == 1 or q.stride(1) == q.shape[2]) else q.contiguous()


def product_type(q: Tensor) -> tl.dtype:
    """q's type, but float32 under the interpreter, whose bfloat16 products are wrong (Triton 3.6)."""
    return tl.bfloat16 if q.dtype == torch.bfloat16 and q.is_cuda else tl.float32
