"""RMSNorm with the residual, in one pass over each row. Never changes its inputs."""

import numpy as np
import torch
from torch import Tensor

from .entry import ARGS, TASK, entry
from .tensors import KINDS, readable, team_size
from .vector import LANES, get, get_f64, get_i64, load16, put, splat16, store16, sum16, take_number


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), readable(weight)
    width = x.shape[-1]
    assert weight.shape == (width,), (weight.shape, x.shape)
    num_rows = x.numel() // width if width else 0
    y = torch.empty_like(x)
    kind = KINDS[x.dtype]
    if residual is None:
        added, added_kind, total, residual_out = 0, kind, 0, x
    else:
        assert residual.shape == x.shape, (residual.shape, x.shape)
        residual = readable(residual)
        residual_out = torch.empty_like(residual)
        added, added_kind, total = residual.data_ptr(), KINDS[residual.dtype], residual_out.data_ptr()
    _rms_norm(
        x.data_ptr(),
        kind,
        weight.data_ptr(),
        KINDS[weight.dtype],
        added,
        added_kind,
        y.data_ptr(),
        total,
        num_rows,
        width,
        eps,
        threads=team_size(num_rows * width),
    )
    return y, residual_out


@entry(ints=10, floats=1)
def _rms_norm(call: int) -> None:
    x, kind = get_i64(call, ARGS), get_i64(call, ARGS + 1)
    weight, weight_kind = get_i64(call, ARGS + 2), get_i64(call, ARGS + 3)
    residual, residual_kind = get_i64(call, ARGS + 4), get_i64(call, ARGS + 5)
    y, total = get_i64(call, ARGS + 6), get_i64(call, ARGS + 7)
    num_rows, width = get_i64(call, ARGS + 8), get_i64(call, ARGS + 9)
    eps = get_f64(call, ARGS + 10)
    whole = width - width % LANES
    row = take_number(call, TASK)
    while row < num_rows:
        start = row * width
        squares, rest = splat16(0.0), np.float32(0.0)
        for i in range(start, start + whole, LANES):
            part = load16(x, i, kind)
            if residual != 0:
                part = part + load16(residual, i, residual_kind)
                store16(total, i, residual_kind, part)
            squares = squares + part * part
        for i in range(start + whole, start + width):
            value = get(x, i, kind)
            if residual != 0:
                value += get(residual, i, residual_kind)
                put(total, i, residual_kind, value)
            rest += value * value
        scale = np.float32(1.0 / np.sqrt((sum16(squares) + rest) / width + eps))
        factor = splat16(scale)
        # The sum is taken again from its parts: what was stored may be rounded.
        for i in range(0, whole, LANES):
            part = load16(x, start + i, kind)
            if residual != 0:
                part = part + load16(residual, start + i, residual_kind)
            store16(y, start + i, kind, part * factor * load16(weight, i, weight_kind))
        for i in range(whole, width):
            value = get(x, start + i, kind)
            if residual != 0:
                value += get(residual, start + i, residual_kind)
            put(y, start + i, kind, value * scale * get(weight, i, weight_kind))
        row = take_number(call, TASK)
