"""A GGUF file's config and tokenizer as a Hugging Face folder has them: config.json and the tokenizer's two files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from ...protocol.errors import UnknownModel, Unsupported
from ..tokenizer.pretokenizers import pre_tokenizer
from ..weights.gguf_header import read_header
from ..weights.model_config import Llama3Rope, ModelConfig

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def hf_config(config: ModelConfig, source: str) -> dict[str, Any]:
    """The contents of config.json. Raises Unsupported for a family or a rope that is not translated."""
    if config.family not in FAMILIES:
        raise Unsupported(
            f"{source}: a folder of a {config.family} GGUF file is not written; {', '.join(FAMILIES)} are. Give "
            "--out FILE.gguf, or the model's folder as the source"
        )
    rope: dict[str, Any] | None = None
    if isinstance(config.rope_scaling, Llama3Rope):
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    elif config.rope_scaling is not None or config.rotary != config.head_dim or any(config.layer_windows):
        raise Unsupported(f"{source}: its rope or its windows are not translated; give --out FILE.gguf")
    return {
        "architectures": [FAMILIES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.qkv_bias and config.family != "qwen2",
        "bos_token_id": None if config.bos_id is None else int(config.bos_id),
        "eos_token_id": [int(id_) for id_ in config.eos_ids],
    }


def write_tokenizer(source: Path, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level vocabulary. Raises Unsupported for another kind."""
    data = read_header(source).metadata
    kind = data.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise Unsupported(
            f"{source}: a tokenizer.json of a {kind!r} vocabulary is not written; only of 'gpt2', byte-level BPE. Give "
            "--out FILE.gguf, or the model's folder as the source"
        )
    tokens, merges = data.get("tokenizer.ggml.tokens"), data.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise UnknownModel(f"{source} has no tokenizer.ggml.tokens or no tokenizer.ggml.merges; fetch it again")
    types = np.asarray(data.get("tokenizer.ggml.token_type", np.ones(len(tokens))))
    pre = pre_tokenizer(str(data.get("tokenizer.ggml.pre", "default")), source=str(source))
    added = [int(i) for i in np.flatnonzero(np.isin(types, (_CONTROL, _USER_DEFINED)))]
    vocab = {text: i for i, text in enumerate(tokens)}
    pairs = [tuple(line.split(" ", 1)) for line in merges]
    known = [pair for pair in pairs if len(pair) == 2 and pair[0] in vocab and pair[1] in vocab]
    made = Tokenizer(models.BPE(vocab, [p for p in known if "".join(p) in vocab], ignore_merges=pre.ignore_merges))
    normalizer = pre.normalizer()
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre.build()
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(tokens[i], normalized=False, special=bool(types[i] == _CONTROL)) for i in added])
    made.save(str(folder / "tokenizer.json"))

    def named(role: str) -> str | None:
        token_id = data.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "add_bos_token": bool(data.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
        "clean_up_tokenization_spaces": False,
    }
    template = data.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")
