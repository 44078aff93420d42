"""How numba compiles the walks of grammars: functions that Python calls, and those that only these call."""

from collections.abc import Callable
from typing import Any

import numba
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import PassManager

from ..numba_code import IS_KNOWN, NO_WRAPPERS, begin_part, begin_whole, shared_typing


class _NativeCompiler(Compiler):
    def define_pipelines(self) -> list[PassManager]:
        self.state.typingctx = shared_typing()
        passes: list[PassManager] = super().define_pipelines()
        return passes

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        begin_whole(self.state, func)
        return super().compile_extra(func)


class _PartCompiler(_NativeCompiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        begin_part(self.state, func)
        return Compiler.compile_extra(self, func)


_NATIVE, _PARTS = (_NativeCompiler, _PartCompiler) if IS_KNOWN else (Compiler, Compiler)


def native(function: Callable[..., Any]) -> Any:
    """A function of grammars that Python calls, kept in numba's cache on disk. Python's lock is free while it runs."""
    return numba.njit(cache=True, nogil=True, pipeline_class=_NATIVE)(function)


def brief_native(function: Callable[..., Any]) -> Any:
    """A ``native`` function that keeps Python's lock, as giving it away would take longer than the function."""
    return numba.njit(cache=True, pipeline_class=_NATIVE)(function)


def native_part(function: Callable[..., Any]) -> Any:
    """A function that ``native`` ones call. Python cannot call it: that raises ValueError."""
    return numba.njit(pipeline_class=_PARTS, **NO_WRAPPERS)(function)
