"""The forms in which quantized matrices are written: their tensors, and what config.json says of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.linear import quantize_int8
from ..quant import GROUP32_KINDS, GroupTensor, QuantTensor, Weight, affine_group32, round_to_bytes
from .rounding import (
    Curvature,
    pack_words,
    round_to_affine,
    round_to_float8,
    round_to_fours,
    round_to_q4_1,
    round_to_q8_0,
)

SCHEMES = ("int8", "int4-g32", "int4-awq", "fp8")
FORMATS = ("compressed-tensors", "awq", "mlx")
_FORMATS_OF = {  # a scheme's formats of a folder; the first one is the default
    "int8": ("compressed-tensors", "mlx"),
    "int4-g32": ("mlx", "compressed-tensors"),
    "int4-awq": ("awq", "mlx"),
    "fp8": ("compressed-tensors",),
}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # ``weights.gptq_awq`` reads it
_AWQ_GROUPS = (128, 64, 32)

Stored = dict[str, torch.Tensor]  # the endings of the names -> tensors


def _no_table(weight: torch.Tensor) -> Stored | None:
    return None


def _no_copy(weight: Weight, is_table: bool) -> Stored | None:
    return None


@dataclass(frozen=True, slots=True)
class FolderForm:
    """One form in safetensors.

    ``dtype``: of the tensors that are not quantized, and of scales. ``config(left, tables)`` returns entries of
    config.json: ``left`` names the matrices that are floats, ``tables`` the embedding and the head if they are not.
    ``encode(weight [N, K], curvature)`` returns the stored tensors; rows of weights are whole groups of ``group_len``.
    ``encode_table(weight)``: of an embedding or a head; None: it stays floats. ``copied(weight, is_table)``: the stored
    tensors of a weight of the source that has the form's numbers already; ``copied_kinds``: ggml's types of layers that
    it takes. ``row_multiple`` divides N. ``stacks_experts``: the experts of a layer are one tensor.
    """

    dtype: torch.dtype
    group_len: int
    config: Callable[[Sequence[str], Sequence[str]], dict[str, Any]]
    encode: Callable[[torch.Tensor, Curvature | None], Stored]
    encode_table: Callable[[torch.Tensor], Stored | None] = _no_table
    copied: Callable[[Weight, bool], Stored | None] = _no_copy
    copied_kinds: tuple[str, ...] = ()
    row_multiple: int = 1
    stacks_experts: bool = False


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


def format_of(scheme: str, name: str = "") -> str:
    """The format of a folder: ``name``, or the scheme's default. Raises ValueError where the scheme has no such one."""
    known = _FORMATS_OF[scheme]
    if name and name not in known:
        raise ValueError(f"format {name!r}: scheme {scheme} is written as {' or '.join(known)}")
    return name or known[0]


def folder_form(scheme: str, form: str, widths: list[int], dtype: torch.dtype) -> FolderForm:
    """``form``: ``format_of`` the scheme. ``widths``: of the matrices; AWQ takes the longest group that divides all of
    them. ``dtype``: the source's, bfloat16 or float16, which MLX's scales have too.
    """
    group_len = 32
    if scheme == "int4-awq":
        group_len = next((size for size in _AWQ_GROUPS if all(width % size == 0 for width in widths)), 32)
    match form, scheme:
        case "mlx", _:
            return _mlx_form(8 if scheme == "int8" else 4, group_len, dtype)
        case "compressed-tensors", "int8":
            weights = {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True}
            return FolderForm(torch.bfloat16, 32, _compressed("pack-quantized", weights), _int8, row_multiple=8)
        case "compressed-tensors", "int4-g32":
            weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
            return FolderForm(torch.bfloat16, 32, _compressed("pack-quantized", weights), _int4, row_multiple=8)
        case "awq", "int4-awq":
            return FolderForm(torch.float16, group_len, _awq_config(group_len), _awq(group_len), row_multiple=8)
        case "compressed-tensors", "fp8":
            weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
            inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
            return FolderForm(torch.bfloat16, 1, _compressed("float-quantized", weights, inputs), _float8)
    raise ValueError(f"scheme {scheme!r} as {form!r}")


