"""Quantized models that this project writes: what its readers, ggml's and transformers' read from them."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from phloem.protocol.errors import InvalidParams, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.models.names import TensorNames
from phloem.runtime.quant import GroupTensor, QuantTensor
from phloem.runtime.quantizing import quantize_model
from phloem.runtime.quantizing.comparison import compare
from phloem.runtime.quantizing.quality import TextReader, score_text
from phloem.runtime.quantizing.rounding import (
    Curvature,
    round_to_affine,
    round_to_fours,
    round_to_q4_1,
    round_to_q8_0,
)
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.runtime.weights import open_weights
from phloem.runtime.weights.gguf_header import read_header
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from phloem.tests.runtime.tokenizer.vocabularies import write_byte_level
from safetensors.torch import load_file

TEXT = "An orchard on the north slope was planted in the spring, when the valley road was still gravel. " * 3
MATRIX = "model.layers.1.mlp.up_proj.weight"
TOKENS = np.arange(60) % 256


def logits_of(path: Path, precision: str = "float32") -> torch.Tensor:
    model = load_model(path, EngineConfig(model="x", precision=precision))
    return Stepper(model).prefill(0, TOKENS % model.config.vocab_size)


def error_of(path: Path, original: Path) -> float:
    """Relative, of the logits in float32."""
    want = logits_of(original)
    return float((logits_of(path) - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("scheme", "form", "bits", "most", "most_logits"),
    [
        ("int8", "compressed-tensors", 8, 0.006, 0.06),
        ("int8", "mlx", 8, 0.006, 0.06),
        ("int4-g32", "compressed-tensors", 4, 0.085, 0.6),
        ("int4-g32", "mlx", 4, 0.075, 0.5),
        ("int4-awq", "awq", 4, None, 0.8),
        ("int4-awq", "mlx", 4, None, 0.8),
        ("fp8", "compressed-tensors", 0, 0.03, 0.25),
    ],
)
def test_a_folder_is_written_in_a_form_that_is_read_again(
    scheme: str, form: str, bits: int, most: float | None, most_logits: float, tmp_path: Path
) -> None:
    original = make_tiny_model(tmp_path / "tiny", seed=0)
    calibration = TEXT if scheme == "int4-awq" else ""
    found = quantize_model(original, tmp_path / "out", scheme, folder_format=form, calibration=calibration)
    assert found.num_matrices == 14 and not found.left and not found.was_packed
    assert found.size_bytes < found.source_bytes
    got = open_weights(found.path).tensor(MATRIX)
    assert (got.bits if isinstance(got, GroupTensor) else 0) == bits
    values = got if isinstance(got, torch.Tensor) else got.dequantize()
    want = open_weights(original).tensor(MATRIX)
    if most is not None:  # AWQ's matrices are scaled
        assert float((values - want).norm() / want.norm()) < most
    # A random model makes more of an error from layer to layer than a trained one.
    assert 1e-4 < error_of(found.path, original) < most_logits
    same, again = (load_tokenizer(path) for path in (original, found.path))
    assert same.encode(TEXT) == again.encode(TEXT)


def test_experts_are_quantized_and_their_routers_are_not(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    original = make_tiny_model(tmp_path / "tiny", seed=0, family="qwen3_moe", **experts)
    found = quantize_model(original, tmp_path / "out", "int8")
    assert found.num_matrices == 2 * (4 + 3 * 4)
    ignored = json.loads((found.path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"} <= set(ignored)
    assert error_of(found.path, original) < 0.3
    with pytest.raises(Unsupported, match="scheme int4-awq: qwen3_moe models have experts; use int4-g32"):
        quantize_model(original, tmp_path / "awq", "int4-awq", calibration=TEXT)


@pytest.mark.parametrize(("scheme", "kind", "most"), [("int8", "Q8_0", 0.06), ("int4-g32", "Q4_1", 0.6)])
def test_a_gguf_file_is_written_from_one(scheme: str, kind: str, most: float, tmp_path: Path) -> None:
    original = make_tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    found = quantize_model(original, tmp_path / "out.gguf", scheme)
    got = open_weights(found.path).tensor("blk.1.attn_q.weight")
    assert isinstance(got, QuantTensor) and got.kind == kind
    assert error_of(found.path, original) < most
    mine, theirs = gguf.GGUFReader(found.path), gguf.GGUFReader(original)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert mine.fields[name].contents() == field.contents(), name
    written = {tensor.name: tensor for tensor in mine.tensors}
    assert len(written) == len(theirs.tensors)
    for before in theirs.tensors:  # ggml's own reader and decoder
        tensor = written[before.name]
        assert list(tensor.shape) == list(before.shape)
        values, want = (gguf.quants.dequantize(x.data, x.tensor_type) for x in (tensor, before))
        assert np.abs(values - want).max() <= 0.15 * np.abs(want).max()


def test_a_matrix_that_has_the_type_already_is_copied_byte_for_byte(tmp_path: Path) -> None:
    original = make_tiny_gguf(tmp_path / "tiny.gguf", seed=0, kinds={"": "Q4_1", "v_proj": "F16", "embed": "Q8_0"})
    found = quantize_model(original, tmp_path / "out.gguf", "int4-g32")
    assert (found.num_matrices, found.num_copied) == (14, 12)
    written, before = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (found.path, original))
    for name, tensor in before.items():
        if tensor.tensor_type.name != "F16":
            assert written[name].tensor_type == tensor.tensor_type
            assert np.array_equal(written[name].data, tensor.data), name
    assert written["blk.0.attn_v.weight"].tensor_type.name == "Q4_1"
    again = quantize_model(found.path, tmp_path / "again.gguf", "int4-g32")
    assert again.num_copied == 14 and torch.equal(logits_of(again.path), logits_of(found.path))


def byte_level_gguf(path: Path, kinds: dict[str, str]) -> Path:
    """A tiny Llama as a GGUF file with a byte-level vocabulary, of which a folder can be written."""
    found = make_tiny_gguf(path, seed=0, kinds=kinds, tied=True)
    vocabulary = read_header(write_byte_level(path.with_name("vocabulary.gguf"))).metadata
    reader = gguf.GGUFReader(found)
    writer = gguf.GGUFWriter(path.with_name("both.gguf"), "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "tokenizer.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0], (*field.types, None)[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*vocabulary["tokenizer.ggml.tokens"][:95], "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("both.gguf")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_folder_of_mlx_keeps_the_numbers_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    """Queries and keys lie in another order of rows there, and the table has 8 bits."""
    original = byte_level_gguf(tmp_path / "tiny.gguf", {"": kind, "embed": "Q8_0"})
    found = quantize_model(original, tmp_path / "out", "int4-g32", calibration=TEXT)
    assert (found.num_matrices, found.num_copied) == (14, 14)
    before, after = open_weights(original), open_weights(found.path)
    assert after.config.tied_embeddings
    names = TensorNames(before.config, "gguf"), TensorNames(after.config, "safetensors")
    for (key, _, _, old), (*_, new) in zip(*(each.entries() for each in names), strict=True):
        want, got = before.tensor(old), after.tensor(new)
        if isinstance(want, QuantTensor):
            assert isinstance(got, GroupTensor) and got.is_exact_in_bytes == (key == "embedding")
            torch.testing.assert_close(got.dequantize(), want.dequantize(), rtol=0, atol=1e-6)
    assert error_of(found.path, original) < 3e-3  # its norms have 16 bits
    assert load_tokenizer(found.path).encode("ab") == load_tokenizer(original).encode("ab")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_floats_that_were_rounded_before_keep_their_numbers(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Numbers of a group reach over 15 steps or fewer, as those of ``Q4_K`` do."""
    rng = torch.Generator().manual_seed(0)
    widths = torch.randint(3, 16, (64, 4, 1), generator=rng)
    q = (torch.rand(64, 4, 32, generator=rng) * (widths + 1)).floor().clamp_max(widths)
    q[..., 0], q[..., 1] = 0, widths[..., 0]
    scale = (0.01 * (0.5 + torch.rand(64, 4, 1, generator=rng))).half().float()
    minimum = (-scale * widths * (0.3 + 0.4 * torch.rand(64, 4, 1, generator=rng))).half().float()
    weight = (q * scale + minimum).view(64, 128)
    got = round_to_affine(weight.to(dtype), group_len=32, scale_dtype=scale_dtype).dequantize()
    steps = (got - weight).view(64, 4, 32).abs() / scale
    exact = dtype == torch.float32 and scale_dtype == torch.float16
    assert float(steps.max()) < (0.02 if exact else 0.12)


