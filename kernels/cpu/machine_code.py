"""Compiling a function of int64 arguments to a C function. Never compiles on import."""

import ctypes
from collections.abc import Callable
from typing import Any

from numba import cfunc, types


def machine_code(function: Callable[..., None], num_arguments: int) -> Any:
    """Owns the code of ``void f(int64, ...)``, which lies at its ``address``.

    Kept in numba's cache on disk, unless neither the package's folder nor the user's can be written.
    """
    signature = types.void(*(types.int64,) * num_arguments)
    try:
        return cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return cfunc(signature, error_model="numpy")(function)


def c_call(address: int, num_arguments: int) -> Callable[..., None]:
    """The compiled function at ``address``, of int64 arguments; Python's lock is free while it runs."""
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * num_arguments)(address)
