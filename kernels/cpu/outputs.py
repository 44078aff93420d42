"""How the products leave their sums: bias added, in the result's type. Never multiplies."""

from numba import njit

from .vector import LANES, get_f32, load16_f32, put, store16


@njit(forceinline=True)
def put_outputs(
    sums: int, at: int, bias: int, out: int, out_kind: int, row: int, stride: int, column: int, num_outputs: int
) -> None:
    """16 float32 at ``sums[at:]`` become outputs ``column`` and following of a row, those that there are; rows lie
    ``stride`` numbers apart.
    """
    to = row * stride + column
    if column + LANES <= num_outputs:
        values = load16_f32(sums, at)
        if bias != 0:
            values = values + load16_f32(bias, column)
        store16(out, to, out_kind, values)
    else:
        for i in range(num_outputs - column):
            value = get_f32(sums, at + i)
            if bias != 0:
                value += get_f32(bias, column + i)
            put(out, to + i, out_kind, value)