def test_a_mixture_becomes_stacks_of_experts_in_mlx(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    original = make_tiny_model(tmp_path / "tiny", seed=0, family="qwen3_moe", **experts)
    found = quantize_model(original, tmp_path / "out", "int4-g32")
    assert found.num_matrices == 2 * (4 + 3 * 4)
    stored = load_file(found.path / "model.safetensors")
    assert stored["model.layers.1.mlp.switch_mlp.down_proj.weight"].shape == (4, 64, 4)
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.float16
    before, after = open_weights(original), open_weights(found.path)
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        want, got = before.tensor(name), after.tensor(name)
        assert isinstance(got, GroupTensor) and isinstance(want, torch.Tensor)
        assert float((got.dequantize() - want).norm() / want.norm()) < 0.075
    assert error_of(found.path, original) < 0.6


def test_a_folder_is_written_from_a_gguf_file(tmp_path: Path) -> None:
    original = make_tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    with pytest.raises(Unsupported, match="a tokenizer.json of a None vocabulary is not written"):
        quantize_model(original, tmp_path / "none", "int8")
    source = open_weights(original)
    from phloem.runtime.quantizing.folder_of_gguf import hf_config

    config = hf_config(source.config, "tiny")
    assert config["num_key_value_heads"] == 2 and config["model_type"] == "llama" and config["tie_word_embeddings"]


def test_a_vocabulary_of_gguf_becomes_a_tokenizer_json(tmp_path: Path) -> None:
    from phloem.runtime.quantizing.folder_of_gguf import write_tokenizer

    source = write_byte_level(tmp_path / "vocabulary.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tokenizer(source, folder)
    before, after = load_tokenizer(source), load_tokenizer(folder)
    for text in ("Some text: 12 ü\n\n  and more", "", "the <|im_end|> of it"):
        assert before.encode(text) == after.encode(text)
    assert before.eos_ids == after.eos_ids and before.bos_id == after.bos_id
    assert (load_chat_template(source, before) is None) == (load_chat_template(folder, after) is None)


def test_scales_by_activations_change_nothing_before_rounding_and_lose_less_after(tmp_path: Path) -> None:
    """Inputs of very different sizes, as large models have them: with AWQ the large ones keep finer weights."""
    from safetensors.torch import load_file, save_file

    original = make_tiny_model(tmp_path / "tiny", seed=0)
    tensors = load_file(original / "model.safetensors")
    sizes = torch.ones(64)
    sizes[::16] = 30.0
    for i in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] *= sizes
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            tensors[f"model.layers.{i}.{name}.weight"] /= sizes.sqrt() * 3
    save_file(tensors, original / "model.safetensors")
    form = "compressed-tensors"
    plain = quantize_model(original, tmp_path / "plain", "int4-g32", folder_format=form)
    scaled = quantize_model(original, tmp_path / "scaled", "int4-awq", calibration=TEXT)
    assert error_of(scaled.path, original) < 0.8 * error_of(plain.path, original)


def test_rounding_to_groups_loses_no_more_than_plain_rounding() -> None:
    weight = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
    groups = weight.view(7, -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = float((((groups - low) / step).round() * step + low - groups).square().sum())
    data = round_to_q4_1(weight)
    blocks = QuantTensor.from_bytes("Q4_1", data.flatten(), weight.shape).dequantize()
    assert np.array_equal(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType.Q4_1), blocks.numpy())
    assert float((blocks - weight).square().sum()) < plain
    fours = round_to_fours(weight, group_len=32, scale_dtype=torch.bfloat16).dequantize()
    assert float((fours - weight).square().sum()) < 1.3 * plain
    eights = QuantTensor.from_bytes("Q8_0", round_to_q8_0(weight).flatten(), weight.shape).dequantize()
    assert float((eights - weight).abs().max()) <= float(weight.abs().max()) / 127 * 0.51


def test_errors_that_are_made_up_for_change_the_product_less() -> None:
    """On inputs of a text: correlated, and of different sizes."""
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(16, 96, generator=rng) * torch.rand(96, generator=rng)
    x = torch.randn(400, 16, generator=rng) @ mixed + 0.1 * torch.randn(400, 96, generator=rng)
    x[:, 7] = 0  # an input that is never used
    weight = torch.randn(48, 96, generator=rng)
    curvature = Curvature.of(x.T @ x)

    def error(rounded: torch.Tensor) -> float:
        return float((x @ (rounded - weight).T).norm() / (x @ weight.T).norm())

    def q4_1(data: torch.Tensor) -> torch.Tensor:
        return QuantTensor.from_bytes("Q4_1", data.flatten(), weight.shape).dequantize()

    def fours(curvature: Curvature | None) -> torch.Tensor:
        return round_to_fours(weight, group_len=32, scale_dtype=torch.bfloat16, curvature=curvature).dequantize()

    assert error(q4_1(round_to_q4_1(weight, curvature=curvature))) < 0.7 * error(q4_1(round_to_q4_1(weight)))
    assert error(fours(curvature)) < 0.7 * error(fours(None))


@pytest.mark.parametrize("form", ["compressed-tensors", "mlx"])
def test_calibrated_groups_lose_less(form: str, tmp_path: Path) -> None:
    original = make_tiny_model(tmp_path / "tiny", seed=0)
    plain = quantize_model(original, tmp_path / "plain", "int4-g32", folder_format=form)
    calibrated = quantize_model(original, tmp_path / "calibrated", "int4-g32", folder_format=form, calibration=TEXT)
    tokens = torch.tensor(load_tokenizer(original).encode(TEXT))[:60].numpy()
    want, one, two = (
        Stepper(load_model(path, EngineConfig(model="x", precision="float32"))).prefill(0, tokens)
        for path in (original, plain.path, calibrated.path)
    )
    assert float((two - want).norm()) < 0.9 * float((one - want).norm())


def test_groups_of_zeros_and_blocks_that_are_such_groups_stay_as_they_are() -> None:
    weight = torch.zeros(2, 64)
    weight[1, :32] = torch.arange(32) % 16 * 0.5 - 3
    for got in (
        QuantTensor.from_bytes("Q4_1", round_to_q4_1(weight).flatten(), (2, 64)).dequantize(),
        QuantTensor.from_bytes("Q8_0", round_to_q8_0(torch.zeros(2, 64)).flatten(), (2, 64)).dequantize() + weight,
        round_to_fours(weight, group_len=32, scale_dtype=torch.float16).dequantize(),
    ):
        assert torch.equal(got, weight)


def test_a_comparison_has_the_original_in_float32_first(tmp_path: Path) -> None:
    original = make_tiny_model(tmp_path / "tiny", seed=0)
    found = quantize_model(original, tmp_path / "out", "int8")
    rows = list(compare(original, found.path, TEXT, ["Hello"], say=lambda what, done, total: None))
    assert [(row.name, row.precision) for row in rows] == [
        ("original", "float32"),
        ("original", "auto"),
        ("quantized", "auto"),
    ]
    assert rows[0].top1 == rows[0].greedy == 1.0 and rows[2].size_bytes == found.size_bytes
    assert abs(rows[2].perplexity / rows[0].perplexity - 1) < 0.05 and rows[2].top1 > 0.8


def test_perplexity_is_that_of_the_definition(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", seed=0)
    tokens = torch.from_numpy(TOKENS)
    reader = TextReader(path, EngineConfig(model="x", precision="float32"))
    want = -torch.log_softmax(logits_of(path), dim=-1)[torch.arange(59), tokens[1 : 59 + 1]].mean()
    assert score_text(reader, tokens).perplexity == pytest.approx(float(want.exp()), rel=1e-4)


@pytest.mark.parametrize(
    ("scheme", "out", "message"),
    [
        ("int3", "out", "scheme 'int3' is not known; there are int8, int4-g32, int4-awq, fp8"),
        ("fp8", "out.gguf", "scheme fp8: GGUF has no such type"),
        ("int8", "out.gguf", "a GGUF file is written from a GGUF file alone"),
        ("int8", "no/such/out", "there is no folder"),
        ("int8", "tiny", "is already there; remove it or give another name"),
        ("int4-awq", "out", "needs a calibration text of 64 tokens or more, and has 0"),
        ("int8 awq", "out", "format 'awq': scheme int8 is written as compressed-tensors or mlx"),
        ("int8 mlx", "out.gguf", "format 'mlx' is one of folders, and --out .*out.gguf is a file"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    scheme: str, out: str, message: str, tmp_path: Path
) -> None:
    original = make_tiny_model(tmp_path / "tiny", seed=0)
    scheme, _, form = scheme.partition(" ")
    with pytest.raises((InvalidParams, Unsupported), match=message):
        quantize_model(original, tmp_path / out, scheme, folder_format=form)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_the_config_says_what_was_written(tmp_path: Path) -> None:
    original = make_tiny_model(tmp_path / "tiny", seed=0, tied=True)
    quantize_model(original, tmp_path / "out", "int4-g32", folder_format="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["model_type"] == "llama"
    written = config["quantization_config"]
    assert written["ignore"] == ["model.embed_tokens", "lm_head"] and written["format"] == "pack-quantized"
