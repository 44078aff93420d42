"""Checkpoints of MLX against their definition in numpy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.protocol.errors import UnknownModel, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.quant import GroupTensor
from phloem.runtime.weights import open_weights
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.weights.quantized import Stored
from safetensors.torch import load_file, save_file

STEM = "model.layers.1.mlp.up_proj"
EMBEDDING = "model.embed_tokens"
CONFIG = {"group_size": 32, "bits": 4}


def stored(rows: int, width: int, *, bits: int = 4, group: int = 32) -> tuple[Stored, torch.Tensor]:
    """(the tensors, what they mean)"""
    rng = np.random.default_rng(bits)
    q = rng.integers(0, 1 << bits, (rows, width), dtype=np.uint32)
    scale = (rng.uniform(0.5, 1.5, (rows, width // group)) * 4 / 2**bits / width**0.5).astype(np.float16)
    bias = (-scale * rng.uniform(0.4, 0.6, scale.shape) * 2**bits).astype(np.float16)
    words = np.zeros((rows, width * bits // 32), dtype=np.uint32)
    for k in range(width):
        words[:, k * bits // 32] |= q[:, k] << np.uint32(k * bits % 32)
    want = q * scale.astype(np.float64).repeat(group, 1) + bias.astype(np.float64).repeat(group, 1)
    parts = {"weight": torch.from_numpy(words), "scales": torch.from_numpy(scale), "biases": torch.from_numpy(bias)}
    return parts, torch.from_numpy(want.astype(np.float32))


def folder_of(path: Path, config: Any, matrices: dict[str, Stored], field: str = "quantization") -> Path:
    folder = make_tiny_model(path / "tiny", seed=0)
    tensors = load_file(folder / "model.safetensors")
    for stem, parts in matrices.items():
        del tensors[f"{stem}.weight"]
        tensors |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {field: config}))
    return folder


@pytest.mark.parametrize("field", ["quantization", "quantization_config"])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 32), (4, 64), (8, 64)])
def test_a_matrix_is_what_the_format_defines(bits: int, group: int, field: str, tmp_path: Path) -> None:
    parts, want = stored(128, 64, bits=bits, group=group)
    found = open_weights(folder_of(tmp_path, {"group_size": group, "bits": bits}, {STEM: parts}, field)).tensor(
        f"{STEM}.weight"
    )
    assert isinstance(found, GroupTensor) == (bits < 8)
    values = found.dequantize() if isinstance(found, GroupTensor) else found
    torch.testing.assert_close(values, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_a_model_with_a_quantized_embedding_and_own_bits_computes_the_same(tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", seed=0)
    tensors = load_file(plain / "model.safetensors")
    embedding, means = stored(*tensors[f"{EMBEDDING}.weight"].shape)
    up, up_means = stored(128, 64, bits=8, group=64)
    config = CONFIG | {STEM: {"group_size": 64, "bits": 8}, "model.layers.0.mlp.up_proj": False}
    folder = folder_of(tmp_path, config, {EMBEDDING: embedding, STEM: up})
    save_file(tensors | {f"{EMBEDDING}.weight": means, f"{STEM}.weight": up_means}, plain / "model.safetensors")
    got, want = (
        Stepper(load_model(path, EngineConfig(model="x", precision="float32"))).prefill(0, np.arange(40))
        for path in (folder, plain)
    )
    assert float((got - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG | {"mode": "mxfp4"}, "mode is 'mxfp4'; read are 'affine'"),
        (CONFIG | {"bits": 3}, "bits is 3; read are 2, 4, 8"),
        (CONFIG | {"group_size": 16}, "group_size is 16; read are 32, 64, 128"),
        (CONFIG | {STEM: {"group_size": 32, "bits": 6}}, "up_proj: quantization_config: bits is 6"),
    ],
)
def test_other_forms_are_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=message):
        open_weights(folder_of(tmp_path, config, {}))


@pytest.mark.parametrize(
    ("config", "part", "tensor", "message"),
    [
        (CONFIG, "biases", None, "no tensor .*up_proj.biases"),
        (CONFIG, "scales", torch.ones(128, 3), r"scales is \[128, 3\], but its quantization asks for \[128, 2\]"),
        (CONFIG, "weight", torch.ones(128, 64), "weight is of torch.float32"),
        (CONFIG | {"group_size": 128}, "biases", torch.ones(128, 1), "groups of 128 in rows of 64 weights"),
        (CONFIG | {STEM: False}, "biases", torch.ones(128, 2), "it is quantized, but its config says false"),
    ],
)
def test_damaged_matrices_are_refused(
    config: Any, part: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    parts = {name: x for name, x in (stored(128, 64)[0] | {part: tensor}).items() if x is not None}
    with pytest.raises(UnknownModel, match=message):
        open_weights(folder_of(tmp_path, config, {STEM: parts})).tensor(f"{STEM}.weight")
