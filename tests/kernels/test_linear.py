"""Packed linear layers against the plain product with the same weights."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llvmlite import ir
from numba import njit, types
from phloem.cpu_isa import ISAS, Isa
from phloem.kernels import linear
from phloem.kernels.cpu import bfloat, packing
from phloem.kernels.cpu.llvm import V16, V16_I16, V16_I32
from phloem.kernels.cpu.vector import compiled
from phloem.kernels.linear import PackedLinear, dequantize
from phloem.tests.kernels.test_integer import optimized, target_machine
from torch import Tensor


def group32(num_rows: int, row_len: int) -> linear.Group32:
    q = torch.randint(0, 16, (num_rows, row_len), dtype=torch.uint8)
    scale, zero = torch.rand(2, num_rows, row_len // 32) / 8
    return q, scale, zero - 0.06


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def error(found: Tensor, expected: Tensor) -> float:
    """The error's norm divided by the norm of the expected values."""
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


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (64, 576), (130, 96)])
def test_bfloat16_weights_with_float32_results(num_rows: int, shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0])
    packed = PackedLinear(weight, precision="bfloat16", bias=bias, out_dtype=torch.float32)
    if not bfloat.has_bfloat16_pairs():
        pytest.skip("this machine multiplies bfloat16 in other ways")
    for x in (torch.randn(num_rows, shape[1]), torch.randn(num_rows, shape[1]).bfloat16()):
        y = packed(x)
        # A float32 input becomes two bfloat16 numbers: each term is exact to 2^-16, however much the sum cancels.
        terms = plain(x.abs(), weight.abs(), bias.abs())
        assert y.dtype == torch.float32 and ((y - plain(x, weight, bias)).abs() <= 2e-5 * terms).all()
        for row in range(num_rows):
            assert torch.equal(packed(x[row : row + 1])[0], y[row])


@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 40])
@pytest.mark.parametrize("precision", ["int4", "int8", "int16", "auto", "bfloat16", "float32"])
def test_groups_of_4_bits(num_rows: int, precision: linear.Precision) -> None:
    weight, bias = group32(48, 96), torch.randn(48)
    x = torch.randn(num_rows, 96).bfloat16()
    packed = PackedLinear(weight, precision=precision, bias=bias)
    y = packed(x)
    assert y.shape == (num_rows, 48) and y.dtype == torch.bfloat16
    assert error(y, plain(x, dequantize(weight), bias)) < 2e-2


def as_halves(weight: linear.Group32) -> linear.Group32:
    """The same groups with scales and zeros that float16 holds."""
    q, scale, zero = weight
    return q, scale.half().float(), zero.half().float()


def rounded(x: Tensor, steps: int) -> Tensor:
    """x with ``steps`` steps from 0 to the highest of each 32 neighbours."""
    groups = x.float().view(x.shape[0], -1, 32)
    step = groups.abs().amax(-1, keepdim=True) / steps
    return ((groups / step.clamp_min(1e-30)).round() * step).view(x.shape)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 19])
@pytest.mark.parametrize("shape", [(16, 32), (33, 64), (100, 576)])
def test_integer_products_lose_only_the_rounding_of_x(num_rows: int, shape: tuple[int, int]) -> None:
    weight, bias = as_halves(group32(*shape)), torch.randn(shape[0])
    x = torch.randn(num_rows, shape[1])
    x[0, :32] = 0  # a group without a scale
    q, scale, zero = weight
    offset = dequantize((torch.full_like(q, 8), scale, zero))  # kernels that do not round x
    steps = plain(rounded(x, 127), dequantize(weight) - offset) + plain(x, offset, bias)
    assert error(PackedLinear(weight, precision="int8", bias=bias)(x), steps) < 1e-6
    assert error(PackedLinear(weight, precision="int16", bias=bias)(x), plain(x, dequantize(weight), bias)) < 1e-4

    q8, scale8 = linear.quantize_int8(torch.randn(shape))
    scale8 = scale8.half().float()
    weight8 = (q8.float().view(shape[0], -1, 32) * scale8.unsqueeze(-1)).view(shape)
    again = linear.quantize_int8(weight8)
    assert torch.equal(again[0], q8)
    torch.testing.assert_close(again[1], scale8)
    product = PackedLinear(weight8, precision="int8", bias=bias)
    assert error(product(x), plain(rounded(x, 127), weight8, bias)) < 1e-6
    assert error(PackedLinear(weight8, precision="int16", bias=bias)(x), plain(x, weight8, bias)) < 1e-4


