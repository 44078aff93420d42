"""Norms of heads, rotary positions and the write of keys and values to their slots, one program for a token and head.

Reads q, k, v and one row of the table for each token; writes q, and k and v to the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8 import encode_fp8


@triton.jit
def _stored(x, cache):
    """x in the cache's type; a cache of bytes holds 8-bit floats."""
    if cache.dtype.element_ty == tl.uint8:
        return encode_fp8(x.to(tl.float32))
    else:
        return x.to(cache.dtype.element_ty)


@triton.jit
def _norm_factor(at, eps, HEAD_DIM: tl.constexpr, WHOLE: tl.constexpr):
    d = tl.arange(0, WHOLE)
    x = tl.load(at + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)


@triton.jit
def _normed(at, weight, factor, d, inside, HAS_NORM: tl.constexpr):
    """A head's numbers as float32, rounded after the norm as a separate norm kernel would round them."""
    x = tl.load(at + d, mask=inside, other=0.0)
    if HAS_NORM:
        scaled = x.to(tl.float32) * factor * tl.load(weight + d, mask=inside, other=0.0)
        x = scaled.to(at.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def rope_write_kv_kernel(
    q,
    k,
    v,
    q_norm,  # float32 [D], with HAS_NORM
    k_norm,
    eps,
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
    HAS_NORM: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    half = rotary // 2
    pair = tl.arange(0, HALF)
    turned = pair < half
    cos = tl.load(cos_sin + position * rotary + pair, mask=turned, other=1.0)
    sin = tl.load(cos_sin + position * rotary + half + pair, mask=turned, other=0.0)
    d = tl.arange(0, WHOLE)
    rest = (d >= rotary) & (d < HEAD_DIM)
    factor = 1.0
    if head < num_heads:
        at = q + token * q_stride + head * HEAD_DIM
        if HAS_NORM:
            factor = _norm_factor(at, eps, HEAD_DIM, WHOLE)
            kept = _normed(at, q_norm, factor, d, rest, HAS_NORM)
        a = _normed(at, q_norm, factor, pair, turned, HAS_NORM)
        b = _normed(at, q_norm, factor, half + pair, turned, HAS_NORM)
        if HAS_NORM:  # without a norm they do not change
            tl.store(at + d, kept.to(q.dtype.element_ty), mask=rest)
        tl.store(at + pair, (a * cos - b * sin).to(q.dtype.element_ty), mask=turned)
        tl.store(at + half + pair, (b * cos + a * sin).to(q.dtype.element_ty), mask=turned)
    else:
        kv_head = head - num_heads
        slot = tl.load(out_slots + token)
        at = k + token * k_stride + kv_head * HEAD_DIM
        to = k_cache + (slot * num_kv_heads + kv_head) * HEAD_DIM
        if HAS_NORM:
            factor = _norm_factor(at, eps, HEAD_DIM, WHOLE)
        a = _normed(at, k_norm, factor, pair, turned, HAS_NORM)
        b = _normed(at, k_norm, factor, half + pair, turned, HAS_NORM)
        tl.store(to + pair, _stored(a * cos - b * sin, k_cache), mask=turned)
        tl.store(to + half + pair, _stored(b * cos + a * sin, k_cache), mask=turned)
        tl.store(to + d, _stored(_normed(at, k_norm, factor, d, rest, HAS_NORM), k_cache), mask=rest)
        if HAS_VALUES:
            value = tl.load(v + token * v_stride + kv_head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
            to_v = v_cache + (slot * num_kv_heads + kv_head) * HEAD_DIM
            tl.store(to_v + d, _stored(value, v_cache), mask=d < HEAD_DIM)


def norm_rope_write_kv(q: Tensor, *inputs: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    rope_write_kv(q, *inputs, q_norm=q_norm, k_norm=k_norm, eps=eps)
    return q


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """With ``q_norm`` and ``k_norm``, each head of q and k is normalised first."""
    k_cache, v_cache = (
        cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache for cache in (k_cache, v_cache)
    )
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    has_values = v is not None
    v = k if v is None else v
    assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim), (k.shape, v.shape)
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "a pool's layer is dense"
    assert all(x.stride(2) == 1 and (x.stride(1) == head_dim or x.shape[1] == 1) for x in (q, k, v)), "heads are dense"
    rotary = cos_sin.shape[1]
    table = cos_sin.float().contiguous()
    if num_tokens:
        rope_write_kv_kernel[(num_tokens, num_heads + num_kv_heads)](
            q,
            k,
            v,
            table if q_norm is None else q_norm.float().contiguous(),
            table if k_norm is None else k_norm.float().contiguous(),
            eps,
            table,
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
            HAS_NORM=q_norm is not None,
            HAS_VALUES=has_values,
            num_warps=1,
        )
