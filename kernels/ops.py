"""The ops of the decoder and what each means. The backend of the first argument's device computes them.

T tokens, R rows, S slots, Hq/Hkv query and KV heads, D head size, V vocabulary, W = ceil(V / 32) mask words.
"""

import torch
from torch import Tensor

from .backend import backend_of
from .groups import Groups
from .quantized_weight import Experts, QuantizedWeight
from .shared import SharedPrefixes, Sharing


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(y, residual_out)`` over the last dimension of x; neither input is changed.

    total = x + residual, or x;  y = total / sqrt(mean(total^2) + eps) * weight, in x's dtype
    residual_out = total in the residual's dtype, or x itself without a residual
    """
    return backend_of(x).rms_norm(x, weight, eps, residual=residual)


def rope_write_kv(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    cos_sin: Tensor,  # float32 [Tmax, rotary size]: cosines of the pairs, then their sines
    positions: Tensor,  # int64 [T]
    k_cache: Tensor,  # [S, Hkv, D]
    v_cache: Tensor,  # [S, Hkv, D]
    out_slots: Tensor,  # int64 [T]
) -> None:
    """Rotates q in place; writes the rotated k, and v, to their slots. k itself is not changed.

    Pair i is (x[i], x[i + half]) with half = rotary size / 2; dimensions from the rotary size on are not rotated:
    a, b = x[i], x[i + half];  x[i], x[i + half] = a * cos - b * sin, b * cos + a * sin
    A cache of float8_e4m3fn stores the nearest number it has, at most 448. q, k and v may be slices of one fused
    projection: only their last two dimensions must be dense.
    """
    backend_of(q).rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, out_slots)


def norm_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_slots: Tensor,
    *,
    q_norm: Tensor,  # float32 [D]
    k_norm: Tensor,  # float32 [D]
    eps: float,
) -> Tensor:  # [T, Hq, D]
    """``rope_write_kv`` after ``rms_norm`` of each head of q and k. Returns the rotated queries; q may change."""
    inputs = (q, k, v, cos_sin, positions, k_cache, v_cache, out_slots)
    return backend_of(q).norm_rope_write_kv(*inputs, q_norm=q_norm, k_norm=k_norm, eps=eps)


def silu_mul(x: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: silu(x[..., :I]) * x[..., I:]."""
    return backend_of(x).silu_mul(x)


def route_experts(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """``(weights float32 [T, top_k], experts int32 [T, top_k])``: the likeliest first, the lower id first among equals.

    weights = softmax(logits [T, E]) at the experts, divided by their sum if ``normalise``
    """
    if not 0 < top_k <= logits.shape[-1]:
        raise ValueError(f"top {top_k} experts: must be between 1 and the layer's {logits.shape[-1]}")
    return backend_of(logits).route_experts(logits, top_k, normalise=normalise)


def mix_experts(
    x: Tensor,  # [T, C]
    gate_up: Experts,  # [E, 2I, C]
    down: Experts,  # [E, C, I]
    weights: Tensor,  # float32 [T, top_k]
    ids: Tensor,  # int32 [T, top_k]
) -> Tensor:  # [T, C] in x's dtype
    """A mixture of experts: ``sum over k of weights[t, k] * down[e] @ silu_mul(gate_up[e] @ x[t])``, e = ids[t, k].

    Only backends that read packed weights take experts packed by ``pack_experts``.
    """
    return backend_of(x).mix_experts(x, gate_up, down, weights, ids)


def gelu_mul(x: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: gelu(x[..., :I]) * x[..., I:], gelu by its tanh formula."""
    return backend_of(x).gelu_mul(x)


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [S, Hkv, D]
    v_cache: Tensor,  # [S, Hkv, D]
    slot_table: Tensor,  # int32 [max rows, max len]
    row_ids: Tensor,  # int32 [R]
    query_starts: Tensor,  # int32 [R + 1]
    kv_lens: Tensor,  # int32 [R]
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:  # [T, Hq, D] in q's dtype
    """Causal attention of each row's new tokens, its last positions, over the slots of its whole context.

    for row r, query t at position p, head h:  slots = slot_table[row_ids[r], j] for j in (p - sliding_window, p]
    s = scale * (q[t, h] . k_cache[slots, h // group]);  s = soft_cap * tanh(s / soft_cap) if soft_cap
    out[t, h] = softmax(s) @ v_cache[slots, h // group]
    The new tokens' K and V must already be in their slots.
    """
    return backend_of(q).paged_attention(
        q,
        k_cache,
        v_cache,
        slot_table,
        row_ids,
        query_starts,
        kv_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


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
) -> Tensor:
    """``paged_attention`` that reads common chunks once for each piece of ``shared``; only the order of sums differs.

    The CPU kernel ignores ``shared``: it finds common chunks by their slots.
    """
    inputs = (q, k_cache, v_cache, slot_table, row_ids, query_starts, kv_lens)
    return backend_of(q).shared_prefix_attention(*inputs, shared=shared, scale=scale, soft_cap=soft_cap)


def sharing_of(device: torch.device, *, group: int) -> Sharing | None:
    """How to cut prefixes for ``shared_prefix_attention``; None: not at all. ``group``: query heads of a KV head."""
    return backend_of(torch.empty(0, dtype=torch.bfloat16, device=device)).sharing_of(device, group)


def quantized_product(
    x: Tensor, weight: QuantizedWeight, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x [T, K] @ weight.T + bias -> [T, N]`` in ``out_dtype`` or x's; sums are float32."""
    return backend_of(x).quantized_product(x, weight, bias=bias, out_dtype=out_dtype)


def add_adapters(y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Groups, *, scales: Tensor) -> Tensor:
    """y [T, N] += scales[t] * (x [T, K] @ down[a].T) @ up[a].T, in place, with a the token's adapter.

    down [A, r, K], up [A, N, r], scales float32 [T]; a token without an adapter keeps its y.
    """
    return backend_of(x).add_adapters(y, x, down, up, adapters, scales=scales)