@pytest.mark.parametrize("precision", ["int8", "int16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_its_batch_to_the_bit(precision: linear.Precision, threads: int) -> None:
    x = torch.randn(21, 576)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for weight in (group32(112, 576), torch.randn(112, 576)):
            packed = PackedLinear(weight, precision=precision)
            together = packed(x)
            for row in range(len(x)):
                assert torch.equal(packed(x[row : row + 1])[0], together[row])
            assert torch.equal(packed(x[4:10]), together[4:10])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("one", ISAS, ids=lambda one: one.name)
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(8, 2), (4, 4), (2, 4), (1, 4)])
def test_a_bfloat16_tile_s_parts_cover_it_and_fit_in_registers(one: Isa, num_rows: int, num_blocks: int) -> None:
    parts = bfloat.tile_parts(one, num_rows, num_blocks)
    covered = [(r, b) for rows, blocks in parts for r in rows for b in blocks]
    assert sorted(covered) == [(r, b) for r in range(num_rows) for b in range(num_blocks)]
    assert all(2 * 16 * len(rows) * len(blocks) <= one.lanes * one.num_registers for rows, blocks in parts)


@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_picked_outputs_are_those_of_the_whole_product(num_rows: int) -> None:
    x, blocks = torch.randn(num_rows, 96), torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    for weight in (group32(100, 96), torch.randn(100, 96)):
        packed = PackedLinear(weight, precision="int16", bias=torch.randn(100), out_dtype=torch.float32)
        if not packed.can_pick:
            continue
        columns = [16 * b + i for b in blocks.tolist() for i in range(16) if 16 * b + i < 100]
        assert torch.equal(packed.pick(x, blocks)[:, columns], packed(x)[:, columns])


def test_the_portable_bfloat16_product_equals_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(2, 32).bfloat16()
    expected = (x.double() * w.double()).view(16, 2).sum(-1)
    for has in (bfloat.has_bfloat16_pairs(), False):
        monkeypatch.setattr(bfloat, "has_bfloat16_pairs", lambda has=has: has)
        total = torch.zeros(16)
        step_function(bfloat.dot2, floats=True)(total.data_ptr(), x.data_ptr(), w.data_ptr())
        torch.testing.assert_close(total.double(), expected, atol=1e-6, rtol=1e-5)


def test_arm_multiplies_pairs_of_bfloat16_in_one_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat, "has_bfloat16_pairs", lambda: True)
    machine = target_machine("aarch64-unknown-linux-gnu", "generic", "+neon,+bf16")
    module = ir.Module("pairs")
    module.triple = machine.triple
    kinds = V16, V16_I32, V16_I32
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [kind.as_pointer() for kind in kinds]), "pairs")
    builder = ir.IRBuilder(function.append_basic_block())
    total = bfloat.dot2(builder, *(builder.load(place, align=4) for place in function.args))
    builder.store(bfloat.rounded(builder, total), builder.bitcast(function.args[0], V16_I16.as_pointer()), align=2)
    builder.ret_void()
    code = machine.emit_assembly(optimized(module, machine))
    assert len(re.findall(r"\tbfdot\tv", code)) == 4 and len(re.findall(r"\tbfcvtn2?\tv", code)) == 4, code


