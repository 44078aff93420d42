"""Products of weights and x in bfloat16, in AMX's tiles, against the sums that its instruction makes, to the bit."""

from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir
from phloem import cpu_isa
from phloem.cpu_isa import ISAS
from phloem.kernels import gelu_mul, silu_mul
from phloem.kernels.cpu import amx, word_block, word_tiles
from phloem.kernels.cpu.packing import pack_int4, pack_int8, packed_rows, to_words
from phloem.kernels.linear import PackedLinear

from .test_integer import optimized, target_machine

Array = np.ndarray[Any, np.dtype[Any]]
AMX = next(one for one in ISAS if one.has_tiles)
needs_amx = pytest.mark.skipif(cpu_isa.isa() is not AMX, reason="this process has no AMX")


Groups = tuple[torch.Tensor, ...]


def groups(bits: int, num_outputs: int, num_groups: int) -> Groups:
    """``(q, scale, zero)``, of 8 bits without zero, with the extremes of q; float16 holds scales and zeros."""
    low, high = (0, 16) if bits == 4 else (-128, 128)
    q = torch.randint(low, high, (num_outputs, 32 * num_groups)).to(torch.uint8 if bits == 4 else torch.int8)
    q[0], q[1] = low, high - 1
    scale, zero = torch.randn(num_outputs, num_groups) / 50, torch.randn(num_outputs, num_groups) / 9
    return (q, scale.half().float(), zero.half().float()) if bits == 4 else (q, scale.half().float())


def exact_weights(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> Array:
    """float64 [N, K], which holds them exactly."""
    w = (q.double() - (0 if zero is None else 8)).view(*scale.shape, 32) * scale[..., None]
    return (w if zero is None else w + zero[..., None]).view(q.shape).numpy()


def rounded_weights(weight: Groups) -> Array:
    """float32 [N, K]: the nearest bfloat16, ties away from zero."""
    bits = exact_weights(*weight).astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).view(np.float32)


def expected_of(x: torch.Tensor, weight: Groups, bias: torch.Tensor) -> Array:
    """As Intel's manual has TDPBF16PS: of 16 pairs the first and the second products are summed, each for itself."""
    left, right = x.bfloat16().float().numpy(), rounded_weights(weight)
    total = np.zeros((len(left), len(right)), dtype=np.float32)
    for group in range(0, left.shape[1], 32):
        sums = np.zeros((2, *total.shape), dtype=np.float32)
        for i in range(32):
            product = left[:, None, group + i].astype(np.float64) * right[None, :, group + i]
            sums[i % 2] = (product + sums[i % 2]).astype(np.float32)  # the product is exact: one rounding
        total += sums[0] + sums[1]
    return total + bias.numpy()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_the_records_in_another_order(bits: int) -> None:
    """On any machine."""
    q, scale, *zero = groups(bits, 35, 70)  # more records than a thread takes at a time
    packed = pack_int4(q, scale, *zero) if bits == 4 else pack_int8(q, scale)
    tail = packed[..., 16 * 4 * bits :].clone()
    words = to_words(packed.clone())
    assert torch.equal(words[..., 16 * 4 * bits :], tail)
    found = words[..., : 16 * 4 * bits].contiguous()
    if bits == 8:
        got = found.view(torch.int8).view(-1, 70, 16, 32).transpose(1, 2).reshape(-1, 70 * 32)
        ids = torch.tensor([0, 34, 17])
        rows = [packed_rows(records, 35, ids, torch.float32, words=i == 1) for i, records in enumerate((packed, words))]
        assert torch.equal(*rows)
        assert torch.equal(rows[0], torch.from_numpy(exact_weights(q, scale)).float()[ids])
    else:
        numbers = found.view(torch.int16).int().view(-1, 70, 4, 32) & 0xFFFF
        numbers = (numbers >> 1) | (numbers & 1) << 15
        four = torch.stack([numbers >> 4 * i & 15 for i in range(4)], dim=3)  # [blocks, groups, 4, 4, 32]
        got = four.view(-1, 70, 16, 32).transpose(1, 2).reshape(-1, 70 * 32).to(torch.uint8)
    assert torch.equal(got[:35], q)


