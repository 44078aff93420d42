"""The one table from (device, dtype) to the functions that run there. Never looks at shapes or values."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from . import reference
from .batch import LogitEdits, Sampled
from .cpu import activation, attention, edits, experts, norm, rope, sampling
from .shared import Sharing


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run every op; ``ops`` says what each means."""

    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_write_kv: Callable[..., None]
    norm_rope_write_kv: Callable[..., Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    paged_attention: Callable[..., Tensor]
    shared_prefix_attention: Callable[..., Tensor]
    sharing_of: Callable[[torch.device, int], Sharing | None]
    quantized_product: Callable[..., Tensor]
    route_experts: Callable[..., tuple[Tensor, Tensor]]
    mix_experts: Callable[..., Tensor]
    add_adapters: Callable[..., Tensor]
    apply_bitmask: Callable[..., Tensor]
    apply_edits: Callable[[Tensor, LogitEdits], Tensor]
    sample: Callable[..., Sampled]
    gather_logprobs: Callable[[Tensor, Tensor], Tensor]
    top_logprobs: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    samples_masked: bool = False  # ``sample`` takes a bitmask too
    reads_packed: bool = False  # weights of 4 and 8 bits and pools of 8-bit floats, as they are stored


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
    samples_masked=True,
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
    """The GPU's; imported with the first tensor that lies there."""
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
    """Every op called inside runs there, whatever the device: for the reference, and for interpreted GPU kernels."""
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
