"""Integer products against the plain loop, to the bit, on every instruction set that this machine can run."""

import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import binding, ir
from phloem import cpu_isa
from phloem.cpu_isa import ISAS, Isa
from phloem.kernels.cpu.group_tile import BYTES, FINER, TWO_BYTES, WIDE_WORDS, group_tile, x_form
from phloem.kernels.cpu.packing import pack_int4, pack_int8
from phloem.kernels.linear import PackedLinear

Array = np.ndarray[Any, np.dtype[Any]]
NUM_GROUPS = 3
FUSING = [one for one in cpu_isa.available() if one.name != "portable"]
fmaf = ctypes.CDLL(None).fmaf
fmaf.argtypes, fmaf.restype = (ctypes.c_float,) * 3, ctypes.c_float


def rounded_groups(x: Array, x_bits: int) -> tuple[Array, Array, Array]:
    """``(steps int64 [T, G, 32], scale, sum of x)``: x in steps of a scale, as the kernel's first phase has it."""
    groups = x.reshape(len(x), -1, 32)
    sums = groups[..., :16] + groups[..., 16:]
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half : 2 * half]
    scale = np.abs(groups).max(-1) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    inner = groups * inverse[..., None]
    steps = np.rint(inner)
    if x_bits == 16:
        steps, scale = steps * FINER + np.rint((inner - steps) * np.float32(FINER)), scale / np.float32(FINER)
    return steps.astype(np.int64), scale, sums[..., 0]


def looped(steps: Array, x_scale: Array, x_sum: Array, q: Array, scale: Array, zero: Array | None) -> Array:
    """The plain loop over groups, each with one rounding of its sum; q without its centre, int64 [N, G, 32]."""
    totals = np.einsum("tgi,ngi->tng", steps, q).astype(np.float32)
    y = np.zeros(totals.shape[:2], dtype=np.float32)
    for t, n in np.ndindex(y.shape):
        total = 0.0
        for g in range(q.shape[1]):
            total = fmaf(totals[t, n, g] * scale[n, g], x_scale[t, g], total)
            if zero is not None:
                total = fmaf(zero[n, g], x_sum[t, g], total)
        y[t, n] = total
    return y


def weights(bits: int, num_outputs: int, num_groups: int) -> tuple[torch.Tensor, Array, torch.Tensor, torch.Tensor]:
    """``(q, q without its centre, scale, zero)``, with the extremes of each."""
    low, high, centre = (0, 16, 8) if bits == 4 else (-128, 128, 0)
    q = torch.randint(low, high, (num_outputs, 32 * num_groups))
    q[0], q[1] = low, high - 1
    scale, zero = (torch.randn(2, num_outputs, num_groups) / 8).half().float()
    q = q.to(torch.uint8 if bits == 4 else torch.int8)
    return q, q.numpy().astype(np.int64).reshape(num_outputs, num_groups, 32) - centre, scale, zero


@pytest.mark.skipif(cpu_isa.isa().name == "portable", reason="this CPU may not fuse a product with a sum")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 9, 45])
@pytest.mark.parametrize(("bits", "precision"), [(4, "int8"), (4, "int16"), (8, "int8"), (8, "int16")])
def test_a_product_is_the_loop_s_to_the_bit(bits: int, precision: Any, num_rows: int) -> None:
    q, centred, scale, zero = weights(bits, 33, 5)
    x = torch.randn(num_rows, 160)
    x[0, :32], x[-1, 32:64] = 0, 3.0
    groups = (q, scale, zero) if bits == 4 else (q, scale)
    y = PackedLinear(groups, precision=precision)(x)
    steps, x_scale, x_sum = rounded_groups(x.numpy(), 8 if precision == "int8" else 16)
    expected = looped(steps, x_scale, x_sum, centred, scale.numpy(), zero.numpy() if bits == 4 else None)
    assert np.array_equal(y.numpy(), expected)