@needs_amx
@pytest.mark.parametrize("num_rows", [1, 2, 17, 40, 64, 65, 84])
@pytest.mark.parametrize(("num_outputs", "num_groups"), [(16, 1), (33, 5), (49, 21)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_the_instruction_s_to_the_bit(bits: int, num_rows: int, num_outputs: int, num_groups: int) -> None:
    weight, bias = groups(bits, num_outputs, num_groups), torch.randn(num_outputs)
    x = torch.randn(num_rows, 32 * num_groups)
    x[0, :32], x[-1, -32:] = 0, 300.0
    product = PackedLinear(weight, precision="auto", bias=bias, out_dtype=torch.float32)
    expected = expected_of(x, weight, bias)
    assert np.array_equal(product(x).numpy(), expected)
    assert np.array_equal(product(x.bfloat16()).numpy(), expected)
    exact = x.double().numpy() @ exact_weights(*weight).T + bias.double().numpy()
    assert np.linalg.norm(expected - exact) < 0.01 * np.linalg.norm(exact)


@needs_amx
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_s_result_does_not_depend_on_its_neighbours(bits: int) -> None:
    weight, x = groups(bits, 1000, 20), torch.randn(120, 640).bfloat16()
    product = PackedLinear(weight, precision="auto", out_dtype=torch.float32)
    y = product(x)
    for rows in (1, 2, 4, 16, 17, 33, 64, 65, 97):
        assert torch.equal(product(x[:rows]), y[:rows])
        assert torch.equal(product(x[-rows:]), y[-rows:])
    for rows in (1, 3, 20, 110):
        picked = product.pick(x[:rows], torch.tensor([0, 7, 62], dtype=torch.int32))
        for block in (0, 7, 62):
            assert torch.equal(picked[:, 16 * block : 16 * block + 16], y[:rows, 16 * block : 16 * block + 16])


@needs_amx
def test_more_of_x_than_the_second_cache_holds() -> None:
    weight, x = groups(4, 48, 160), torch.randn(300, 32 * 160)  # two bands, of 256 rows and 44, in pieces of 72 groups
    product = PackedLinear(weight, precision="auto")
    assert torch.equal(product(x), torch.cat([product(part) for part in x.split(60)]))


@needs_amx
def test_a_row_of_zeros_gives_the_bias() -> None:
    bias = torch.randn(20)
    assert torch.equal(
        PackedLinear(groups(4, 20, 2), precision="auto", bias=bias)(torch.zeros(6, 64)), bias.expand(6, 20)
    )


def test_blocks_are_multiplied_with_their_instructions() -> None:
    """On any machine: what AMX multiplies, and what unpacks weights, as assembly."""
    machine = target_machine("x86_64-unknown-linux-gnu", "sapphirerapids", "")
    code = assembly(machine, 7, word_block.multiply_block(bits=4, num_tiles=4))  # unpacks before the loop and in it
    assert code.count("tdpbf16ps") == 8 and code.count("tilestored") == 4
    assert code.count("vpermw") == 32 and code.count("vfmadd") == 32 and "vpshldw" in code
    assert assembly(machine, 7, word_block.multiply_block(bits=8, num_tiles=1)).count("vpmovsxbd") == 64
    code = assembly(machine, 8, word_block.multiply_panel(blocks=2, column_blocks=2))
    assert code.count("tdpbf16ps") >= 4 and code.count("tilestored") == 4
    assert assembly(machine, 4, word_block.unpack_groups(4)).count("vpermw") == 16
    code = assembly(machine, 1, lambda builder, narrow: amx.open_columns(builder, narrow, word_block.NARROW))
    assert code.count("ldtilecfg") == 2


def test_words_are_multiplied_with_their_instruction() -> None:
    """On any machine: attention's products as assembly, whole blocks and shorter ones."""
    machine = target_machine("x86_64-unknown-linux-gnu", "sapphirerapids", "")
    for last in (False, True):
        code = assembly(machine, 7, word_tiles.multiply_block(last=last, adds=True))
        assert code.count("tdpbf16ps") >= 2 and code.count("tilestored") == 2
    code = assembly(machine, 5, word_tiles.multiply_keys_block)
    assert code.count("tdpbf16ps") >= 2 and code.count("tilestored") == 2
    code = assembly(machine, 1, lambda builder, rows: amx.open_uneven_tiles(builder, rows, (2, 3)))
    assert code.count("ldtilecfg") == 2


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
@pytest.mark.parametrize("num_rows", [1, 3, 16, 40, 90])
@pytest.mark.parametrize(("bits", "gate"), [(4, "silu"), (8, "gelu_tanh")])
def test_joined_products_equal_those_with_an_activation_between(num_rows: int, bits: int, gate: Any) -> None:
    activate = {"silu": silu_mul, "gelu_tanh": gelu_mul}[gate]
    x = torch.randn(num_rows, 32 * 41)
    first = PackedLinear(groups(bits, 192, 41), precision="auto", bias=torch.randn(192), out_dtype=torch.float32)
    then = PackedLinear(groups(bits, 50, 3), precision="auto", bias=torch.randn(50), out_dtype=torch.float32)
    joined = first.gated(x, gate, then)
    assert joined is not None and torch.equal(then(joined), then(activate(first(x))))


def test_only_whole_groups_of_products_in_tiles_join() -> None:
    x, then = torch.randn(3, 64), PackedLinear(groups(4, 50, 1), precision="auto", out_dtype=torch.float32)
    bfloat16 = PackedLinear(groups(4, 64, 2), precision="auto", out_dtype=torch.bfloat16)
    odd = PackedLinear(groups(4, 32, 2), precision="auto", out_dtype=torch.float32)
    exact = PackedLinear(groups(4, 64, 2), precision="int16", out_dtype=torch.float32)
    assert all(product.gated(x, "silu", then) is None for product in (bfloat16, odd, exact))


def test_a_product_that_looks_at_its_inputs_does_not_join() -> None:
    class Watched(PackedLinear):
        pass

    x = torch.randn(3, 64)
    first, then = (PackedLinear(groups(4, 64, 2), precision="auto", out_dtype=torch.float32) for _ in range(2))
    for one in (first, then):
        one.__class__ = Watched
        assert first.gated(x, "silu", then) is None
        one.__class__ = PackedLinear