def _mlx_form(bits: int, group_len: int, dtype: torch.dtype) -> FolderForm:
    """``w = q * scale + bias`` of real biases: blocks of ggml with 4 bits in groups of 32 lose nothing in it."""

    def config(left: Sequence[str], tables: Sequence[str]) -> dict[str, Any]:
        settings: dict[str, Any] = {"group_size": group_len, "bits": bits}
        if (bits, group_len) != (8, 32):
            settings |= {name: {"group_size": 32, "bits": 8} for name in tables}
        return {"quantization": settings, "quantization_config": settings}  # mlx-lm writes both

    def eights(weight: torch.Tensor, curvature: Curvature | None = None) -> Stored:
        _, exact = quantize_int8(weight)
        scale = exact.to(dtype).float()
        step = scale.clamp_min(torch.finfo(torch.float16).tiny).unsqueeze(-1)
        numbers = (weight.float().view(*scale.shape, 32) / step).round_().clamp_(-127, 127).view(weight.shape)
        return stored((numbers + 128).to(torch.uint8), scale, -128 * scale, 8)

    def fours(weight: torch.Tensor, curvature: Curvature | None) -> Stored:
        groups = round_to_affine(weight, group_len=group_len, scale_dtype=dtype, curvature=curvature)
        return stored(groups.q, groups.scale, groups.minimum, 4)

    def table(weight: torch.Tensor) -> Stored | None:
        return eights(weight) if weight.shape[1] % 32 == 0 else None

    def copied(weight: Weight, is_table: bool) -> Stored | None:
        wanted = 8 if is_table else bits
        if wanted == 4 and group_len == 32 and isinstance(weight, QuantTensor) and weight.kind in GROUP32_KINDS:
            return stored(*affine_group32(weight), 4)
        if wanted == 4 and isinstance(weight, GroupTensor) and weight.bits == 4 and weight.zero is not None:
            if weight.q.shape[1] // weight.scale.shape[1] % group_len:
                return None
            times = weight.q.shape[1] // group_len // weight.scale.shape[1]
            scale, zero = (part.repeat_interleave(times, dim=1) for part in (weight.scale, weight.zero))
            return stored(weight.q, scale, zero - 8 * scale, 4)
        if wanted == 8 and isinstance(weight, QuantTensor) and weight.kind == "Q8_0":
            q, scale = round_to_bytes(weight)  # exact
            return stored((q.to(torch.int16) + 128).to(torch.uint8), scale, -128 * scale, 8)
        return None

    def stored(q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, bits: int) -> Stored:
        words = pack_words(q, bits).view(torch.uint32)
        return {"weight": words, "scales": scale.to(dtype), "biases": bias.to(dtype)}

    kinds = ("Q8_0",) if bits == 8 else GROUP32_KINDS if group_len == 32 else ()
    return FolderForm(
        dtype, group_len, config, eights if bits == 8 else fours, table, copied, kinds, stacks_experts=True
    )


def _compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> Callable[[Sequence[str], Sequence[str]], dict[str, Any]]:
    def config(left: Sequence[str], tables: Sequence[str]) -> dict[str, Any]:
        args = {"type": "int", "dynamic": False, **weights}
        group = {"targets": ["Linear"], "weights": args, "input_activations": inputs, "output_activations": None}
        settings = {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(left),
            "kv_cache_scheme": None,
        }
        return {"quantization_config": settings}

    return config


def _awq_config(group_len: int) -> Callable[[Sequence[str], Sequence[str]], dict[str, Any]]:
    def config(left: Sequence[str], tables: Sequence[str]) -> dict[str, Any]:
        settings = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_len,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(left),
        }
        return {"quantization_config": settings}

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
