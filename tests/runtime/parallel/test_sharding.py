"""Shares: together they are the whole, each rank reads its own bytes alone, and what cannot be split says why."""

from pathlib import Path

import msgspec
import pytest
import torch
from phloem.protocol.errors import InvalidParams, UnknownModel, Unsupported
from phloem.runtime.models.names import TensorNames
from phloem.runtime.parallel.sharding import SharedFile, even_parts, piece_len_of, share_of
from phloem.runtime.quant import QuantTensor
from phloem.runtime.weights import open_weights
from phloem.runtime.weights.model_config import ModelConfig
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from phloem.tests.runtime.weights.quantized import awq, quantized_folder, random_numbers

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def config(**changes: object) -> ModelConfig:
    given = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_positions": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    return ModelConfig(**(given | changes))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 9])
def test_the_shares_are_the_whole_and_each_head_has_its_key_value_head(size: int) -> None:
    whole = config()
    shares = [share_of(whole, rank=rank, size=size) for rank in range(size)]
    for name, count in (("heads", 9), ("inner", 1536), ("vocab", 1000)):
        assert [i for share in shares for i in getattr(share, name)] == list(range(count)), name
    assert sorted({head for share in shares for head in share.kv_heads}) == [0, 1, 2]
    for share in shares:
        assert [head // 3 for head in share.heads] == [
            head for head in share.kv_heads for _ in range(len(share.heads) // len(share.kv_heads))
        ]
        local = share.local_config()
        assert local.num_heads == len(share.heads) and local.vocab_size == len(share.vocab)
        assert share.vocab.start % 32 == 0 and share.inner.start % 32 == 0


def test_parts_differ_by_one_at_most() -> None:
    assert even_parts(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 10, "tensor_parallel=10: the model has 9 query heads, 3 for each of 3 key/value heads; at most 9"),
        ({"intermediate_size": 96}, 4, "96 inner dimensions of the MLP, 3 pieces of 32; at most 3 ranks"),
        ({"vocab_size": 33}, 3, "33 tokens of the vocabulary, 2 pieces of 32; at most 2"),
        ({"whole_qk_norm": True}, 2, "this llama model has one norm over all heads, which are not split"),
        ({"family": "gpt2", "transposed": True}, 2, "this gpt2 model has matrices stored as"),
    ],
)
def test_what_cannot_be_split_says_why(changes: dict[str, object], size: int, message: str) -> None:
    with pytest.raises((InvalidParams, Unsupported), match=message):
        share_of(config(**changes), rank=0, size=size)


def files(folder: Path) -> dict[str, Path]:
    return {
        "llama": make_tiny_model(folder / "llama", seed=1, tied=True, num_files=2),
        "qwen2": make_tiny_model(folder / "qwen2", seed=2, family="qwen2", attention_bias=True),
        "qwen3_moe": make_tiny_model(folder / "moe", seed=3, family="qwen3_moe", **MOE),
        "gguf": make_tiny_gguf(folder / "q8.gguf", seed=4, kinds={"weight": "Q8_0", "attn": "Q4_1"}, hidden_size=128),
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return files(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "gguf"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_byte_is_read_once_and_replicated_ones_by_every_rank(
    paths: dict[str, Path], kind: str, size: int
) -> None:
    file = open_weights(paths[kind])
    names = [name for name in file.names() if not name.endswith("inv_freq")]
    total = sum(stored(file.tensor(name)) for name in names)
    ranks = []
    for rank in range(size):
        shared = SharedFile(file, share_of(file.config, rank=rank, size=size, piece_len=piece_len_of(file)))
        for name in names:
            shared.tensor(name)
        ranks.append(shared)
    replicated = ranks[0].replicated_bytes
    assert all(one.replicated_bytes == replicated for one in ranks) and 0 < replicated < total / 4
    copies = 0  # of keys and values, whose heads are 2
    if size > file.config.num_kv_heads:
        names_of = TensorNames(file.config, file.format)
        keys = [
            names_of.of_layer(i, key)
            for i in range(2)
            for key in ("k", "v", "k_bias", "v_bias")
            if key in names_of.layer_keys
        ]
        copies = sum(stored(file.tensor(name)) for name in keys) // file.config.num_kv_heads
    read = sum(sum(one.read_bytes.values()) for one in ranks)
    assert read == total + (size - 1) * replicated + copies
    # Of 4 pieces in 3 parts the first has 2.
    assert max(sum(one.read_bytes.values()) for one in ranks) <= 1.5 * total / size + replicated + copies


def stored(weight: torch.Tensor | QuantTensor) -> int:
    return weight.size_bytes if isinstance(weight, QuantTensor) else weight.numel() * weight.element_size()


def test_packed_columns_are_split_at_the_borders_of_blocks(paths: dict[str, Path]) -> None:
    file = open_weights(paths["gguf"])
    name = "blk.0.ffn_down.weight"
    whole = file.tensor(name)
    assert isinstance(whole, QuantTensor) and whole.kind == "Q8_0"
    parts = [SharedFile(file, share_of(file.config, rank=rank, size=2)).tensor(name) for rank in range(2)]
    assert all(isinstance(part, QuantTensor) and part.kind == "Q8_0" for part in parts)
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), whole.dequantize())
    with pytest.raises(Unsupported, match="weights 16 to 64 of rows of Q8_0, whose blocks hold 32"):
        whole.take_columns(range(16, 64))


def test_long_blocks_stay_together(tmp_path: Path) -> None:
    file = open_weights(make_tiny_gguf(tmp_path / "k.gguf", seed=1, kinds={"down_proj": "Q6_K"}, hidden_size=256))
    assert piece_len_of(file) == 256
    share = share_of(file.config, rank=1, size=2, piece_len=256)
    assert share.inner == range(256, 512)


def test_a_tensor_without_a_rule_and_one_of_another_shape_are_refused(paths: dict[str, Path]) -> None:
    file = open_weights(paths["llama"])
    shared = SharedFile(file, share_of(file.config, rank=0, size=2))
    with pytest.raises(Unsupported, match="tensor model.layers.0.strange of a llama model has no rule"):
        shared.tensor("model.layers.0.strange")
    larger = msgspec.structs.replace(file.config, num_heads=8)
    with pytest.raises(UnknownModel, match=r"q_proj.weight is \[64, 64\], but its config asks for 128 of these"):
        SharedFile(file, share_of(larger, rank=0, size=2)).tensor("model.layers.0.self_attn.q_proj.weight")


def test_quantized_safetensors_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    stem = "model.layers.1.mlp.up_proj"
    stored = awq(*random_numbers(128, 64, 32, 4, symmetric=False))
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    file = open_weights(quantized_folder(make_tiny_model(tmp_path / "tiny", seed=0), settings, {stem: stored}))
    shared = SharedFile(file, share_of(file.config, rank=0, size=2))
    with pytest.raises(Unsupported, match="up_proj.weight is quantized in safetensors, which is not read in parts"):
        shared.tensor(f"{stem}.weight")
    assert shared.read_bytes == {}
