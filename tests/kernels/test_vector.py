"""The vector functions against numpy."""

from typing import Any

import numpy as np
import torch
from numba import njit
from phloem.kernels.cpu.tiles import multiply_tile, transpose_tile, turn_columns
from phloem.kernels.cpu.vector import (
    BFLOAT16,
    FLOAT32,
    compiled,
    exp2_16,
    exp2_near_each,
    exp16,
    load16,
    load16_f32,
    store16,
    store16_f32,
    vector16,
)

_tile_3x2 = multiply_tile(3, 2)
_transpose_f32, _transpose_bf16 = transpose_tile(FLOAT32), transpose_tile(BFLOAT16)


def _of_each(function: Any) -> Any:
    """Compiled: ``f(x, y, count)``, which writes the function of each 16 float32 of x to y."""

    @njit
    def run(x: int, y: int, count: int) -> None:
        for i in range(0, count, 16):
            store16_f32(y, i, function(load16_f32(x, i)))

    return run


_exp2_near = compiled(vector16, vector16)(lambda builder, x: exp2_near_each(builder, [x])[0])
_exp_all, _exp2_all, _exp2_near_all = map(_of_each, (exp16, exp2_16, _exp2_near))


@njit
def _turn(lines: int, to: int, step: int) -> None:
    turn_columns(lines, to, step)


@njit
def _convert(x: int, x_kind: int, y: int, y_kind: int, count: int) -> None:
    for i in range(0, count, 16):
        store16(y, i, y_kind, load16(x, i, x_kind))


@njit
def _multiply(a: int, b: int, c: int, count: int) -> None:
    _tile_3x2(a, count, b, 32, c, 32, count)


@njit
def _transpose(rows: int, start: int, kind: int, to: int) -> None:
    if kind == BFLOAT16:
        _transpose_bf16(rows, start, to, 20)
    else:
        _transpose_f32(rows, start, to, 20)


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87.3, 88.3, 1 << 16, dtype=np.float32)
    y = np.empty_like(x)
    _exp_all(x.ctypes.data, y.ctypes.data, len(x))
    assert np.abs(y / np.exp(x.astype(np.float64)) - 1).max() < 2 * np.finfo(np.float32).eps


def test_exp_of_the_extremes() -> None:
    x = np.array([-np.inf, -1e30, -87.4, 0.0, 100.0, np.inf, np.nan, *[0.0] * 9], dtype=np.float32)
    y = np.empty_like(x)
    _exp_all(x.ctypes.data, y.ctypes.data, len(x))
    assert (y[:3] == 0).all() and y[3] == 1
    assert np.isfinite(y[4:6]).all() and (y[4:6] > 1e38).all()
    assert np.isnan(y[6])


def test_exp2_is_within_three_units_in_the_last_place() -> None:
    x = np.linspace(-126, 127, 1 << 16, dtype=np.float32)
    y = np.empty_like(x)
    _exp2_all(x.ctypes.data, y.ctypes.data, len(x))
    assert np.abs(y / np.exp2(x.astype(np.float64)) - 1).max() < 3 * np.finfo(np.float32).eps


def test_exp2_of_weights_is_a_hundred_times_more_exact_than_they_are_kept() -> None:
    x = np.concatenate((np.linspace(-126, 126, 4096), np.linspace(-1, 1, 4096))).astype(np.float32)
    y = np.empty_like(x)
    _exp2_near_all(x.ctypes.data, y.ctypes.data, len(x))
    assert np.abs(y / np.exp2(x.astype(np.float64)) - 1).max() < 8e-6
    x[:4], x[4] = (-np.inf, -1e30, -1000, -150), np.nan
    _exp2_near_all(x.ctypes.data, y.ctypes.data, 16)
    assert not y[:4].any() and np.isnan(y[4])


def test_columns_are_turned_four_at_a_time() -> None:
    lines, rows = np.random.default_rng(0).random((16, 16), np.float32), np.zeros((4, 20), np.float32)
    _turn(lines.ctypes.data + 4 * 8, rows.ctypes.data, 20)
    assert (rows[:, :16] == lines[:, 8:12].T).all() and not rows[:, 16:].any()


def test_exp2_of_what_weighs_nothing_is_exactly_0() -> None:
    x = np.array([-np.inf, -1e30, -127.0, -126.7, -126.2, 0.0, np.nan, *[0.0] * 9], dtype=np.float32)
    y = np.empty_like(x)
    _exp2_all(x.ctypes.data, y.ctypes.data, len(x))
    assert (y[:3] == 0).all() and y[5] == 1
    assert ((y[3:5] >= 0) & (y[3:5] < 2.0**-125)).all()
    assert np.isnan(y[6])


def test_bfloat16_rounds_as_torch_does() -> None:
    x = torch.cat(
        (torch.randn(4096), torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.3e38, 1e-40, 1.00390625]))
    )
    x = torch.nn.functional.pad(x, (0, -len(x) % 16))
    halves, back = torch.empty(len(x), dtype=torch.bfloat16), torch.empty(len(x))
    _convert(x.data_ptr(), FLOAT32, halves.data_ptr(), BFLOAT16, len(x))
    assert torch.equal(halves.view(torch.int16), x.bfloat16().view(torch.int16))
    _convert(halves.data_ptr(), BFLOAT16, back.data_ptr(), FLOAT32, len(x))
    assert torch.equal(back, halves.float())


def test_tile_product_adds_to_what_is_there() -> None:
    for count in (0, 1, 17):
        a, b, c = torch.randn(3, count), torch.randn(count, 32), torch.randn(3, 32)
        expected = c + a @ b
        _multiply(a.data_ptr(), b.data_ptr(), c.data_ptr(), count)
        torch.testing.assert_close(c, expected)


def test_transpose_of_scattered_rows() -> None:
    for kind, dtype in ((FLOAT32, torch.float32), (BFLOAT16, torch.bfloat16)):
        x = torch.randn(40, 50).to(dtype)
        picks = torch.randperm(40)[:16]
        rows = torch.tensor([x[i].data_ptr() for i in picks.tolist()])
        to = torch.zeros(16, 20)
        _transpose(rows.data_ptr(), 34, kind, to.data_ptr())
        assert torch.equal(to[:, :16], x[picks, 34:].float().T)
        assert (to[:, 16:] == 0).all()
