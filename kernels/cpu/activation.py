"""The gated activations of a feed-forward block.

gelu by its tanh formula (Hendrycks and Gimpel, 2016) is ``x * sigmoid(2u)``, u = sqrt(2 / pi) (x + 0.044715 x^3), and
silu is ``x * sigmoid(x)``: one kernel computes both.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .entry import TASK, counters, entry
from .llvm import FUSED, LANES, V16, constant
from .machine_code import inlined
from .tensors import KINDS, task_len, team_size
from .vector import (
    compiled,
    exp2,
    exp2_each,
    get,
    load16,
    put,
    quotient,
    splat16,
    store16,
    take_number,
    vector16,
)

_LOG2_E = np.float32(1.44269504)
_SLOPE = np.float32(2.0 * np.sqrt(2.0 / np.pi))
_CUBIC = np.float32(0.044715) * _SLOPE
_SHARE = 512  # gates of one row, so that threads can share a long one
_LOWEST = np.float32(-88.0)  # silu of a smaller gate is 0 in float32; this one's power of 2 is a normal number


def silu_mul(x: Tensor) -> Tensor:
    return _gated(x, is_gelu=False)


def gelu_mul(x: Tensor) -> Tensor:
    return _gated(x, is_gelu=True)


def _gated(x: Tensor, *, is_gelu: bool) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    num_rows, threads = y.numel() // width if width else 0, team_size(2 * y.numel())
    rows_a_task = task_len(num_rows, threads, 1)
    share = max(width, 1) if rows_a_task > 1 else _SHARE
    call = GatedCall(x.data_ptr(), y.data_ptr(), KINDS[x.dtype], num_rows, width, rows_a_task, share, is_gelu)
    _gated_product(call, threads=threads)
    return y


class GatedCall(NamedTuple):
    x: int  # [rows, 2 * width]: gates, then what they are multiplied with
    y: int  # [rows, width]
    kind: int  # of x and y
    num_rows: int
    width: int
    rows_a_task: int
    share: int  # of a row's gates that a task has: all of them where it has several rows
    is_gelu: int


@inlined
def sigmoid_of(is_gelu: bool) -> tuple[np.float32, np.float32]:
    """``(slope, cubic)``: the sigmoid is of gate * (slope + cubic * gate^2)."""
    if is_gelu:
        return _SLOPE, _CUBIC
    return np.float32(1.0), np.float32(0.0)


def gated_each(builder: Any, gates: list[Any], ups: list[Any], slopes: Any, cubics: Any) -> list[Any]:
    """The activations of vectors of 16 gates, times ``ups``; ``slopes`` and ``cubics`` as from ``sigmoid_of``."""
    lowest, turn = constant(V16, float(_LOWEST)), constant(V16, float(-_LOG2_E))

    def exponent(gate: Any) -> Any:
        square = builder.fmul(builder.fmul(cubics, gate), gate)
        inner = builder.fmul(gate, builder.fadd(slopes, square, flags=FUSED))
        return builder.fmul(builder.select(builder.fcmp_ordered(">", lowest, inner), lowest, inner), turn)

    powers = exp2_each(builder, [exponent(gate) for gate in gates], V16)
    divisors = [builder.fadd(constant(V16, 1.0), power) for power in powers]
    quotients = [quotient(builder, gate, divisor) for gate, divisor in zip(gates, divisors, strict=True)]
    return [builder.fmul(value, up) for value, up in zip(quotients, ups, strict=True)]


@compiled(vector16, *(vector16,) * 4)
def gated16(builder: Any, gate: Any, up: Any, slopes: Any, cubics: Any) -> Any:
    """``gated_each`` of one vector."""
    return gated_each(builder, [gate], [up], slopes, cubics)[0]


@entry
def _gated_product(call: GatedCall) -> None:
    x, y, kind, num_rows, width = call.x, call.y, call.kind, call.num_rows, call.width
    rows_a_task, step = call.rows_a_task, call.share
    shares = (width + step - 1) // step
    slope, cubic = sigmoid_of(call.is_gelu != 0)
    slopes, cubics = splat16(slope), splat16(cubic)
    task = take_number(counters(call), TASK)
    while task // shares * rows_a_task < num_rows:
        first = task // shares * rows_a_task
        begin = task % shares * step
        end = min(begin + step, width)
        whole = end - (end - begin) % LANES
        for row in range(first, min(first + rows_a_task, num_rows)):
            gates, ups, to = 2 * row * width, (2 * row + 1) * width, row * width
            for i in range(begin, whole, LANES):
                store16(y, to + i, kind, gated16(load16(x, gates + i, kind), load16(x, ups + i, kind), slopes, cubics))
            for i in range(whole, end):
                value = get(x, gates + i, kind)
                divisor = np.float32(1.0) + exp2(max(_LOWEST, value * (slope + cubic * value * value)) * -_LOG2_E)
                put(y, to + i, kind, value / divisor * get(x, ups + i, kind))
        task = take_number(counters(call), TASK)
