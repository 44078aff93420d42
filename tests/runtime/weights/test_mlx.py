"""Checkpoints of MLX against their definition in numpy."""

import json
import shutil
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
from phloem.runtime.weights.mlx import stack_of
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.weights.quantized import Stored
from safetensors.torch import load_file, save_file

STEM = "model.layers.1.mlp.up_proj"
EMBEDDING = "model.embed_tokens"
CONFIG = {"group_size": 32, "bits": 4}


def stored(rows: int, width: int, *, bits: int = 4, group: int = 32, seed: int = 0) -> tuple[Stored, torch.Tensor]:
    """(the tensors, what they mean)"""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 1 << bits, (rows, width), dtype=np.uint32)
    scale = (rng.uniform(0.5, 1.5, (rows, width // group)) * 4 / 2**bits / width**0.5).astype(np.float16)
    bias = (-scale * rng.uniform(0.4, 0.6, scale.shape) * 2**bits).astype(np.float16)
    words = np.zeros((rows, width * bits // 32 + 1), dtype=np.uint64)
    for k in range(width):
        word, bit = divmod(k * bits, 32)
        number = q[:, k].astype(np.uint64) << np.uint64(bit)
        words[:, word] |= number & np.uint64(0xFFFFFFFF)
        words[:, word + 1] |= number >> np.uint64(32)
    words = words[:, :-1].astype(np.uint32)
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
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 32), (4, 32), (4, 64), (5, 32), (6, 64), (8, 64)])
def test_a_matrix_is_what_the_format_defines(bits: int, group: int, field: str, tmp_path: Path) -> None:
    parts, want = stored(128, 64, bits=bits, group=group)
    found = open_weights(folder_of(tmp_path, {"group_size": group, "bits": bits}, {STEM: parts}, field)).tensor(
        f"{STEM}.weight"
    )
    assert isinstance(found, GroupTensor) and found.bits == (4 if bits <= 4 else 8) and not found.is_exact_in_bytes
    torch.testing.assert_close(found.dequantize(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    if bits > 4:  # the form of the kernels
        rounded = GroupTensor(*found.parts32())
        assert rounded.is_exact_in_bytes
        error = (rounded.dequantize() - want).abs().view(128, -1, 32).amax(-1)
        assert bool((error <= want.abs().view(128, -1, 32).amax(-1) / 127 * 0.501).all())


def test_eight_bits_around_128_are_bytes_without_rounding(tmp_path: Path) -> None:
    parts, _ = stored(128, 64, bits=8)
    parts["biases"] = -128 * parts["scales"]
    found = open_weights(folder_of(tmp_path, {"group_size": 32, "bits": 8}, {STEM: parts})).tensor(f"{STEM}.weight")
    assert isinstance(found, GroupTensor) and found.is_exact_in_bytes and found.q.dtype == torch.int8
    q = parts["weight"].view(torch.uint8).view(128, 2, 32).float() - 128
    assert torch.equal(found.dequantize(), (q * parts["scales"].float().unsqueeze(-1)).view(128, 64))


def test_a_model_with_a_quantized_embedding_and_own_bits_computes_the_same(tmp_path: Path) -> None:
    plain = make_tiny_model(tmp_path / "plain", seed=0)
    tensors = load_file(plain / "model.safetensors")
    embedding, means = stored(*tensors[f"{EMBEDDING}.weight"].shape)
    up, up_means = stored(128, 64, bits=8, group=64)
    config = CONFIG | {STEM: {"group_size": 64, "bits": 8}, "model.layers.0.mlp.up_proj": False}
    folder = folder_of(tmp_path, config, {EMBEDDING: embedding, STEM: up})
    save_file(tensors | {f"{EMBEDDING}.weight": means, f"{STEM}.weight": up_means}, plain / "model.safetensors")
    got, want = _logits(folder), _logits(plain)
    assert float((got - want).norm() / want.norm()) < 1e-3


def test_a_head_with_scales_of_its_own_is_read_where_the_config_ties_it(tmp_path: Path) -> None:
    shape = (259, 64)
    own, tied = stored(*shape, bits=6)[0], stored(*shape, bits=4)[0]
    folder = folder_of(tmp_path, CONFIG | {"lm_head": {"group_size": 32, "bits": 6}}, {EMBEDDING: tied})
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file(tensors | {f"lm_head.{part}": tensor for part, tensor in own.items()}, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(whole))
    logits = _logits(folder)
    whole["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(whole))
    assert torch.equal(logits, _logits(folder))


@pytest.mark.parametrize(("family", "bits"), [("qwen3_moe", 0), ("qwen3_moe", 5), ("mixtral", 4)])
def test_stacked_experts_are_those_of_a_folder_with_one_tensor_for_each(family: str, bits: int, tmp_path: Path) -> None:
    """``bits`` 0: stacks of floats."""
    if family == "mixtral":
        plain = make_family(tmp_path / "plain", FAMILIES["mixtral"])
    else:
        sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        plain = make_tiny_model(tmp_path / "plain", seed=0, family=family, **sizes)
    stacked = tmp_path / "stacked"
    shutil.copytree(plain, stacked)
    tensors = load_file(plain / "model.safetensors")
    kept, stacks = dict(tensors), {}
    for name in tensors:
        found = stack_of(name)
        if found is not None:
            stacks.setdefault(found, []).append(name)
            del kept[name]
    assert stacks and all(len(names) == 5 for names in stacks.values())
    for stack, names in stacks.items():
        names.sort(key=lambda name: int(name.split(".experts.")[1].split(".")[0]))
        if not bits:
            kept[stack] = torch.stack([tensors[name] for name in names])
            continue
        made = [stored(*tensors[name].shape, bits=bits, seed=i) for i, name in enumerate(names)]
        tensors |= {name: means for name, (_, means) in zip(names, made, strict=True)}
        for part in ("weight", "scales", "biases"):
            kept[f"{stack.removesuffix('.weight')}.{part}"] = torch.stack([parts[part] for parts, _ in made])
    save_file(tensors, plain / "model.safetensors")
    save_file(kept, stacked / "model.safetensors")
    if bits:
        own = {stack.removesuffix(".weight"): {"group_size": 32, "bits": bits} for stack in stacks}
        whole = json.loads((stacked / "config.json").read_text()) | {"quantization": CONFIG | own}
        (stacked / "config.json").write_text(json.dumps(whole))
    torch.testing.assert_close(_logits(stacked), _logits(plain), rtol=1e-3, atol=1e-3)
    kept[stack] = kept[stack][:4].clone()
    save_file(kept, stacked / "model.safetensors")
    with pytest.raises(UnknownModel, match=r"switch_mlp.*\[4, .* but its config asks for 5 experts"):
        open_weights(stacked)


def _logits(path: Path) -> torch.Tensor:
    return Stepper(load_model(path, EngineConfig(model="x", precision="float32"))).prefill(0, np.arange(40))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG | {"mode": "mxfp4"}, "mode is 'mxfp4'; read are 'affine'"),
        (CONFIG | {"bits": 7}, "bits is 7; read are 2, 3, 4, 5, 6, 8"),
        (CONFIG | {"group_size": 16}, "group_size is 16; read are 32, 64, 128"),
        (CONFIG | {STEM: {"group_size": 32, "bits": 1}}, "up_proj: quantization_config: bits is 1"),
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
