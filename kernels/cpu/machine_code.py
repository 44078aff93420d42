"""Compiling a function to a C function, and calling that from Python."""

import ctypes
from collections.abc import Callable
from typing import Any

from numba import cfunc, types


def machine_code(function: Callable[..., None], *arguments: types.Type) -> Any:
    """Owns the code of ``void f(arguments)``, which lies at its ``address``; each argument is an int64 to C.

    Kept in numba's cache on disk, unless neither the package's folder nor the user's can be written.
    """
    signature = types.void(*arguments)
    try:
        return cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return cfunc(signature, error_model="numpy")(function)


def c_call(address: int, num_arguments: int) -> Callable[..., None]:
    """The compiled function at ``address``, of int64 arguments; Python's lock is free while it runs."""
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * num_arguments)(address)
