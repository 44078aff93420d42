"""How numba compiles the functions of this package.

By itself numba optimises each function and makes machine code of it, and does so again in all that call it. Here a
function that only compiled code calls (a *part*) is linked and optimised in its callers alone, and each operator is
resolved once for the same types. With a numba whose insides are not known all goes numba's own way; results are the
same.
"""

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import numba
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target
from numba.core.typing import Context

_KNOWN_NUMBA = "0.68."
IS_KNOWN = numba.__version__.startswith(_KNOWN_NUMBA)
NO_WRAPPERS: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True} if IS_KNOWN else {}  # not documented


class PartLibrary(JITCodeLibrary):
    """The code of a function that only compiled code calls: it is linked, optimised and becomes machine code as a part
    of a ``WholeLibrary`` alone.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    @property
    def parts(self) -> "list[PartLibrary]":
        """Those that it calls."""
        return [one for one in self._linking_libraries if isinstance(one, PartLibrary)]


class WholeLibrary(PartLibrary):
    """A function's code with that of all parts that it calls, directly or not. It is optimised once: numba's first runs
    make its own calls cheaper that count references to arrays, of which our loops have none.
    """

    def finalize(self) -> None:
        reached = dict.fromkeys(self._linking_libraries)
        left = self.parts
        while left:
            called = left.pop()._linking_libraries
            left.extend(one for one in called if one not in reached and isinstance(one, PartLibrary))
            reached.update(dict.fromkeys(called))
        self._linking_libraries = list(reached)
        JITCodeLibrary.finalize(self)

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class Typing(Context):
    """numba's inference, which resolves a built-in function or operator once for the same types, not at each place."""

    resolved: dict[tuple[int, Any], tuple[Any, Any]]  # the function, which keeps its id, and the call's signature

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        resolve = super().resolve_function_type
        function = func if isinstance(func, types.Type) else self._lookup_global(func)
        if kws or not isinstance(function, types.Function) or any(one.prefer_literal for one in function.templates):
            return resolve(func, args, kws)
        key = id(function), tuple(types.unliteral(arg) if isinstance(arg, types.Literal) else arg for arg in args)
        if key in self.resolved:
            return self.resolved[key][1]
        found = resolve(func, args, kws)
        if found is not None and not any(isinstance(arg, types.Literal) for arg in found.args):  # holds for any number
            self.resolved[key] = function, found
        return found


@cache
def shared_typing() -> Typing:
    """It shares all that numba's own has."""
    context = copy(cpu_target.typing_context)
    context.__class__ = Typing
    context.resolved = {}
    return context


def begin_part(state: Any, function: Callable[..., Any]) -> None:
    """Before a compiler compiles a function as a part, which raises ValueError if Python calls it. ``state``: the
    compiler's.
    """
    context = state.targetctx  # a copy, for this function
    state.library = PartLibrary(context.codegen(), function.__qualname__)
    # numba's key: a built-in function of one object, another one for each part. Called, it finds nothing to remove.
    context.get_executable = lambda *_: [].remove


def begin_whole(state: Any, function: Callable[..., Any]) -> None:
    """Before a compiler compiles a function that is called from outside of compiled code."""
    state.library = WholeLibrary(state.targetctx.codegen(), function.__qualname__)
    state.library.enable_object_caching()
