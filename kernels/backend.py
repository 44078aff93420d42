"""The table from (device, dtype) to the functions that run there, and the signature of each op.

A Protocol per op is what every backend's function has to accept: tensors by position, options by name. ``ops`` and
``sampling`` say what each op means. T tokens, R rows, S slots, Hq/Hkv query and KV heads, D head size, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from . import reference
from .batch import LogitEdits, SampleBatch, Sampled
from .cpu import activation, attention, edits, experts, norm, rope, sampling
from .groups import Groups
from .quantized_weight import Experts, QuantizedWeight
from .shared import SharedPrefixes, Sharing


class RmsNorm(Protocol):
    """x [..., C], weight [C], residual [..., C] -> (y, residual_out), each [..., C]."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, /, *, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


class RopeWriteKv(Protocol):
    """q [T, Hq, D], k and v [T, Hkv, D], cos_sin [positions, rotary], positions [T], caches [S, Hkv, D], slots [T]."""

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
    ) -> None: ...


class NormRopeWriteKv(Protocol):
    """As ``RopeWriteKv``, with q_norm and k_norm float32 [D] -> the rotated queries [T, Hq, D]."""

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
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
    ) -> Tensor: ...


class Gated(Protocol):
    """x [..., 2I] -> [..., I]."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class PagedAttention(Protocol):
    """q [T, Hq, D], caches [S, Hkv, D], slot_table [rows, length], row_ids [R], query_starts [R + 1], kv_lens [R]
    -> [T, Hq, D].
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
        scale: float,
        sliding_window: int,
        soft_cap: float,
    ) -> Tensor: ...


class SharedPrefixAttention(Protocol):
    """As ``PagedAttention``."""

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
        soft_cap: float,
    ) -> Tensor: ...


class SharingOf(Protocol):
    """The device and the query heads of a KV head -> how prefixes are to be cut; None: not at all."""

    def __call__(self, device: torch.device, group: int, /) -> Sharing | None: ...


class QuantizedProduct(Protocol):
    """x [T, K], weight [N, K], bias [N] -> [T, N]."""

    def __call__(
        self, x: Tensor, weight: QuantizedWeight, /, *, bias: Tensor | None, out_dtype: torch.dtype | None
    ) -> Tensor: ...


class RouteExperts(Protocol):
    """logits [T, E] -> (weights float32, experts int32), each [T, top_k]."""

    def __call__(self, logits: Tensor, top_k: int, /, *, normalise: bool) -> tuple[Tensor, Tensor]: ...


class MixExperts(Protocol):
    """x [T, C], gate_up [E, 2I, C], down [E, C, I], weights and ids [T, top_k] -> [T, C].

    Only a backend that ``reads_packed`` is given packed experts.
    """

    def __call__(self, x: Tensor, gate_up: Experts, down: Experts, weights: Tensor, ids: Tensor, /) -> Tensor: ...


class AddAdapters(Protocol):
    """y [T, N], x [T, K], down [A, r, K], up [A, N, r], scales [T] -> y, changed in place."""

    def __call__(
        self, y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Groups, /, *, scales: Tensor
    ) -> Tensor: ...


class ApplyBitmask(Protocol):
    """logits [R, V], mask int32 [M, words], rows int64 [M] -> logits, changed in place."""

    def __call__(self, logits: Tensor, mask: Tensor, /, *, rows: Tensor | None) -> Tensor: ...


class ApplyEdits(Protocol):
    """logits [R, V] -> logits, changed in place."""

    def __call__(self, logits: Tensor, edits: LogitEdits, /) -> Tensor: ...


class Sample(Protocol):
    """logits [R, V] -> one token a row."""

    def __call__(self, logits: Tensor, batch: SampleBatch, /) -> Sampled: ...


class SampleMasked(Protocol):
    """logits [R, V], mask int32 [M, words], rows int64 [M] -> one token a row."""

    def __call__(self, logits: Tensor, batch: SampleBatch, /, *, mask: Tensor, rows: Tensor | None) -> Sampled: ...


class GatherLogprobs(Protocol):
    """logits [R, V], token_ids int64 [R] -> float32 [R]."""

    def __call__(self, logits: Tensor, token_ids: Tensor, /) -> Tensor: ...


class TopLogprobs(Protocol):
    """logits [R, V] -> (ids int64, log-probabilities float32), each [R, k]."""

    def __call__(self, logits: Tensor, k: int, /) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run every op."""

    rms_norm: RmsNorm
    rope_write_kv: RopeWriteKv
    norm_rope_write_kv: NormRopeWriteKv
    silu_mul: Gated
    gelu_mul: Gated
    paged_attention: PagedAttention
    shared_prefix_attention: SharedPrefixAttention
    sharing_of: SharingOf
    quantized_product: QuantizedProduct
    route_experts: RouteExperts
    mix_experts: MixExperts
    add_adapters: AddAdapters
    apply_bitmask: ApplyBitmask
    apply_edits: ApplyEdits
    sample: Sample
    gather_logprobs: GatherLogprobs
    top_logprobs: TopLogprobs
    sample_masked: SampleMasked | None = None  # None: the mask is written into the logits first
    reads_packed: bool = False  # takes weights of 4 and 8 bits and pools of 8-bit floats as they are stored


REFERENCE = Backend(
    rms_norm=reference.rms_norm,
    rope_write_kv=reference.rope_write_kv,
    norm_rope_write_kv=reference.norm_rope_write_kv,
    silu_mul=reference.silu_mul,
    gelu_mul=reference.gelu_mul,
    paged_attention=reference.paged_attention,
    shared_prefix_attention=reference.shared_prefix_attention,
    sharing_of=reference.sharing_of,
    quantized_product=reference.quantized_product,
    route_experts=reference.route_experts,
    mix_experts=reference.mix_experts,
    add_adapters=reference.add_adapters,
    apply_bitmask=reference.apply_bitmask,
    apply_edits=reference.apply_edits,
    sample=reference.sample,
    gather_logprobs=reference.gather_logprobs,
    top_logprobs=reference.top_logprobs,
)

CPU = replace(
    REFERENCE,
    rms_norm=norm.rms_norm,
    rope_write_kv=rope.rope_write_kv,
    norm_rope_write_kv=rope.norm_rope_write_kv,
    silu_mul=activation.silu_mul,
    mix_experts=experts.mix_experts,
    paged_attention=attention.paged_attention,
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
    from .triton import edits as triton_edits
    from .triton import experts as triton_experts
    from .triton import grouped, quantized
    from .triton import norm as triton_norm
    from .triton import rope as triton_rope
    from .triton import sampling as triton_sampling

    return replace(
        REFERENCE,
        rms_norm=triton_norm.rms_norm,
        rope_write_kv=triton_rope.rope_write_kv,
        norm_rope_write_kv=triton_rope.norm_rope_write_kv,
        silu_mul=triton_activation.silu_mul,
        gelu_mul=triton_activation.gelu_mul,
        paged_attention=triton_attention.paged_attention,
        shared_prefix_attention=triton_attention.shared_prefix_attention,
        sharing_of=triton_attention.sharing_of,
        quantized_product=quantized.quantized_product,
        route_experts=triton_experts.route_experts,
        mix_experts=triton_experts.mix_experts,
        add_adapters=grouped.add_adapters,
        reads_packed=True,
        apply_bitmask=triton_edits.apply_bitmask,
        apply_edits=triton_edits.apply_edits,
        sample=triton_sampling.sample,
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
