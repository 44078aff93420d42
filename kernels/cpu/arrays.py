"""numpy arrays in compiled code, made from addresses: for an ``entry`` whose record holds addresses."""

from typing import Any

import numba as nb
import numpy as np
from numba import njit, types
from numba.extending import intrinsic


def _to_pointer(typing: Any, address: Any, like: Any) -> Any:
    """An int64 address as a pointer to the type of ``like``."""
    result = types.CPointer(like)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(result))

    return result(types.int64, like), codegen


_pointer: Any = intrinsic(_to_pointer)


@njit(inline="always")
def int32s(address, count):
    """int32 [count]"""
    return nb.carray(_pointer(address, np.int32(0)), (count,))


@njit(inline="always")
def int64s(address, count):
    """int64 [count]"""
    return nb.carray(_pointer(address, np.int64(0)), (count,))


@njit(inline="always")
def int32_rows(address, count, width):
    """int32 [count, width]"""
    return nb.carray(_pointer(address, np.int32(0)), (count, width))


def address_of(array: np.ndarray) -> int:
    """Of a contiguous array, which the caller keeps until the call is over."""
    address: int = array.__array_interface__["data"][0]
    return address
