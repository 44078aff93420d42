"""Checkpoints of compressed-tensors (llm-compressor) and of FP8: weights as whole numbers or 8-bit floats, with scales.

    pack-quantized   weight_packed int32 [N, K * bits / 32], q + 2^(bits - 1) in neighbouring places of a word;
                     weight_shape [2]; weight_scale [N, G]; weight_zero_point int32 [N * bits / 32, G]; weight_g_idx [K]
    int-quantized    weight int8 [N, K]; weight_scale, and weight_zero_point of 8 bits: [1], [N, 1] or [N, G]
    float-quantized  weight e4m3 [N, K]; weight_scale [1], [N, 1], [N, G], or one for each block
    fp8              weight e4m3 [N, K]; weight_scale_inv for each block, as DeepSeek-V3 has it, or weight_scale

    w = (q - zero) * scale

Scales of activations are not read: activations stay in a finer type than 8 bits of one scale.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from ...protocol.errors import Unsupported
from ..quant import GroupTensor, group_tensor
from .damage import shown
from .packed_parts import FLOAT8, FLOATS, INTS, Settings, StoredMatrix, column_groups, group_len_of, unpack_words

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_ACTIVATION_SCALES = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_zero_point")


class _Weights:
    """The weights of one group of a config."""

    def __init__(self, settings: Settings, args: Any, form: str) -> None:
        if not isinstance(args, dict):
            raise settings.unsupported("weights", args, "each group must say how its weights are stored")
        own = Settings(args, settings.source)
        self.bits = own.choice("num_bits", (4, 8))
        self.is_float = own.choice("type", ("int", "float"), "int") == "float"
        self.strategy = own.choice("strategy", _STRATEGIES, None if "strategy" in args else "tensor")
        self.is_packed = form == "pack-quantized"
        if self.is_float and (self.bits != 8 or self.is_packed):
            raise own.unsupported("num_bits", self.bits, "floats are read in 8 bits, float-quantized")
        own.choice("symmetric", (True, False), True)
        own.choice("dynamic", (False,), False)
        self.group_size = own.size("group_size") if self.strategy == "group" else -1
        self.block = _block(own, args.get("block_structure")) if self.strategy == "block" else None

    def matrix(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        if self.is_packed:
            return self._packed(parts)
        if self.is_float:
            return _float8(parts, "weight_scale", self._block_of(parts))
        q = parts.take("weight", (torch.int8,), (None, None))
        num_rows, width = q.shape
        scale = self._factors(parts, "weight_scale", FLOATS, num_rows, width)
        if self.block is not None:
            return q.float() * parts.scales("weight_scale", num_rows, width, self.block)
        half = 1 << (self.bits - 1)
        zero = None
        if parts.has("weight_zero_point"):
            zero = self._factors(parts, "weight_zero_point", (torch.int8,), num_rows, width).float() + half
        if int(q.min()) < -half or int(q.max()) >= half:
            raise parts.refuse(f"weights of {int(q.min())} to {int(q.max())} are no numbers of {self.bits} bits")
        numbers = (q.to(torch.int16) + half).to(torch.uint8)
        group_ids = column_groups(parts, "weight_g_idx", width, scale.shape[1])
        return group_tensor(numbers, scale, zero, bits=self.bits, group_ids=group_ids)

    def _packed(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        count = 32 // self.bits
        words = parts.take("weight_packed", (torch.int32,), (None, None))
        num_rows, width = (int(size) for size in parts.take("weight_shape", INTS, (2,)))
        if num_rows != words.shape[0] or -(-width // count) != words.shape[1]:
            raise parts.refuse(f"weight_shape is [{num_rows:,}, {width:,}], but weight_packed {list(words.shape)}")
        scale = self._factors(parts, "weight_scale", FLOATS, num_rows, width)
        zero = None
        if parts.has("weight_zero_point"):
            packed = parts.take("weight_zero_point", (torch.int32,), (-(-num_rows // count), scale.shape[1]))
            zero = unpack_words(packed.T, self.bits)[:, :num_rows].T
        q = unpack_words(words, self.bits)[:, :width].contiguous()
        group_ids = column_groups(parts, "weight_g_idx", width, scale.shape[1])
        return group_tensor(q, scale, zero, bits=self.bits, group_ids=group_ids)

    def _factors(
        self, parts: StoredMatrix, part: str, dtypes: tuple[torch.dtype, ...], num_rows: int, width: int
    ) -> torch.Tensor:
        """[N, G]."""
        if self.strategy == "group":
            num_groups = -(-width // group_len_of(parts, self.group_size, width))
            return parts.take(part, dtypes, (num_rows, num_groups))
        if self.strategy == "channel":
            return parts.take(part, dtypes, (num_rows, 1))
        if self.strategy == "block":
            return parts.take(part, dtypes, (None, None))
        return parts.take(part, dtypes, (1,)).view(1, 1).expand(num_rows, 1)

    def _block_of(self, parts: StoredMatrix) -> tuple[int, int] | None:
        if self.strategy == "group":
            width = parts.take("weight", FLOAT8, (None, None)).shape[1]
            return 1, group_len_of(parts, self.group_size, width)
        return self.block


class CompressedTensors:
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", *_ACTIVATION_SCALES)
    marks = ("weight_packed", "weight_scale")

    def __init__(self, settings: Settings) -> None:
        groups = settings.data.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise settings.unsupported("config_groups", groups, "it must name at least one group")
        sparsity = settings.data.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise settings.unsupported("sparsity_config", sparsity, "only dense weights are read")
        common = settings.data.get("format")
        if common != "mixed-precision":
            settings.choice("format", _FORMATS)
        self._groups: list[tuple[list[str], _Weights]] = []
        for group in groups.values():
            own = Settings(group if isinstance(group, dict) else {}, settings.source)
            form = own.choice("format", _FORMATS, common) if own.data.get("format") else common
            if form not in _FORMATS:
                raise settings.unsupported("format", form, f"read are {', '.join(_FORMATS)}")
            targets = own.data.get("targets")
            if not isinstance(targets, list):
                raise settings.unsupported("targets", targets, "it must be a list of names")
            self._groups.append(
                ([str(target) for target in targets], _Weights(settings, own.data.get("weights"), form))
            )
        kinds = dict.fromkeys(f"{'FP' if w.is_float else 'INT'}{w.bits}" for _, w in self._groups)
        self.label = f"compressed-tensors, {' and '.join(kinds)}"

    def matrix(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        for targets, weights in self._groups:
            if any(_matches(target, parts.stem, exactly=True) for target in targets):
                return weights.matrix(parts)
        for targets, weights in self._groups:
            if any(_matches(target, parts.stem, exactly=False) for target in targets):
                return weights.matrix(parts)
        raise parts.refuse("it is quantized, but no group of quantization_config has it as a target")


class Float8:
    parts = ("weight_scale_inv", "weight_scale", *_ACTIVATION_SCALES)
    marks = ("weight_scale_inv", "weight_scale")
    label = "FP8"

    def __init__(self, settings: Settings) -> None:
        settings.choice("fmt", ("e4m3", "float8_e4m3fn", None))
        settings.choice("activation_scheme", ("dynamic", "static", None))
        size = settings.data.get("weight_block_size")
        self._block = None if size is None else _block(settings, size, "weight_block_size")

    def matrix(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        by_block = parts.has("weight_scale_inv")
        if by_block and self._block is None:
            raise parts.refuse("it has weight_scale_inv, but quantization_config no weight_block_size")
        return _float8(parts, "weight_scale_inv" if by_block else "weight_scale", self._block if by_block else None)


def _float8(parts: StoredMatrix, scale: str, block: tuple[int, int] | None) -> torch.Tensor:
    stored = parts.take("weight", FLOAT8, (None, None))
    num_rows, width = stored.shape
    return stored.float() * parts.scales(scale, num_rows, width, block)


def _block(settings: Settings, size: Any, field: str = "block_structure") -> tuple[int, int]:
    if isinstance(size, str):  # "128x128"
        size = [int(part) for part in re.findall(r"\d{1,9}", size)]
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(side) is int for side in size)
    if not is_pair or not all(1 <= side < 1 << 31 for side in size):
        raise settings.unsupported(field, size, "it must be the rows and columns of a block")
    return size[0], size[1]


def _matches(target: str, stem: str, *, exactly: bool) -> bool:
    """``Linear`` is every product; ``re:`` begins a pattern."""
    if not exactly:
        return target == "Linear"
    if not target.startswith("re:"):
        return target == stem
    try:
        return re.match(target[3:], stem) is not None
    except re.error as error:
        raise Unsupported(f"quantization_config: target {shown(target)!r} is no pattern: {error}") from error


def compressed(data: Mapping[str, Any], source: str) -> CompressedTensors:
    return CompressedTensors(Settings(data, source))
