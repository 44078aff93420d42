"""Products with packed weights, experts and adapters: the GPU's kernels, interpreted, against plain torch."""

from collections.abc import Callable

import pytest
import torch
from phloem import kernels
from phloem.kernels import backend, linear, reference
from phloem.kernels.backend import REFERENCE, triton_backend, using
from phloem.kernels.quantized_weight import (
    QuantizedWeight,
    dequantize,
    joined_experts,
    pack_fp8,
    pack_int4,
    pack_int8,
    unpacked_experts,
)
from phloem.kernels.triton import grouped, row, unpack
from torch import Tensor

BACKENDS = [triton_backend(), REFERENCE]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
SHAPES = [(0, 64, 3), (1, 32, 1), (3, 96, 50), (17, 160, 70), (70, 128, 33)]  # rows, width in, width out


def int4(weight: Tensor) -> QuantizedWeight:
    rows, width = weight.shape
    groups = (
        torch.randint(0, 16, (rows, width), dtype=torch.uint8),
        torch.rand(rows, width // 32),
        torch.randn(rows, width // 32),
    )
    packed = pack_int4(*groups)
    torch.testing.assert_close(dequantize(packed), linear.dequantize(groups), atol=2e-2, rtol=1e-3)
    return packed


def int8(weight: Tensor) -> QuantizedWeight:
    packed = pack_int8(*linear.quantize_int8(weight))
    torch.testing.assert_close(dequantize(packed), weight, atol=2e-2, rtol=1e-3)
    return packed


def fp8(weight: Tensor) -> QuantizedWeight:
    return pack_fp8(weight, group_len=32)


@pytest.mark.parametrize("pack", [int4, int8, fp8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_with_a_packed_weight(pack: Callable[[Tensor], QuantizedWeight], shape: tuple[int, int, int]) -> None:
    rows, width_in, width_out = shape
    x, bias = torch.randn(rows, width_in), torch.randn(width_out)
    packed = pack(torch.randn(width_out, width_in))
    exact = dequantize(packed)
    assert packed.shape == exact.shape
    for product in (triton_backend().quantized_product, reference.quantized_product):
        torch.testing.assert_close(product(x, packed), x @ exact.T, atol=1e-3, rtol=1e-4)
        found = product(x.bfloat16(), packed, bias=bias, out_dtype=torch.float32)
        torch.testing.assert_close(found, x.bfloat16().float() @ exact.T + bias, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("pack", [int4, int8, fp8])
@pytest.mark.parametrize(("width_in", "width_out"), [(32, 1), (1056, 37), (4640, 21)])
def test_one_row_has_the_same_product(pack: Callable[[Tensor], QuantizedWeight], width_in: int, width_out: int) -> None:
    x, bias = torch.randn(1, width_in).bfloat16(), torch.randn(width_out)
    packed = pack(torch.randn(width_out, width_in))
    expected = x.float() @ dequantize(packed).T
    # A slice of wider rows: its values do not lie at a multiple of 16 bytes.
    shifted = torch.cat((torch.zeros(1, 3).bfloat16(), x), dim=1)[:, 3:]
    for given in (x, shifted):
        found = row.row_product(given, packed, bias=bias, out_dtype=torch.float32)
        torch.testing.assert_close(found, expected + bias, atol=1e-3, rtol=1e-4)
    assert row.row_product(x, packed).dtype == torch.bfloat16
    assert not row.is_row(torch.cat((x, x)), packed)
    with pytest.raises(AssertionError):
        row.row_product(torch.cat((x, x)), packed)


@pytest.mark.parametrize("pack", [int4, int8, fp8])
def test_unpacked_in_parts_the_product_is_the_same(pack: Callable[[Tensor], QuantizedWeight]) -> None:
    x, bias, packed = torch.randn(5, 96), torch.randn(50), pack(torch.randn(50, 96))
    expected = x @ dequantize(packed).T
    for scratch_bytes in (1, 20 * 96 * 4, 1 << 20):
        found = unpack.unpacked_product(x, packed, scratch_bytes=scratch_bytes)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    found = unpack.unpacked_product(x.bfloat16(), packed, bias=bias, out_dtype=torch.float32)
    expected = x.bfloat16().float() @ dequantize(packed).T + bias
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("rows", "width_in", "width_out"), [(1, 4096, 3), (1, 1040, 67), (1, 4100, 5), (3, 64, 20)])
def test_a_product_with_a_weight_that_is_not_packed(rows: int, width_in: int, width_out: int) -> None:
    x, weight, bias = (
        torch.randn(*shape).bfloat16() for shape in ((rows, width_in), (width_out, width_in), (width_out,))
    )
    for given in (None, bias):
        with using(triton_backend()):
            found = backend.dense_product(x, weight, bias=given)
        expected = x.float() @ weight.float().T + (0 if given is None else given.float())
        torch.testing.assert_close(found.float(), expected, atol=4e-2, rtol=1e-2)
        assert found.dtype == torch.bfloat16
        if row.is_row(x, weight):
            torch.testing.assert_close(row.row_product(x, weight, bias=given).float(), expected, atol=4e-2, rtol=1e-2)


def test_scales_beyond_float16_stay_float32() -> None:
    packed = pack_int8(torch.full((1, 32), 3, dtype=torch.int8), torch.tensor([[1e6]]))
    assert packed.scale.dtype == torch.float32 and dequantize(packed)[0, 0] == 3e6
    product = triton_backend().quantized_product(torch.ones(1, 32), packed)
    assert float(product) == pytest.approx(96e6, rel=1e-3)  # TF32 on a GPU


def test_8_bit_floats_are_within_their_rounding_of_the_weight() -> None:
    weight = torch.randn(7, 256)
    torch.testing.assert_close(dequantize(pack_fp8(weight)), weight, rtol=1 / 16, atol=1e-4)


@pytest.mark.parametrize("precision", ["int4", "int8", "int16", "fp8", "auto"])
def test_a_linear_layer_of_packed_weights_runs_them_as_they_are(precision: linear.Precision) -> None:
    weight, bias, x = torch.randn(40, 256), torch.randn(40), torch.randn(5, 256).bfloat16()
    groups = (torch.randint(0, 16, (40, 256), dtype=torch.uint8), *torch.rand(2, 40, 8))
    held = groups if precision in ("int4", "auto") else weight
    with using(triton_backend()):
        layer = linear.PackedLinear(held, precision=precision, bias=bias)
        found, columns = layer(x), torch.zeros(5, 50, dtype=torch.bfloat16)
        layer.write(x, columns[:, :40])
    assert layer.describe() == ("int4" if held is groups else precision.replace("16", "8")) + " packed"
    exact = linear.dequantize(groups) if held is groups else weight
    expected = x.float() @ exact.T + bias
    assert float((found.float() - expected).norm() / expected.norm()) < (0.04 if precision == "fp8" else 0.01)
    assert found.dtype == torch.bfloat16 and torch.equal(columns[:, :40], found) and not columns[:, 40:].any()


def test_8_bit_floats_without_their_kernel_are_the_same_weights() -> None:
    weight, x = torch.randn(8, 256), torch.randn(3, 256)
    found = linear.PackedLinear(weight, precision="fp8", out_dtype=torch.float32)(x)
    torch.testing.assert_close(found, x @ dequantize(pack_fp8(weight)).T, atol=0.3, rtol=0.05)


def test_a_width_that_is_no_multiple_of_the_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="40 wide: must be a multiple of its groups of 32"):
        pack_int8(torch.zeros(2, 40, dtype=torch.int8), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="fp8 of a weight 40 wide"):
        pack_fp8(torch.zeros(2, 40))


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_takes_the_likeliest_experts_lower_ids_first(normalise: bool) -> None:
    logits = torch.randn(9, 12)
    logits[4] = 0.0
    shares = logits.softmax(-1)
    order = shares.sort(descending=True, stable=True)
    expected = order.values[:, :3] / (order.values[:, :3].sum(-1, keepdim=True) if normalise else 1)
    for each in BACKENDS:
        with using(each):
            weights, ids = kernels.route_experts(logits, 3, normalise=normalise)
            assert torch.equal(ids.long(), order.indices[:, :3])
            torch.testing.assert_close(weights, expected)
    with pytest.raises(ValueError, match="top 13 experts: must be between 1 and the layer's 12"):
        kernels.route_experts(logits, 13, normalise=normalise)


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 8, 3), (20, 3, 2), (19, 5, 1)])
def test_a_mixture_is_the_sum_of_its_experts(num_tokens: int, num_experts: int, top_k: int) -> None:
    hidden, width = 24, 20
    x = torch.randn(num_tokens, hidden)
    gate_up, down = torch.randn(num_experts, 2 * width, hidden), torch.randn(num_experts, hidden, width)
    weights, ids = reference.route_experts(torch.randn(num_tokens, num_experts), top_k, normalise=True)
    expected = torch.zeros_like(x)
    for t in range(num_tokens):
        for share, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            expected[t] += share * (down[e] @ (torch.nn.functional.silu(gate) * up))
    for each in BACKENDS:
        with using(each):
            found = kernels.mix_experts(x, gate_up, down, weights, ids)
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize(("hidden", "width", "num_tokens"), [(64, 32, 9), (160, 96, 40), (32, 128, 0)])
def test_packed_experts_are_those_that_their_numbers_say(kind: str, hidden: int, width: int, num_tokens: int) -> None:
    x, count = 0.02 * torch.randn(num_tokens, hidden), 5
    pack = {"int4": int4, "int8": int8, "fp8": lambda weight: pack_fp8(weight, group_len=32)}[kind]
    gate_up = joined_experts([pack(torch.randn(2 * width, hidden) * 0.2) for _ in range(count)])
    down = joined_experts([pack(torch.randn(hidden, width) * 0.2) for _ in range(count)])
    weights, ids = reference.route_experts(torch.randn(num_tokens, count), 2, normalise=True)
    unpacked = unpacked_experts(gate_up, 2 * width), unpacked_experts(down, hidden)
    expected = reference.mix_experts(x, *unpacked, weights, ids)
    scale = float(expected.abs().max()) if num_tokens else 1.0
    for each in BACKENDS:
        with using(each):
            found = kernels.mix_experts(x, gate_up, down, weights, ids)
            torch.testing.assert_close(found, expected, atol=1e-3 * scale, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "block_len"), [(0, 3, 16), (5, 3, 16), (512, 128, 16), (3000, 7, 64)]
)
def test_rows_are_grouped_in_their_order(num_rows: int, num_groups: int, block_len: int) -> None:
    ids = torch.randint(-1, num_groups, (num_rows,), dtype=torch.int32)
    found = grouped.group_rows(ids, num_groups, block_len)
    numbers = torch.where(ids < 0, num_groups, ids).long()
    counts = torch.bincount(numbers, minlength=num_groups + 1)
    assert torch.equal(found.order.long(), numbers.argsort(stable=True))
    assert found.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    expected = [
        (group, int(found.starts[group]) + first)
        for group in range(num_groups)
        for first in range(0, int(counts[group]), block_len)
    ]
    blocks = list(zip(found.groups.tolist(), found.firsts.tolist(), strict=True))
    assert blocks[: len(expected)] == expected
    assert all(group == -1 for group, _ in blocks[len(expected) :])


@pytest.mark.parametrize("adapters", [[0, 2, -1, 2, 0, -1, 1], [-1, -1], [], [1] * 20])
def test_each_token_gets_its_own_adapter_or_none(adapters: list[int]) -> None:
    num_tokens, width_in, width_out, rank = len(adapters), 40, 36, 8
    x, y = torch.randn(num_tokens, width_in), torch.randn(num_tokens, width_out)
    down, up = torch.randn(3, rank, width_in), torch.randn(3, width_out, rank)
    expected = y.clone()
    for t, a in enumerate(adapters):
        if a >= 0:
            expected[t] += up[a] @ (down[a] @ x[t])
    groups = kernels.Groups(torch.tensor(adapters, dtype=torch.int64), 3)
    for each in BACKENDS:
        with using(each):
            mine = y.clone()
            found = kernels.add_adapters(mine, x, down, up, groups)
        assert found is mine
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
