"""Rotary positions and the write of keys and values to their slots, one program a token and head. Never reads a slot.

Reads q, k, v and one row of the table for each token; writes q, and k and v to the cache.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_write_kv_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    k_cache,
    v_cache,
    out_slots,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    num_kv_heads,
    rotary,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # a power of two, not less than rotary / 2
    WHOLE: tl.constexpr,  # a power of two, not less than the head size
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    half = rotary // 2
    pair = tl.arange(0, HALF)
    turned = pair < half
    cos = tl.load(cos_sin + position * rotary + pair, mask=turned, other=1.0)
    sin = tl.load(cos_sin + position * rotary + half + pair, mask=turned, other=0.0)
    if head < num_heads:
        at = q + token * q_stride + head * HEAD_DIM
        a = tl.load(at + pair, mask=turned, other=0.0).to(tl.float32)
        b = tl.load(at + half + pair, mask=turned, other=0.0).to(tl.float32)
        tl.store(at + pair, (a * cos - b * sin).to(q.dtype.element_ty), mask=turned)
        tl.store(at + half + pair, (b * cos + a * sin).to(q.dtype.element_ty), mask=turned)
    else:
        kv_head = head - num_heads
        slot = tl.load(out_slots + token)
        at = k + token * k_stride + kv_head * HEAD_DIM
        to = k_cache + (slot * num_kv_heads + kv_head) * HEAD_DIM
        a = tl.load(at + pair, mask=turned, other=0.0).to(tl.float32)
        b = tl.load(at + half + pair, mask=turned, other=0.0).to(tl.float32)
        tl.store(to + pair, (a * cos - b * sin).to(k_cache.dtype.element_ty), mask=turned)
        tl.store(to + half + pair, (b * cos + a * sin).to(k_cache.dtype.element_ty), mask=turned)
        d = tl.arange(0, WHOLE)
        rest = (d >= rotary) & (d < HEAD_DIM)
        tl.store(to + d, tl.load(at + d, mask=rest, other=0.0).to(k_cache.dtype.element_ty), mask=rest)
        value = tl.load(v + token * v_stride + kv_head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        to_v = v_cache + (slot * num_kv_heads + kv_head) * HEAD_DIM
        tl.store(to_v + d, value.to(v_cache.dtype.element_ty), mask=d < HEAD_DIM)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_slots: Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim), (k.shape, v.shape)
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "a pool's layer is dense"
    assert all(x.stride(2) == 1 and (x.stride(1) == head_dim or x.shape[1] == 1) for x in (q, k, v)), "heads are dense"
    rotary = cos_sin.shape[1]
    if num_tokens:
        rope_write_kv_kernel[(num_tokens, num_heads + num_kv_heads)](
            q,
            k,
            v,
            cos_sin.float().contiguous(),
            positions,
            k_cache,
            v_cache,
            out_slots,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            num_heads,
            num_kv_heads,
            rotary,
            HEAD_DIM=head_dim,
            HALF=triton.next_power_of_2(rotary // 2),
            WHOLE=triton.next_power_of_2(head_dim),
            num_warps=1,
        )
