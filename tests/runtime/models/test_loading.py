"""A model that cannot be loaded says which file, which tensor or field, and what to do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.cpu_isa import isa
from phloem.kernels import silu_mul
from phloem.kernels.backend import REFERENCE, using
from phloem.protocol.errors import InvalidParams, UnknownModel, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.layers.embedding import BlockEmbedding, TiedEmbedding
from phloem.runtime.layers.mlp import MLP
from phloem.runtime.models import load_model, loading
from phloem.runtime.weights import open_weights
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from safetensors.torch import load_file, save_file


def config(**more: Any) -> EngineConfig:
    return EngineConfig(model="tiny", **{"precision": "float32", **more})


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path, seed=0)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    change(folder, intermediate_size=96)
    with pytest.raises(UnknownModel, match=r"layers.0.mlp.gate_proj.weight is \[128, 64\], but .* asks for \[96, 64\]"):
        load_model(folder, config())


def test_a_tensor_too_many_is_another_model(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Unsupported, match=r"1 tensors that .* does not use: model.layers.0.self_attn.q_proj.bias"):
        load_model(folder, config())


def test_stored_rope_tables_are_no_strangers(folder: Path) -> None:
    plain = load_model(folder, config())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors")
    assert load_model(folder, config()).config == plain.config


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnknownModel, match=r"has no tensor model.norm.weight; it is incomplete"):
        load_model(folder, config())


def test_an_untied_head_that_is_missing_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnknownModel, match=r"has no tensor lm_head.weight"):
        load_model(folder, config())


def test_more_positions_than_trained_are_refused(folder: Path) -> None:
    assert load_model(folder, config()).max_positions == 2048
    assert load_model(folder, config(max_seq_len=100)).max_positions == 100
    with pytest.raises(InvalidParams, match=r"max_seq_len 2,049 is beyond the 2,048 positions of .*; lower it"):
        load_model(folder, config(max_seq_len=2049))


def test_devices_that_cannot_run_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(InvalidParams, match="device 'gpu' is unknown; use cpu, cuda or cuda:N"):
        load_model(folder, config(device="gpu"))
    with pytest.raises(Unsupported, match="device 'mps'; models run on cpu and cuda"):
        load_model(folder, config(device="mps"))
    if not torch.cuda.is_available():
        with pytest.raises(InvalidParams, match="torch finds no CUDA device here; use cpu"):
            load_model(folder, config(device="cuda"))


def test_types_follow_precision_and_kv_dtype(folder: Path) -> None:
    assert load_model(folder, config()).kv_dtype == torch.float32
    assert load_model(folder, config(kv_dtype="bfloat16")).kv_dtype == torch.bfloat16
    bfloat16 = load_model(folder, config(precision="bfloat16"))
    assert (bfloat16.dtype, bfloat16.kv_dtype) == (torch.bfloat16, torch.bfloat16)
    assert load_model(folder, config(precision="bfloat16", kv_dtype="float32")).kv_dtype == torch.float32


def test_8_bit_keys_and_values_need_kernels_that_read_them(folder: Path, tmp_path: Path) -> None:
    assert load_model(folder, config(kv_dtype="int8")).kv_dtype == torch.int8
    with pytest.raises(InvalidParams, match="kv_dtype 'fp8' on cpu: only GPU kernels .* use int8, bfloat16 or auto"):
        load_model(folder, config(kv_dtype="fp8"))
    with (
        using(replace(REFERENCE, reads_packed=True)),
        pytest.raises(InvalidParams, match="kv_dtype 'int8' on cpu: only CPU kernels .* use fp8, bfloat16 or auto"),
    ):
        load_model(folder, config(kv_dtype="int8"))
    latent = make_family(tmp_path / "latent", FAMILIES["deepseek_v3"])
    with pytest.raises(InvalidParams, match="kv_dtype 'int8' and the latent attention of .*latent: .* use bfloat16"):
        load_model(latent, config(kv_dtype="int8"))


def test_weights_of_8_bits_stay_near_the_file_s(folder: Path) -> None:
    tokens = np.arange(20, dtype=np.int32)
    exact, rounded = (
        Stepper(load_model(folder, config(precision=precision))).prefill(0, tokens) for precision in ("float32", "fp8")
    )
    assert float((rounded - exact).norm() / exact.norm()) < 0.25


def test_a_gguf_file_loads_at_every_precision(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=1, kinds={"": "Q4_1", "v_proj": "Q8_0"})
    for precision in ("float32", "bfloat16", "int4", "int16", "auto"):
        assert load_model(path, config(precision=precision)).config.num_layers == 2


def test_between_products_by_16_bits_only_what_attention_reads_is_rounded(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=1, kinds={"": "Q4_1", "v_proj": "Q8_0"}, hidden_size=256)
    tokens = np.arange(40, dtype=np.int32)
    precisions = ("float32", "int16", "bfloat16", "auto")
    models = {precision: load_model(path, config(precision=precision)) for precision in precisions}
    if "by int16" not in models["int16"].describe():
        pytest.skip("this machine multiplies no bytes")
    logits = {precision: Stepper(model).prefill(0, tokens) for precision, model in models.items()}
    errors = {key: float((logits[key] - logits["float32"]).pow(2).mean().sqrt()) for key in precisions[1:]}
    assert models["int16"].dtype == torch.float32 and models["int16"].kv_dtype == torch.bfloat16
    if isa().has_tiles:
        assert errors["int16"] < 0.8 * errors["bfloat16"]  # keys and values are bfloat16 in all
        assert errors["int16"] < errors["auto"] < errors["bfloat16"]
    else:
        assert errors["int16"] < errors["auto"] / 3


def test_layers_join_their_gates_where_the_product_can(tmp_path: Path) -> None:
    """With AMX. Elsewhere the activation is a kernel of its own."""
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=1, kinds={"": "Q4_1"}, hidden_size=256)
    mlp = load_model(path, config(precision="auto")).layers[0].mlp
    assert isinstance(mlp, MLP)
    x = torch.randn(3, 256)
    joined = mlp.gate_up.gated(x, "silu", mlp.down)
    assert (joined is not None) == isa().has_tiles
    if joined is not None:
        expected = mlp.down(silu_mul(mlp.gate_up(x)))
        assert torch.equal(mlp.down(joined), expected) and torch.equal(mlp(x), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_float_weights_run_at_int16_too(family: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    path = make_tiny_model(tmp_path, seed=0, family=family, **(experts if "moe" in family else {}))
    tokens = np.arange(20, dtype=np.int32)
    exact, found = (Stepper(load_model(path, config(precision=p))).prefill(0, tokens) for p in ("float32", "int16"))
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_random_weights_need_a_config_alone_and_keep_activations_of_order_one(family: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    path = make_tiny_model(tmp_path, seed=0, family=family, hidden_size=256, **(experts if "moe" in family else {}))
    for file in path.glob("*.safetensors"):
        file.unlink()
    model = load_model(path, EngineConfig(model="tiny", precision="float32", weights="random"))
    logits = Stepper(model).prefill(0, np.arange(40, dtype=np.int32))
    assert logits.isfinite().all() and 0.3 < float(logits.std()) < 3.0
    assert bool((model.embedding.weight != 0).all(dim=1).any())


def test_a_mixture_with_layers_without_experts_is_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    path = make_tiny_model(tmp_path / "a", seed=0, family="qwen3_moe", **experts, mlp_only_layers=[1])
    with pytest.raises(Unsupported, match="mlp_only_layers is set: some layers without experts are not served"):
        load_model(path, EngineConfig(model="tiny"))
    path = make_tiny_model(tmp_path / "b", seed=0, family="qwen3_moe", **(experts | {"num_experts_per_tok": 5}))
    with pytest.raises(Unsupported, match="5 experts a token; it must be between 1 and 4"):
        load_model(path, EngineConfig(model="tiny"))


def test_a_tied_embedding_in_bytes_is_read_from_the_head_exactly(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=2, kinds={"weight": "Q8_0"})
    model = load_model(path, config(precision="auto"))
    if not model.head.has_rows:
        pytest.skip("this machine's head is torch's")
    table = open_weights(path).tensor("token_embd.weight").dequantize(model.dtype)
    ids = torch.tensor([0, 95, 17, 17])
    assert isinstance(model.embedding, TiedEmbedding)
    assert torch.equal(model.embedding(ids), table[ids]) and torch.equal(model.embedding.weight, table)


def test_an_embedding_that_is_copied_run_by_run_has_the_file_s_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa().has_tiles:
        pytest.skip("activations are float32 here, and the embedding too")
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=3, kinds={"weight": "Q4_0"}, tied=False)
    monkeypatch.setattr(loading, "COPIED_ROWS", 7)
    embedding = load_model(path, EngineConfig(model="tiny")).embedding
    table = open_weights(path).tensor("token_embd.weight")
    assert isinstance(embedding, BlockEmbedding) and not isinstance(table, torch.Tensor)
    assert torch.equal(embedding.weight, table.dequantize(torch.bfloat16))
    assert torch.equal(embedding(torch.tensor([95, 0, 6, 7])), table.dequantize(torch.bfloat16)[[95, 0, 6, 7]])
