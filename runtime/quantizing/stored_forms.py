"""The forms in which quantized matrices are written: their tensors, and what config.json says of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.linear import quantize_int8
from .rounding import Curvature, pack_words, round_to_float8, round_to_fours, round_to_q4_1, round_to_q8_0

SCHEMES = ("int8", "int4-g32", "int4-awq", "fp8")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # ``weights.gptq_awq`` reads it
_AWQ_GROUPS = (128, 64, 32)

Stored = dict[str, torch.Tensor]  # the endings of the names -> tensors


@dataclass(frozen=True, slots=True)
class FolderForm:
    """One form in safetensors.

    ``dtype``: of the tensors that are not quantized, and of scales. ``encode(weight [N, K], curvature)``
    returns the stored tensors; rows of weights are whole groups of ``group_len``.
    """

    dtype: torch.dtype
    group_len: int
    config: Callable[[list[str]], dict[str, Any]]  # of the names of the matrices that are left as floats
    encode: Callable[[torch.Tensor, Curvature | None], Stored]


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """One form in GGUF: ggml's name of the layers' type, its number as ``general.file_type``, and its encoder."""

    kind: str
    file_type: int
    encode: Callable[[torch.Tensor, Curvature | None], torch.Tensor]


def gguf_form(scheme: str) -> GGUFForm | None:
    """None for a scheme that GGUF has no type for."""
    if scheme == "int8":
        return GGUFForm("Q8_0", 7, lambda weight, curvature: round_to_q8_0(weight))
    if scheme in ("int4-g32", "int4-awq"):
        return GGUFForm("Q4_1", 3, lambda weight, curvature: round_to_q4_1(weight, curvature=curvature))
    return None


def folder_form(scheme: str, widths: list[int]) -> FolderForm:
    """``widths``: of the matrices; AWQ takes the longest group that divides all of them."""
    match scheme:
        case "int8":
            weights = {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True}
            return FolderForm(torch.bfloat16, 32, _compressed("pack-quantized", weights), _int8)
        case "int4-g32":
            weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
            return FolderForm(torch.bfloat16, 32, _compressed("pack-quantized", weights), _int4)
        case "int4-awq":
            group_len = next((size for size in _AWQ_GROUPS if all(width % size == 0 for width in widths)), 32)
            return FolderForm(torch.float16, group_len, _awq_config(group_len), _awq(group_len))
        case "fp8":
            weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
            inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
            return FolderForm(torch.bfloat16, 1, _compressed("float-quantized", weights, inputs), _float8)
    raise ValueError(f"scheme {scheme!r}: must be one of {', '.join(SCHEMES)}")


def _compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> Callable[[list[str]], dict[str, Any]]:
    def config(left: list[str]) -> dict[str, Any]:
        args = {"type": "int", "dynamic": False, **weights}
        group = {"targets": ["Linear"], "weights": args, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": left,
            "kv_cache_scheme": None,
        }

    return config


def _awq_config(group_len: int) -> Callable[[list[str]], dict[str, Any]]:
    def config(left: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_len,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": left,
        }

    return config


def _int8(weight: torch.Tensor, curvature: Curvature | None) -> Stored:
    _, exact = quantize_int8(weight)
    scale = exact.bfloat16()
    step = scale.float().clamp_min(torch.finfo(torch.float16).tiny).unsqueeze(-1)
    numbers = (weight.float().view(*exact.shape, 32) / step).round_().clamp_(-128, 127).view(weight.shape)
    packed = pack_words((numbers + 128).to(torch.uint8), 8)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _int4(weight: torch.Tensor, curvature: Curvature | None) -> Stored:
    groups = round_to_fours(weight, group_len=32, scale_dtype=torch.bfloat16, curvature=curvature)
    return {
        "weight_packed": pack_words(groups.q, 4),
        "weight_scale": groups.scale.bfloat16(),
        "weight_zero_point": pack_words(groups.zero.T, 4).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _awq(group_len: int) -> Callable[[torch.Tensor, Curvature | None], Stored]:
    def encode(weight: torch.Tensor, curvature: Curvature | None) -> Stored:
        groups = round_to_fours(weight, group_len=group_len, scale_dtype=torch.float16, curvature=curvature)
        return {
            "qweight": pack_words(groups.q.T.contiguous(), 4, order=_AWQ_ORDER),
            "qzeros": pack_words(groups.zero.T.contiguous(), 4, order=_AWQ_ORDER),
            "scales": groups.scale.T.contiguous().half(),
        }

    return encode


def _float8(weight: torch.Tensor, curvature: Curvature | None) -> Stored:
    stored, scale = round_to_float8(weight)
    return {"weight": stored, "weight_scale": scale}
