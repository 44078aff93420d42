"""Weight quantisation: decoding a file's blocks, and the 4-bit and 8-bit groups that the kernels take."""

import torch

from .bytes32 import round_to_bytes
from .group32 import GROUP32_KINDS, affine_group32, quantize_group32, repack_group32
from .group_tensor import GroupTensor, group_tensor
from .quant_tensor import FORMATS, BlockFormat, QuantTensor
from .records import pack_records

Weight = torch.Tensor | QuantTensor | GroupTensor

__all__ = [
    "BlockFormat",
    "FORMATS",
    "GROUP32_KINDS",
    "GroupTensor",
    "QuantTensor",
    "Weight",
    "affine_group32",
    "group_tensor",
    "pack_records",
    "quantize_group32",
    "repack_group32",
    "round_to_bytes",
]
