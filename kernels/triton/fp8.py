"""8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa, no infinity) as bytes, on any architecture.

sm_80 has no instruction that converts them, so bits are moved instead; ``has_fp8`` says which. The caller applies
scales.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def has_fp8(device: torch.device) -> bool:
    """Whether the device converts e4m3 by an instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def as_bytes(cache: Tensor) -> Tensor:
    """A pool of 8-bit floats as uint8; any other as it is. The memory is the same."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def decode_fp8(byte):
    """uint8 -> float32, exact, subnormals too: the fields are placed in a float16, whose exponent bias is 8 more."""
    wide = byte.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def factor_of_fp8(byte, TYPE: tl.constexpr, IS_NATIVE: tl.constexpr):
    """uint8 -> ``TYPE``, exact; IS_NATIVE: by the device's instruction, see ``has_fp8``."""
    if IS_NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(TYPE)
    else:
        return decode_fp8(byte).to(TYPE)


@triton.jit
def encode_fp8(x):
    """float32 -> uint8, rounded to nearest even; magnitudes beyond 448 become 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    own = size.to(tl.int32, bitcast=True)
    normal = ((own + 0x7FFFF + ((own >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are of 2^-9; adding 2^23 rounds to a whole number and leaves it in the low bits.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(size < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return byte.to(tl.uint8)


@triton.jit
def of_bytes(stored, KIND: tl.constexpr, HAS_FP8: tl.constexpr):
    """float32: weights of 8 bits before their scale is applied; bfloat16 holds each exactly."""
    if KIND != "fp8":
        number = stored.to(tl.float32)
    else:
        number = factor_of_fp8(stored, tl.float32, HAS_FP8)
    return number
