"""Low-rank adapters of a batch's tokens, each with its own, added to a product's results.

A row's result is the same to the bit whichever other rows there are.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..groups import Groups
from .entry import FIRST_DONE, FIRST_TASK, TASK, counters, entry
from .machine_code import helper
from .recording import scratch
from .tensors import KINDS, readable, team_size
from .vector import (
    LANES,
    fused16,
    get,
    get_f32,
    get_i64,
    load16,
    put,
    put_f32,
    splat16,
    store16,
    sum16,
    take_number,
    watch,
)

_RANKS = 4  # a task of the first phase
_OUTPUTS = 512  # a task of the second
_TILE = 4 * LANES  # outputs computed together
_MIN_SHARE = 100_000  # products worth a second thread


def adapter_tables(
    count: int, rank: int, width: int, num_outputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The numbers of neighbouring outputs lie next to one another in both."""
    _add_adapters.compile()
    down = torch.zeros(count, rank, width, dtype=dtype, device=device)
    return down, torch.zeros(count, rank, num_outputs, dtype=dtype, device=device).transpose(1, 2)


def add_adapters(y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Groups) -> Tensor:
    (num_rows, width), (_, rank, _), num_outputs = x.shape, down.shape, up.shape[1]
    assert down.shape == (len(up), up.shape[2], width) and y.shape == (num_rows, num_outputs), (down.shape, up.shape)
    assert y.stride(1) == 1 and down.dtype == up.dtype, (y.stride(), down.dtype, up.dtype)
    x, down, up = readable(x), readable(down), readable(up.transpose(1, 2))
    ids = adapters.ids.long().contiguous()
    hidden = scratch("adapters", num_rows * rank, torch.float32)
    call = AdaptersCall(
        x.data_ptr(),
        KINDS[x.dtype],
        down.data_ptr(),
        up.data_ptr(),
        KINDS[down.dtype],
        ids.data_ptr(),
        y.data_ptr(),
        y.stride(0),
        KINDS[y.dtype],
        hidden.data_ptr(),
        num_rows,
        width,
        rank,
        num_outputs,
    )
    _add_adapters(call, threads=team_size(num_rows * rank * (width + num_outputs), min_share=_MIN_SHARE))
    return y


class AdaptersCall(NamedTuple):
    x: int  # [T, K]
    kind: int  # of x
    down: int  # [A, r, K]
    up: int  # [A, r, N]
    table_kind: int  # of down and up
    ids: int  # int64 [T]: each row's adapter, below 0 for none
    y: int  # [T, N]
    y_step: int  # numbers from one row of y to the next
    y_kind: int
    hidden: int  # float32 [T, r], written in the first phase
    num_rows: int  # T
    width: int  # K
    rank: int  # r
    num_outputs: int  # N


@entry
def _add_adapters(call: AdaptersCall) -> None:
    _write_hidden(call)
    ids, up, kind, hidden = call.ids, call.up, call.table_kind, call.hidden
    y, y_step, y_kind = call.y, call.y_step, call.y_kind
    num_rows, rank, num_outputs = call.num_rows, call.rank, call.num_outputs
    shares = (num_outputs + _OUTPUTS - 1) // _OUTPUTS
    task = take_number(counters(call), TASK)
    while task < num_rows * shares:
        row = task // shares
        adapter = get_i64(ids, row)
        begin = (task - row * shares) * _OUTPUTS
        end = min(begin + _OUTPUTS, num_outputs) if adapter >= 0 else begin
        tiles = end - (end - begin) % _TILE
        whole = end - (end - begin) % LANES
        table, first, to = adapter * rank * num_outputs, row * rank, row * y_step
        for column in range(begin, tiles, _TILE):
            a, b, c, d = splat16(0.0), splat16(0.0), splat16(0.0), splat16(0.0)
            for i in range(rank):
                factor = splat16(get_f32(hidden, first + i))
                at = table + i * num_outputs + column
                a = fused16(a, factor, load16(up, at, kind))
                b = fused16(b, factor, load16(up, at + LANES, kind))
                c = fused16(c, factor, load16(up, at + 2 * LANES, kind))
                d = fused16(d, factor, load16(up, at + 3 * LANES, kind))
            place = to + column
            store16(y, place, y_kind, load16(y, place, y_kind) + a)
            store16(y, place + LANES, y_kind, load16(y, place + LANES, y_kind) + b)
            store16(y, place + 2 * LANES, y_kind, load16(y, place + 2 * LANES, y_kind) + c)
            store16(y, place + 3 * LANES, y_kind, load16(y, place + 3 * LANES, y_kind) + d)
        for column in range(tiles, whole, LANES):
            a = splat16(0.0)
            for i in range(rank):
                a = fused16(a, splat16(get_f32(hidden, first + i)), load16(up, table + i * num_outputs + column, kind))
            store16(y, to + column, y_kind, load16(y, to + column, y_kind) + a)
        for column in range(whole, end):
            total = np.float32(0.0)
            for i in range(rank):
                total += get_f32(hidden, first + i) * get(up, table + i * num_outputs + column, kind)
            put(y, to + column, y_kind, get(y, to + column, y_kind) + total)
        task = take_number(counters(call), TASK)


@helper
def _write_hidden(call: AdaptersCall) -> None:
    """The first phase: x times ``down``, shared by the team. Returns when all of it is there."""
    x, x_kind, down, kind, ids, hidden = call.x, call.kind, call.down, call.table_kind, call.ids, call.hidden
    width, rank = call.width, call.rank
    shares = (rank + _RANKS - 1) // _RANKS
    num_tasks, whole = call.num_rows * shares, width - width % LANES
    task = take_number(counters(call), FIRST_TASK)
    while task < num_tasks:
        row = task // shares
        adapter = get_i64(ids, row)
        begin = (task - row * shares) * _RANKS
        end = min(begin + _RANKS, rank) if adapter >= 0 else begin
        start, table = row * width, adapter * rank * width
        if end - begin == _RANKS:
            line = table + begin * width
            a, b, c, d = splat16(0.0), splat16(0.0), splat16(0.0), splat16(0.0)
            for i in range(0, whole, LANES):
                part, at = load16(x, start + i, x_kind), line + i
                a = fused16(a, part, load16(down, at, kind))
                b = fused16(b, part, load16(down, at + width, kind))
                c = fused16(c, part, load16(down, at + 2 * width, kind))
                d = fused16(d, part, load16(down, at + 3 * width, kind))
            put_f32(hidden, row * rank + begin, sum16(a))
            put_f32(hidden, row * rank + begin + 1, sum16(b))
            put_f32(hidden, row * rank + begin + 2, sum16(c))
            put_f32(hidden, row * rank + begin + 3, sum16(d))
        else:
            for j in range(begin, end):
                a, line = splat16(0.0), table + j * width
                for i in range(0, whole, LANES):
                    a = fused16(a, load16(x, start + i, x_kind), load16(down, line + i, kind))
                put_f32(hidden, row * rank + j, sum16(a))
        for j in range(begin, end):
            rest = get_f32(hidden, row * rank + j)
            for i in range(whole, width):
                rest += get(x, start + i, x_kind) * get(down, table + j * width + i, kind)
            put_f32(hidden, row * rank + j, rest)
        take_number(counters(call), FIRST_DONE)
        task = take_number(counters(call), FIRST_TASK)
    while watch(counters(call), FIRST_DONE) < num_tasks:
        pass
