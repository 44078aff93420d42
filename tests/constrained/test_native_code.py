"""Functions that are compiled for grammars."""

import sys

import numpy as np
import pytest
from phloem.constrained.native_code import brief_native, native, native_part


@native_part
def _doubled(numbers):
    more = np.zeros(2 * len(numbers), numbers.dtype)
    for i in range(len(numbers)):
        more[i] = numbers[i]
    return more


@native_part
def _quarters(numbers, low):
    more = _doubled(_doubled(numbers))
    for i in range(len(numbers), len(more)):
        more[i] = max(more[i - len(numbers)], low)
    return more


@native
def _spread(numbers, low):
    return _quarters(numbers, low), low in (1, 2)


@brief_native
def _again(numbers):
    return _quarters(numbers, 7)


def test_a_part_of_a_part_is_linked_and_its_arrays_live_as_long_as_they_are_held() -> None:
    numbers = np.arange(3, dtype=np.int32)
    held = sys.getrefcount(numbers)
    spread, is_small = _spread(numbers, 1)
    assert spread.tolist() == [0, 1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 2]
    assert is_small
    assert _again(numbers).tolist() == [0, 1, 2] + 9 * [7]
    assert sys.getrefcount(numbers) == held


def test_python_cannot_call_a_part() -> None:
    numbers = np.arange(3, dtype=np.int32)
    _spread(numbers, 1)
    with pytest.raises(ValueError, match="not in list"):
        _doubled(numbers)
