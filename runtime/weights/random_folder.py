"""Random weights of the shapes that a config.json asks for, to measure speed.

They are made on the device when they are read, scaled so that activations stay near 1. They are not zeros, which some
devices multiply faster.
"""

from pathlib import Path

import torch

from ...protocol.errors import Unsupported
from .config_parts import Latent
from .json_file import read_json
from .model_config import ModelConfig
from .part import Part, part_of
from .quantized_folder import scheme_of
from .safetensors_file import read_folder_config

_TABLES = ("embed_tokens", "wte", "wpe", "embed_in")


class RandomFolder:
    """A folder's config, and tensors under Hugging Face names. Two reads of one name give different tensors."""

    format = "safetensors"

    def __init__(self, path: Path, *, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.path = path
        self.config: ModelConfig = read_folder_config(path)
        if scheme_of(read_json(path / "config.json"), str(path)) is not None:
            raise Unsupported(
                f"{path}: random weights are bfloat16, but its quantization_config names others; use weights='file', "
                "or remove the field"
            )
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def names(self) -> list[str]:
        return []  # as many as are asked for

    def has_packed(self) -> bool:
        return False

    def release(self) -> None:
        pass  # what was made is not kept here

    def unpacked(self) -> str:
        return ""

    def shape(self, name: str) -> tuple[int, ...]:
        return _shape_of(name, self.config)

    def tensor(self, name: str, part: Part | None = None) -> torch.Tensor:
        shape = _shape_of(name, self.config)
        made = torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16)
        if len(shape) == 2 and self.config.transposed and name.split(".")[-2] not in _TABLES:
            made = made.T
        if len(shape) == 1:
            made = made.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
        else:
            made = made.mul_(1.0 if name.split(".")[-2] in _TABLES else shape[1] ** -0.5)
        found = made if part is None else part_of(made, part)
        assert isinstance(found, torch.Tensor)
        return found


def _shape_of(name: str, config: ModelConfig) -> tuple[int, ...]:
    hidden, dim = config.hidden_size, config.head_dim
    q_len, kv_len = config.num_heads * dim, config.num_kv_heads * dim
    inner = config.intermediate_size
    if any(part in name for part in (".experts.", ".shared_expert.", ".shared_experts.")):
        inner = config.expert_size if ".experts." in name else config.shared_expert_size
    whole = config.whole_qk_norm
    part, kind = name.split(".")[-2:]
    if kind == "e_score_correction_bias":
        return (config.num_experts,)
    rows, columns = {
        **dict.fromkeys(("embed_tokens", "lm_head", "wte", "embed_in", "embed_out"), (config.vocab_size, hidden)),
        "wpe": (config.max_positions, hidden),
        **dict.fromkeys(("c_attn", "query_key_value"), (q_len + 2 * kv_len, hidden)),
        **dict.fromkeys(("c_fc", "dense_h_to_4h"), (inner, hidden)),
        "dense": (hidden, q_len),
        "dense_4h_to_h": (hidden, inner),
        "c_proj": (hidden, inner if ".mlp." in name else q_len),
        "q_proj": (q_len, hidden),
        "k_proj": (kv_len, hidden),
        "v_proj": (kv_len, hidden),
        "o_proj": (hidden, q_len),
        "qkv_proj": (q_len + 2 * kv_len, hidden),
        "q_norm": (q_len if whole else dim, 0),
        "k_norm": (kv_len if whole else dim, 0),
        "gate": (config.num_experts, hidden),
        "shared_expert_gate": (1, hidden),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (inner, hidden)),
        "gate_up_proj": (2 * inner, hidden),
        **dict.fromkeys(("down_proj", "w2"), (hidden, inner)),
        **(_latent_shapes(config.latent, config) if config.latent is not None else {}),
    }.get(part, (hidden, 0))  # the others are norms
    return (rows, columns) if columns and kind == "weight" else (rows,)


def _latent_shapes(latent: Latent, config: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden, heads = config.hidden_size, config.num_heads
    return {
        "q_proj": (heads * latent.query_dim, hidden),
        "q_a_proj": (latent.query_size, hidden),
        "q_a_layernorm": (latent.query_size, 0),
        "q_b_proj": (heads * latent.query_dim, latent.query_size),
        "kv_a_proj_with_mqa": (latent.slot_dim, hidden),
        "kv_a_layernorm": (latent.size, 0),
        "kv_b_proj": (heads * (latent.nope_dim + latent.value_dim), latent.size),
        "o_proj": (hidden, heads * latent.value_dim),
    }
