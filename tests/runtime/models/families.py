"""The served families: for each a tiny random model, as transformers saves it and as llama.cpp's converter writes it.

``test_families`` proves each of them and checks the README's table, which ``python -m
phloem.tests.runtime.models.families`` prints.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from phloem.tests.runtime.models.tiny import interleaved, write_byte_tokenizer
from phloem.tests.runtime.models.tiny_gguf import add_tensor, write_gguf
from safetensors.torch import load_file

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
GPT2_SIZES = {"n_embd": 64, "n_layer": 3, "n_head": HEADS, "n_positions": 256}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "partial_rotary_factor": 0.75,
}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16} | {
    "mscale": 0.9,
    "mscale_all_dim": 0.9,
}
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 16}
DEEPSEEK = LATENT | {"num_key_value_heads": HEADS, "moe_intermediate_size": 32, "num_experts_per_tok": 3}
LATENT_METADATA = {"attention.kv_lora_rank": 64, "rope.dimension_count": 8} | {
    "expert_feed_forward_length": 32,
    "expert_used_count": 3,
    "leading_dense_block_count": 1,
}
YARN_METADATA = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 10000.0} | {
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_log_multiplier": 0.09,
}


@dataclass(frozen=True)
class Family:
    """``arch``: llama.cpp's name, empty where it has none. ``metadata``: what its files say beyond the sizes.
    ``taped``: whether decode steps on a CPU run from a tape.
    """

    title: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    arch: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0  # that the converter adds to norm weights
    taped: bool = True
    adapts: bool = True  # takes low-rank adapters


FAMILIES: dict[str, Family] = {
    "gemma2": Family(
        "Gemma 2",
        "gemma2",
        {"sliding_window": 7, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "attn_logit_softcapping": 3.0}
        | {"final_logit_softcapping": 2.0},
        "gemma2",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "attention.sliding_window": 7},
        norm_offset=1.0,
    ),
    "gemma3": Family(
        "Gemma 3, text",
        "gemma3_text",
        {"sliding_window": 7, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "num_hidden_layers": 7}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        "gemma3",
        {
            "attention.sliding_window": 7,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        norm_offset=1.0,
    ),
    "phi3": Family(
        "Phi-3, Phi-4",
        "phi3",
        {"sliding_window": 9, "original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE},
        "phi3",
        {"attention.sliding_window": 9, "rope.dimension_count": 12, "rope.scaling.original_context_length": 64},
    ),
    "olmo2": Family("OLMo 2", "olmo2", {}, "olmo2", taped=False),
    "granite": Family(
        "Granite 3",
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 5.0}
        | {"tie_word_embeddings": True},
        "granite",
        {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.1, "logit_scale": 5.0},
    ),
    "smollm3": Family("SmolLM3", "smollm3", {"num_hidden_layers": 5}, "smollm3"),
    "mixtral": Family(
        "Mixtral",
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11},
        "llama",
        {"expert_count": 5, "expert_used_count": 2, "attention.sliding_window": 11},
        taped=False,
    ),
    "gpt2": Family("GPT-2", "gpt2", GPT2_SIZES, "gpt2", taped=False, adapts=False),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia", "gpt_neox", {}, "gptneox", {"rope.dimension_count": 4}, taped=False, adapts=False
    ),
    "qwen2_moe": Family(
        "Qwen2 mixtures of experts",
        "qwen2_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 64},
        "qwen2moe",
        {"expert_count": 5, "expert_used_count": 3, "expert_feed_forward_length": 32}
        | {"expert_shared_feed_forward_length": 64},
        taped=False,
    ),
    "qwen3_moe": Family(
        "Qwen3 mixtures of experts",
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
        | {"head_dim": HEAD_DIM},
        "qwen3moe",
        {"expert_count": 5, "expert_used_count": 3, "expert_feed_forward_length": 32},
        taped=False,
    ),
    "deepseek_v2": Family(
        "DeepSeek-V2",
        "deepseek_v2",
        DEEPSEEK
        | {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None}
        | {"rope_parameters": YARN},
        "deepseek2",
        LATENT_METADATA
        | YARN_METADATA
        | {"attention.key_length": 40, "attention.value_length": 16, "expert_count": 8, "expert_shared_count": 2}
        | {"expert_weights_scale": 1.7, "expert_group_count": 4, "expert_group_used_count": 2},
        taped=False,
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3",
        "deepseek_v3",
        DEEPSEEK
        | {"n_routed_experts": 12, "n_shared_experts": 1, "routed_scaling_factor": 2.3, "first_k_dense_replace": 1}
        | {"n_group": 4, "topk_group": 2, "q_lora_rank": 32, "num_nextn_predict_layers": 0}
        | {"rope_parameters": YARN},
        "deepseek2",
        LATENT_METADATA
        | YARN_METADATA
        | {"attention.key_length": 72, "attention.value_length": 64, "attention.q_lora_rank": 32}
        | {"attention.key_length_mla": 40, "attention.value_length_mla": 16, "attention.head_count_kv": 1}
        | {"expert_count": 12, "expert_shared_count": 1, "expert_weights_scale": 2.3, "expert_weights_norm": True}
        | {"expert_gating_func": 2, "expert_group_count": 4, "expert_group_used_count": 2},
        taped=False,
    ),
}


# Families that ``test_decoder`` proves, with weights that it writes by hand: title -> GGUF architecture.
BY_HAND = {"Llama 2 and 3, SmolLM2": "llama", "Mistral": "llama", "Qwen2, Qwen2.5": "qwen2", "Qwen3": "qwen3"}

# Proven by ``tests/runtime/vision``: their decoder is Llama's, and their image encoder is in no GGUF file that is read.
WITH_IMAGES = ("Idefics3, SmolVLM, with images",)


def table() -> str:
    """The README's table of families, in the order of their names."""
    rows = [f"| {title} | yes | `{arch}` | yes | yes |" for title, arch in BY_HAND.items()]
    rows += [f"| {title} | yes | none | no | yes |" for title in WITH_IMAGES]
    for family in FAMILIES.values():
        adapts, taped = ("yes" if has else "no" for has in (family.adapts, family.taped))
        rows.append(f"| {family.title} | yes | `{family.arch}` | {adapts} | {taped} |")
    head = ["| family | safetensors | GGUF architecture | LoRA | CPU tape |", "|---|---|---|---|---|"]
    return "\n".join([*head, *sorted(rows)])


