"""Compiling a function to a C function, and calling that from Python."""

import ctypes
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc


class _Cache(FunctionCache):
    """numba's cache on disk, fresh until a source of this folder changes: a kernel's code includes the functions that
    it calls, and numba by itself looks at the kernel's own file only.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = (self._cache_file._source_stamp, sources_digest(Path(__file__).parent))


@cache
def sources_digest(folder: Path) -> bytes:
    """Of the folder's Python files."""
    digest = blake2b()
    for file in sorted(folder.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.digest()


def machine_code(function: Callable[..., None], *arguments: types.Type) -> Any:
    """Owns the code of ``void f(arguments)``, which lies at its ``address``; each argument is an int64 to C.

    Kept in numba's cache on disk, unless neither the package's folder nor the user's can be written.
    """
    code: Any = CFunc(function, (arguments, types.void), {}, {"error_model": "numpy"})
    try:
        code._cache = _Cache(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
    code.compile()
    return code


def c_call(address: int, num_arguments: int) -> Callable[..., None]:
    """The compiled function at ``address``, of int64 arguments; Python's lock is free while it runs."""
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * num_arguments)(address)
