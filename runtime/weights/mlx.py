"""Checkpoints of MLX (mlx-lm): numbers of few bits, with a scale and a bias for groups of inputs.

weight uint32 [N, K * bits / 32]: the bits of neighbouring inputs one after the other, from the lowest bit of the first
word on   scales, biases [N, G]

w[n, k] = q[n, k] * scale[n, g] + bias[n, g],  g the group of input k

The experts of a layer are stacked: ``....switch_mlp.up_proj.weight`` is [E, N, ...], and so are scales and biases.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..quant import GroupTensor
from .packed_parts import FLOATS, Settings, StoredMatrix, unpack_bits

_WORDS = (torch.uint32, torch.int32)
_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)


class Mlx:
    parts = ("weight", "scales", "biases")
    marks = ("scales",)

    def __init__(self, settings: Settings) -> None:
        self._form = _form(settings)
        self._own: dict[str, tuple[int, int] | None] = {}  # of single modules; None: not quantized
        for stem, value in settings.data.items():
            if isinstance(value, dict):
                self._own[stem] = _form(Settings(value, f"{settings.source}: {stem}"))
            elif value is False:
                self._own[stem] = None
        kinds = sorted({self._form[0], *(form[0] for form in self._own.values() if form is not None)})
        self.label = f"MLX of {' and '.join(map(str, kinds))} bits"

    def matrix(self, parts: StoredMatrix) -> GroupTensor | torch.Tensor:
        stem = (stack_of(f"{parts.stem}.weight") or "").removesuffix(".weight") or parts.stem
        form = self._own.get(stem, self._form)
        if form is None:
            raise parts.refuse("it is quantized, but its config says false")
        bits, group_size = form
        words = parts.take("weight", _WORDS, (None, None))
        num_rows, width = words.shape[0], words.shape[1] * 32 // bits
        if width % group_size or words.shape[1] * 32 % bits:
            raise parts.refuse(f"groups of {group_size:,} in rows of {width:,} weights; the config is of another model")
        shape = (num_rows, width // group_size)
        scale = parts.take("scales", FLOATS, shape).float()
        bias = parts.take("biases", FLOATS, shape).float()
        q = unpack_bits(words, bits)
        if bits <= 4:
            return GroupTensor(q, scale, bias + 8 * scale)
        if bits == 8 and torch.equal(bias, -128 * scale):
            return GroupTensor((q ^ 128).view(torch.int8), scale)
        return GroupTensor(q, scale, bias + 128 * scale, centre=128)


_EXPERT = re.compile(r"(.+)\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(weight|scales|biases)")
_STACK = re.compile(r"(.+)\.switch_mlp\.(gate_proj|up_proj|down_proj)\.(weight|scales|biases)")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_IN_MIXTRAL = {product: name for name, product in _OF_MIXTRAL.items()}


def stack_of(name: str) -> str | None:
    """The name of the tensor in which mlx-lm stacks this tensor of an expert with those of the others."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    block, product, ending = found.groups()
    return f"{block}.switch_mlp.{_OF_MIXTRAL.get(product, product)}.{ending}"


def is_stack(name: str) -> bool:
    return _STACK.fullmatch(name) is not None


def experts_of(stack: str, count: int) -> Iterator[str]:
    """The names that the tensors of a stack have in other folders."""
    found = _STACK.fullmatch(stack)
    assert found is not None, stack
    block, product, ending = found.groups()
    if block.endswith("block_sparse_moe"):
        product = _IN_MIXTRAL[product]
    return (f"{block}.experts.{expert}.{product}.{ending}" for expert in range(count))


def is_mlx(data: Any) -> bool:
    """MLX names no method. ``data``: what config.json has as ``quantization`` or ``quantization_config``."""
    return isinstance(data, Mapping) and "quant_method" not in data and {"bits", "group_size"} <= data.keys()


def _form(settings: Settings) -> tuple[int, int]:
    """(bits, group_size)"""
    settings.choice("mode", ("affine",), "affine")
    return settings.choice("bits", _BITS), settings.choice("group_size", _GROUP_SIZES)