def make_family(folder: Path, family: Family, *, seed: int = 0) -> Path:
    """A folder that transformers saved, with random weights that make tokens differ and norms matter."""
    config = transformers.AutoConfig.for_model(family.model_type, **_sizes(family.model_type) | dict(family.config))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=rng)
            if weight.ndim == 1:
                is_norm = any(part in name for part in ("norm", "ln_")) and name.endswith("weight")
                weight.copy_((1.0 - family.norm_offset if is_norm else 0.0) + 0.2 * noise)
            else:
                width = weight.shape[0 if family.model_type == "gpt2" else -1]
                is_table = any(part in name for part in ("embed", "wte", "wpe"))
                weight.copy_(noise * (1.0 / HEADS if is_table else 2.0 / width**0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=rng))
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def make_family_gguf(path: Path, folder: Path, family: Family, *, kind: str = "F32") -> Path:
    """The folder's model as llama.cpp's converter writes it, its matrices of format ``kind``."""
    config = transformers.AutoConfig.from_pretrained(folder)
    state = {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
    }
    if family.arch == "gpt2":
        metadata |= {
            "feed_forward_length": 4 * config.n_embd,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    elif family.arch == "gptneox":
        metadata |= {"feed_forward_length": SIZES["intermediate_size"], "use_parallel_residual": True}
        metadata |= {"attention.layer_norm_epsilon": config.layer_norm_eps, "rope.freq_base": 10000.0}
    else:
        metadata |= {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM,
            "rope.freq_base": config.rope_parameters.get("rope_theta", 0.0),
        }
    metadata |= family.metadata
    with write_gguf(path, family.arch, metadata) as writer:
        if family.model_type == "phi3":
            for name in ("short", "long"):
                factors = np.array(LONG_ROPE[f"{name}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)
        names = gguf.get_tensor_name_map(_arch(family.arch), config.num_hidden_layers)
        stacked = _stacked(state)
        if "attention.key_length_mla" in family.metadata:
            stacked = _split_latent_products(stacked, LATENT["qk_nope_head_dim"], LATENT["v_head_dim"])
        for name, weight in stacked.items():
            stem, _, suffix = name.replace("e_score_correction_bias", "e_score_correction.bias").rpartition(".")
            found = names.get_name(stem)
            assert found is not None, name
            if found.endswith("norm") and suffix == "weight":
                weight = weight + family.norm_offset
            if family.arch in ("llama", "granite", "smollm3") and stem.endswith(("q_proj", "k_proj")):
                weight = interleaved(weight, HEADS if stem.endswith("q_proj") else KV_HEADS)
            if family.arch == "gpt2" and weight.ndim == 2 and ".h." in name:
                weight = weight.T  # transformers stores [inputs, outputs]
            if stem.endswith("query_key_value"):
                by_head = weight.reshape(HEADS, 3, HEAD_DIM, *weight.shape[1:])
                weight = by_head.swapaxes(0, 1).reshape(weight.shape)
            if stem.endswith("shared_expert_gate"):
                weight = weight[0]
            # A router keeps its floats in llama.cpp's files.
            add_tensor(writer, f"{found}.{suffix}", weight, "F32" if weight.ndim == 1 or "gate_inp" in found else kind)
    return path


def _sizes(model_type: str) -> dict[str, Any]:
    absent = {"gpt2": ("num_key_value_heads", "intermediate_size"), "gpt_neox": ("num_key_value_heads",)}
    return {key: size for key, size in SIZES.items() if key not in absent.get(model_type, ())}


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, arch_name in gguf.MODEL_ARCH_NAMES.items() if arch_name == name)


def _stacked(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A layer's experts in one tensor for each part, under the names that the name map knows."""
    parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    found: dict[str, Any] = {}
    for name, weight in state.items():
        before, experts, after = name.partition(".experts.")
        if not experts:
            found[name] = weight
            continue
        expert, part, _ = after.split(".")
        layer = before.rpartition(".")[0]
        stack = found.setdefault(f"{layer}.mlp.experts.{parts.get(part, part)}.weight", {})
        stack[int(expert)] = weight
    return {
        name: np.stack([part for _, part in sorted(each.items())]) if isinstance(each, dict) else each
        for name, each in found.items()
    }


def _split_latent_products(state: dict[str, np.ndarray], keys: int, values: int) -> dict[str, np.ndarray]:
    """``kv_b_proj`` as newer files have it: keys [H, latent, keys], values [H, values, latent]."""
    found = {}
    for name, weight in state.items():
        if "kv_b_proj" not in name:
            found[name] = weight
            continue
        by_head = weight.reshape(HEADS, keys + values, -1)
        found[name.replace("kv_b", "k_b")] = by_head[:, :keys].swapaxes(1, 2)
        found[name.replace("kv_b", "v_b")] = by_head[:, keys:]
    return found


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
