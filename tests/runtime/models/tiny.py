"""Tiny random models on disk, with a byte tokenizer: a whole engine runs on one in milliseconds a step.

They are not trained: their tokens are noise, but the same noise for the same seed, and the logits have no ties.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

BYTE_TOKENS = 256
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
VOCAB_SIZE = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    seed: int,
    vocab_size: int = VOCAB_SIZE,
    family: str = "llama",
    num_layers: int = 2,
    hidden_size: int = 64,
    context_length: int = 512,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_positions: int = 2048,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    num_files: int = 1,
    **extra: Any,
) -> Path:
    """Write config.json, safetensors and tokenizer files into ``folder``; ``extra`` goes into config.json as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[
                family
            ]
        ],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        **extra,
    }
    config["architectures"] = [config["architectures"][0] + "ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(config, seed=seed).items()}
    _save(folder, tensors, num_files)
    write_byte_tokenizer(folder)
    return folder


def tiny_tensors(config: dict[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face names, for a ``config.json``."""
    rng = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_len, kv_len = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    found: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        found[name] = torch.randn(rows, columns, generator=rng) * (gain / columns**0.5)

    def vector(name: str, length: int, mean: float) -> None:
        found[name] = mean + 0.1 * torch.randn(length, generator=rng)

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=hidden**0.5)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, gain=2.0)
    vector("model.norm.weight", hidden, 1.0)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        vector(at + "input_layernorm.weight", hidden, 1.0)
        vector(at + "post_attention_layernorm.weight", hidden, 1.0)
        blocks = ["mlp"]
        if family == "qwen3_moe":
            blocks = [f"mlp.experts.{expert}" for expert in range(config["num_experts"])]
            inner = config["moe_intermediate_size"]
            matrix(f"{at}mlp.gate.weight", config["num_experts"], hidden, gain=2.0)
        for part, rows, columns in (
            ("self_attn.q_proj", q_len, hidden),
            ("self_attn.k_proj", kv_len, hidden),
            ("self_attn.v_proj", kv_len, hidden),
            ("self_attn.o_proj", hidden, q_len),
            *((f"{block}.gate_proj", inner, hidden) for block in blocks),
            *((f"{block}.up_proj", inner, hidden) for block in blocks),
            *((f"{block}.down_proj", hidden, inner) for block in blocks),
        ):
            matrix(f"{at}{part}.weight", rows, columns, gain=2.0)
            attention = config.get("attention_bias", False) or (family == "qwen2" and "o_proj" not in part)
            if attention if "self_attn" in part else config.get("mlp_bias", False):
                vector(f"{at}{part}.bias", rows, 0.0)
        if family in ("qwen3", "qwen3_moe"):
            vector(at + "self_attn.q_norm.weight", head_dim, 1.0)
            vector(at + "self_attn.k_norm.weight", head_dim, 1.0)
    return found


def write_byte_tokenizer(
    folder: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    more_specials: tuple[str, ...] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """tokenizer.json and tokenizer_config.json: token b is the byte b, then three special tokens and more, and ChatML.

    Further tokens can be drawn, but no text is encoded to them.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    names |= {f"[{id_}]": id_ for id_ in range(VOCAB_SIZE + len(more_specials), vocab_size)}
    specials = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
    specials |= {text: VOCAB_SIZE + i for i, text in enumerate(more_specials)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id_, "content": text, **plain} for text, id_ in specials.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": names, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "model_max_length": 2048,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def make_tiny_gguf(
    path: Path,
    *,
    seed: int,
    family: str = "llama",
    kinds: dict[str, str] | None = None,
    tied: bool = True,
    rope_factors: np.ndarray | None = None,
    hidden_size: int = 64,
    context_length: int = 512,
    num_layers: int = 2,
    **metadata: Any,
) -> Path:
    """A GGUF file as llama.cpp's converter would write it. ``kinds``: the format of tensors whose name holds the key,
    the last match wins, F32 without; ``metadata``: further keys of the architecture.
    """
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "tie_word_embeddings": tied,
    }
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(num_layers)
    writer.add_context_length(context_length)
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(2 * hidden_size)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(hidden_size // 4)
    writer.add_value_length(hidden_size // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        writer.add_key_value(
            f"{family}.{key.replace('__', '.')}",
            value,
            {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}[
                type(value)
            ],
        )
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), num_layers)
    for name, tensor in tiny_tensors(config, seed=seed).items():
        stem, _, suffix = name.rpartition(".")
        weight = tensor.numpy()
        if family == "llama" and stem.endswith(("q_proj", "k_proj")):
            weight = interleaved(weight, 4 if stem.endswith("q_proj") else 2)
        kind = "F32"
        if weight.ndim > 1:
            for key, wanted in (kinds or {}).items():
                kind = wanted if key in name else kind
        _add(writer, f"{names.get_name(stem)}.{suffix}", weight, kind, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp stores Llama's: the two halves of a head interleaved."""
    half = weight.shape[0] // num_heads // 2
    return np.ascontiguousarray(
        weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _add(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, kind: str, seed: int) -> None:
    ggml_type = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        # ggml's Python cannot quantize to K blocks, but any bytes with small scales are weights.
        rng = np.random.default_rng(seed)
        _, size = gguf.GGML_QUANT_SIZES[ggml_type]
        data = rng.integers(0, 256, (weight.shape[0], weight.shape[1] // 256, size), dtype=np.uint8)
        for start in (208,) if kind == "Q6_K" else (0, 2):
            step = 2e-4 if kind == "Q6_K" or start == 0 else 1e-3
            data[:, :, start : start + 2] = np.full((*data.shape[:2], 1), step, dtype=np.float16).view(np.uint8)
        writer.add_tensor(name, data.reshape(weight.shape[0], -1), raw_dtype=ggml_type)
    else:
        writer.add_tensor(name, gguf.quants.quantize(weight, ggml_type), raw_dtype=ggml_type)


def _save(folder: Path, tensors: dict[str, torch.Tensor], num_files: int) -> None:
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    homes = {name: f"model-{i % num_files + 1:05}-of-{num_files:05}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(homes.values()):
        part = {name: tensor for name, tensor in tensors.items() if homes[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
