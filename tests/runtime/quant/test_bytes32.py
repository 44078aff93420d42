"""Rounding blocks to bytes gives the bits that rounding their floats gives."""

import pytest
import torch
from phloem.kernels.linear import quantize_int8
from phloem.runtime.quant import FORMATS, QuantTensor, round_to_bytes
from phloem.tests.runtime.quant.blocks import random_blocks

ROW_LEN = 512


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("num_rows", [1, 7, 150])
def test_rounding_blocks_is_rounding_their_floats(kind: str, num_rows: int) -> None:
    weight = random_blocks(kind, num_rows, ROW_LEN // FORMATS[kind].block_len)
    q, scale = round_to_bytes(weight)
    floats = weight.dequantize()
    assert q.shape == (num_rows, ROW_LEN) and scale.shape == (num_rows, ROW_LEN // 32)
    if kind == "Q8_0":  # the file's own bytes, whether or not they reach 127
        assert torch.equal(q.float().view(-1, 32) * scale.view(-1, 1), floats.view(-1, 32))
        return
    wanted_q, wanted_scale = quantize_int8(floats)
    assert torch.equal(q, wanted_q) and torch.equal(scale, wanted_scale)


def test_a_group_of_zeros_stays_one() -> None:
    weight = QuantTensor.from_bytes("Q4_0", torch.zeros(ROW_LEN // 32 * 18, dtype=torch.uint8), (1, ROW_LEN))
    q, scale = round_to_bytes(weight)
    assert not q.any() and not scale.any()
