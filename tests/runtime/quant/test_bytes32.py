"""Rounding blocks to bytes gives the bits that rounding their floats gives."""

import pytest
import torch
from phloem.kernels.linear import quantize_int8
from phloem.runtime.quant import FORMATS, QuantTensor, round_to_bytes

ROW_LEN = 512


def blocks_of(kind: str, num_rows: int) -> QuantTensor:
    """Random blocks; their float16 scales are small numbers, wherever in a block they lie."""
    form = FORMATS[kind]
    rng = torch.Generator().manual_seed(len(kind) + num_rows)
    data = torch.randint(0, 256, (num_rows, ROW_LEN // form.block_len, form.block_bytes), generator=rng).byte()
    starts = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, (0,))
    for start in starts:
        scales = torch.randn(data.shape[:2], generator=rng).half() / 64
        data[:, :, start : start + 2] = scales.unsqueeze(-1).view(torch.uint8)
    return QuantTensor.from_bytes(kind, data.flatten(), (num_rows, ROW_LEN))


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("num_rows", [1, 7, 150])
def test_rounding_blocks_is_rounding_their_floats(kind: str, num_rows: int) -> None:
    weight = blocks_of(kind, num_rows)
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
