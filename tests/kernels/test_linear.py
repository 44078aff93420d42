"""Packed linear layers against the plain product with the same weights."""

import pytest
import torch
from phloem.kernels import linear, machine
from phloem.kernels.linear import PackedLinear, dequantize
from torch import Tensor


def group32(num_rows: int, row_len: int) -> linear.Group32:
    q = torch.randint(0, 16, (num_rows, row_len), dtype=torch.uint8)
    scale, zero = torch.rand(2, num_rows, row_len // 32) / 8
    return q, scale, zero - 0.06


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the size of the expected values as a whole."""
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-9))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 17])
@pytest.mark.parametrize("shape", [(33, 64), (100, 7), (1, 1), (96, 576)])
def test_float32_is_exact_and_bfloat16_rounds(num_rows: int, shape: tuple[int, int]) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(num_rows, shape[1])
    expected = plain(x, weight, bias)
    exact = PackedLinear(weight, precision="float32", bias=bias)(x)
    assert exact.dtype == torch.float32 and error(exact, expected) < 1e-6
    rounded = PackedLinear(weight, precision="bfloat16", bias=bias)(x.bfloat16())
    assert rounded.dtype == torch.bfloat16 and error(rounded, expected) < 2e-2


@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 40])
@pytest.mark.parametrize("precision", ["int4", "auto", "bfloat16", "float32"])
def test_groups_of_4_bits(num_rows: int, precision: linear.Precision) -> None:
    weight, bias = group32(48, 96), torch.randn(48)
    x = torch.randn(num_rows, 96).bfloat16()
    packed = PackedLinear(weight, precision=precision, bias=bias)
    assert error(packed(x), plain(x, dequantize(weight), bias)) < 2e-2


def test_auto_changes_kernel_at_the_given_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(linear, "_fits_int4", lambda weight: True)
    for name in ("Int4Product", "OneDnnProduct", "FloatProduct"):
        kind = getattr(linear, name)
        run = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, x, run=run, name=name: calls.append(name) or run(self, x))
    if not machine.has_int4_products():
        pytest.skip("this machine has no 4-bit product")
    packed = PackedLinear(group32(32, 64), int4_rows=3)
    for num_rows in (1, 3, 4):
        packed(torch.randn(num_rows, 64))
    assert calls[:2] == ["Int4Product"] * 2 and calls[2] != "Int4Product"
    assert packed.describe().startswith("int4 up to 3 rows, ")


def test_without_the_machine_s_kernels_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_int4_products", lambda: False)
    monkeypatch.setattr(linear, "has_bfloat16_products", lambda: False)
    weight, x = group32(32, 64), torch.randn(3, 64)
    packed = PackedLinear(weight, precision="int4")
    assert packed.describe() == "float32"
    assert error(packed(x), plain(x, dequantize(weight))) < 1e-2


def test_rows_that_no_kernel_takes_fall_back() -> None:
    weight, x = group32(33, 64), torch.randn(2, 64)
    packed = PackedLinear(weight, precision="int4")
    assert not packed.describe().startswith("int4")
    assert error(packed(x), plain(x, dequantize(weight))) < 2e-2


def test_leading_dimensions_and_result_type() -> None:
    weight, x = torch.randn(24, 16), torch.randn(2, 3, 16).bfloat16()
    y = PackedLinear(weight, precision="bfloat16", out_dtype=torch.float32)(x)
    assert y.shape == (2, 3, 24) and y.dtype == torch.float32
    assert error(y, plain(x, weight)) < 2e-2


def test_float_weights_are_not_quantized_silently() -> None:
    with pytest.raises(ValueError, match="quantize it"):
        PackedLinear(torch.randn(16, 32), precision="int4")
