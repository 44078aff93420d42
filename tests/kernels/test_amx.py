"""Fixed-point products, by bytes and in AMX's tiles, against whole numbers of any size, to the bit."""

from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir
from phloem import cpu_isa
from phloem.cpu_isa import ISAS
from phloem.kernels import gelu_mul, silu_mul
from phloem.kernels.cpu import amx, fixed_tile, word_tiles
from phloem.kernels.cpu.group_tile import FINER
from phloem.kernels.cpu.packing import pack_fixed
from phloem.kernels.linear import PackedLinear

from .test_integer import fmaf, optimized, target_machine

Array = np.ndarray[Any, np.dtype[Any]]
AMX = next(one for one in ISAS if one.has_tiles)
needs_amx = pytest.mark.skipif(cpu_isa.isa() is not AMX, reason="this process has no AMX")


Groups = tuple[torch.Tensor, ...]


def groups(bits: int, num_outputs: int, num_groups: int) -> Groups:
    """``(q, scale, zero)``, of 8 bits without zero, with the extremes of q."""
    low, high = (0, 16) if bits == 4 else (-128, 128)
    q = torch.randint(low, high, (num_outputs, 32 * num_groups)).to(torch.uint8 if bits == 4 else torch.int8)
    q[0], q[1] = low, high - 1
    scale, zero = torch.randn(num_outputs, num_groups) / 50, torch.randn(num_outputs, num_groups) / 9
    return (q, scale, zero) if bits == 4 else (q, scale)


