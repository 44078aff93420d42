import numpy as np
from phloem.constrained.machine.untouched import touch, untouched


def test_touched_rows_keep_what_they_hold():
    array = untouched((1000, 256), np.int32)
    array[5] = 7
    touch(array, 0, 17)
    touch(array, 990, 1000)
    assert (array[5] == 7).all()
    assert array.sum() == 7 * 256


def test_small_arrays_are_touched_without_effect():
    array = untouched((3, 2), np.int32)
    touch(array, 1, 3)
    assert array.tolist() == [[0, 0]] * 3
