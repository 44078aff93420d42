"""Model files are read as written, or refused with the fault's name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from phloem.protocol.errors import UnknownModel, Unsupported
from phloem.runtime.quant import QuantTensor
from phloem.runtime.weights import open_weights, read_header
from phloem.runtime.weights.gguf_header import GGML_TYPES
from phloem.tests.runtime.models.tiny import interleaved, make_tiny_gguf, make_tiny_model, tiny_tensors


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", seed=0)


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return make_tiny_gguf(tmp_path / "tiny.gguf", seed=0, kinds={"": "Q4_0", "v_proj": "F16", "down": "BF16"})


def test_header_is_what_ggml_s_own_reader_sees(gguf_path: Path) -> None:
    header, reader = read_header(gguf_path), gguf.GGUFReader(gguf_path)
    assert set(header.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        place = header.tensors[tensor.name]
        assert (place.kind, place.start, place.size_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert place.shape == tuple(reversed(tensor.shape.tolist()))
    for key, value in header.metadata.items():
        assert reader.fields[key].contents() == value


def test_the_table_of_formats_is_ggml_s() -> None:
    ours = {kind: (block_len, size_bytes) for kind, (_, block_len, size_bytes) in GGML_TYPES.items()}
    theirs = {int(kind): tuple(sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: ours[kind] for kind in theirs} == theirs
    assert all(GGML_TYPES[int(kind)][0] == kind.name for kind in gguf.GGML_QUANT_SIZES)


def test_header_reads_lists(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_token_list([b"a", "ü".encode(), b"", b"\xff"])
    writer.add_token_types([1, 2, 3, 6])
    writer.add_token_scores([0.5, -1.0, 0.0, 2.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(tmp_path / "a.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"] == ["a", "ü", "", "\udcff"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1, 2, 3, 6]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0, 0.0, 2.0]


def test_a_header_that_somebody_holds_is_read_once_until_the_file_changes(gguf_path: Path) -> None:
    header = read_header(gguf_path)
    assert read_header(gguf_path) is header
    gguf_path.write_bytes(gguf_path.read_bytes() + b"\0")
    again = read_header(gguf_path)
    assert again is not header and again.tensors == header.tensors


def test_gguf_tensors_come_as_stored(gguf_path: Path) -> None:
    weights = open_weights(gguf_path)
    gate, down = weights.tensor("blk.1.ffn_gate.weight"), weights.tensor("blk.1.ffn_down.weight")
    assert isinstance(gate, QuantTensor)
    assert (gate.kind, gate.shape) == ("Q4_0", (128, 64))
    assert isinstance(down, torch.Tensor)
    assert (down.dtype, down.shape) == (torch.bfloat16, (64, 128))
    assert open_weights(gguf_path).tensor("blk.0.attn_v.weight").dtype == torch.float16


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_query_and_key_rows_come_in_half_split_order(kind: str, tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=2, kinds={"": kind})
    config = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    trained = tiny_tensors(config, seed=2)
    for ours, theirs, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        want = trained[f"model.layers.0.self_attn.{theirs}.weight"]
        assert not np.array_equal(interleaved(want.numpy(), heads), want.numpy())
        got = open_weights(path).tensor(f"blk.0.{ours}.weight")
        got = got.dequantize() if isinstance(got, QuantTensor) else got
        assert (got - want).abs().max() <= (0 if kind == "F32" else 0.02)


def bytes_in_memory(path: Path) -> int:
    """Of the file, in this process, by way of mappings."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split()
        if not field.endswith(":"):
            is_ours = line.endswith(str(path))
        elif field == "Rss:" and is_ours:
            found += int(values[0]) << 10
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_what_was_read_leaves_memory_and_can_be_read_again(form: str, tmp_path: Path) -> None:
    if form == "gguf":
        file = path = make_tiny_gguf(tmp_path / "big.gguf", seed=0, hidden_size=256)
    else:
        path = make_tiny_model(tmp_path / "big", seed=0, hidden_size=256)
        file = path / "model.safetensors"
    weights = open_weights(path)
    names = weights.names()
    before = {name: weights.tensor(name).clone() for name in names}  # type: ignore[union-attr]
    held = weights.tensor(names[0])
    was = bytes_in_memory(file)
    assert was > file.stat().st_size // 2
    del held
    weights.release()
    assert bytes_in_memory(file) < was // 4
    for name, tensor in before.items():
        assert torch.equal(weights.tensor(name), tensor)  # type: ignore[arg-type]
    held = weights.tensor(names[0])
    weights.release()
    assert torch.equal(held, before[names[0]])  # type: ignore[arg-type]


