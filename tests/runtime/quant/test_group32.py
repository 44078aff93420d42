"""4-bit groups of 32 stand for the same weights as the blocks they came from."""

import numpy as np
import pytest
import torch
from phloem.protocol.errors import Unsupported
from phloem.runtime.quant import (
    FORMATS,
    GROUP32_KINDS,
    QuantTensor,
    quantize_group32,
    repack_group32,
)


def unpacked(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The weights by the formula, float32."""
    groups = (q.float() - 8).view(*scale.shape, 32)
    return (groups * scale.unsqueeze(-1) + zero.unsqueeze(-1)).view(q.shape)


def random_4bit(kind: str, num_rows: int, row_len: int) -> QuantTensor:
    rng = np.random.default_rng(1)
    form = FORMATS[kind]
    data = rng.integers(0, 256, (num_rows, row_len // form.block_len, form.block_bytes), dtype=np.uint8)
    for start in (0,) if kind == "Q4_0" else (0, 2):
        data[:, :, start : start + 2] = rng.uniform(0.01, 1, (*data.shape[:2], 1)).astype(np.float16).view(np.uint8)
    return QuantTensor.from_bytes(kind, torch.from_numpy(data).flatten(), (num_rows, row_len))


@pytest.mark.parametrize("kind", GROUP32_KINDS)
def test_repacked_weights_are_the_file_s_own(kind: str) -> None:
    tensor = random_4bit(kind, 5, 512)
    q, scale, zero = repack_group32(tensor)
    assert (q.dtype, q.shape, scale.shape, zero.shape) == (torch.uint8, (5, 512), (5, 16), (5, 16))
    assert int(q.max()) <= 15
    want = tensor.dequantize()
    assert (unpacked(q, scale, zero) - want).abs().max() <= 2e-6 * want.abs().max()


def test_a_format_of_other_groups_is_refused_by_name() -> None:
    q6 = QuantTensor("Q6_K", torch.zeros(1, 1, 210, dtype=torch.uint8), (1, 256))
    with pytest.raises(Unsupported, match="Q6_K as 4-bit groups of 32; only Q4_0, Q4_1, Q4_K"):
        repack_group32(q6)


def test_rounding_is_never_off_by_more_than_half_a_step() -> None:
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(2))
    q, scale, zero = quantize_group32(weight)
    error = (unpacked(q, scale, zero) - weight).abs().view(9, 3, 32)
    assert (error <= scale.unsqueeze(-1) / 2 + 1e-6).all()


def test_rounding_keeps_both_ends_and_constant_groups() -> None:
    weight = torch.cat((torch.full((1, 32), 0.3), torch.linspace(-1, 2, 32).view(1, 32)), dim=1)
    back = unpacked(*quantize_group32(weight))
    assert torch.allclose(back[0, :32], weight[0, :32], atol=1e-7)
    assert torch.allclose(back[0, [32, 63]], weight[0, [32, 63]], atol=1e-6)


def test_rows_that_are_no_whole_number_of_groups_are_refused() -> None:
    with pytest.raises(Unsupported, match="rows of 40 weights"):
        quantize_group32(torch.zeros(2, 40))