@pytest.mark.parametrize("x_bits", [8, 16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("one", FUSING, ids=lambda one: one.name)
def test_a_tile_is_the_loop_s_to_the_bit(one: Isa, bits: int, x_bits: int) -> None:
    packed, record, expected = tile_case(one, bits, x_bits)
    for num_rows in one.tile_rows:
        out = np.zeros((num_rows, 16), dtype=np.float32)
        run = compiled_tile(one, num_rows, bits, x_bits)
        run(packed.ctypes.data, record.ctypes.data, NUM_GROUPS, out.ctypes.data)
        assert np.array_equal(out, expected[:num_rows]), num_rows


def tile_case(one: Isa, bits: int, x_bits: int) -> tuple[Array, Array, Array]:
    """``(weights uint8, record uint8, result float32 [rows, 16])`` of a tile with as many rows as the set has."""
    q, centred, scale, zero = weights(bits, 16, NUM_GROUPS)
    packed = pack_int4(q, scale, zero) if bits == 4 else pack_int8(q, scale)
    rows, form = one.tile_rows[-1], x_form(one, bits, x_bits)
    x = torch.randn(rows, 32 * NUM_GROUPS)
    x[0], x[-1, :32] = 1.0, -1.0
    steps, x_scale, x_sum = rounded_groups(x.numpy(), x_bits)
    record = b"".join(records(steps, x_scale, x_sum, 8 if bits == 4 else 128, form))
    expected = looped(steps, x_scale, x_sum, centred, scale.numpy(), zero.numpy() if bits == 4 else None)
    return packed.view(torch.uint8).numpy().reshape(-1), np.frombuffer(record, dtype=np.uint8), expected


def records(steps: Array, scale: Array, sums: Array, centre: int, form: int) -> Iterator[bytes]:
    """Each group of the rows of a tile, in this form."""
    for g in range(steps.shape[1]):
        group = steps[:, g]
        if form == TWO_BYTES:
            upper = np.rint(group / FINER).astype(np.int64)
            planes = [upper, group - FINER * upper]
        else:
            planes = [group]
        yield scale[:, g].tobytes() + sums[:, g].tobytes()
        for plane in planes:
            yield (-centre * plane.sum(-1)).astype(np.int32).tobytes()
        for plane in planes:
            if form in (BYTES, TWO_BYTES):
                yield plane.astype(np.int8).tobytes()
            else:
                assert np.abs(plane).max() <= 127 * (FINER + 1 if form == WIDE_WORDS else 1)
                yield plane.reshape(-1, 8, 4)[..., [0, 2, 1, 3]].astype(np.int16).tobytes()


@functools.cache
def compiled_tile(one: Isa, num_rows: int, bits: int, x_bits: int) -> Callable[[int, int, int, int], None]:
    machine = target_machine(binding.get_process_triple(), binding.get_host_cpu_name(), host_features(one))
    engine = binding.create_mcjit_compiler(tile_module(one, num_rows, bits, x_bits, machine), machine)
    engine.finalize_object()
    ENGINES.append(engine)  # own the code
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 4)(engine.get_function_address("tile"))


ENGINES: list[Any] = []


def host_features(one: Isa) -> str:
    return cpu_isa.restricted(one, cpu_isa.host_features())


def target_machine(triple: str, cpu: str, features: str) -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)


def tile_module(one: Isa, num_rows: int, bits: int, x_bits: int, machine: Any, *, name: str = "tile") -> Any:
    """A module with one function, ``void name(weights, record, num_groups, out)``, of int64 arguments."""
    module = ir.Module(name)
    module.triple = machine.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4), name)
    builder = ir.IRBuilder(function.append_basic_block())
    group_tile(one, num_rows, bits, x_bits)(builder, *function.args)
    builder.ret_void()
    return optimized(module, machine)


def optimized(module: ir.Module, machine: Any) -> Any:
    parsed = binding.parse_assembly(str(module))
    passes = binding.create_pass_builder(machine, binding.PipelineTuningOptions(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return parsed


@pytest.mark.parametrize(
    ("name", "triple", "cpu", "bits", "x_bits", "instruction"),
    [
        ("avx512_vnni", "x86_64-unknown-linux-gnu", "cascadelake", 4, 8, r"vpdpbusd\t.*%zmm"),
        ("avx_vnni", "x86_64-unknown-linux-gnu", "alderlake", 4, 8, r"{vex}\tvpdpbusd\t.*%ymm"),
        ("avx2", "x86_64-unknown-linux-gnu", "haswell", 4, 8, r"vpmaddubsw\t.*%ymm"),
        ("avx2", "x86_64-unknown-linux-gnu", "haswell", 8, 16, r"vpmaddwd\t.*%ymm"),
        ("neon_i8mm", "aarch64-unknown-linux-gnu", "neoverse-v1", 8, 8, r"usdot\tv.*4b\["),
        ("neon_dotprod", "aarch64-unknown-linux-gnu", "neoverse-n1", 4, 8, r"\tsdot\tv.*4b\["),
        ("portable", "aarch64-unknown-linux-gnu", "cortex-a72", 4, 8, r"\taddp\tv"),
    ],
)
def test_a_tile_multiplies_with_its_instruction(
    name: str, triple: str, cpu: str, bits: int, x_bits: int, instruction: str
) -> None:
    one = next(one for one in ISAS if one.name == name)
    machine = target_machine(triple, cpu, ",".join(f"+{feature}" for feature in one.features))
    code = machine.emit_assembly(tile_module(one, one.tile_rows[-1], bits, x_bits, machine))
    assert re.search(instruction, code)
