"""Norms of heads, rotary positions and the write of keys and values to their slots; a program has some heads of one
token.

Reads q, k, v and one row of the table for each token; writes q, and k and v to the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from .fp8 import as_bytes, encode_fp8

PAIRS = 256  # that a program rotates


@triton.jit
def _stored(x, cache):
    """x in the cache's type; a cache of bytes holds 8-bit floats."""
    if cache.dtype.element_ty == tl.uint8:
        return encode_fp8(x.to(tl.float32))
    else:
        return x.to(cache.dtype.element_ty)


@triton.jit
def _normed(x, factor, weight, d, inside):
    """Rounded after the norm, as a separate norm kernel would round it."""
    scaled = x.to(tl.float32) * factor[:, None] * tl.load(weight + d, mask=inside, other=0.0)[None, :]
    return scaled.to(x.dtype)


@triton.jit
def _turned_heads(
    lines,  # pointers [HEADS, 1] to heads
    there,  # [HEADS]
    norm,
    eps,
    cos,
    sin,
    half,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """``(first half, second half, rest)``: float32 [HEADS, HALF] twice, rotated, and [HEADS, WHOLE] as it is."""
    pair = tl.arange(0, HALF)
    turned = there[:, None] & (pair < half)[None, :]
    a = tl.load(lines + pair[None, :], mask=turned, other=0.0)
    b = tl.load(lines + half + pair[None, :], mask=turned, other=0.0)
    rest = a
    if HAS_REST:
        d = tl.arange(0, WHOLE)
        beyond = (d >= 2 * half) & (d < HEAD_DIM)
        rest = tl.load(lines + d[None, :], mask=there[:, None] & beyond[None, :], other=0.0)
    if HAS_NORM:
        squares = tl.sum(a.to(tl.float32) * a.to(tl.float32) + b.to(tl.float32) * b.to(tl.float32), 1)
        if HAS_REST:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)
        a = _normed(a, factor, norm, pair, pair < half)
        b = _normed(b, factor, norm, half + pair, pair < half)
        if HAS_REST:
            rest = _normed(rest, factor, norm, d, beyond)
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :], rest.to(tl.float32)


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
    HEADS: tl.constexpr,  # of one program
    HAS_NORM: tl.constexpr,
    HAS_REST: tl.constexpr,  # a head is longer than what is rotated
    HAS_VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half = rotary // 2
    pair = tl.arange(0, HALF)
    d = tl.arange(0, WHOLE)
    cos_at = cos_sin + tl.load(positions + token) * rotary + pair
    cos = tl.load(cos_at, mask=pair < half, other=1.0)
    sin = tl.load(cos_at + half, mask=pair < half, other=0.0)
    q_parts = (num_heads + HEADS - 1) // HEADS
    if part < q_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        there = head < num_heads
        lines = q + token * q_stride + head[:, None] * HEAD_DIM
        a, b, rest = _turned_heads(lines, there, q_norm, eps, cos, sin, half, HEAD_DIM, HALF, WHOLE, HAS_NORM, HAS_REST)
        turned = there[:, None] & (pair < half)[None, :]
        tl.store(lines + pair[None, :], a.to(q.dtype.element_ty), mask=turned)
        tl.store(lines + half + pair[None, :], b.to(q.dtype.element_ty), mask=turned)
        if HAS_NORM and HAS_REST:  # without a norm the rest does not change
            beyond = there[:, None] & ((d >= rotary) & (d < HEAD_DIM))[None, :]
            tl.store(lines + d[None, :], rest.to(q.dtype.element_ty), mask=beyond)
    else:
        head = (part - q_parts) * HEADS + tl.arange(0, HEADS)
        there = head < num_kv_heads
        place = (tl.load(out_slots + token) * num_kv_heads + head)[:, None] * HEAD_DIM
        lines = k + token * k_stride + head[:, None] * HEAD_DIM
        a, b, rest = _turned_heads(lines, there, k_norm, eps, cos, sin, half, HEAD_DIM, HALF, WHOLE, HAS_NORM, HAS_REST)
        turned = there[:, None] & (pair < half)[None, :]
        tl.store(k_cache + place + pair[None, :], _stored(a, k_cache), mask=turned)
        tl.store(k_cache + place + half + pair[None, :], _stored(b, k_cache), mask=turned)
        if HAS_REST:
            beyond = there[:, None] & ((d >= rotary) & (d < HEAD_DIM))[None, :]
            tl.store(k_cache + place + d[None, :], _stored(rest, k_cache), mask=beyond)
        if HAS_VALUES:
            inside = there[:, None] & (d < HEAD_DIM)[None, :]
            value = tl.load(v + token * v_stride + head[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            tl.store(v_cache + place + d[None, :], _stored(value, v_cache), mask=inside)


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
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
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
        half = triton.next_power_of_2(rotary // 2)
        heads = min(max(PAIRS // half, 1), 8)  # a warp loads their halves with 16 bytes a thread
        grid = (num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
        rope_write_kv_kernel[grid](
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
            HALF=half,
            WHOLE=triton.next_power_of_2(head_dim),
            HEADS=heads,
            HAS_NORM=q_norm is not None,
            HAS_REST=rotary < head_dim,
            HAS_VALUES=has_values,
            num_warps=1,
        )
