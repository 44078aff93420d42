"""Checkpoints of AWQ, GPTQ, compressed-tensors, FP8 and bitsandbytes against slow loops over their numbers."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.protocol.errors import PhloemError, UnknownModel, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.quant import GroupTensor
from phloem.runtime.weights import open_weights
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.weights.quantized import (
    Stored,
    awq,
    gptq,
    neighbours,
    pack_quantized,
    quantized_folder,
    random_numbers,
    weights_by_loop,
)
from safetensors.torch import load_file, save_file

ROWS, WIDTH = 128, 64  # of an up projection of the tiny model
STEM = "model.layers.1.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def ct(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["x"]}


def folder_of(path: Path, config: dict[str, Any], stored: Stored) -> Path:
    return quantized_folder(make_tiny_model(path / "tiny", seed=0), config, {STEM: stored})


def check(folder: Path, want: torch.Tensor, *, packed: int) -> None:
    """The stored matrix is ``want``, in groups of ``packed`` bits (0: floats); so is what a model computes with it."""
    got = open_weights(folder).tensor(f"{STEM}.weight")
    assert (got.bits if isinstance(got, GroupTensor) else 0) == packed
    values = got if isinstance(got, torch.Tensor) else got.dequantize()
    assert values.shape == want.shape
    torch.testing.assert_close(values, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    plain = make_tiny_model(folder.parent / "plain", seed=0)
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | {f"{STEM}.weight": want}, plain / "model.safetensors")
    tokens = np.arange(40)
    for precision in ("float32", "auto"):
        logits, expected = (
            Stepper(load_model(path, EngineConfig(model="x", precision=used))).prefill(0, tokens)
            for path, used in ((folder, precision), (plain, "float32"))
        )
        error = float((logits - expected).norm() / expected.norm())
        assert error < (1e-3 if precision == "float32" else 0.1), (precision, error)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("v1", [True, False])
def test_gptq(bits: int, symmetric: bool, v1: bool, tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, bits, symmetric=symmetric)
    groups = neighbours(WIDTH, 32)
    config = GPTQ | {"bits": bits, "sym": symmetric, "checkpoint_format": "gptq" if v1 else "gptq_v2"}
    folder = folder_of(tmp_path, config, gptq(q, zero, scale, bits=bits, groups=groups, v1=v1))
    packed = 4 if bits < 8 else 8 if symmetric else 0  # kernels of 8 bits have no zero points
    check(folder, weights_by_loop(q, zero, scale, groups), packed=packed)


def test_gptq_in_the_order_of_activations_and_without_g_idx(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, 4, symmetric=True)
    groups = np.random.default_rng(1).permutation(neighbours(WIDTH, 32)).tolist()
    stored = gptq(q, zero, scale, bits=4, groups=groups)
    folder = folder_of(tmp_path, GPTQ | {"desc_act": True}, stored)
    check(folder, weights_by_loop(q, zero, scale, groups), packed=0)
    plain = folder_of(tmp_path / "b", GPTQ, gptq(q, zero, scale, bits=4, groups=None))
    check(plain, weights_by_loop(q, zero, scale, neighbours(WIDTH, 32)), packed=4)


def test_gptq_of_whole_rows_and_a_bias_of_zeros(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, WIDTH, 4, symmetric=False)
    stored = gptq(q, zero, scale, bits=4, groups=[0] * WIDTH) | {"bias": torch.zeros(ROWS)}
    folder = folder_of(tmp_path, GPTQ | {"group_size": -1}, stored)
    check(folder, weights_by_loop(q, zero, scale, [0] * WIDTH), packed=4)


def test_a_gptq_zero_point_of_0_is_0_and_not_16(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, 4, symmetric=False)
    zero[:] = 0
    groups = neighbours(WIDTH, 32)
    folder = folder_of(tmp_path, GPTQ, gptq(q, zero, scale, bits=4, groups=groups))
    check(folder, weights_by_loop(q, zero, scale, groups), packed=4)


def test_awq(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, 4, symmetric=False)
    folder = folder_of(tmp_path, AWQ, awq(q, zero, scale))
    check(folder, weights_by_loop(q, zero, scale, neighbours(WIDTH, 32)), packed=4)


def test_groups_that_no_kernel_has_are_unpacked_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 16, 4, symmetric=False)
    folder = folder_of(tmp_path, AWQ | {"group_size": 16}, awq(q, zero, scale))
    with caplog.at_level(logging.WARNING, logger="phloem"):
        check(folder, weights_by_loop(q, zero, scale, neighbours(WIDTH, 16)), packed=0)
    assert "AWQ of 4 bits: 1 of 1 quantized matrices are unpacked" in caplog.text


@pytest.mark.parametrize(("bits", "symmetric", "packed"), [(4, True, 4), (4, False, 4), (8, True, 8), (8, False, 0)])
def test_compressed_tensors_packed(bits: int, symmetric: bool, packed: int, tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, bits, symmetric=symmetric)
    config = ct("pack-quantized", num_bits=bits, strategy="group", group_size=32, symmetric=symmetric)
    folder = folder_of(tmp_path, config, pack_quantized(q, zero, scale, bits=bits, symmetric=symmetric))
    check(folder, weights_by_loop(q, zero, scale, neighbours(WIDTH, 32)), packed=packed)


def test_compressed_tensors_in_the_order_of_activations(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, 4, symmetric=True)
    groups = [(k % 2) for k in range(WIDTH)]
    stored = pack_quantized(q, zero, scale, bits=4, symmetric=True) | {"weight_g_idx": torch.tensor(groups).int()}
    config = ct("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group")
    check(folder_of(tmp_path, config, stored), weights_by_loop(q, zero, scale, groups), packed=0)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_compressed_tensors_of_bytes(strategy: str, tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, WIDTH, 8, symmetric=True)
    stored = {"weight": torch.from_numpy(q - 128).to(torch.int8), "weight_scale": torch.from_numpy(scale)}
    if strategy == "tensor":
        scale[:] = scale[0]
        stored["weight_scale"] = torch.from_numpy(scale[0])
    config = ct("int-quantized", num_bits=8, strategy=strategy)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    check(folder_of(tmp_path, config, stored), weights_by_loop(q, zero, scale, [0] * WIDTH), packed=8)


def float8_by_loop(stored: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Bytes read as sign, four bits of exponent and three of mantissa; a scale for each block."""
    out = torch.zeros(stored.shape)
    for n, line in enumerate(stored.view(torch.uint8).tolist()):
        for k, byte in enumerate(line):
            exponent, mantissa = byte >> 3 & 15, byte & 7
            value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            out[n, k] = (-value if byte >> 7 else value) * float(scale[n // rows, k // columns])
    return out


@pytest.mark.parametrize(
    ("config", "part", "block"),
    [
        (ct("float-quantized", num_bits=8, type="float", strategy="tensor"), "weight_scale", (ROWS, WIDTH)),
        (ct("float-quantized", num_bits=8, type="float", strategy="channel"), "weight_scale", (1, WIDTH)),
        (ct("float-quantized", num_bits=8, type="float", strategy="group", group_size=32), "weight_scale", (1, 32)),
        (
            ct("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 32]),
            "weight_scale",
            (48, 32),
        ),
        ({"quant_method": "fp8", "weight_block_size": [48, 48], "fmt": "e4m3"}, "weight_scale_inv", (48, 48)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", (ROWS, WIDTH)),
    ],
)
def test_float8(config: dict[str, Any], part: str, block: tuple[int, int], tmp_path: Path) -> None:
    stored = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) * 50).to(torch.float8_e4m3fn)
    shape = -(-ROWS // block[0]), -(-WIDTH // block[1])
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 200
    kept = scale.view(1) if scale.numel() == 1 else scale
    folder = folder_of(tmp_path, config, {"weight": stored, part: kept, "input_scale": torch.ones(1)})
    check(folder, float8_by_loop(stored, scale, *block), packed=0)


def test_groups_of_a_config_name_their_targets(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, 4, symmetric=True)
    config = ct("pack-quantized", num_bits=8, strategy="channel")
    four = ct("pack-quantized", num_bits=4, strategy="group", group_size=32)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = four | {"targets": ["re:.*up_proj$"]}
    folder = folder_of(tmp_path, config, pack_quantized(q, zero, scale, bits=4, symmetric=True))
    check(folder, weights_by_loop(q, zero, scale, neighbours(WIDTH, 32)), packed=4)


@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_of_4_bits(nested: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    block, nested_block = 64, 16
    codes = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    q = rng.integers(0, 16, ROWS * WIDTH)
    count = len(q) // block
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [ROWS, WIDTH]}
    stored = {
        "weight": torch.tensor([[q[i] << 4 | q[i + 1]] for i in range(0, len(q), 2)], dtype=torch.uint8),
        "weight.quant_map": torch.from_numpy(codes),
    }
    if nested:
        table, outer = rng.uniform(-1, 1, 256).astype(np.float32), rng.uniform(0.1, 0.2, count // nested_block)
        bytes_of = rng.integers(0, 256, count)
        greatest = [table[bytes_of[b]] * np.float32(outer[b // nested_block]) + 0.25 for b in range(count)]
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.25}
        stored |= {
            "weight.absmax": torch.from_numpy(bytes_of.astype(np.uint8)),
            "weight.nested_quant_map": torch.from_numpy(table),
            "weight.nested_absmax": torch.from_numpy(outer.astype(np.float32)),
        }
    else:
        greatest = rng.uniform(0.1, 0.4, count).astype(np.float32).tolist()
        stored["weight.absmax"] = torch.tensor(greatest)
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    want = torch.tensor([codes[q[i]] * greatest[i // block] for i in range(len(q))]).view(ROWS, WIDTH).float()
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    check(folder_of(tmp_path, config, stored), want, packed=0)


def test_bitsandbytes_of_8_bits(tmp_path: Path) -> None:
    q, zero, _ = random_numbers(ROWS, WIDTH, WIDTH, 8, symmetric=True)
    greatest = torch.rand(ROWS, generator=torch.Generator().manual_seed(0)) + 0.1
    stored = {"weight": torch.from_numpy(q - 128).to(torch.int8), "SCB": greatest}
    want = weights_by_loop(q, zero, (greatest / 127).view(-1, 1).numpy(), [0] * WIDTH)
    check(folder_of(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored), want, packed=8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "weights quantized by 'aqlm' are not read; read are awq, gptq, compressed-tensors,"),
        ({"bits": 4}, "weights quantized by None are not read"),
        ([1], r"quantization_config is \[1\]; it must be an object"),
        (GPTQ | {"bits": 3}, "bits is 3; read are 2, 4, 8"),
        (GPTQ | {"bits": "4"}, "bits is '4'"),
        (GPTQ | {"group_size": 0}, "group_size is 0; it must be a number of at least 1, or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; read are 'gptq', 'gptq_v2'"),
        (GPTQ | {"dynamic": {"+:x": {"bits": 8}}}, "dynamic is .*; read are only rules that leave modules out"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; read is 'gemm'"),
        (AWQ | {"bits": 8}, "bits is 8; read are 4"),
        (ct("marlin-24", num_bits=4), "format is 'marlin-24'; read are 'pack-quantized'"),
        (ct("nvfp4-pack-quantized", num_bits=4, type="float"), "format is 'nvfp4-pack-quantized'"),
        (ct("pack-quantized", num_bits=4, strategy="group"), "group_size is None; it must be a number"),
        (ct("pack-quantized", num_bits=8, type="float"), "num_bits is 8; floats are read in 8 bits, float-quantized"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; read are 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be the rows"),
        ({"quant_method": "bitsandbytes"}, "either it or load_in_8bit must be true"),
    ],
)
def test_configs_that_are_not_read_are_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    folder = quantized_folder(make_tiny_model(tmp_path / "tiny", seed=0), config, {})
    with pytest.raises(Unsupported, match=message):
        open_weights(folder)


def lying(stored: Stored, part: str, tensor: torch.Tensor | None) -> Stored:
    return {name: x for name, x in (stored | {part: tensor}).items() if x is not None}


@pytest.mark.parametrize(
    ("config", "part", "tensor", "message"),
    [
        (GPTQ, "scales", None, "no tensor .*up_proj.scales, which its quantization needs"),
        (GPTQ, "scales", torch.ones(3, ROWS).half(), r"scales is \[3, 128\], but its quantization asks for \[2, 128\]"),
        (GPTQ, "scales", torch.ones(2, ROWS).int(), "scales is of torch.int32, not float32 or float16 or bfloat16"),
        (GPTQ, "qzeros", torch.zeros(2, 5).int(), r"qzeros is \[2, 5\], but its quantization asks for \[2, 16\]"),
        (GPTQ, "qweight", torch.zeros(0, ROWS).int(), r"qweight is \[0, 128\], but its quantization asks for"),
        (GPTQ, "qweight", torch.zeros(8).int(), r"qweight is \[8\]"),
        (GPTQ, "g_idx", torch.full((WIDTH,), 2).int(), "g_idx names group 2, but there are 2"),
        (GPTQ, "g_idx", torch.arange(WIDTH).int() - 1, "g_idx names group -1, but there are 2"),
        (GPTQ, "g_idx", torch.zeros(3).int(), r"g_idx is \[3\], but its quantization asks for \[64\]"),
        (GPTQ | {"group_size": 128}, "g_idx", None, "groups of 128 in rows of 64 weights"),
        (GPTQ | {"group_size": 64}, "g_idx", None, r"scales is \[2, 128\], but its quantization asks for \[1, 128\]"),
        (GPTQ, "weight", torch.ones(ROWS, WIDTH), "has both a plain and a quantized weight"),
    ],
)
def test_matrices_that_contradict_their_config_are_refused(
    config: dict[str, Any], part: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, 4, symmetric=False)
    stored = gptq(q, zero, scale, bits=4, groups=neighbours(WIDTH, 32))
    with pytest.raises((UnknownModel, Unsupported), match=message):
        open_weights(folder_of(tmp_path, config, lying(stored, part, tensor))).tensor(f"{STEM}.weight")


def test_a_matrix_of_another_shape_than_the_config_s_is_refused(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, 2 * WIDTH, 32, 4, symmetric=False)
    folder = folder_of(tmp_path, AWQ, awq(q, zero, scale))
    with pytest.raises(UnknownModel, match=r"up_proj.weight is \[128, 128\], but its config asks for \[128, 64\]"):
        load_model(folder, EngineConfig(model="x"))


def test_a_shape_that_lies_allocates_nothing(tmp_path: Path) -> None:
    q, zero, scale = random_numbers(ROWS, WIDTH, 32, 4, symmetric=True)
    stored = pack_quantized(q, zero, scale, bits=4, symmetric=True)
    stored["weight_shape"] = torch.tensor([1 << 40, 1 << 40])
    config = ct("pack-quantized", num_bits=4, strategy="group", group_size=32)
    with pytest.raises(UnknownModel, match=r"weight_shape is \[1,099,511,627,776, 1,099,511,627,776\]"):
        open_weights(folder_of(tmp_path, config, stored)).tensor(f"{STEM}.weight")


def test_random_weights_of_a_quantized_folder_are_refused(tmp_path: Path) -> None:
    folder = quantized_folder(make_tiny_model(tmp_path / "tiny", seed=0), AWQ, {})
    with pytest.raises(PhloemError, match="random weights are bfloat16, but its quantization_config names others"):
        load_model(folder, EngineConfig(model="x", weights="random"))
