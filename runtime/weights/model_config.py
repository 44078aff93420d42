"""A model's config: sizes, norms, rope, biases, windows."""

import math
from typing import Any, Literal

import msgspec

from ...protocol.errors import Unsupported
from .config_parts import Latent, Routing
from .config_reader import ConfigReader
from .damage import shown
from .deepseek import deepseek_of_gguf, deepseek_of_hf, yarn_growth
from .vision_config import VISION_TYPES, text_config

MAX_BLOCKS = 100_000  # feed-forward blocks of all layers: one each, or its experts
# GGUF's tensors of factors by frequency: Llama 3's, then the two of LongRoPE.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
Activation = Literal["silu", "gelu_tanh", "gelu"]


class LinearRope(msgspec.Struct, frozen=True, tag="linear"):
    """Every frequency divided by ``factor``."""

    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, tag="llama3"):
    """Low frequencies are divided by ``factor``, high ones are kept, and those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnRope(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (Peng et al., 2023). ``attention_factor`` 0 means ``0.1 ln(factor) + 1``."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True


class FactorsRope(msgspec.Struct, frozen=True, tag="factors"):
    """Each frequency divided by its own factor, as GGUF files store Llama 3's scaling."""

    factors: tuple[float, ...]


class LongRope(msgspec.Struct, frozen=True, tag="longrope"):
    """LongRoPE (Ding et al., 2024): each frequency divided by its own factor; rotated vectors grow by ``magnitude``.

    ``long`` serves a table of more than ``original_max_positions`` positions, ``short`` one of up to as many. An engine
    uses one of them for all its texts, since cached keys would be wrong for the other.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    magnitude: float


RopeScaling = LinearRope | Llama3Rope | YarnRope | FactorsRope | LongRope


class ModelConfig(msgspec.Struct, frozen=True):
    """One decoder-only transformer. ``layer_windows``: each layer's sliding window in tokens, 0 for none.

    With ``num_experts`` the feed-forward blocks are mixtures of experts, each of ``expert_size`` inner dimensions. A
    token takes the ``experts_per_token`` likeliest, weighted by probability, normalised to 1 if ``normalised_experts``.
    With ``shared_expert_size`` every token also goes through one more expert, which has a gate of its own unless not
    ``shared_expert_gated``. The first ``dense_layers`` layers have no experts. ``routing``: how experts are chosen if
    not as above.

    With ``latent`` a slot holds one vector of a layer, ``head_dim`` numbers of one head, both key and value.

    ``pre_norms`` are before attention and MLP, ``post_norms`` after them and before the residual is added.
    ``norm_offset`` is added to the file's norm weights. ``whole_qk_norm``: one norm over all heads of the queries, one
    over those of the keys. With ``layer_norm`` norms subtract the mean and have biases. With ``parallel_residual``
    attention and MLP read the same residual. An MLP that is not ``gated`` is ``down(activation(up(x)))``.

    Of the file's tensors: ``fused_qkv`` is one tensor, with the rows of each head together if ``qkv_by_head``;
    ``fused_gate_up`` is one; matrices are ``transposed``, [inputs, outputs].
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float  # of all norms, also of those that subtract the mean
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qkv_by_head: bool = False
    transposed: bool = False
    layer_norm: bool = False
    parallel_residual: bool = False
    gated: bool = True
    learned_positions: bool = False  # a table that is added to the embedding
    activation: Activation = "silu"
    rotary_dim: int | None = None  # dimensions of a head that rope rotates; None: all
    local_rope_theta: float = 0.0  # of layers with a window, whose rope is not scaled; 0: theirs is that of the others
    unrotated_layers: tuple[int, ...] = ()  # without rope
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0
    attention_scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: none
    logits_cap: float = 0.0  # as attention_cap
    layer_windows: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalised_experts: bool = False
    shared_expert_size: int = 0
    shared_expert_gated: bool = True
    dense_layers: int = 0
    routing: Routing | None = None
    latent: Latent | None = None
    prediction_layers: int = 0  # layers of the file after the last, which predict further tokens and are not read
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size"):
            if getattr(self, field) < 1:
                raise Unsupported(f"model config: {field} is {getattr(self, field)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise Unsupported(
                f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise Unsupported(f"model config: head_dim is {self.head_dim}; rope needs an even number")
        if not 0 < self.rotary <= self.head_dim or self.rotary % 2:
            raise Unsupported(
                f"model config: rope over {self.rotary} of {self.head_dim} dimensions; it needs an even number above 0"
            )
        if self.qkv_by_head and self.num_heads != self.num_kv_heads:
            raise Unsupported(
                f"model config: {self.num_heads} query and {self.num_kv_heads} key/value heads in a projection by "
                "head, which needs as many of both"
            )
        if self.num_experts and self.activation != "silu":
            raise Unsupported(f"model config: experts with {self.activation}; only silu is served")
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise Unsupported(
                f"model config: {self.experts_per_token} experts a token; it must be between 1 and {self.num_experts}"
            )
        if self.num_experts and self.expert_size < 1:
            raise Unsupported(f"model config: expert_size is {self.expert_size}; it must be at least 1")
        if self.routing is not None:
            self.routing.check(self.num_experts, self.experts_per_token)
        if self.num_layers * max(1, self.num_experts) > MAX_BLOCKS:
            raise Unsupported(
                f"model config: {self.num_layers:,} layers of {self.num_experts:,} experts; in all there may be "
                f"{MAX_BLOCKS:,} experts"
            )
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise Unsupported(f"model config: {len(self.layer_windows)} layer windows for {self.num_layers} layers")

    def window_of(self, layer: int) -> int:
        return self.layer_windows[layer] if self.layer_windows else 0

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.dense_layers

    @property
    def slot_vectors(self) -> int:
        """Vectors that a slot holds for a layer and head: a key and a value, or one that is both."""
        return 1 if self.latent is not None else 2

    @property
    def rotary(self) -> int:
        """The dimensions of a head that rope rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


_GPT: dict[str, Any] = {"layer_norm": True, "gated": False, "fused_qkv": True}
_GPT2 = _GPT | {"learned_positions": True}
# model_type or architecture -> our family
HF_FAMILIES = {
    **{name: name for name in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")},
    **{name: name for name in ("gemma2", "phi3", "olmo2", "granite", "smollm3")},
    **{name: name for name in ("gpt2", "gpt_neox", "deepseek_v2", "deepseek_v3")},
    "gemma3_text": "gemma3",
    **dict.fromkeys(VISION_TYPES, "idefics3"),
}
GGUF_FAMILIES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3")},
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "deepseek2": "deepseek_v2",  # and V3
}
# Families that are asked for and cannot be served, with the reason.
_REASONS = dict.fromkeys(
    ("llama4", "llama4_text"),
    "its layers attend within chunks of the text, and its queries grow with their position, which no kernel here does",
)
_WINDOWED = ("mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "gemma2", "gemma3")
_QK_NORMED = ("qwen3", "qwen3_moe", "gemma3", "olmo2")
_GEMMAS = ("gemma2", "gemma3")
_DEEPSEEKS = ("deepseek_v2", "deepseek_v3")
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6}  # every so many layers, one attends to the whole context
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GGUF_ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(("gemma2", "gemma3", "gpt2"), "gelu_tanh"),
    "gpt_neox": "gelu",
}
_GPT_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
_UNROTATED_EVERY = 4  # SmolLM3: every fourth layer has no rope
_LOCAL_ROPE_THETA = 10000.0  # Gemma 3's, which its GGUF files do not say
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}  # layers of the sizes whose scores are scaled by hidden size / heads


def config_from_hf(data: dict[str, Any], *, source: str) -> ModelConfig:
    """From the contents of a Hugging Face ``config.json``. ``source`` names the file in errors."""
    family = HF_FAMILIES.get(str(data.get("model_type")))
    if family is None:
        kind = data.get("model_type")
        why = _REASONS.get(str(kind), f"served are {', '.join(HF_FAMILIES)}")
        raise Unsupported(f"{source}: model_type {kind!r} is not served; {why}")
    if family == "idefics3":
        data = text_config(data, source=source)
    data = _common_names(data, family)
    read = ConfigReader(data, source)
    if family in _GEMMAS:
        act = data.get("hidden_activation") or data.get("hidden_act") or "gelu_pytorch_tanh"
    else:
        act = data.get("hidden_act", "silu")
    activations = _GPT_ACTIVATIONS if family in ("gpt2", "gpt_neox") else _ACTIVATIONS
    if act not in activations:
        raise Unsupported(f"{source}: hidden_act {act!r} is not served; served are {', '.join(activations)}")
    num_layers, hidden, heads = map(read.integer, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
    rope: dict[str, Any] = data.get("rope_parameters") or data.get("rope_scaling") or {}
    local_theta = 0.0
    if family == "gemma3":
        rope, local_theta = _gemma3_ropes(rope, data, source)
    elif "full_attention" in rope or "sliding_attention" in rope:
        raise Unsupported(f"{source}: rope parameters by layer type are not served")
    theta = rope.get("rope_theta", data.get("rope_theta", 10000.0))
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise Unsupported(f"{source}: partial_rotary_factor is {partial!r}; it must be above 0 and at most 1")
    max_positions = read.integer("max_position_embeddings")
    head_dim = read.integer("head_dim", 128 if family in ("qwen3", "qwen3_moe") else hidden // heads)
    attention_bias = bool(data.get("attention_bias", False))
    common: dict[str, Any] = {
        "family": family,
        "num_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": read.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": read.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": read.integer("vocab_size"),
        "max_positions": max_positions,
        "rms_norm_eps": float(data.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(theta),
        "rope_scaling": _hf_rope(rope, data, max_positions, source),
        "rotary_dim": int(head_dim * partial) if partial != 1 else None,
        "local_rope_theta": local_theta,
        "tied_embeddings": bool(data.get("tie_word_embeddings", family in (*_GEMMAS, "smollm3"))),
        "qkv_bias": attention_bias or family == "qwen2" or (family == "qwen2_moe" and bool(data.get("qkv_bias", True))),
        "output_bias": attention_bias,
        "mlp_bias": bool(data.get("mlp_bias", False)),
        "qk_norm": family in _QK_NORMED,
        "layer_windows": _hf_windows(data, family, num_layers, source),
        "activation": activations[act],
        "bos_id": data.get("bos_token_id"),
        "eos_ids": ids_of(data.get("eos_token_id")),
    }
    return ModelConfig(**common | _hf_own(read, family, num_layers, rope))


def ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's ``eos_token_id``: absent, one id, or many."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def config_from_gguf(
    data: dict[str, Any], *, source: str, tensor_names: frozenset[str], rope_factors: dict[str, tuple[float, ...]]
) -> ModelConfig:
    """From a GGUF file's metadata, and from its tensor names where the metadata is incomplete. ``rope_factors``: its
    tensors of ``ROPE_FACTORS``, by name.
    """
    arch = str(data.get("general.architecture"))
    family = GGUF_FAMILIES.get(arch)
    if family is None:
        why = _REASONS.get(arch, f"served are {', '.join(GGUF_FAMILIES)}")
        raise Unsupported(f"{source}: architecture {arch!r} is not served; {why}")
    own = {key.removeprefix(f"{arch}."): value for key, value in data.items() if key.startswith(f"{arch}.")}
    read = ConfigReader(own, f"{source}: {arch}")
    if own.get("expert_count", 0) and family not in ("llama", "qwen2_moe", "qwen3_moe", *_DEEPSEEKS):
        raise Unsupported(
            f"{source}: {own['expert_count']} experts of {arch}; only llama, qwen2moe, qwen3moe, deepseek2 have them"
        )
    if family == "llama" and own.get("expert_count", 0):
        family = "mixtral"
    if family == "deepseek_v2" and own.get("expert_gating_func") == 2:
        family = "deepseek_v3"
    num_layers, hidden, heads = map(read.integer, ("block_count", "embedding_length", "attention.head_count"))
    head_dim = read.integer("attention.key_length", hidden // heads)
    rotary = read.integer("rope.dimension_count", head_dim)
    tokens = data.get("tokenizer.ggml.tokens")
    vocab_size = read.integer("vocab_size", len(tokens) if tokens is not None else 0)
    max_positions = read.integer("context_length")
    window = int(own.get("attention.sliding_window", 0))
    eos = data.get("tokenizer.ggml.eos_token_id")
    common: dict[str, Any] = {
        "family": family,
        "num_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_heads": heads,
        "num_kv_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_positions": max_positions,
        "rms_norm_eps": float(
            own.get("attention.layer_norm_rms_epsilon", own.get("attention.layer_norm_epsilon", 1e-6))
        ),
        "rope_theta": float(own.get("rope.freq_base", 10000.0)),
        "rope_scaling": _gguf_rope(own, max_positions, rope_factors, source),
        "rotary_dim": rotary if rotary != head_dim else None,
        "tied_embeddings": "output.weight" not in tensor_names,
        "qkv_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & tensor_names),
        "output_bias": "blk.0.attn_output.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_down.bias" in tensor_names,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensor_names,
        "layer_windows": _gguf_windows(window, family, num_layers),
        "activation": _GGUF_ACTIVATIONS.get(family, "silu"),
        "bos_id": data.get("tokenizer.ggml.bos_token_id"),
        "eos_ids": ids_of(eos),
    }
    if family in _DEEPSEEKS:
        return ModelConfig(**common | deepseek_of_gguf(read, family, tensor_names))
    return ModelConfig(**common | _gguf_own(read, family, num_layers, head_dim))


def _hf_own(read: ConfigReader, family: str, num_layers: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The fields that only this family has."""
    data = read.data
    match family:
        case "deepseek_v2" | "deepseek_v3":
            return deepseek_of_hf(read, family, rope)
        case "qwen3_moe":
            return _hf_experts(read)
        case "qwen2_moe":
            return _hf_experts(read) | {"shared_expert_size": read.integer("shared_expert_intermediate_size")}
        case "mixtral":
            return {
                "num_experts": read.integer("num_local_experts"),
                "experts_per_token": read.integer("num_experts_per_tok"),
                "expert_size": read.integer("intermediate_size"),
                "normalised_experts": True,
            }
        case "gemma2" | "gemma3":
            read.refuse("use_bidirectional_attention", "only causal attention is served")
            return {
                "post_norms": True,
                "norm_offset": 1.0,
                "embedding_scale": read.integer("hidden_size") ** 0.5,
                "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
                "attention_cap": read.number("attn_logit_softcapping", 0),
                "logits_cap": read.number("final_logit_softcapping", 0),
            }
        case "phi3":
            return {"fused_qkv": True, "fused_gate_up": True}
        case "gpt2":
            read.refuse("scale_attn_by_inverse_layer_idx", "scores scaled by layer are not served")
            read.refuse("add_cross_attention", "only decoders are served")
            if not data.get("scale_attn_weights", True):
                raise Unsupported(f"{read.source}: scale_attn_weights false is not served; only true is")
            return _GPT2 | {"transposed": True, "unrotated_layers": tuple(range(num_layers))}
        case "gpt_neox":
            parallel = bool(data.get("use_parallel_residual", True))
            return _GPT | {"parallel_residual": parallel, "qkv_by_head": True}
        case "olmo2":
            return {"whole_qk_norm": True, "pre_norms": False, "post_norms": True}
        case "granite":
            return {
                "embedding_scale": read.number("embedding_multiplier", 1),
                "residual_scale": read.number("residual_multiplier", 1),
                "attention_scale": read.number("attention_multiplier", 1),
                "logits_scale": 1 / read.number("logits_scaling", 1),
            }
        case "smollm3":
            rotated = data.get("no_rope_layers")  # 1: with rope
            if rotated is None:
                every = max(1, read.integer("no_rope_layer_interval", _UNROTATED_EVERY))
                rotated = [(layer + 1) % every for layer in range(num_layers)]
            if not isinstance(rotated, list) or len(rotated) != num_layers:
                raise Unsupported(f"{read.source}: no_rope_layers must be a list of {num_layers} numbers")
            return {"unrotated_layers": tuple(layer for layer, has_rope in enumerate(rotated) if not has_rope)}
    return {}


def _hf_experts(read: ConfigReader) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    read.refuse("mlp_only_layers", "some layers without experts are not served; all layers must have them")
    if (step := read.integer("decoder_sparse_step", 1)) != 1:
        raise Unsupported(f"{read.source}: decoder_sparse_step {step} is not served; only 1 is, experts in all layers")
    return {
        "num_experts": read.integer("num_experts", read.data.get("num_local_experts")),  # newer transformers' name
        "experts_per_token": read.integer("num_experts_per_tok"),
        "expert_size": read.integer("moe_intermediate_size"),
        "normalised_experts": bool(read.data.get("norm_topk_prob", False)),
    }


def _common_names(data: dict[str, Any], family: str) -> dict[str, Any]:
    """The config with the names and defaults that most families have."""
    if family == "gpt2":
        named = {ours: data[theirs] for ours, theirs in _GPT2_NAMES.items() if data.get(theirs) is not None}
        if isinstance(data.get("n_embd"), int):
            named.setdefault("intermediate_size", 4 * data["n_embd"])
        usual = {"hidden_act": "gelu_new", "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
        return usual | data | named | {"attention_bias": True, "mlp_bias": True}
    if family == "gpt_neox":
        usual = {
            "hidden_act": "gelu",
            "attention_bias": True,
            "partial_rotary_factor": data.get("rotary_pct", 0.25),
            "rope_theta": data.get("rotary_emb_base", 10000.0),
            "rms_norm_eps": data.get("layer_norm_eps", 1e-5),
        }
        return usual | data | {"mlp_bias": True}
    return data


def _gemma3_ropes(rope: dict[str, Any], data: dict[str, Any], source: str) -> tuple[dict[str, Any], float]:
    """The rope of layers that attend to the whole context, and the base of those with a window."""
    if not {"full_attention", "sliding_attention"} & set(rope):  # as transformers 4 wrote it
        full = {"rope_theta": data.get("rope_theta", 1e6), **rope}
        return full, float(data.get("rope_local_base_freq", _LOCAL_ROPE_THETA))
    full, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    if (kind := local.get("rope_type", "default")) != "default":
        raise Unsupported(f"{source}: rope scaling {kind!r} of layers with a window is not served; only default is")
    return {"rope_theta": 1e6, **full}, float(local.get("rope_theta", _LOCAL_ROPE_THETA))


def _hf_rope(rope: dict[str, Any], data: dict[str, Any], max_positions: int, source: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    where = f"{source}: rope scaling {kind!r}"

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise Unsupported(f"{where} needs {key}, a number, and has {value!r}")
        return float(value)

    match kind:
        case "default" | None:
            return None
        case "linear":
            return LinearRope(factor=number("factor"))
        case "llama3":
            return Llama3Rope(
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_max_positions=int(number("original_max_position_embeddings", max_positions)),
            )
        case "yarn":
            shares = [number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
            if any(shares) and not all(shares):
                raise Unsupported(
                    f"{where} with mscale {shares[0]:g} but mscale_all_dim {shares[1]:g}; give both or none"
                )
            original = number("original_max_position_embeddings", max_positions)
            factor = number("factor", max_positions / original)
            growths = [yarn_growth(factor, share) for share in shares]
            return YarnRope(
                factor=factor,
                original_max_positions=int(original),
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
                attention_factor=number("attention_factor", growths[0] / growths[1] if all(shares) else 0.0),
                truncate=bool(rope.get("truncate", True)),
            )
        case "longrope" | "su":
            trained = data.get("original_max_position_embeddings", max_positions)
            original = int(number("original_max_position_embeddings", trained))
            return LongRope(
                short=_factors(rope.get("short_factor"), f"{where}: short_factor"),
                long=_factors(rope.get("long_factor"), f"{where}: long_factor"),
                original_max_positions=original,
                magnitude=number("attention_factor", long_rope_magnitude(max_positions, original)),
            )
    raise Unsupported(f"{where} is not served; served are default, linear, llama3, yarn, longrope")


def long_rope_magnitude(max_positions: int, original: int) -> float:
    """LongRoPE's own growth of rotated vectors (Ding et al., 2024)."""
    factor = max_positions / max(original, 1)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def _factors(found: Any, where: str) -> tuple[float, ...]:
    if not isinstance(found, list) or not found or not all(isinstance(x, int | float) and x > 0 for x in found):
        raise Unsupported(f"{where} is {shown(repr(found))}; it must be a list of numbers above 0")
    return tuple(map(float, found))


def _gguf_own(read: ConfigReader, family: str, num_layers: int, head_dim: int) -> dict[str, Any]:
    """The fields that only this family has. What llama.cpp's files leave out is what its own loader takes."""
    match family:
        case "mixtral" | "qwen2_moe" | "qwen3_moe":
            experts = {
                "num_experts": read.integer("expert_count"),
                "experts_per_token": read.integer("expert_used_count"),
                "expert_size": read.integer("expert_feed_forward_length", read.integer("feed_forward_length", 0)),
                "normalised_experts": family != "qwen2_moe",
            }
            if family == "qwen2_moe":
                experts["shared_expert_size"] = read.integer("expert_shared_feed_forward_length")
            return experts
        case "gemma2" | "gemma3":
            dim = head_dim
            if num_layers == _LARGEST_GEMMAS[family]:
                dim = read.integer("embedding_length") // read.integer("attention.head_count")
            return {
                "post_norms": True,
                "embedding_scale": read.integer("embedding_length") ** 0.5,
                "attention_scale": dim**-0.5,
                "attention_cap": read.number("attn_logit_softcapping", 0),
                "logits_cap": read.number("final_logit_softcapping", 0),
                "local_rope_theta": _LOCAL_ROPE_THETA if family == "gemma3" else 0.0,
            }
        case "phi3":
            return {"fused_qkv": True, "fused_gate_up": True}
        case "gpt2":
            return _GPT2 | {"unrotated_layers": tuple(range(num_layers))}
        case "gpt_neox":
            return _GPT | {"parallel_residual": bool(read.data.get("use_parallel_residual", True))}
        case "olmo2":
            return {"whole_qk_norm": True, "pre_norms": False, "post_norms": True}
        case "granite":
            return {
                "embedding_scale": read.number("embedding_scale", 1),
                "residual_scale": read.number("residual_scale", 1),
                "attention_scale": read.number("attention.scale", head_dim**-0.5),
                "logits_scale": 1 / read.number("logit_scale", 1),
            }
        case "smollm3":
            return {"unrotated_layers": tuple(range(_UNROTATED_EVERY - 1, num_layers, _UNROTATED_EVERY))}
    return {}


def _gguf_windows(window: int, family: str, num_layers: int) -> tuple[int, ...]:
    if not window:
        return ()
    every = _WINDOW_PATTERNS.get(family, num_layers + 1)
    return tuple(window if (layer + 1) % every else 0 for layer in range(num_layers))


def _gguf_rope(
    own: dict[str, Any], max_positions: int, tensors: dict[str, tuple[float, ...]], source: str
) -> RopeScaling | None:
    kind = own.get("rope.scaling.type", "none")
    factors, short, long = (tensors.get(name) for name in ROPE_FACTORS)
    if short is not None and long is not None:
        original = int(own.get("rope.scaling.original_context_length", max_positions))
        magnitude = own.get("rope.scaling.attn_factor", long_rope_magnitude(max_positions, original))
        return LongRope(short=short, long=long, original_max_positions=original, magnitude=float(magnitude))
    if short is not None or long is not None:
        raise Unsupported(f"{source}: only one of the tensors {ROPE_FACTORS[1]} and {ROPE_FACTORS[2]}; both are needed")
    if factors is not None:
        if kind != "none":
            raise Unsupported(f"{source}: rope scaling {kind!r} together with the tensor {ROPE_FACTORS[0]}")
        return FactorsRope(factors=factors)
    factor = float(own.get("rope.scaling.factor", 1.0))
    match kind:
        case "none":
            return None
        case "linear":
            return LinearRope(factor=factor)
        case "yarn":
            return YarnRope(
                factor=factor,
                original_max_positions=int(own.get("rope.scaling.original_context_length", max_positions)),
                beta_fast=float(own.get("rope.scaling.yarn_beta_fast", 32.0)),
                beta_slow=float(own.get("rope.scaling.yarn_beta_slow", 1.0)),
                # llama.cpp scales DeepSeek's scores instead of its rotated vectors: see ``deepseek_of_gguf``.
                attention_factor=1.0 if "attention.kv_lora_rank" in own else 0.0,
            )
    raise Unsupported(f"{source}: rope scaling {kind!r} is not served; served are none, linear, yarn")


def _hf_windows(data: dict[str, Any], family: str, num_layers: int, source: str) -> tuple[int, ...]:
    window = data.get("sliding_window") or 0
    if family not in _WINDOWED or not window:
        return ()
    if family in ("mistral", "mixtral", "phi3"):
        return (window,) * num_layers
    if family in _GEMMAS:
        every = data.get("sliding_window_pattern") or _WINDOW_PATTERNS[family]
        if not isinstance(every, int) or every < 1:
            raise Unsupported(
                f"{source}: sliding_window_pattern is {shown(repr(every))}; it must be an integer above 0"
            )
        windows = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    elif not data.get("use_sliding_window", False):
        return ()
    else:
        first = data.get("max_window_layers", 28)
        windows = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    types = data.get("layer_types") or windows
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise Unsupported(f"{source}: layer_types {', '.join(sorted(unknown))} are not served")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
