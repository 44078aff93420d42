"""The ops of the decoder and of sampling for each device, and the plain-torch reference of each."""

from .backend import (
    adapter_tables,
    add_adapters,
    apply_edits,
    gather_logprobs,
    gelu_mul,
    mix_experts,
    norm_rope_write_kv,
    paged_attention,
    partial_attention,
    quantized_product,
    rms_norm,
    rope_write_kv,
    route_experts,
    shared_prefix_attention,
    sharing_of,
    silu_mul,
    top_logprobs,
)
from .batch import LogitEdits, SampleBatch, Sampled
from .groups import Groups
from .quantized_weight import QuantizedWeight
from .sampling import apply_bitmask, sample, uniform
from .shared import SharedPrefixes, Sharing
from .threads import set_kernel_threads, set_threads
from .warm_up import begin_warm_up, warm_up

__all__ = [
    "Groups",
    "LogitEdits",
    "QuantizedWeight",
    "SampleBatch",
    "Sampled",
    "SharedPrefixes",
    "Sharing",
    "adapter_tables",
    "add_adapters",
    "apply_bitmask",
    "apply_edits",
    "begin_warm_up",
    "gather_logprobs",
    "gelu_mul",
    "mix_experts",
    "norm_rope_write_kv",
    "paged_attention",
    "partial_attention",
    "quantized_product",
    "rms_norm",
    "rope_write_kv",
    "route_experts",
    "sample",
    "set_kernel_threads",
    "set_threads",
    "shared_prefix_attention",
    "sharing_of",
    "silu_mul",
    "top_logprobs",
    "uniform",
    "warm_up",
]
