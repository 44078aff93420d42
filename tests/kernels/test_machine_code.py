"""Functions that are compiled for kernels alone."""

import numba
import numpy as np
import pytest
from numba import types
from phloem.kernels.cpu import machine_code
from phloem.kernels.cpu.machine_code import helper
from phloem.kernels.cpu.vector import get_f32, load16_f32, put_f32, splat16, store16_f32


@helper
def _scaled(numbers: int, factor: np.float32, count: int) -> None:
    for i in range(0, count // 16 * 16, 16):
        store16_f32(numbers, i, load16_f32(numbers, i) * splat16(factor) + splat16(factor) / load16_f32(numbers, i))
    for i in range(count // 16 * 16, count):
        put_f32(numbers, i, get_f32(numbers, i) * factor + factor / get_f32(numbers, i))


def _scale_thrice(numbers: int) -> None:
    _scaled(numbers, np.float32(3.0), 19)


_FOUR = 4


def _compare_with_four(numbers: int) -> None:
    put_f32(numbers, 0, np.float32(1.0 if _FOUR == _FOUR else 0.0))  # numba makes code of its own for two constants
    for i in range(1, 6):
        put_f32(numbers, i, np.float32(1.0 if i == _FOUR else 0.0))


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cache(function: object) -> None:
        raise RuntimeError("cannot cache function '_scale_thrice': no locator available for file 'x.py'")

    monkeypatch.setattr(machine_code, "_Cache", no_cache)


def test_a_kernel_has_its_helpers_code_which_is_no_machine_code_of_its_own(no_disk: None) -> None:
    numbers = np.arange(19, dtype=np.float32)  # [19]; the first is 0: a division by it is infinite, and no error
    with np.errstate(divide="ignore"):
        wanted = numbers * np.float32(3.0) + np.float32(3.0) / numbers
    code = machine_code.machine_code.__wrapped__(_scale_thrice, types.int64)
    machine_code.c_call(code.address, 1)(numbers.ctypes.data)
    assert numbers[0] == np.inf
    np.testing.assert_allclose(numbers, wanted, rtol=1e-6)
    (compiled,) = _scaled.overloads.values()
    if numba.__version__.startswith("0.68."):  # others compile helpers as they compile all functions
        assert compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name) == 0


def test_code_for_two_constants_is_not_taken_for_numbers(no_disk: None) -> None:
    numbers = np.zeros(6, np.float32)
    code = machine_code.machine_code.__wrapped__(_compare_with_four, types.int64)
    machine_code.c_call(code.address, 1)(numbers.ctypes.data)
    assert numbers.tolist() == [1, 0, 0, 0, 1, 0]
