"""The ops of the decoder and of sampling, what each means, and the functions that compute it on each device.

A Protocol per op is what every backend's function has to accept: tensors by position, options by name. Its body is the
op that the models call, such as ``rms_norm``, which runs on the backend of its first argument.

T tokens, R rows, S slots, Hq/Hkv query and KV heads, D head size, V vocabulary, W = ceil(V / 32) mask words.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from . import reference
from .batch import LogitEdits, SampleBatch, Sampled
from .cpu import activation, adapters, attention, edits, experts, norm, rope, sampling
from .groups import Groups
from .quantized_weight import Experts, QuantizedWeight
from .shared import SharedPrefixes, Sharing


class RmsNorm(Protocol):
    """``(y, residual_out)`` over the last dimension of x; neither input is changed.

    total = x + residual, or x;  y = total / sqrt(mean(total^2) + eps) * weight, in x's dtype
    residual_out = total in the residual's dtype, or x itself without a residual
    """

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, /, *, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return backend_of(x).rms_norm(x, weight, eps, residual=residual)


class RopeWriteKv(Protocol):
    """Rotates q in place; writes the rotated k, and v, to their slots. k itself is not changed.

    Pair i is (x[i], x[i + half]) with half = rotary size / 2; dimensions from the rotary size on are not rotated:
    a, b = x[i], x[i + half];  x[i], x[i + half] = a * cos - b * sin, b * cos + a * sin
    A cache of float8_e4m3fn stores the nearest number it has, at most 448; one of int8 [S, Hkv, ``kv_row_len``] stores
    ``quantize_kv`` of each vector, on CPUs alone. q, k and v may be slices of one fused projection: only their last two
    dimensions must be dense. Without v only keys are written, and ``v_cache`` may be ``k_cache``: each vector is key
    and value.
    """

    def __call__(
        self,
        q: Tensor,  # [T, Hq, D]
        k: Tensor,  # [T, Hkv, D]
        v: Tensor | None,  # [T, Hkv, D]
        cos_sin: Tensor,  # float32 [Tmax, rotary size]: cosines of the pairs, then their sines
        positions: Tensor,  # int64 [T]
        k_cache: Tensor,  # [S, Hkv, D]
        v_cache: Tensor,  # [S, Hkv, D]
        out_slots: Tensor,  # int64 [T]
        /,
    ) -> None:
        backend_of(q).rope_write_kv(q, k, v, cos_sin, positions, k_cache, v_cache, out_slots)


class NormRopeWriteKv(Protocol):
    """``rope_write_kv`` after ``rms_norm`` of each head of q and k. Returns the rotated queries; q may change."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out_slots: Tensor,
        /,
        *,
        q_norm: Tensor,  # float32 [D]
        k_norm: Tensor,  # float32 [D]
        eps: float,
    ) -> Tensor:  # [T, Hq, D]
        inputs = (q, k, v, cos_sin, positions, k_cache, v_cache, out_slots)
        return backend_of(q).norm_rope_write_kv(*inputs, q_norm=q_norm, k_norm=k_norm, eps=eps)


class Gated(Protocol):
    def __call__(self, x: Tensor, /) -> Tensor: ...


