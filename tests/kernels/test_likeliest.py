"""The highest outputs found with half the arithmetic are those of the whole product, to the same of equal ones."""

import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.kernels import SampleBatch
from phloem.kernels.cpu.likeliest import FEW, LikeliestOutputs, row_norms
from phloem.kernels.linear import PackedLinear, quantize_int8
from torch import Tensor


def head_of(num_outputs: int, width: int, *, bias: bool = False, spread: float = 1.0) -> PackedLinear:
    """With rows of different lengths, and every seventh row equal to its neighbour."""
    weight = torch.randn(num_outputs, width) * spread * (0.5 + torch.rand(num_outputs, 1))
    weight[1::7] = weight[: len(weight[1::7]) * 7 : 7]
    return PackedLinear(
        quantize_int8(weight),
        precision="int16",
        bias=torch.randn(num_outputs) if bias else None,
        out_dtype=torch.float32,
    )


def likeliest(head: PackedLinear, num_tokens: int) -> LikeliestOutputs:
    found = head.likeliest(num_tokens)
    assert found is not None
    return found


def expected(head: PackedLinear, x: Tensor, num_tokens: int, masks: Tensor | None = None) -> Tensor:
    logits = head(x)
    logits[:, num_tokens:] = float("-inf")
    return kernels.sample(logits, SampleBatch.greedy(len(x)), mask=masks).token_ids


def addresses(masks: np.ndarray, ids: np.ndarray) -> Tensor:
    """Of the masks; 0 for -1."""
    return torch.from_numpy(np.where(ids < 0, 0, masks.ctypes.data + masks.strides[0] * ids).astype(np.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 9, 33])
@pytest.mark.parametrize(("num_outputs", "num_tokens"), [(20_000, 20_000), (16_001, 16_001), (16_008, 15_990)])
def test_tokens_equal_those_of_the_whole_product(num_outputs, num_tokens, num_rows, dtype) -> None:
    for bias in (False, True):
        head = head_of(num_outputs, 96, bias=bias)
        take = likeliest(head, num_tokens)
        for _ in range(3):
            x = (torch.randn(num_rows, 96) * torch.rand(num_rows, 1) * 9).to(dtype)
            x[:, ::17] *= 4  # a few large numbers, so that rounding takes much from their neighbours
            found = take(x, torch.zeros(num_rows, dtype=torch.int64))
            assert torch.equal(found, expected(head, x, num_tokens))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_masks_leave_the_highest_allowed_token(share: float) -> None:
    head, num_rows = head_of(20_003, 64), 12
    take = likeliest(head, 20_003)
    rng = np.random.default_rng(3)
    for _ in range(4):
        x = torch.randn(num_rows, 64)
        bits = rng.random((4, 20_032)) < share
        masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        ids = rng.integers(-1, 4, num_rows)
        rows = np.full((num_rows, masks.shape[1]), 0xFFFFFFFF, np.uint32)
        rows[ids >= 0] = masks[ids[ids >= 0]]
        whole = expected(head, x, 20_003, torch.from_numpy(rows.view(np.int32)))
        assert torch.equal(take(x, addresses(masks, ids)), whole)


def test_a_row_that_may_be_nothing_leaves_the_answer_to_the_logits() -> None:
    head = head_of(1024, 64)
    take = likeliest(head, 1024)
    x = torch.randn(6, 64)
    none = np.zeros((1, 32), np.uint32)
    ids = np.array([-1, -1, 0, -1, -1, -1])
    assert (take(x, addresses(none, ids)) == -1).all()
    broken = x.clone()
    broken[3] = float("nan")
    assert (take(broken, addresses(none, np.full(6, -1))) == -1).all()
    assert torch.equal(take(x, addresses(none, np.full(6, -1))), expected(head, x, 1024)), "nothing is left behind"


def test_too_many_that_are_near_the_highest_leave_the_answer_to_the_logits() -> None:
    weight = torch.randn(1, 64).repeat(4096, 1)
    head = PackedLinear(quantize_int8(weight), precision="int16", out_dtype=torch.float32)
    x = torch.randn(5, 64)
    assert (likeliest(head, 4096)(x, torch.zeros(5, dtype=torch.int64)) == -1).all()
    few = int(FEW * 256) * 16
    weight[few:] *= 0.01
    x = torch.where((x @ weight[0])[:, None] > 0, x, -x)  # the long rows are the highest ones
    head = PackedLinear(quantize_int8(weight), precision="int16", out_dtype=torch.float32)
    assert (likeliest(head, 4096)(x, torch.zeros(5, dtype=torch.int64)) == 0).all(), "of equal ones the first"


def test_lengths_of_rows_are_those_of_the_packed_weights() -> None:
    head = head_of(1003, 160)
    weights = head.rows(torch.arange(1003), torch.float32).double()
    norms = row_norms(head.packed.records, 1003)
    assert (norms.double() >= weights.norm(dim=1)).all()
    torch.testing.assert_close(norms.double(), weights.norm(dim=1), rtol=1e-6, atol=0)


def test_heads_of_other_types_have_no_such_way() -> None:
    weight = torch.randn(64, 64)
    assert PackedLinear(weight, precision="bfloat16", out_dtype=torch.float32).likeliest(64) is None
    assert PackedLinear(quantize_int8(weight), precision="int8", out_dtype=torch.float32).likeliest(64) is None
    assert PackedLinear(quantize_int8(weight), precision="int16").likeliest(64) is None
