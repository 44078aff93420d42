"""Compiling a function to a C function, and calling that from Python."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba import types
from numba.core import ir, typed_passes, untyped_passes
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.lowering import Lower
from numba.core.registry import cpu_target
from numba.core.runtime import nrt
from numba.core.typing import signature

from ...cpu_isa import tell_numba
from ...numba_code import IS_KNOWN, NO_WRAPPERS, begin_part, begin_whole, shared_typing


class _Cache(FunctionCache):
    """numba's cache on disk, fresh until a source of this folder changes: a kernel's code includes the functions that
    it calls, and numba by itself looks at the kernel's own file only.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = (self._cache_file._source_stamp, sources_digest(Path(__file__).parent))

    def has(self, types_of_call: Any) -> bool:
        """Whether the function is on disk."""
        return self._cache_file.load(self._index_key(types_of_call, cpu_target.target_context.codegen())) is not None

    @global_compiler_lock
    def load_address(self, types_of_call: Any) -> int:
        """Of the function that is on disk, or 0. numba itself would first load what it needs to compile others, and
        read the function's code for a compiler too.
        """
        context = cpu_target.target_context
        codegen = context.codegen()
        data = self._cache_file.load(self._index_key(types_of_call, codegen))
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


class _Lower(Lower):
    """numba's writer of LLVM code, without counts of references, zeros in new variables and notes for debuggers."""

    def incref(self, typ: Any, val: Any) -> None: ...

    def decref(self, typ: Any, val: Any) -> None: ...

    def delvar(self, name: str) -> None: ...

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        with self.builder.goto_entry_block():
            return self.builder.alloca(lltype, name=name)

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        if expr.static_lhs is not ir.UNDEFINED or expr.static_rhs is not ir.UNDEFINED:
            return super().lower_binop(resty, expr, op)
        function, wanted = shared_typing().resolve_value_type(op), self.fndesc.calltypes[expr]
        values = [
            self.context.cast(self.builder, self.loadvar(one.name), self.typeof(one.name), kind)
            for one, kind in zip((expr.lhs, expr.rhs), wanted.args, strict=True)
        ]
        found = shared_typing().resolve_function_type(function, wanted.args, {})
        result = self.context.get_function(function, found)(self.builder, values)
        return self.context.cast(self.builder, result, wanted.return_type, resty)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(typed_passes.BaseNativeLowering):
    _name: Any = "kernel_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        return _Lower


# Of numba's, those that the code of kernels needs. It has no closures, list comprehensions, array expressions, ``with``
# or ``raise``, and a variable of a kernel has one type: numba widens it where its values have several.
_PASSES = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    untyped_passes.InlineInlinables,
    untyped_passes.GenericRewrites,
    typed_passes.NopythonTypeInference,
    typed_passes.AnnotateTypes,
    _Lowering,
    typed_passes.NoPythonBackend,
)


class _Frontend(Compiler):
    def define_pipelines(self) -> list[PassManager]:
        self.state.typingctx = shared_typing()
        passes = PassManager("kernel")
        for one in _PASSES:
            passes.add_pass(one)
        passes.finalize()
        return [passes]


class _HelperCompiler(_Frontend):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        begin_part(self.state, func)
        return super().compile_extra(func)


class _KernelCompiler(_Frontend):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        begin_whole(self.state, func)
        return super().compile_extra(func)


_HELPERS, _KERNELS = (_HelperCompiler, _KernelCompiler) if IS_KNOWN else (Compiler, Compiler)


class MachineCode:
    """Owns the code of ``void f(...)``, which lies at ``address``. ``is_new``: it was compiled, not found on disk."""

    def __init__(self, owner: Any, address: int, *, is_new: bool) -> None:
        self._owner, self.address, self.is_new = owner, address, is_new


def helper(function: Callable[..., Any]) -> Any:
    """A function for kernels. Python cannot call it: the code for that would take a sixth of the time that kernels take
    to compile. A call raises ValueError.
    """
    return numba.njit(pipeline_class=_HELPERS, error_model="numpy", **NO_WRAPPERS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A ``helper`` that becomes a part of each function that calls it."""
    return numba.njit(forceinline=True, pipeline_class=_HELPERS, error_model="numpy", **NO_WRAPPERS)(function)


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
        # Another numba loads it itself.
        address = cache.load_address(signature(types.void, *arguments)) if IS_KNOWN else 0
        if address:
            return MachineCode(code, address, is_new=False)
    with _without_collection():
        code.compile()
    return MachineCode(code, code.address, is_new=code.cache_hits == 0)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python's search for cycles of garbage would take a tenth of the time: a compiler makes many objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_on_disk(function: Callable[..., None], *arguments: types.Type) -> bool:
    """Whether ``machine_code`` would find it there. True where nothing can be kept on disk."""
    try:
        tell_numba()
        return _Cache(function).has(signature(types.void, *arguments))
    except RuntimeError:
        return True


def _c_function(function: Callable[..., None], arguments: tuple[types.Type, ...]) -> Any:
    tell_numba()
    return CFunc(function, (arguments, types.void), {}, {"error_model": "numpy"}, pipeline_class=_KERNELS)


def c_call(address: int, num_arguments: int) -> Callable[..., None]:
    """The compiled function at ``address``, of int64 arguments; Python's lock is free while it runs."""
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * num_arguments)(address)