class PagedAttention(Protocol):
    """Causal attention of each row's new tokens, its last positions, over the slots of its whole context.

    for row r, query t at position p, head h:  slots = slot_table[row_ids[r], j] for j in (p - sliding_window, p]
    s = scale * (q[t, h] . k_cache[slots, h // group]);  s = soft_cap * tanh(s / soft_cap) if soft_cap
    out[t, h] = softmax(s) @ v_cache[slots, h // group]
    The new tokens' K and V must already be in their slots. Caches of int8 are [S, Hkv, ``kv_row_len``], on CPUs alone.
    """

    def __call__(
        self,
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [S, Hkv, D]
        v_cache: Tensor,  # [S, Hkv, D]
        slot_table: Tensor,  # int32 [max rows, max len]
        row_ids: Tensor,  # int32 [R]
        query_starts: Tensor,  # int32 [R + 1]
        kv_lens: Tensor,  # int32 [R]
        /,
        *,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:  # [T, Hq, D] in q's dtype
        inputs = (q, k_cache, v_cache, slot_table, row_ids, query_starts, kv_lens)
        run = backend_of(q).paged_attention
        return run(*inputs, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)


class PartialAttention(Protocol):
    """Attention of each token t over the keys [firsts[t], ends[t]) of its row alone, and what joins it with others.

    for query t, head h:  slots = slot_table[row_ids[r], j] for j in [firsts[t], ends[t]), s as in ``paged_attention``
    out[t, h] = softmax(s) @ v_cache[slots, h // group], 0 without keys
    logs[t, h] = log2(sum(e ** s)), -inf without keys
    ``ends`` and ``firsts`` (None: 0) may not fall within a row. Neither is rounded to q's type.
    """

    def __call__(
        self,
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [S, Hkv, D]
        v_cache: Tensor,  # [S, Hkv, D]
        slot_table: Tensor,  # int32 [max rows, max len]
        row_ids: Tensor,  # int32 [R]
        query_starts: Tensor,  # int32 [R + 1]
        ends: Tensor,  # int32 [T]
        /,
        *,
        scale: float,
        firsts: Tensor | None = None,  # int32 [T]
        soft_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # float32 [T, Hq, D], float32 [T, Hq]
        inputs = (q, k_cache, v_cache, slot_table, row_ids, query_starts, ends)
        return backend_of(q).partial_attention(*inputs, scale=scale, firsts=firsts, soft_cap=soft_cap)


class SharedPrefixAttention(Protocol):
    """``paged_attention`` that reads common chunks once for each piece of ``shared``; only the order of sums differs.

    The CPU kernel ignores ``shared``: it finds common chunks by their slots.
    """

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_table: Tensor,
        row_ids: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        /,
        *,
        shared: SharedPrefixes,
        scale: float,
        soft_cap: float = 0.0,
    ) -> Tensor:
        inputs = (q, k_cache, v_cache, slot_table, row_ids, query_starts, kv_lens)
        return backend_of(q).shared_prefix_attention(*inputs, shared=shared, scale=scale, soft_cap=soft_cap)


class SharingOf(Protocol):
    def __call__(self, device: torch.device, group: int, head_dim: int, dtype: torch.dtype, /) -> Sharing | None: ...


class QuantizedProduct(Protocol):
    """``x [T, K] @ weight.T + bias -> [T, N]`` in ``out_dtype`` or x's; sums are float32."""

    def __call__(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        /,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return backend_of(x).quantized_product(x, weight, bias=bias, out_dtype=out_dtype)


class DenseProduct(Protocol):
    """``x [T, K] @ weight [N, K].T + bias -> [T, N]``, all of one type; sums are float32."""

    def __call__(self, x: Tensor, weight: Tensor, /, *, bias: Tensor | None = None) -> Tensor:
        return backend_of(x).dense_product(x, weight, bias=bias)


class RouteExperts(Protocol):
    """``(weights float32 [T, top_k], experts int32 [T, top_k])``: the likeliest first, the lower id first among equals.

    weights = softmax(logits [T, E]) at the experts, divided by their sum if ``normalise``
    """

    def __call__(self, logits: Tensor, top_k: int, /, *, normalise: bool) -> tuple[Tensor, Tensor]:
        if not 0 < top_k <= logits.shape[-1]:
            raise ValueError(f"top {top_k} experts: must be between 1 and the layer's {logits.shape[-1]}")
        return backend_of(logits).route_experts(logits, top_k, normalise=normalise)


class MixExperts(Protocol):
    """A mixture of experts: ``sum over k of weights[t, k] * down[e] @ silu_mul(gate_up[e] @ x[t])``, e = ids[t, k].

    x [T, C], gate_up [E, 2I, C], down [E, C, I], weights float32 and ids int32 [T, top_k] -> [T, C] in x's dtype.
    Only a backend that ``reads_packed`` takes packed experts, one below the other.
    """

    def __call__(self, x: Tensor, gate_up: Experts, down: Experts, weights: Tensor, ids: Tensor, /) -> Tensor:
        return backend_of(x).mix_experts(x, gate_up, down, weights, ids)


class AddAdapters(Protocol):
    """y [T, N] += (x [T, K] @ down[a].T) @ up[a].T, in place, with a the token's adapter.

    down [A, r, K], up [A, N, r]; a token without an adapter keeps its y.
    """

    def __call__(self, y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Groups, /) -> Tensor:
        return backend_of(x).add_adapters(y, x, down, up, adapters)


class AdapterTables(Protocol):
    """Zeros for ``add_adapters``, down [count, rank, width] and up [count, num_outputs, rank], laid out as the device's
    kernel reads them.
    """

    def __call__(
        self, count: int, rank: int, width: int, num_outputs: int, dtype: torch.dtype, device: torch.device, /
    ) -> tuple[Tensor, Tensor]: ...


class ApplyBitmask(Protocol):
    """logits [R, V], mask int32 [M, W], rows int64 [M] -> logits, changed in place."""

    def __call__(self, logits: Tensor, mask: Tensor, /, *, rows: Tensor | None) -> Tensor: ...


class ApplyEdits(Protocol):
    """Adds biases, then penalises repeated tokens, in place, and returns the logits [R, V].

    for each bias:       logit += value
    for each token seen: logit = logit / repetition if logit > 0 else logit * repetition
    for each generated:  logit -= frequency * times generated + presence
    """

    def __call__(self, logits: Tensor, edits: LogitEdits, /) -> Tensor:
        return backend_of(logits).apply_edits(logits, edits)


class Sample(Protocol):
    """logits [R, V] -> one token a row."""

    def __call__(self, logits: Tensor, batch: SampleBatch, /) -> Sampled: ...


class SampleMasked(Protocol):
    """logits [R, V], mask int32 [.., W], rows int64 [M], ids int64 [M], None: 0 to M - 1 -> one token a row."""

    def __call__(
        self, logits: Tensor, batch: SampleBatch, /, *, mask: Tensor, rows: Tensor | None, ids: np.ndarray | None
    ) -> Sampled: ...


class GatherLogprobs(Protocol):
    """float32 [R]: log-softmax of each row of the logits [R, V] at its token (int64 [R])."""

    def __call__(self, logits: Tensor, token_ids: Tensor, /) -> Tensor:
        return backend_of(logits).gather_logprobs(logits, token_ids)


class TopLogprobs(Protocol):
    """The k likeliest ids (int64 [R, k], lower ids first among equals) and their log-probabilities (float32 [R, k])."""

    def __call__(self, logits: Tensor, k: int, /) -> tuple[Tensor, Tensor]:
        if not 0 < k <= logits.shape[-1]:
            raise ValueError(f"top_logprobs of {k} tokens: must be between 1 and the vocabulary's {logits.shape[-1]}")
        return backend_of(logits).top_logprobs(logits, k)


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run every op: the plain-torch reference, where it has no faster function."""

    rms_norm: RmsNorm = reference.rms_norm
    rope_write_kv: RopeWriteKv = reference.rope_write_kv
    norm_rope_write_kv: NormRopeWriteKv = reference.norm_rope_write_kv
    silu_mul: Gated = reference.silu_mul
    gelu_mul: Gated = reference.gelu_mul
    paged_attention: PagedAttention = reference.paged_attention
    partial_attention: PartialAttention = reference.partial_attention
    shared_prefix_attention: SharedPrefixAttention = reference.shared_prefix_attention
    sharing_of: SharingOf = reference.sharing_of
    quantized_product: QuantizedProduct = reference.quantized_product
    dense_product: DenseProduct = reference.dense_product
    route_experts: RouteExperts = reference.route_experts
    mix_experts: MixExperts = reference.mix_experts
    add_adapters: AddAdapters = reference.add_adapters
    adapter_tables: AdapterTables = reference.adapter_tables
    apply_bitmask: ApplyBitmask = reference.apply_bitmask
    apply_edits: ApplyEdits = reference.apply_edits
    sample: Sample = reference.sample
    gather_logprobs: GatherLogprobs = reference.gather_logprobs
    top_logprobs: TopLogprobs = reference.top_logprobs
    sample_masked: SampleMasked | None = None  # None: the mask is written into the logits first
    reads_packed: bool = False  # takes weights of 4 and 8 bits and pools of 8-bit floats as they are stored


REFERENCE = Backend()

CPU = Backend(
    rms_norm=norm.rms_norm,
    rope_write_kv=rope.rope_write_kv,
    norm_rope_write_kv=rope.norm_rope_write_kv,
    silu_mul=activation.silu_mul,
    gelu_mul=activation.gelu_mul,
    mix_experts=experts.mix_experts,
    add_adapters=adapters.add_adapters,
    adapter_tables=adapters.adapter_tables,
    paged_attention=attention.paged_attention,
    partial_attention=attention.partial_attention,
    shared_prefix_attention=attention.shared_prefix_attention,
    apply_bitmask=edits.apply_bitmask,
    apply_edits=edits.apply_edits,
    sample=sampling.sample,
    sample_masked=sampling.sample,
    gather_logprobs=sampling.gather_logprobs,
    top_logprobs=sampling.top_logprobs,
)

BACKENDS: Mapping[tuple[str, torch.dtype], Backend] = {
    ("cpu", torch.float32): CPU,
    ("cpu", torch.bfloat16): CPU,
}

_chosen: ContextVar[Backend | None] = ContextVar("backend", default=None)


@cache
def triton_backend() -> Backend:
    """The GPU's backend, imported when the first op runs on a GPU."""
    from .triton import activation as triton_activation
    from .triton import attention as triton_attention
    from .triton import dense, grouped, quantized
    from .triton import edits as triton_edits
    from .triton import experts as triton_experts
    from .triton import norm as triton_norm
    from .triton import rope as triton_rope
    from .triton import sampling as triton_sampling

    return Backend(
        rms_norm=triton_norm.rms_norm,
        rope_write_kv=triton_rope.rope_write_kv,
        norm_rope_write_kv=triton_rope.norm_rope_write_kv,
        silu_mul=triton_activation.silu_mul,
        gelu_mul=triton_activation.gelu_mul,
        paged_attention=triton_attention.paged_attention,
        partial_attention=triton_attention.partial_attention,
        shared_prefix_attention=triton_attention.shared_prefix_attention,
        sharing_of=triton_attention.sharing_of,
        quantized_product=quantized.quantized_product,
        dense_product=dense.dense_product,
        route_experts=triton_experts.route_experts,
        mix_experts=triton_experts.mix_experts,
        add_adapters=grouped.add_adapters,
        reads_packed=True,
        apply_bitmask=triton_edits.apply_bitmask,
        apply_edits=triton_edits.apply_edits,
        sample=triton_sampling.sample,
        sample_masked=triton_sampling.sample,
    )


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Runs every op called inside on ``backend``, whatever the device: the reference, or interpreted GPU kernels."""
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


def backend_of(x: Tensor) -> Backend:
    """The backend for the op's first argument; the plain-torch reference where no faster one is listed."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if x.is_cuda and x.dtype in (torch.float32, torch.bfloat16):
        return triton_backend()
    return BACKENDS.get((x.device.type, x.dtype), REFERENCE)


def reads_packed(device: torch.device | str) -> bool:
    """Whether the device's kernels take packed weights and pools of 8-bit floats as they are stored."""
    return backend_of(torch.empty(0, dtype=torch.bfloat16, device=device)).reads_packed


def _op(kind: Any) -> Any:
    """The public op: the body of its Protocol, which calls the function of the first argument's backend."""
    return MethodType(kind.__call__, kind)


rms_norm: RmsNorm = _op(RmsNorm)
rope_write_kv: RopeWriteKv = _op(RopeWriteKv)
norm_rope_write_kv: NormRopeWriteKv = _op(NormRopeWriteKv)
paged_attention: PagedAttention = _op(PagedAttention)
partial_attention: PartialAttention = _op(PartialAttention)
shared_prefix_attention: SharedPrefixAttention = _op(SharedPrefixAttention)
quantized_product: QuantizedProduct = _op(QuantizedProduct)
dense_product: DenseProduct = _op(DenseProduct)
mix_experts: MixExperts = _op(MixExperts)
add_adapters: AddAdapters = _op(AddAdapters)
apply_edits: ApplyEdits = _op(ApplyEdits)
gather_logprobs: GatherLogprobs = _op(GatherLogprobs)
route_experts: RouteExperts = _op(RouteExperts)
top_logprobs: TopLogprobs = _op(TopLogprobs)


def silu_mul(x: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: silu(x[..., :I]) * x[..., I:]."""
    return backend_of(x).silu_mul(x)


def gelu_mul(x: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: gelu(x[..., :I]) * x[..., I:], gelu by its tanh formula."""
    return backend_of(x).gelu_mul(x)


def adapter_tables(
    count: int, rank: int, *, width: int, num_outputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """As ``AdapterTables``, for a model's activations of ``dtype``."""
    make = backend_of(torch.empty(0, dtype=dtype, device=device)).adapter_tables
    return make(count, rank, width, num_outputs, dtype, device)


def sharing_of(device: torch.device, *, group: int, head_dim: int, dtype: torch.dtype) -> Sharing | None:
    """How to cut prefixes for ``shared_prefix_attention`` of queries of ``dtype``; None: not at all. ``group``: query
    heads of a KV head.
    """
    of = backend_of(torch.empty(0, dtype=torch.bfloat16, device=device)).sharing_of
    return of(device, group, head_dim, dtype)
