"""A model's config: sizes, norms, rope, biases, windows."""

from typing import Any

import msgspec

from ...protocol.errors import Unsupported
from .damage import shown

MAX_SIZE = (1 << 31) - 1  # what the formats' own 32-bit fields can hold
MAX_LAYERS = 10_000
MAX_BLOCKS = 100_000  # feed-forward blocks of all layers: one each, or its experts
_LAYER_KEYS = ("num_hidden_layers", "block_count")


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


RopeScaling = LinearRope | Llama3Rope | YarnRope | FactorsRope


class ModelConfig(msgspec.Struct, frozen=True):
    """One decoder-only transformer. ``layer_windows``: each layer's sliding window in tokens, 0 for none.

    With ``num_experts`` the feed-forward blocks are mixtures of experts, each of ``expert_size`` inner dimensions. A
    token takes the ``experts_per_token`` likeliest, weighted by probability, normalised to 1 if ``normalised_experts``.
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
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalised_experts: bool = False
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
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise Unsupported(
                f"model config: {self.experts_per_token} experts a token; it must be between 1 and {self.num_experts}"
            )
        if self.num_experts and self.expert_size < 1:
            raise Unsupported(f"model config: expert_size is {self.expert_size}; it must be at least 1")
        if self.num_layers * max(1, self.num_experts) > MAX_BLOCKS:
            raise Unsupported(
                f"model config: {self.num_layers:,} layers of {self.num_experts:,} experts; in all there may be "
                f"{MAX_BLOCKS:,} experts"
            )
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise Unsupported(f"model config: {len(self.layer_windows)} layer windows for {self.num_layers} layers")

    def window_of(self, layer: int) -> int:
        return self.layer_windows[layer] if self.layer_windows else 0


HF_FAMILIES = {name: name for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")}
_QK_NORMED = ("qwen3", "qwen3_moe")
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def config_from_hf(data: dict[str, Any], *, source: str) -> ModelConfig:
    """From the contents of a Hugging Face ``config.json``. ``source`` names the file in errors."""
    family = HF_FAMILIES.get(str(data.get("model_type")))
    if family is None:
        raise Unsupported(
            f"{source}: model_type {data.get('model_type')!r} is not served; served are {', '.join(HF_FAMILIES)}"
        )
    read = _Reader(data, source)
    read.refuse("quantization_config", "weights quantized by another tool; use the plain or a GGUF file")
    if (act := data.get("hidden_act", "silu")) != "silu":
        raise Unsupported(f"{source}: hidden_act {act!r} is not served; only silu is")
    num_layers, hidden, heads = map(read.integer, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
    rope: dict[str, Any] = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if "full_attention" in rope or "sliding_attention" in rope:
        raise Unsupported(f"{source}: rope parameters by layer type are not served")
    theta = rope.get("rope_theta", data.get("rope_theta", 10000.0))
    if (partial := rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))) != 1.0:
        raise Unsupported(f"{source}: partial_rotary_factor {partial} is not served; only 1.0 is")
    max_positions = read.integer("max_position_embeddings")
    attention_bias = bool(data.get("attention_bias", False))
    return ModelConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", 128 if family in _QK_NORMED else hidden // heads),
        vocab_size=read.integer("vocab_size"),
        max_positions=max_positions,
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=_hf_rope(rope, max_positions, source),
        tied_embeddings=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=family in _QK_NORMED,
        layer_windows=_hf_windows(data, family, num_layers, source),
        **(_hf_experts(read) if family == "qwen3_moe" else {}),
        bos_id=data.get("bos_token_id"),
        eos_ids=ids_of(data.get("eos_token_id")),
    )


def ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's ``eos_token_id``: absent, one id, or many."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def config_from_gguf(
    data: dict[str, Any], *, source: str, tensor_names: frozenset[str], rope_factors: tuple[float, ...] | None
) -> ModelConfig:
    """From a GGUF file's metadata, and from its tensor names where the metadata is incomplete."""
    arch = str(data.get("general.architecture"))
    family = GGUF_FAMILIES.get(arch)
    if family is None:
        raise Unsupported(f"{source}: architecture {arch!r} is not served; served are {', '.join(GGUF_FAMILIES)}")
    own = {key.removeprefix(f"{arch}."): value for key, value in data.items() if key.startswith(f"{arch}.")}
    read = _Reader(own, f"{source}: {arch}")
    if own.get("expert_count", 0):
        raise Unsupported(f"{source}: {own['expert_count']} experts; mixtures of experts are not served")
    num_layers, hidden, heads = map(read.integer, ("block_count", "embedding_length", "attention.head_count"))
    head_dim = read.integer("attention.key_length", hidden // heads)
    if (rotary := read.integer("rope.dimension_count", head_dim)) != head_dim:
        raise Unsupported(f"{source}: rope over {rotary} of {head_dim} dimensions is not served")
    tokens = data.get("tokenizer.ggml.tokens")
    vocab_size = read.integer("vocab_size", len(tokens) if tokens is not None else 0)
    max_positions = read.integer("context_length")
    window = int(own.get("attention.sliding_window", 0))
    eos = data.get("tokenizer.ggml.eos_token_id")
    return ModelConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=read.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=max_positions,
        rms_norm_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(own.get("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_rope(own, max_positions, rope_factors, source),
        tied_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        layer_windows=(window,) * num_layers if window else (),
        bos_id=data.get("tokenizer.ggml.bos_token_id"),
        eos_ids=ids_of(eos),
    )


class _Reader:
    """Reads the fields of a config; an error names the field and the file."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.data, self.source = data, source

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise Unsupported(f"{self.source}: {key} is {shown(repr(value))}; it must be one integer")
        most = MAX_LAYERS if key in _LAYER_KEYS else MAX_SIZE
        if not 0 <= value <= most:
            raise Unsupported(f"{self.source}: {key} is {value:,}; it must be between 0 and {most:,}")
        return value

    def refuse(self, key: str, why: str) -> None:
        if self.data.get(key):
            raise Unsupported(f"{self.source}: {key} is set: {why}")


def _hf_experts(read: _Reader) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    read.refuse("mlp_only_layers", "some layers without experts are not served; all layers must have them")
    if (step := read.integer("decoder_sparse_step", 1)) != 1:
        raise Unsupported(f"{read.source}: decoder_sparse_step {step} is not served; only 1 is, experts in all layers")
    return {
        "num_experts": read.integer("num_experts"),
        "experts_per_token": read.integer("num_experts_per_tok"),
        "expert_size": read.integer("moe_intermediate_size"),
        "normalised_experts": bool(read.data.get("norm_topk_prob", False)),
    }


def _hf_rope(rope: dict[str, Any], max_positions: int, source: str) -> RopeScaling | None:
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
            for key in ("mscale", "mscale_all_dim"):
                if rope.get(key):
                    raise Unsupported(f"{where} with {key} {rope[key]} is not served")
            original = number("original_max_position_embeddings", max_positions)
            return YarnRope(
                factor=number("factor", max_positions / original),
                original_max_positions=int(original),
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
                attention_factor=number("attention_factor", 0.0),
                truncate=bool(rope.get("truncate", True)),
            )
    raise Unsupported(f"{where} is not served; served are default, linear, llama3, yarn")


def _gguf_rope(
    own: dict[str, Any], max_positions: int, factors: tuple[float, ...] | None, source: str
) -> RopeScaling | None:
    kind = own.get("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise Unsupported(f"{source}: rope scaling {kind!r} together with the tensor rope_freqs.weight")
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
            )
    raise Unsupported(f"{source}: rope scaling {kind!r} is not served; served are none, linear, yarn")


def _hf_windows(data: dict[str, Any], family: str, num_layers: int, source: str) -> tuple[int, ...]:
    window = data.get("sliding_window") or 0
    if family == "llama" or not window:
        return ()
    if family == "mistral":
        return (window,) * num_layers
    if not data.get("use_sliding_window", False):
        return ()
    first = data.get("max_window_layers", 28)
    types = data.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise Unsupported(f"{source}: layer_types {', '.join(sorted(unknown))} are not served")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
