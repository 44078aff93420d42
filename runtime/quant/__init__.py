"""Weight quantisation: decoding a file's blocks, and the 4-bit and 8-bit groups that the kernels take."""

from .bytes32 import round_to_bytes
from .group32 import GROUP32_KINDS, quantize_group32, repack_group32
from .quant_tensor import FORMATS, BlockFormat, QuantTensor

__all__ = [
    "BlockFormat",
    "FORMATS",
    "GROUP32_KINDS",
    "QuantTensor",
    "quantize_group32",
    "repack_group32",
    "round_to_bytes",
]
