"""Rotary positions and the write of keys and values to their slots, in one pass over the tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..quantized_kv import kv_row_len
from .entry import TASK, THREAD, counters, entry
from .machine_code import inlined
from .norm import rms_norm
from .quantized_kv import QUANTIZED, pack_vector
from .recording import scratch
from .tensors import KINDS, task_len, team_size
from .vector import FLOAT32, LANES, get, get_i64, load16, put, store16, take_number

_TOKENS_A_TASK = 4  # at least


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_slots: Tensor,
) -> None:
    is_dense = _is_dense(q) and k_cache.is_contiguous() and v_cache.is_contiguous()
    if not is_dense or k_cache.dtype == torch.float8_e4m3fn:
        reference.rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, out_slots)
        return
    num_tokens, num_heads, head_dim = q.shape
    assert k.shape == (num_tokens, k_cache.shape[1], head_dim), (k.shape, k_cache.shape)
    assert v is None or v.shape == k.shape, (k.shape, v.shape)
    is_quantized = k_cache.dtype == torch.int8
    row_len = kv_row_len(head_dim, k_cache.dtype)
    assert k_cache.shape == v_cache.shape and k_cache.shape[2] == row_len, (k_cache.shape, v_cache.shape)
    assert head_dim >= cos_sin.shape[1], (q.shape, cos_sin.shape)
    assert len(positions) == len(out_slots) == num_tokens, (len(positions), len(out_slots), num_tokens)
    k = _like(k, q)
    v = None if v is None else _like(v, q)
    cos_sin = cos_sin.float().contiguous()
    positions, out_slots = positions.long().contiguous(), out_slots.long().contiguous()
    threads = team_size(num_tokens * (num_heads + 2 * k.shape[1]) * head_dim)
    vector_len = -(-head_dim // LANES) * LANES
    vectors = scratch("vectors to pack", threads * vector_len, torch.float32) if is_quantized else None
    call = RopeCall(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        0 if v is None else v.data_ptr(),
        0 if v is None else v.stride(0),
        KINDS[q.dtype],
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        positions.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        QUANTIZED if is_quantized else KINDS[k_cache.dtype],
        row_len,
        out_slots.data_ptr(),
        num_tokens,
        num_heads,
        k.shape[1],
        head_dim,
        0 if vectors is None else vectors.data_ptr(),
        vector_len,
        task_len(num_tokens, threads, _TOKENS_A_TASK),
    )
    _rope_write_kv(call, threads=threads)


def norm_rope_write_kv(q: Tensor, k: Tensor, *inputs: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    q, _ = rms_norm(q, q_norm, eps)
    k, _ = rms_norm(k, k_norm, eps)
    rope_write_kv(q, k, *inputs)
    return q


def _like(x: Tensor, q: Tensor) -> Tensor:
    return x if _is_dense(x) and x.dtype == q.dtype else x.to(q.dtype).contiguous()


def _is_dense(x: Tensor) -> bool:
    """Whether each token's heads lie one after the other."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)


class RopeCall(NamedTuple):
    """A step counts numbers from one token to the next; within a token its heads lie one after the other."""

    q: int  # [T, Hq, D]
    q_step: int
    k: int  # [T, Hkv, D]
    k_step: int
    v: int  # [T, Hkv, D]; 0: no values are written
    v_step: int
    kind: int  # of q, k and v
    cos_sin: int  # float32 [positions, rotary]
    rotary: int  # dimensions of a head that are rotated
    positions: int  # int64 [T]
    k_cache: int  # [S, Hkv, row_len]
    v_cache: int  # [S, Hkv, row_len]
    cache_kind: int
    row_len: int  # elements of a key or value: D, or bytes if it is QUANTIZED
    out_slots: int  # int64 [T]
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vectors: int  # float32 [threads, vector_len]: where each thread makes what becomes QUANTIZED
    vector_len: int
    tokens_a_task: int


@entry
def _rope_write_kv(call: RopeCall) -> None:
    q, q_step, k, k_step, v, v_step, kind = call.q, call.q_step, call.k, call.k_step, call.v, call.v_step, call.kind
    cos_sin, rotary = call.cos_sin, call.rotary
    k_cache, v_cache, cache_kind = call.k_cache, call.v_cache, call.cache_kind
    num_tokens, num_heads, num_kv_heads, head_dim = call.num_tokens, call.num_heads, call.num_kv_heads, call.head_dim
    row_len, is_quantized = call.row_len, cache_kind == QUANTIZED
    vector = call.vectors + 4 * call.vector_len * take_number(counters(call), THREAD)
    tokens_a_task = call.tokens_a_task
    task = take_number(counters(call), TASK)
    while task * tokens_a_task < num_tokens:
        for token in range(task * tokens_a_task, min((task + 1) * tokens_a_task, num_tokens)):
            angles = get_i64(call.positions, token) * rotary
            slot = get_i64(call.out_slots, token) * num_kv_heads * row_len
            for head in range(num_heads):
                at = token * q_step + head * head_dim
                _rotate(q, at, kind, cos_sin, angles, rotary, q, at, kind, rotary)
            for head in range(num_kv_heads):
                at, row = head * head_dim, slot + head * row_len
                keys, values, to, to_kind = k_cache, v_cache, row, cache_kind
                if is_quantized:
                    keys, values, to, to_kind = vector, vector, 0, FLOAT32
                _rotate(k, token * k_step + at, kind, cos_sin, angles, rotary, keys, to, to_kind, head_dim)
                if is_quantized:
                    pack_vector(vector, head_dim, k_cache + row)
                if v != 0:
                    _copy(v, token * v_step + at, kind, values, to, to_kind, head_dim)
                    if is_quantized:
                        pack_vector(vector, head_dim, v_cache + row)
        task = take_number(counters(call), TASK)


@inlined
def _rotate(
    x: int,
    at: int,
    kind: int,
    cos_sin: int,
    angles: int,
    rotary: int,
    to: int,
    to_at: int,
    to_kind: int,
    size: int,
) -> None:
    """Rotates one head: pair i is elements i and i + half. Elements from ``rotary`` up to ``size`` are copied."""
    half = rotary // 2
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        a, b = load16(x, at + i, kind), load16(x, at + half + i, kind)
        cos, sin = load16(cos_sin, angles + i, FLOAT32), load16(cos_sin, angles + half + i, FLOAT32)
        store16(to, to_at + i, to_kind, a * cos - b * sin)
        store16(to, to_at + half + i, to_kind, b * cos + a * sin)
    for i in range(whole, half):
        c, d = get(x, at + i, kind), get(x, at + half + i, kind)
        cosine, sine = get(cos_sin, angles + i, FLOAT32), get(cos_sin, angles + half + i, FLOAT32)
        put(to, to_at + i, to_kind, c * cosine - d * sine)
        put(to, to_at + half + i, to_kind, d * cosine + c * sine)
    _copy(x, at + rotary, kind, to, to_at + rotary, to_kind, size - rotary)


@inlined
def _copy(x: int, at: int, kind: int, to: int, to_at: int, to_kind: int, size: int) -> None:
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store16(to, to_at + i, to_kind, load16(x, at + i, kind))
    for i in range(whole, size):
        put(to, to_at + i, to_kind, get(x, at + i, kind))
