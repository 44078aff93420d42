"""What this machine's CPU can do, asked of torch. Never measures."""

from functools import cache

import torch


@cache
def has_bfloat16_products() -> bool:
    """Whether bfloat16 matrix products run as such, and not by way of float32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    except (AttributeError, RuntimeError):
        return False


@cache
def has_int4_products() -> bool:
    """Whether torch has a vectorised product with 4-bit weights here."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.zeros(16, 32, dtype=torch.int32), 1)
        x, scale_zero = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(1, 16, 2, dtype=torch.bfloat16)
        torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scale_zero)
    except (AttributeError, RuntimeError):
        return False
    return True
