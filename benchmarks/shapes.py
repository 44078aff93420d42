"""Configs of published models, to run with random weights. Speed does not depend on the values of weights."""

import json
from pathlib import Path
from typing import Any

QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
}
SHAPES = {"Qwen3-0.6B": QWEN3_0_6B, "Llama-3-8B": LLAMA_3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
_TOY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def write_shape(name: str, folder: Path, *, is_toy: bool = False) -> Path:
    """Write the shape's config and a tokenizer with its vocabulary size to ``folder``. ``is_toy``: a tiny variant."""
    from phloem.tests.runtime.models.tiny import IM_END, IM_START, write_byte_tokenizer

    config = {**SHAPES[name], "bos_token_id": IM_START, "eos_token_id": IM_END}
    if is_toy:
        config |= {key: value for key, value in _TOY.items() if key in config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_byte_tokenizer(folder, vocab_size=config["vocab_size"])
    return folder
