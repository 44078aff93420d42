"""The same model in Hugging Face transformers, float32, whose logits are the reference.

A GGUF file is read here with ggml's own Python package and name map: no line is shared with the runtime.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.constants import MODEL_ARCH
from gguf.tensor_mapping import get_tensor_name_map

ARCHES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3, "gemma3": MODEL_ARCH.GEMMA3}
GEMMA3_LOCAL_THETA = 10000.0  # which its files do not say


def hf_from_folder(path: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


class _Reader(gguf.GGUFReader):
    """Reads from a plain array over the mapped file: numpy's own kind for such files makes each slice slow."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


def hf_from_gguf(path: Path) -> torch.nn.Module:
    reader = _Reader(path)

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    arch = field("general.architecture")
    heads = field(f"{arch}.attention.head_count")
    kv_heads = field(f"{arch}.attention.head_count_kv", heads)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rope = {"rope_type": "default", "rope_theta": field(f"{arch}.rope.freq_base", 10000.0)}
    own: dict[str, Any] = {"rope_parameters": rope}
    if key_length := field(f"{arch}.attention.key_length"):
        own["head_dim"] = key_length
    if arch == "gemma3":
        local = {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_THETA}
        own["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
        own |= {"sliding_window": field(f"{arch}.attention.sliding_window"), "query_pre_attn_scalar": key_length}
    config = transformers.AutoConfig.for_model(
        "gemma3_text" if arch == "gemma3" else arch,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=field(f"{arch}.embedding_length"),
        intermediate_size=field(f"{arch}.feed_forward_length"),
        num_hidden_layers=field(f"{arch}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field(f"{arch}.context_length"),
        rms_norm_eps=field(f"{arch}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensors,
        **own,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = get_tensor_name_map(ARCHES[arch], config.num_hidden_layers)
    state = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        tensor = tensors.get(f"{names.get_name(stem)}.{suffix}")
        if tensor is None:
            assert name == "lm_head.weight", name
            tensor = tensors["token_embd.weight"]
        weight = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            weight = _half_split(weight, heads if stem.endswith("q_proj") else kv_heads)
        if arch == "gemma3" and stem.endswith("norm"):
            weight -= 1.0  # which llama.cpp's converter adds
        state[name] = torch.from_numpy(weight)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if arch == "gemma3":  # a buffer, which the meta device leaves without a value
        embedding = model.model.embed_tokens
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    return model.eval()


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of what llama.cpp's converter does to query and key rows."""
    dim = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, dim, 2, *weight.shape[1:]).swapaxes(2, 1).reshape(weight.shape)


@torch.no_grad()
def hf_logits(model: torch.nn.Module, token_ids: np.ndarray) -> torch.Tensor:
    """float32 [T, V] of one sequence, all positions at once."""
    return model(torch.from_numpy(token_ids.astype(np.int64)).unsqueeze(0), use_cache=False).logits[0]


@torch.no_grad()
def hf_hidden(model: torch.nn.Module, token_ids: np.ndarray) -> torch.Tensor:
    """The last hidden states of one sequence, float32 [T, C], after the final norm: what AutoModel returns."""
    given = torch.from_numpy(token_ids.astype(np.int64)).unsqueeze(0)
    return model.model(given, use_cache=False).last_hidden_state[0]


def pooled_vector(hidden: torch.Tensor, *, pooling: str) -> np.ndarray:
    """The embedding of one sequence's last hidden states by ``pooling`` (last or mean), float32 [C] of length 1."""
    pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
    return (pooled / pooled.norm()).numpy()