def test_a_folder_s_config_and_tensors(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    weights = open_weights(folder)
    assert weights.config.eos_ids == (258, 256)
    assert (weights.config.num_heads, weights.config.num_kv_heads, weights.config.head_dim) == (4, 2, 16)
    assert weights.tensor("model.norm.weight").shape == (64,)
    assert "lm_head.weight" in weights.names()


def test_a_tied_model_s_copy_of_the_embedding_is_ignored(folder: Path) -> None:
    change(folder, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_weights(folder).names()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not served; served are llama, mistral, mixtral, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served; served are silu, gelu_pytorch_tanh"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope scaling 'dynamic' is not served; served are default, linear"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope scaling 'longrope': short_factor is None; it must be a list",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}},
            r"rope scaling 'longrope': long_factor is \[0.0\]; it must be a list of numbers above 0",
        ),
        ({"rope_scaling": {"full_attention": {}}}, "rope parameters by layer type are not served"),
        (
            {"model_type": "gemma3_text", "rope_scaling": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope scaling 'yarn' of layers with a window is not served",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention is set: only causal",
        ),
        ({"model_type": "gemma2", "sliding_window": 8, "sliding_window_pattern": "x"}, "sliding_window_pattern is 'x'"),
        ({"model_type": "llama4_text"}, "'llama4_text' is not served; its layers attend within chunks of the text"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling is 0; it must be above 0"),
        ({"model_type": "granite", "residual_multiplier": "1"}, "residual_multiplier is '1'; it must be a number"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers must be a list of 2 numbers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' needs factor, a number, and has None"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 0.7}},
            "'yarn' with mscale 0.7 but mscale_all_dim 0; give both or none",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be above 0 and at most 1"),
        ({"partial_rotary_factor": 0.2}, "rope over 3 of 16 dimensions; it needs an even number"),
        ({"partial_rotary_factor": 0.01}, "rope over 0 of 16 dimensions; it needs an even number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; it must be one integer"),
        ({"num_attention_heads": 3}, "3 query heads cannot share 2 key/value heads evenly"),
        ({"head_dim": 15}, "head_dim is 15; rope needs an even number"),
        ({"num_hidden_layers": 0}, "num_layers is 0; it must be at least 1"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(folder: Path, fields: dict[str, Any], message: str) -> None:
    change(folder, **fields)
    with pytest.raises(Unsupported, match=message):
        open_weights(folder)


def test_paths_that_hold_no_model_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no model at .*/nothing: it must be a .gguf file, or a folder"):
        open_weights(tmp_path / "nothing")
    with pytest.raises(UnknownModel, match=r"config.json cannot be read"):
        open_weights(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnknownModel, match=r"has no \*.safetensors file; its pytorch_model.bin is not read"):
        open_weights(folder)
    (folder / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(UnknownModel, match=r"cannot be read as safetensors: .*; fetch it again"):
        open_weights(folder)


def test_an_index_that_names_a_file_outside_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(UnknownModel, match=r"names ../model.safetensors, which is not in the folder"):
        open_weights(folder)


def test_integer_tensors_are_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Unsupported, match=r"model.norm.weight is of torch.int8; read are float32"):
        open_weights(folder).tensor("model.norm.weight")


def test_other_architectures_and_experts_of_gguf_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(Unsupported, match="architecture 'mamba' is not served; served are llama, qwen2, qwen3"):
        open_weights(tmp_path / "mamba.gguf")
    for more, message in (
        (
            {"family": "qwen3", "expert_count": 8},
            "8 experts of qwen3; only llama, qwen2moe, qwen3moe, deepseek2 have them",
        ),
        ({"rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not served; served are none, linear, yarn"),
        ({"rope__dimension_count": 7}, "rope over 7 of 16 dimensions; it needs an even number"),
        ({"rope__dimension_count": 0}, "rope over 0 of 16 dimensions; it needs an even number"),
    ):
        path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=0, **more)
        with pytest.raises(Unsupported, match=message):
            open_weights(path)


def test_a_file_cut_short_anywhere_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    whole = gguf_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, 2000, 97), len(whole) // 2, len(whole) - 33]:
        cut.write_bytes(whole[:size])
        with pytest.raises(UnknownModel, match=r"ends at byte .*fetch it again"):
            open_weights(cut)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UnknownModel, match=r"is not a GGUF file: it starts with b'PK"):
        open_weights(path)
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(Unsupported, match="GGUF version 9; read are 2 and 3"):
        open_weights(path)
    path.write_bytes(b"")
    with pytest.raises(UnknownModel, match="cannot be read as a GGUF file"):
        open_weights(path)


def test_reading_a_header_imports_no_torch(gguf_path: Path) -> None:
    code = (
        "import sys; from phloem.runtime.weights import read_header;"
        "read_header(sys.argv[1]); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(gguf_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=gguf_path.parent)
    assert done.stdout == "False\n"