def whole_weights(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> tuple[Array, Array]:
    """(int64 [N, K], their scale float32 [N]) from the packed records."""
    packed, w_scale = pack_fixed(q, scale, *(() if zero is None else (zero,)))
    size, count = (512, 1) if zero is None else (256, 2)
    pairs = packed[..., size:].contiguous().view(torch.int16).view(*packed.shape[:2], 16, count).transpose(1, 2).long()
    s, z = (pairs.reshape(-1, packed.shape[1], count)[: len(q), :, i] for i in (0, -1))
    w = (q.long() - (0 if zero is None else 8)).view(*scale.shape, 32) * s[..., None]
    if zero is not None:
        w = w + z[..., None]
    return w.view(q.shape).numpy(), w_scale[: len(q)].numpy()


def expected_of(x: Array, w: Array, w_scale: Array, bias: Array) -> Array:
    """Rounds x as the kernel does, multiplies whole numbers, and joins both sums in float32."""
    x_scale = np.abs(x).max(1, keepdims=True) / np.float32(127 * FINER)
    scale = x_scale * np.float32(FINER)
    inner = x * np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    upper = np.rint(inner)
    lower = np.rint((inner - upper) * np.float32(FINER))
    totals = [plane.astype(np.int64) @ w.T for plane in (upper, lower)]
    assert all(np.abs(total).max() < 2**31 for total in totals)
    high, low = (total.astype(np.float32).astype(np.float64) for total in totals)
    value = (high * FINER + low).astype(np.float32)
    factor = w_scale * x_scale
    return np.vectorize(fmaf, otypes=[np.float32])(value, factor, bias)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_an_outputs_scale_is_the_smallest_that_keeps_weights_and_sums_in_their_bits(bits: int, even: bool) -> None:
    """``even``: all weights of an output are equally large, so that their sum decides."""
    q, scale, *zero = groups(bits, 33, 60)
    if even:
        q.fill_(15 if bits == 4 else 127)
        scale.fill_(0.01)
        zero = [torch.full_like(part, -0.13) for part in zero]
    _, w_scale = pack_fixed(q, scale, *zero)
    centre, z = (8, zero[0].double()) if zero else (0, torch.zeros(1, 1).double())
    w = (q.double() - centre).view(*scale.shape, 32) * scale.double()[..., None] + z[..., None]
    largest = (scale.abs() * 2 ** (bits - 1)).double() + z.abs()
    added = 2 ** (bits - 2) + 0.5
    by_weight = largest.amax(1) / (32_512 - added)
    by_sum = w.abs().sum((1, 2)) / ((2**31 - 1) / 127 - added * q.shape[1])
    assert bool((by_sum > by_weight).all()) is even
    np.testing.assert_allclose(w_scale[:33], torch.maximum(by_weight, by_sum), rtol=1e-5)


@needs_amx
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 17, 40])
@pytest.mark.parametrize(("num_outputs", "num_groups"), [(16, 1), (33, 5), (64, 18), (49, 43)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_that_of_whole_numbers_to_the_bit(
    bits: int, num_rows: int, num_outputs: int, num_groups: int
) -> None:
    weight, x, bias = (
        groups(bits, num_outputs, num_groups),
        torch.randn(num_rows, 32 * num_groups),
        torch.randn(num_outputs),
    )
    x[0, :32], x[-1, -32:] = 0, 300.0
    y = PackedLinear(weight, precision="auto", bias=bias)(x)
    assert np.array_equal(y.numpy(), expected_of(x.numpy(), *whole_weights(*weight), bias.numpy()))


@needs_amx
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_s_result_does_not_depend_on_its_neighbours(bits: int) -> None:
    weight, x = groups(bits, 1000, 20), torch.randn(70, 640).bfloat16()
    product = PackedLinear(weight, precision="auto", out_dtype=torch.float32)
    y = product(x)
    for rows in (1, 2, 4, 5, 16, 17, 33):
        assert torch.equal(product(x[:rows]), y[:rows])
        assert torch.equal(product(x[-rows:]), y[-rows:])
    for rows in (3, 20):
        picked = product.pick(x[:rows], torch.tensor([0, 7, 62], dtype=torch.int32))
        for block in (0, 7, 62):
            assert torch.equal(picked[:, 16 * block : 16 * block + 16], y[:rows, 16 * block : 16 * block + 16])


@needs_amx
def test_a_row_of_zeros_gives_the_bias() -> None:
    bias = torch.randn(20)
    assert torch.equal(
        PackedLinear(groups(4, 20, 2), precision="auto", bias=bias)(torch.zeros(6, 64)), bias.expand(6, 20)
    )


def test_fixed_point_weights_are_near_and_their_sums_fit() -> None:
    q, scale, zero = groups(4, 64, 280)
    q[2], scale[2], zero[2] = 15, 0.01, 0.5  # all alike: the largest sum for their size
    scale[3], zero[3] = 0, 0
    w, w_scale = whole_weights(q, scale, zero)
    assert np.abs(w).max() <= 32_767
    assert (127 * np.abs(w).sum(1)).max() < 2**31
    exact = (q.double() - 8).view(64, 280, 32) * scale[..., None].double() + zero[..., None].double()
    error = torch.from_numpy(w * w_scale[:, None].astype(np.float64)) - exact.view(64, -1)
    assert error.norm() / exact.norm() < 0.001


def test_planes_are_multiplied_with_their_instructions() -> None:
    """On any machine: what AMX multiplies, and what few rows do, as assembly."""
    machine = target_machine("x86_64-unknown-linux-gnu", "sapphirerapids", "")
    code = assembly(machine, 5, fixed_tile.multiply_tiles)
    assert code.count("tdpbssd") == code.count("tdpbsud") > 0
    code = assembly(machine, 5, fixed_tile.few_rows(AMX, 2, 4))
    assert "vpdpbusd" in code and "vpdpwssd" in code
    assert "vpmullw" in assembly(machine, 2, fixed_tile.unpack_group(4))


def test_words_are_multiplied_with_their_instruction() -> None:
    """On any machine: attention's products as assembly, whole blocks and shorter ones."""
    machine = target_machine("x86_64-unknown-linux-gnu", "sapphirerapids", "")
    for last in (False, True):
        code = assembly(machine, 7, word_tiles.multiply_block(last=last, adds=True))
        assert code.count("tdpbf16ps") >= 2 and code.count("tilestored") == 2
    code = assembly(machine, 1, lambda builder, rows: amx.open_uneven_tiles(builder, rows, (2, 3)))
    assert code.count("ldtilecfg") == 2


def test_8_bit_weights_in_fixed_point_are_near_and_their_sums_fit() -> None:
    q, scale = groups(8, 64, 40)
    w, w_scale = whole_weights(q, scale)
    assert np.abs(w).max() <= 32_767
    assert (127 * np.abs(w).sum(1)).max() < 2**31
    exact = q.double().view(64, 40, 32) * scale[..., None].double()
    error = torch.from_numpy(w * w_scale[:, None].astype(np.float64)) - exact.view(64, -1)
    assert error.norm() / exact.norm() < 0.005


def assembly(machine: Any, num_arguments: int, emit: Any) -> str:
    module = ir.Module("amx")
    module.triple = machine.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * num_arguments), "run")
    builder = ir.IRBuilder(function.append_basic_block())
    amx.open_tiles(builder)
    emit(builder, *function.args)
    amx.close_tiles(builder)
    builder.ret_void()
    code: str = machine.emit_assembly(optimized(module, machine))
    return code


@needs_amx
@pytest.mark.parametrize("num_rows", [1, 3, 4, 9, 40])
@pytest.mark.parametrize(("bits", "gate"), [(4, "silu"), (8, "gelu_tanh")])
def test_gates_within_the_product_equal_the_activation_after_it(num_rows: int, bits: int, gate: Any) -> None:
    activate = {"silu": silu_mul, "gelu_tanh": gelu_mul}[gate]
    weight, x = groups(bits, 96, 41), torch.randn(num_rows, 32 * 41)
    product = PackedLinear(weight, precision="auto", bias=torch.randn(96), out_dtype=torch.float32)
    assert product.can_gate
    assert torch.equal(product.gated(x, gate), activate(product(x)))


def test_only_whole_blocks_of_fixed_point_in_float32_join_their_gates() -> None:
    bfloat16 = PackedLinear(groups(4, 96, 2), precision="auto", out_dtype=torch.bfloat16)
    odd = PackedLinear(groups(4, 40, 2), precision="auto", out_dtype=torch.float32)
    exact = PackedLinear(groups(4, 96, 2), precision="int16", out_dtype=torch.float32)
    assert not any(product.can_gate for product in (bfloat16, odd, exact))
