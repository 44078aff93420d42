"""A low-rank adapter (LoRA, Hu et al. 2021) as PEFT saves it: a folder with its config and one safetensors file."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...protocol.errors import UnknownModel, Unsupported

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "down_proj"), "mlp"),
}
_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
# Options that are not implemented, each with the value at which it has no effect.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
}
LowRankPair = tuple[torch.Tensor, torch.Tensor]  # down [r, K] and up [N, r], with the scale in it; float32


def read_adapter(path: Path) -> dict[tuple[int, str], LowRankPair]:
    """The two factors that are added to each weight, by layer and PEFT's name of the weight, as in ``TARGETS``."""
    scale = _scale(path)
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UnknownModel(f"adapter {path}: {WEIGHTS} cannot be read: {error}") from error
    halves: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or TARGETS.get(match[3]) != match[2]:
            known = ", ".join(TARGETS)
            raise Unsupported(f"adapter {path}: tensor {name} changes what is not adapted here; there are {known}")
        halves.setdefault((int(match[1]), match[3]), {})[match[4]] = tensor.float()
    found = {}
    for (layer, target), pair in halves.items():
        if len(pair) != 2 or pair["A"].ndim != 2 or pair["A"].shape[0] != pair["B"].shape[-1]:
            shapes = ", ".join(f"lora_{half} {list(tensor.shape)}" for half, tensor in sorted(pair.items()))
            raise UnknownModel(f"adapter {path}: {target} of layer {layer} is not a pair of one rank: {shapes}")
        found[layer, target] = (pair["A"], pair["B"] * scale)
    if not found:
        raise UnknownModel(f"adapter {path}: {WEIGHTS} holds no tensors")
    return found


def _scale(path: Path) -> float:
    try:
        config = msgspec.json.decode((path / CONFIG).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UnknownModel(f"adapter {path}: {CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnknownModel(f"adapter {path}: {CONFIG} holds no JSON object")
    for field, plain in _PLAIN.items():
        if field in config and config[field] not in plain:
            raise Unsupported(f"adapter {path}: {field}={config[field]!r} in {CONFIG}; only {plain[0]!r} is served")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise UnknownModel(f"adapter {path}: r={rank!r} and lora_alpha={alpha!r} in {CONFIG}; both must be numbers")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
