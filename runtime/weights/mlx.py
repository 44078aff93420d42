"""Checkpoints of MLX (mlx-lm): numbers of few bits, with a scale and a bias for groups of inputs.

weight uint32 [N, K * bits / 32]: words of neighbouring inputs, the first one lowest   scales, biases [N, G]

w[n, k] = q[n, k] * scale[n, g] + bias[n, g],  g the group of input k
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..quant import GroupTensor
from .packed_parts import FLOATS, Settings, StoredMatrix, unpack_words

_WORDS = (torch.uint32, torch.int32)
_BITS = (2, 4, 8)
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
        form = self._own.get(parts.stem, self._form)
        if form is None:
            raise parts.refuse("it is quantized, but its config says false")
        bits, group_size = form
        words = parts.take("weight", _WORDS, (None, None))
        num_rows, width = words.shape[0], words.shape[1] * (32 // bits)
        if width % group_size:
            raise parts.refuse(f"groups of {group_size:,} in rows of {width:,} weights; the config is of another model")
        shape = (num_rows, width // group_size)
        scale = parts.take("scales", FLOATS, shape).float()
        bias = parts.take("biases", FLOATS, shape).float()
        q = unpack_words(words.view(torch.int32), bits)
        if bits <= 4:
            return GroupTensor(q, scale, bias + 8 * scale)
        groups = q.float().view(*shape, group_size)
        return (groups * scale.unsqueeze(-1) + bias.unsqueeze(-1)).view(num_rows, width)


def is_mlx(data: Any) -> bool:
    """MLX names no method. ``data``: what config.json has as ``quantization`` or ``quantization_config``."""
    return isinstance(data, Mapping) and "quant_method" not in data and {"bits", "group_size"} <= data.keys()


def _form(settings: Settings) -> tuple[int, int]:
    """(bits, group_size)"""
    settings.choice("mode", ("affine",), "affine")
    return settings.choice("bits", _BITS), settings.choice("group_size", _GROUP_SIZES)
