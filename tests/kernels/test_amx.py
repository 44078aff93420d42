"""Products in AMX's tiles against a loop that rounds as the instruction does, to the bit."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir
from phloem import cpu_isa
from phloem.cpu_isa import ISAS
from phloem.kernels.cpu.amx import close_tiles, multiply_tiles, open_tiles, unpack_tiles
from phloem.kernels.linear import PackedLinear

from .test_integer import optimized, target_machine, weights

Array = np.ndarray[Any, np.dtype[Any]]
AMX = next(one for one in ISAS if one.has_tiles)
needs_amx = pytest.mark.skipif(cpu_isa.isa() is not AMX, reason="this process has no AMX")


def bfloat16(values: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even."""
    return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()


def unpacked(q: Array, scale: Array, zero: Array | None) -> Array:
    """float32 [N, K]: weights in float16 by one rounding, then in bfloat16's 8 bits with ties away from 0."""
    exact = q.astype(np.float64) * scale[..., None] + (0 if zero is None else zero[..., None].astype(np.float64))
    halves = (exact * 2.0**15).astype(np.float16)
    assert np.isfinite(halves).all()
    size = ((halves.view(np.uint16) & 0x7FFF) + 4) >> 3
    values = (size.astype(np.uint32) << 16).view(np.float32) * np.float32(2.0**97)
    return np.where(np.signbit(halves), -values, values).reshape(len(q), -1)


def looped(x: Array, w: Array) -> Array:
    """TDPBF16PS, 32 neighbours at a time: two sums of products in float32, of the pairs' first and second numbers."""
    order = np.arange(x.shape[1]).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
    x, w = x[:, order].astype(np.float64), w[:, order].astype(np.float64)
    y = np.zeros((len(x), len(w)), dtype=np.float32)
    for start in range(0, x.shape[1], 32):
        sums = np.zeros((2, *y.shape), dtype=np.float32)
        for k in range(start, start + 32, 2):
            for second in range(2):
                product = x[:, k + second, None] * w[None, :, k + second]  # exact: 16 bits
                sums[second] = (sums[second] + product).astype(np.float32)
        y += sums[0] + sums[1]
    return y


@needs_amx
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_groups"), [(1, 16, 1), (5, 33, 5), (17, 64, 18), (40, 49, 43)]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_the_loop_s_to_the_bit(bits: int, num_rows: int, num_outputs: int, num_groups: int) -> None:
    q, centred, scale, zero = weights(bits, num_outputs, num_groups)
    scale, zero = (scale / 64).half().float(), (zero / 64).half().float()
    x, bias = torch.randn(num_rows, 32 * num_groups), torch.randn(num_outputs)
    x[0, :32], x[-1, -32:] = 0, 300.0
    groups = (q, scale, zero) if bits == 4 else (q, scale)
    y = PackedLinear(groups, precision="auto", bias=bias)(x)
    w = unpacked(centred, scale.numpy(), zero.numpy() if bits == 4 else None)
    expected = torch.from_numpy(looped(bfloat16(x.numpy()), w)) + bias
    assert torch.equal(y, expected)


@needs_amx
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_s_result_does_not_depend_on_its_neighbours_or_the_threads(bits: int) -> None:
    q, _, scale, zero = weights(bits, 1000, 20)
    x = torch.randn(70, 640).bfloat16()
    product = PackedLinear((q, scale, zero) if bits == 4 else (q, scale), precision="auto", out_dtype=torch.float32)
    y = product(x)
    assert y.isfinite().all()
    for rows in (1, 16, 17, 33):
        assert torch.equal(product(x[:rows]), y[:rows])
        assert torch.equal(product(x[-rows:]), y[-rows:])
    picked = product.pick(x[:3], torch.tensor([0, 7, 62], dtype=torch.int32))
    for block in (0, 7, 62):
        assert torch.equal(picked[:, 16 * block : 16 * block + 16], y[:3, 16 * block : 16 * block + 16])


@needs_amx
def test_weights_keep_their_precision_whatever_their_size() -> None:
    for size in (1e-4, 1.0, 300.0):
        q, centred, scale, _ = weights(8, 32, 4)
        scale = (scale.abs() * size).half().float()
        x = torch.randn(4, 128)
        exact = x.double() @ torch.from_numpy(centred * scale.numpy()[..., None].astype(np.float64)).view(32, 128).T
        y = PackedLinear((q, scale), precision="auto")(x)
        assert (y - exact).norm() / exact.norm() < 0.005


def test_tiles_are_multiplied_and_unpacked_with_their_instructions() -> None:
    machine = target_machine("x86_64-unknown-linux-gnu", "sapphirerapids", "")
    assert "tdpbf16ps" in machine.emit_assembly(product_module(machine))
    code = machine.emit_assembly(unpack_module(machine))
    assert re.search(r"vfmadd\w+ph\t.*%zmm", code) and re.search(r"vpmulhrsw\t.*%zmm", code)


def product_module(machine: Any) -> Any:
    module, builder, arguments = empty_module(machine, 7)
    open_tiles(builder)
    multiply_tiles(2, 2)(builder, *arguments)
    close_tiles(builder)
    builder.ret_void()
    return optimized(module, machine)


def unpack_module(machine: Any) -> Any:
    module, builder, arguments = empty_module(machine, 4)
    unpack_tiles(4)(builder, *arguments)
    builder.ret_void()
    return optimized(module, machine)


def empty_module(machine: Any, num_arguments: int) -> tuple[Any, Any, Any]:
    module = ir.Module("amx")
    module.triple = machine.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * num_arguments), "run")
    return module, ir.IRBuilder(function.append_basic_block()), function.args
