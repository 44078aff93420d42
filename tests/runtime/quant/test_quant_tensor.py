"""Every block format against ggml's own Python decoder, on random bytes."""

import gguf
import numpy as np
import pytest
import torch
from phloem.protocol.errors import Unsupported
from phloem.runtime.quant import FORMATS, QuantTensor
from phloem.tests.runtime.quant.blocks import random_blocks


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 1), (7, 3), (0, 2)])
def test_dequantize_equals_ggml_exactly(kind: str, num_rows: int, num_blocks: int) -> None:
    tensor = random_blocks(kind, num_rows, num_blocks)
    got = tensor.dequantize()
    assert got.dtype == torch.float32
    assert got.shape == (num_rows, num_blocks * FORMATS[kind].block_len)
    if num_rows:
        data = tensor.blocks.reshape(num_rows, -1).numpy()
        want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("kind", FORMATS)
def test_block_sizes_are_ggml_s(kind: str) -> None:
    form = FORMATS[kind]
    assert (form.block_len, form.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def test_taking_rows_moves_whole_rows_of_blocks() -> None:
    tensor = random_blocks("Q4_K", 6, 2)
    order = torch.tensor([5, 0, 3])
    assert torch.equal(tensor.take_rows(order).dequantize(), tensor.dequantize()[order])
    assert torch.equal(tensor.take_rows(slice(2, 4)).dequantize(), tensor.dequantize()[2:4])


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="type NVFP4; the types read are Q4_0, Q4_1"):
        QuantTensor.from_bytes("NVFP4", torch.zeros(0, dtype=torch.uint8), (0, 256))


def test_rows_that_are_no_whole_number_of_blocks_are_refused() -> None:
    with pytest.raises(Unsupported, match="rows of 40 weights; its blocks hold 32"):
        QuantTensor.from_bytes("Q4_0", torch.zeros(36, dtype=torch.uint8), (1, 40))


def test_the_lowest_exponents_of_mxfp4_are_ggml_s() -> None:
    data = np.full((1, 250, 17), 0x21, dtype=np.uint8)
    data[0, :, 0] = np.arange(250)
    tensor = QuantTensor.from_bytes("MXFP4", torch.from_numpy(data).flatten(), (1, 250 * 32))
    want = gguf.quants.dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(tensor.dequantize().numpy(), want)
