"""What the configs of DeepSeek-V2 and V3 say beyond those of other decoders."""

import math
from typing import Any

from ...protocol.errors import Unsupported
from .config_parts import Latent, Routing
from .config_reader import ConfigReader

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of scoring functions


def deepseek_of_hf(read: ConfigReader, family: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig`` from a config.json. ``rope``: its rope scaling."""
    for key in ("attention_bias", "mlp_bias"):
        read.refuse(key, f"biases of {family} are not served")
    if (every := read.integer("moe_layer_freq", 1)) != 1:
        raise Unsupported(f"{read.source}: moe_layer_freq is {every}; only 1 is served")
    is_v3 = family == "deepseek_v3"
    scoring, method = ("sigmoid", "noaux_tc") if is_v3 else ("softmax", "greedy")
    methods = (method,) if is_v3 else (method, "group_limited_greedy")
    if (found := read.data.get("scoring_func") or scoring) != scoring:
        raise Unsupported(f"{read.source}: scoring_func {found!r} of {family} is not served; only {scoring!r} is")
    if (method := read.data.get("topk_method") or method) not in methods:
        raise Unsupported(f"{read.source}: topk_method {method!r} is not served; served are {', '.join(methods)}")
    normalised = bool(read.data.get("norm_topk_prob", is_v3))
    if normalised and not is_v3:
        raise Unsupported(f"{read.source}: norm_topk_prob true of {family} is not served; only false is")
    has_groups = is_v3 or method == "group_limited_greedy"
    latent = Latent(
        size=read.integer("kv_lora_rank"),
        rope_dim=read.integer("qk_rope_head_dim"),
        nope_dim=read.integer("qk_nope_head_dim"),
        value_dim=read.integer("v_head_dim"),
        query_size=read.integer("q_lora_rank", 0),
        is_interleaved=bool(read.data.get("rope_interleave", True)) or not is_v3,
    )
    return _attention(latent, _growth(rope)) | {
        "num_experts": read.integer("n_routed_experts"),
        "experts_per_token": read.integer("num_experts_per_tok"),
        "expert_size": read.integer("moe_intermediate_size"),
        "normalised_experts": normalised,
        "shared_expert_size": read.integer("n_shared_experts", 0) * read.integer("moe_intermediate_size"),
        "shared_expert_gated": False,
        "dense_layers": read.integer("first_k_dense_replace", 0),
        "prediction_layers": read.integer("num_nextn_predict_layers", read.integer("num_mtp_layers", 0)),
        "routing": Routing(
            scoring="sigmoid" if is_v3 else "softmax",
            num_groups=read.integer("n_group", 1) if has_groups else 1,
            groups_taken=read.integer("topk_group", 1) if has_groups else 1,
            scale=read.number("routed_scaling_factor", 1),
            has_bias=is_v3,
        ),
    }


def deepseek_of_gguf(read: ConfigReader, family: str, tensor_names: frozenset[str]) -> dict[str, Any]:
    """Fields of ``ModelConfig`` from the metadata of llama.cpp's ``deepseek2``."""
    scoring = read.integer("expert_gating_func", _SOFTMAX)
    if scoring not in (_SOFTMAX, _SIGMOID):
        raise Unsupported(f"{read.source}: expert_gating_func {scoring} is not served; served are 1 and 2")
    rope_dim = read.integer("rope.dimension_count")
    query_dim = read.integer("attention.key_length_mla", read.data.get("attention.key_length"))
    if query_dim <= rope_dim:
        raise Unsupported(f"{read.source}: query heads of {query_dim} dimensions, of which rope rotates {rope_dim}")
    latent = Latent(
        size=read.integer("attention.kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=query_dim - rope_dim,
        value_dim=read.integer("attention.value_length_mla", read.data.get("attention.value_length")),
        query_size=read.integer("attention.q_lora_rank", 0),
        is_split="blk.0.attn_k_b.weight" in tensor_names,
    )
    factor = read.number("rope.scaling.factor", 1)
    growth = 1 + read.number("rope.scaling.yarn_log_multiplier", 0) * math.log(factor) if factor > 1 else 1.0
    return _attention(latent, growth) | {
        "num_experts": read.integer("expert_count"),
        "experts_per_token": read.integer("expert_used_count"),
        "expert_size": read.integer("expert_feed_forward_length"),
        "normalised_experts": bool(read.data.get("expert_weights_norm", False)),
        "shared_expert_size": read.integer("expert_shared_count", 0) * read.integer("expert_feed_forward_length"),
        "shared_expert_gated": False,
        "dense_layers": read.integer("leading_dense_block_count", 0),
        "routing": Routing(
            scoring="sigmoid" if scoring == _SIGMOID else "softmax",
            num_groups=read.integer("expert_group_count", 1) or 1,
            groups_taken=read.integer("expert_group_used_count", 1) or 1,
            scale=read.number("expert_weights_scale", 1),
            has_bias=any(name.endswith(".exp_probs_b.bias") for name in tensor_names),
        ),
    }


def _attention(latent: Latent, growth: float) -> dict[str, Any]:
    """``growth``: what YaRN multiplies queries and keys with, both."""
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.slot_dim,
        "rotary_dim": latent.rope_dim,
        "attention_scale": latent.query_dim**-0.5 * growth**2,
    }


def _growth(rope: dict[str, Any]) -> float:
    factor, share = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return yarn_growth(factor, share) if is_scaled and share else 1.0


def yarn_growth(factor: float, share: float = 1.0) -> float:
    """YaRN's growth of vectors for a context ``factor`` times as long (Peng et al., 2023); ``share`` of it."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0
