"""The ops of the decoder and of sampling for each device, and the reference of each. Never imports upwards."""

from .batch import LogitEdits, SampleBatch, Sampled
from .ops import mix_experts, paged_attention, rms_norm, rope_write_kv, route_experts, silu_mul
from .sampling import apply_bitmask, apply_edits, apply_penalties, gather_logprobs, sample, top_logprobs, uniform
from .threads import set_kernel_threads, set_threads
from .warm_up import warm_up

__all__ = [
    "LogitEdits",
    "SampleBatch",
    "Sampled",
    "apply_bitmask",
    "apply_edits",
    "apply_penalties",
    "gather_logprobs",
    "mix_experts",
    "paged_attention",
    "rms_norm",
    "rope_write_kv",
    "route_experts",
    "sample",
    "set_kernel_threads",
    "set_threads",
    "silu_mul",
    "top_logprobs",
    "uniform",
    "warm_up",
]