def step_function(step: Callable[..., Any], *, floats: bool = False) -> Callable[[int, int, int], None]:
    """A kernel's innermost step, total + left * right, on 16 words in memory."""
    words = ir.VectorType(ir.IntType(32), 16)
    totals = ir.VectorType(ir.FloatType(), 16) if floats else words

    @compiled(types.void, *(types.int64,) * 3)
    def on_memory(builder: Any, *addresses: Any) -> None:
        kinds = (totals, words, words)
        places = [builder.inttoptr(a, kind.as_pointer()) for a, kind in zip(addresses, kinds, strict=True)]
        values = [builder.load(place, align=1) for place in places]
        builder.store(step(builder, *values), places[0], align=1)

    @njit
    def run(total: int, left: int, right: int) -> None:
        on_memory(total, left, right)

    return run


def test_scales_beyond_float16_are_not_packed_as_such() -> None:
    q, scale, zero = group32(16, 32)
    packed = PackedLinear((q, scale * 1e6, zero), precision="int8")
    assert "int8" not in packed.describe()
    x = torch.randn(2, 32)
    assert error(packed(x), plain(x, dequantize((q, scale * 1e6, zero)))) < 2e-2


def test_without_the_machine_s_kernels_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_int4_products", lambda: False)
    monkeypatch.setattr(linear, "has_bfloat16_products", lambda: False)
    weight, x = group32(32, 64), torch.randn(3, 64)
    packed = PackedLinear(weight, precision="int4")
    assert packed.describe() == "float32"
    assert error(packed(x), plain(x, dequantize(weight))) < 1e-2


def test_shapes_that_no_kernel_takes_fall_back() -> None:
    weight, x = group32(33, 64), torch.randn(2, 64)
    packed = PackedLinear(weight, precision="int4")
    assert not packed.describe().startswith("int4")
    assert error(packed(x), plain(x, dequantize(weight))) < 2e-2
    narrow, y = torch.randn(20, 40), torch.randn(2, 40)
    assert error(PackedLinear(narrow, precision="int8")(y), plain(y, narrow)) < 2e-2


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int16"])
def test_leading_dimensions_and_result_type(precision: linear.Precision) -> None:
    weight, x = torch.randn(24, 32), torch.randn(2, 3, 32).bfloat16()
    y = PackedLinear(weight, precision=precision, out_dtype=torch.float32)(x)
    assert y.shape == (2, 3, 24) and y.dtype == torch.float32
    assert error(y, plain(x, weight)) < 2e-2


def test_float_weights_are_not_quantized_to_4_bits_silently() -> None:
    with pytest.raises(ValueError, match="quantize it"):
        PackedLinear(torch.randn(16, 32), precision="int4")


@pytest.mark.parametrize("shape", [(16, 32), (37, 96)])
def test_rows_of_packed_bytes_are_the_weights(shape: tuple[int, int]) -> None:
    q, scale = torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(shape[0], shape[1] // 32).half().float()
    weight = (q.float().view(*scale.shape, 32) * scale.unsqueeze(-1)).view(shape)
    packed = packing.pack_int8(q, scale)
    ids = torch.tensor([0, 5, shape[0] - 1, 5])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(packing.packed_rows(packed, shape[0], ids, dtype), weight[ids].to(dtype))
        out, also = torch.zeros(len(ids), shape[1], dtype=dtype), torch.zeros(len(ids), shape[1])
        assert packing.packed_rows(packed, shape[0], ids, dtype, out=out, also=also) is out
        assert torch.equal(out, weight[ids].to(dtype)) and torch.equal(also, out.float())
    assert packing.packed_rows(packed, shape[0], ids[:0], torch.float32).shape == (0, shape[1])
    with pytest.raises(ValueError, match=f"row {shape[0]}: must be between 0 and {shape[0] - 1}"):
        packing.packed_rows(packed, shape[0], torch.tensor([shape[0]]), torch.float32)


def test_weights_in_groups_of_bytes_are_taken_as_they_are() -> None:
    q, scale = linear.quantize_int8(torch.randn(40, 64))
    scale = scale.half().float()
    weight, x = (q.float().view(40, 2, 32) * scale.unsqueeze(-1)).view(40, 64), torch.randn(3, 64)
    for precision in ("int8", "int16", "float32"):
        got, want = (PackedLinear(form, precision=precision)(x) for form in ((q, scale), weight))
        assert error(got, want) < 1e-6
