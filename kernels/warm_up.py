"""Compiling the CPU kernels ahead of the first step. numba keeps them on disk."""

from collections.abc import Callable

from .cpu import activation, attention, attention_plan, edits, norm, rope, sampling
from .cpu.entry import entries


def warm_up(progress: Callable[[int, int], None] | None = None) -> None:
    """Compiles the CPU kernels, about a minute the first time on a machine, or loads them from numba's cache.

    ``progress(done, all)`` is called from the first kernel on that had to be compiled. The products of ``PackedLinear``
    compile when the first layer of their kind is made.
    """
    found = list(entries(activation, attention, attention_plan, edits, norm, rope, sampling))
    has_compiled = False
    for done, entry in enumerate(found, 1):
        has_compiled |= entry.compile()
        if has_compiled and progress is not None:
            progress(done, len(found))
