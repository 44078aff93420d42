"""The names of a decoder's tensors in each file format."""

from collections.abc import Iterator, Mapping, Sequence

from ...protocol.errors import Unsupported
from ..weights.damage import shown
from ..weights.model_config import ROPE_FACTORS, ModelConfig

# Our name -> (Hugging Face's, llama.cpp's); the first {} is the layer, the second the expert.
_MODEL = {
    "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "head": ("lm_head.weight", "output.weight"),
    "norm_bias": ("model.norm.bias", "output_norm.bias"),
    "positions": ("model.position.weight", "position_embd.weight"),
}
_LAYER = {
    "attention_norm": ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    "q": ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    "k": ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    "v": ("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    "output": ("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    "mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "gate": ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    "up": ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    "down": ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
}
_QKV_BIAS = {
    "q_bias": ("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"),
    "k_bias": ("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"),
    "v_bias": ("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"),
}
_OUTPUT_BIAS = {"output_bias": ("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias")}
_MLP_BIAS = {
    "gate_bias": ("model.layers.{}.mlp.gate_proj.bias", "blk.{}.ffn_gate.bias"),
    "up_bias": ("model.layers.{}.mlp.up_proj.bias", "blk.{}.ffn_up.bias"),
    "down_bias": ("model.layers.{}.mlp.down_proj.bias", "blk.{}.ffn_down.bias"),
}
_QK_NORM = {
    "q_norm": ("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    "k_norm": ("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
}
_POST_NORMS = {
    "mlp_norm": ("model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "attention_post_norm": ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight"),
    "mlp_post_norm": ("model.layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight"),
}
_FUSED_QKV = {"qkv": ("model.layers.{}.self_attn.qkv_proj.weight", "blk.{}.attn_qkv.weight")}
_FUSED_GATE_UP = {
    "gate_up": ("model.layers.{}.mlp.gate_up_proj.weight", "blk.{}.ffn_up.weight"),
}
# llama.cpp stacks the experts of a layer into one tensor.
_EXPERTS = {
    "router": ("model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight"),
    "expert_gate": ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "blk.{}.ffn_gate_exps.weight"),
    "expert_up": ("model.layers.{}.mlp.experts.{}.up_proj.weight", "blk.{}.ffn_up_exps.weight"),
    "expert_down": ("model.layers.{}.mlp.experts.{}.down_proj.weight", "blk.{}.ffn_down_exps.weight"),
}
_MIXTRAL_EXPERTS = {
    "router": ("model.layers.{}.block_sparse_moe.gate.weight", "blk.{}.ffn_gate_inp.weight"),
    "expert_gate": ("model.layers.{}.block_sparse_moe.experts.{}.w1.weight", "blk.{}.ffn_gate_exps.weight"),
    "expert_up": ("model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "blk.{}.ffn_up_exps.weight"),
    "expert_down": ("model.layers.{}.block_sparse_moe.experts.{}.w2.weight", "blk.{}.ffn_down_exps.weight"),
}
_SHARED_EXPERT = {
    "shared_router": ("model.layers.{}.mlp.shared_expert_gate.weight", "blk.{}.ffn_gate_inp_shexp.weight"),
    "shared_gate": ("model.layers.{}.mlp.shared_expert.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight"),
    "shared_up": ("model.layers.{}.mlp.shared_expert.up_proj.weight", "blk.{}.ffn_up_shexp.weight"),
    "shared_down": ("model.layers.{}.mlp.shared_expert.down_proj.weight", "blk.{}.ffn_down_shexp.weight"),
}
# DeepSeek's.
_LATENT = {
    "q_down": ("model.layers.{}.self_attn.q_a_proj.weight", "blk.{}.attn_q_a.weight"),
    "q_down_norm": ("model.layers.{}.self_attn.q_a_layernorm.weight", "blk.{}.attn_q_a_norm.weight"),
    "q_up": ("model.layers.{}.self_attn.q_b_proj.weight", "blk.{}.attn_q_b.weight"),
    "kv_down": ("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", "blk.{}.attn_kv_a_mqa.weight"),
    "kv_down_norm": ("model.layers.{}.self_attn.kv_a_layernorm.weight", "blk.{}.attn_kv_a_norm.weight"),
    "kv_up": ("model.layers.{}.self_attn.kv_b_proj.weight", "blk.{}.attn_kv_b.weight"),
    "k_up": ("model.layers.{}.self_attn.k_b_proj.weight", "blk.{}.attn_k_b.weight"),
    "v_up": ("model.layers.{}.self_attn.v_b_proj.weight", "blk.{}.attn_v_b.weight"),
}
_ROUTER_BIAS = {"router_bias": ("model.layers.{}.mlp.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias")}
_UNGATED_SHARED_EXPERT = {
    "shared_gate": ("model.layers.{}.mlp.shared_experts.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight"),
    "shared_up": ("model.layers.{}.mlp.shared_experts.up_proj.weight", "blk.{}.ffn_up_shexp.weight"),
    "shared_down": ("model.layers.{}.mlp.shared_experts.down_proj.weight", "blk.{}.ffn_down_shexp.weight"),
}
# GPT-2 and GPT-NeoX have names of their own in Hugging Face's files.
_LAYER_NORM_BIAS = {
    "attention_norm_bias": ("model.layers.{}.input_layernorm.bias", "blk.{}.attn_norm.bias"),
    "mlp_norm_bias": ("model.layers.{}.post_attention_layernorm.bias", "blk.{}.ffn_norm.bias"),
}
_FUSED_QKV_BIAS = {"qkv_bias": ("model.layers.{}.self_attn.qkv_proj.bias", "blk.{}.attn_qkv.bias")}
_RENAMED = {
    "gpt2": {
        "model.embed_tokens": "transformer.wte",
        "model.position": "transformer.wpe",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    "gpt_neox": {
        "lm_head": "embed_out",
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "model.layers": "gpt_neox.layers",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    "idefics3": {
        "model.embed_tokens": "model.text_model.embed_tokens",
        "model.norm": "model.text_model.norm",
        "model.layers": "model.text_model.layers",
    },
}
_OF_DENSE = ("gate", "up", "down")  # of layers without experts
_OF_EXPERTS = frozenset((*_EXPERTS, *_SHARED_EXPERT, *_ROUTER_BIAS))
_FORMATS = ("safetensors", "gguf")
# Tables that are computed here or read with the config, so no layer reads them.
_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")  # saved by old transformers
_DERIVED = ("rotary_emb.inv_freq", *_MASKS, *ROPE_FACTORS)


class TensorNames:
    """The names of one model's tensors in one format: exactly those that its config asks for."""

    def __init__(self, config: ModelConfig, file_format: str) -> None:
        column = _FORMATS.index(file_format)
        layer = dict(_LAYER)
        for wanted, names in (
            (config.qkv_bias, _QKV_BIAS),
            (config.output_bias, _OUTPUT_BIAS),
            (config.mlp_bias, _MLP_BIAS),
            (config.qk_norm, _QK_NORM),
            (config.post_norms, _POST_NORMS),
            (config.fused_qkv, _FUSED_QKV),
            (config.fused_qkv and config.qkv_bias, _FUSED_QKV_BIAS),
            (config.fused_gate_up, _FUSED_GATE_UP),
            (config.layer_norm, _LAYER_NORM_BIAS),
            (config.shared_expert_size, _SHARED_EXPERT if config.shared_expert_gated else _UNGATED_SHARED_EXPERT),
            (config.routing is not None and config.routing.has_bias, _ROUTER_BIAS),
            (config.latent is not None, _LATENT),
        ):
            if wanted:
                layer |= names
        absent: tuple[str, ...] = () if config.pre_norms else ("attention_norm", "mlp_norm")
        if config.fused_qkv:
            absent = (*absent, "q", "k", "v", "q_bias", "k_bias", "v_bias")
        if config.fused_gate_up:
            absent = (*absent, "gate", "up")
        if not config.gated:
            absent = (*absent, "gate", "gate_bias")
        if config.latent is not None:
            absent = (*absent, "k", "v", *(("kv_up",) if config.latent.is_split else ("k_up", "v_up")))
            absent = (*absent, *(("q",) if config.latent.query_size else ("q_down", "q_down_norm", "q_up")))
        if config.num_experts:
            layer |= _MIXTRAL_EXPERTS if config.family == "mixtral" else _EXPERTS
        layer = {key: names for key, names in layer.items() if key not in absent}
        model = {key: names for key, names in _MODEL.items() if key != "head" or not config.tied_embeddings}
        if not config.learned_positions:
            del model["positions"]
        if not config.layer_norm:
            del model["norm_bias"]
        renamed = _RENAMED.get(config.family, {}) if file_format == "safetensors" else {}
        self._model = {key: _renamed(names[column], renamed) for key, names in model.items()}
        self._layer = {key: _renamed(names[column], renamed) for key, names in layer.items()}
        self._config = config

    @property
    def model_keys(self) -> tuple[str, ...]:
        return tuple(self._model)

    @property
    def layer_keys(self) -> tuple[str, ...]:
        return tuple(self._layer)

    def of_model(self, key: str) -> str:
        return self._model[key]

    def of_layer(self, layer: int, key: str) -> str:
        return self._layer[key].format(layer)

    def of_expert(self, layer: int, expert: int, key: str) -> str:
        return self._layer[key].format(layer, expert)

    def entries(self) -> Iterator[tuple[str, int, int, str]]:
        """(our name, layer, expert, the file's name) of every tensor; layer and expert are -1 where there is none."""
        for key, name in self._model.items():
            yield key, -1, -1, name
        for layer in range(self._config.num_layers):
            for key, name in self._layer.items():
                if not self._has(layer, key):
                    continue
                for expert in range(self._config.num_experts) if name.count("{}") > 1 else (-1,):
                    yield key, layer, expert, name.format(layer, expert)

    def _has(self, layer: int, key: str) -> bool:
        config = self._config
        if config.num_experts and key in _OF_DENSE:
            return layer < config.dense_layers
        return config.has_experts(layer) or key not in _OF_EXPERTS

    def refuse_strangers(self, present: Sequence[str], *, source: str) -> None:
        """Raises Unsupported when a file holds tensors that this model does not use: it is of another architecture."""
        known = {name for *_, name in self.entries()}
        num_layers = self._config.num_layers
        unread = tuple(f"model.layers.{num_layers + i}." for i in range(self._config.prediction_layers))
        strangers = [
            name
            for name in present
            if name not in known and not name.endswith(_DERIVED) and not name.startswith(unread)
        ]
        if strangers:
            names = ", ".join(map(shown, strangers[:4])) + (", ..." if len(strangers) > 4 else "")
            raise Unsupported(f"{source}: {len(strangers)} tensors that this architecture does not use: {names}")


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name
