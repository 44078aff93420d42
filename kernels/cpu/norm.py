"""RMSNorm with the residual, in one pass over each row."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .entry import TASK, counters, entry
from .tensors import KINDS, readable, task_len, team_size
from .vector import LANES, get, load16, put, splat16, store16, sum16, take_number


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    weight, width = readable(weight), x.shape[-1]
    group, step = 1, width
    if not x.is_contiguous() and _has_dense_groups(x):
        group, step = x.shape[-2] if x.ndim == 3 else 1, x.stride(0)
    else:
        x = x.contiguous()
    assert weight.shape == (width,), (weight.shape, x.shape)
    num_rows = x.numel() // width if width else 0
    y = torch.empty(x.shape, dtype=x.dtype)
    kind = KINDS[x.dtype]
    if residual is None:
        added, added_kind, total, residual_out = 0, kind, 0, x
    else:
        assert residual.shape == x.shape, (residual.shape, x.shape)
        residual = readable(residual)
        residual_out = torch.empty_like(residual)
        added, added_kind, total = residual.data_ptr(), KINDS[residual.dtype], residual_out.data_ptr()
    threads = team_size(num_rows * width)
    call = RmsNormCall(
        x.data_ptr(),
        group,
        step,
        kind,
        weight.data_ptr(),
        KINDS[weight.dtype],
        added,
        added_kind,
        y.data_ptr(),
        total,
        num_rows,
        width,
        task_len(num_rows, threads, 1),
        eps,
    )
    _rms_norm(call, threads=threads)
    return y, residual_out


def _has_dense_groups(x: Tensor) -> bool:
    """Whether x is [groups, width], or [groups, rows, width] with each group's rows one after the other."""
    return x.stride(-1) == 1 and (x.ndim == 2 or (x.ndim == 3 and x.stride(1) == x.shape[2]))


class RmsNormCall(NamedTuple):
    x: int  # [rows, width]; within a group rows lie one after the other
    group: int  # rows
    step: int  # numbers from one group of x to the next
    kind: int  # of x and y
    weight: int  # [width]
    weight_kind: int
    residual: int  # [rows, width], or 0: there is none
    residual_kind: int  # of residual and residual_out
    y: int  # [rows, width]
    residual_out: int  # [rows, width]
    num_rows: int
    width: int
    rows_a_task: int
    eps: float


@entry
def _rms_norm(call: RmsNormCall) -> None:
    x, kind, y, width = call.x, call.kind, call.y, call.width
    weight, weight_kind = call.weight, call.weight_kind
    residual, residual_kind, residual_out = call.residual, call.residual_kind, call.residual_out
    num_rows, eps = call.num_rows, call.eps
    group, step = call.group, call.step
    whole = width - width % LANES
    rows_a_task = call.rows_a_task
    row = rows_a_task * take_number(counters(call), TASK)
    end = min(row + rows_a_task, num_rows)
    while row < end:
        start = row * width
        at = row // group * step + row % group * width  # of x; ``start`` is of the others
        squares, rest = splat16(0.0), np.float32(0.0)
        for i in range(0, whole, LANES):
            part = load16(x, at + i, kind)
            if residual != 0:
                part = part + load16(residual, start + i, residual_kind)
                store16(residual_out, start + i, residual_kind, part)
            squares = squares + part * part
        for i in range(whole, width):
            value = get(x, at + i, kind)
            if residual != 0:
                value += get(residual, start + i, residual_kind)
                put(residual_out, start + i, residual_kind, value)
            rest += value * value
        scale = np.float32(1.0 / np.sqrt((sum16(squares) + rest) / width + eps))
        factor = splat16(scale)
        # The sum is taken again from its parts: the stored one may be rounded.
        for i in range(0, whole, LANES):
            part = load16(x, at + i, kind)
            if residual != 0:
                part = part + load16(residual, start + i, residual_kind)
            store16(y, start + i, kind, part * factor * load16(weight, i, weight_kind))
        for i in range(whole, width):
            value = get(x, at + i, kind)
            if residual != 0:
                value += get(residual, start + i, residual_kind)
            put(y, start + i, kind, value * scale * get(weight, i, weight_kind))
        row += 1
        if row == end:
            row = rows_a_task * take_number(counters(call), TASK)
            end = min(row + rows_a_task, num_rows)
