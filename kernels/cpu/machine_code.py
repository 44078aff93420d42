"""Compiling a function to a C function, and calling that from Python."""

import ctypes
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import nrt

from ...cpu_isa import tell_numba

_KNOWN_NUMBA = "0.68."  # whose way of keeping code on disk ``load_address`` reads; another numba loads it itself
_IS_KNOWN = numba.__version__.startswith(_KNOWN_NUMBA)
_NO_WRAPPERS: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True} if _IS_KNOWN else {}  # not documented


class _Cache(FunctionCache):
    """numba's cache on disk, fresh until a source of this folder changes: a kernel's code includes the functions that
    it calls, and numba by itself looks at the kernel's own file only.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = (self._cache_file._source_stamp, sources_digest(Path(__file__).parent))

    def has(self, signature: Any) -> bool:
        """Whether the function is on disk."""
        return self._cache_file.load(self._index_key(signature, cpu_target.target_context.codegen())) is not None

    @global_compiler_lock
    def load_address(self, signature: Any) -> int:
        """Of the function that is on disk, or 0. numba itself would first load what it needs to compile others, and
        read the function's code for a compiler too.
        """
        context = cpu_target.target_context
        codegen = context.codegen()
        data = self._cache_file.load(self._index_key(signature, codegen))
        if data is None:
            return 0
        _add_symbols()
        (_, kind, (object_code, _)), about = data[:2]
        assert kind == "object", kind
        engine = codegen._engine._ee
        engine.add_object_file(binding.ObjectFileRef.from_data(object_code))
        engine.finalize_object()
        address: int = engine.get_function_address(about.llvm_cfunc_wrapper_name)
        return address


@cache
def _add_symbols() -> None:
    """numba's own functions that compiled code calls where it raises an exception."""
    for name, address in nrt._nrt.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


@cache
def sources_digest(folder: Path) -> bytes:
    """Of the folder's Python files."""
    digest = blake2b()
    for file in sorted(folder.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.digest()


class _HelperLibrary(JITCodeLibrary):
    """The code of a ``helper``, which is optimised and becomes machine code as a part of kernels only."""

    def _optimize_final_module(self) -> None: ...

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _KernelLibrary(JITCodeLibrary):
    """A kernel's code with all its helpers. It is optimised once: numba's first run is for counts of references, which
    kernels do not have.
    """

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _HelperCompiler(Compiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        context = self.state.targetctx  # a copy, for this function
        self.state.library = _HelperLibrary(context.codegen(), func.__qualname__)
        context.get_executable = lambda *_: [].append  # numba's key: a built-in function, another one for each helper
        return super().compile_extra(func)


class _KernelCompiler(Compiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        library = _KernelLibrary(self.state.targetctx.codegen(), func.__qualname__)
        library.enable_object_caching()
        self.state.library = library
        return super().compile_extra(func)


_HELPERS, _KERNELS = (_HelperCompiler, _KernelCompiler) if _IS_KNOWN else (Compiler, Compiler)


class MachineCode:
    """Owns the code of ``void f(...)``, which lies at ``address``. ``is_new``: it was compiled, not found on disk."""

    def __init__(self, owner: Any, address: int, *, is_new: bool) -> None:
        self._owner, self.address, self.is_new = owner, address, is_new


def helper(function: Callable[..., Any]) -> Any:
    """A function for kernels. Python cannot call it: the code for that would take a sixth of the time that kernels take
    to compile.
    """
    return numba.njit(pipeline_class=_HELPERS, error_model="numpy", **_NO_WRAPPERS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A ``helper`` that becomes a part of each function that calls it."""
    return numba.njit(forceinline=True, pipeline_class=_HELPERS, error_model="numpy", **_NO_WRAPPERS)(function)


@cache
def machine_code(function: Callable[..., None], *arguments: types.Type) -> MachineCode:
    """The code of ``void f(arguments)``; each argument is an int64 to C.

    Kept in numba's cache on disk, unless neither the package's folder nor the user's can be written.
    """
    code = _c_function(function, arguments)
    try:
        code._cache = cache = _Cache(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
    else:
        address = cache.load_address(code._sig) if _IS_KNOWN else 0
        if address:
            return MachineCode(code, address, is_new=False)
    code.compile()
    return MachineCode(code, code.address, is_new=code.cache_hits == 0)


def is_on_disk(function: Callable[..., None], *arguments: types.Type) -> bool:
    """Whether ``machine_code`` would find it there. True where nothing can be kept on disk."""
    try:
        return _Cache(function).has(_c_function(function, arguments)._sig)
    except RuntimeError:
        return True


def _c_function(function: Callable[..., None], arguments: tuple[types.Type, ...]) -> Any:
    tell_numba()
    return CFunc(function, (arguments, types.void), {}, {"error_model": "numpy"}, pipeline_class=_KERNELS)


def c_call(address: int, num_arguments: int) -> Callable[..., None]:
    """The compiled function at ``address``, of int64 arguments; Python's lock is free while it runs."""
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * num_arguments)(address)
