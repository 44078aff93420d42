"""Compiling the CPU kernels ahead of the first step. numba keeps them on disk."""

from collections.abc import Callable
from types import ModuleType

from ..cpu_isa import CpuIsa
from .compiling import Compiling, begin_compiling
from .cpu import activation, attention, attention_plan, edits, likeliest, norm, rope, sampling
from .cpu.entry import entries

# The slowest to compile first.
_MODULES = (attention, sampling, attention_plan, likeliest, rope, activation, norm, edits)


def begin_warm_up(*others: ModuleType, cpu_isa: CpuIsa, num_threads: int) -> Compiling | None:
    """Have other processes compile what ``warm_up`` compiles, while this one does other work. The caller closes it.

    None where there is little to compile, or one thread.
    """
    return begin_compiling((*_MODULES, *others), cpu_isa=cpu_isa, num_threads=num_threads)


def warm_up(
    progress: Callable[[int, int], None] | None = None, *others: ModuleType, begun: Compiling | None = None
) -> None:
    """Compiles the CPU kernels, about half a minute of CPU time the first time on a machine, or loads them from numba's
    cache; ``others`` are modules with more kernels.

    ``progress(done, all)`` is called from the first kernel on that had to be compiled. The products of ``PackedLinear``
    compile when the first layer of their kind is made.
    """
    found = list(entries(*_MODULES, *others))
    has_compiled = begun is not None
    if begun is not None:
        while (kernel := begun.take()) is not None:
            if progress is not None:
                progress(len(found) - begun.num_left - 1, len(found))
            kernel.compile()
        begun.wait()
    for done, entry in enumerate(found, 1):
        has_compiled |= entry.compile()
        if has_compiled and progress is not None:
            progress(done, len(found))
