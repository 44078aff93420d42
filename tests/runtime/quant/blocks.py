"""Random blocks of ggml's formats."""

import numpy as np
import torch
from phloem.runtime.quant import FORMATS, QuantTensor

# The bytes of a block at which a float16 scale begins, where it is not byte 0.
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}
_HALVES |= {"Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ1_M": ()}


def random_blocks(kind: str, num_rows: int, num_blocks: int, seed: int = 0) -> QuantTensor:
    """Random bytes with small, finite scales, wherever in a block they lie."""
    rng = np.random.default_rng(seed)
    form = FORMATS[kind]
    data = rng.integers(0, 256, (num_rows, num_blocks, form.block_bytes), dtype=np.uint8)
    for start in _HALVES.get(kind, (0,)):
        scales = (rng.standard_normal((num_rows, num_blocks, 1)) / 64).astype(np.float16)
        data[:, :, start : start + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        data[:, :, 0] = rng.integers(110, 125, (num_rows, num_blocks))  # an exponent
    if kind == "IQ1_M":
        data[:, :, 55] &= 0xBF  # the top of a float16 in four pieces
    return QuantTensor.from_bytes(kind, torch.from_numpy(data).flatten(), (num_rows, num_blocks * form.block_len))
