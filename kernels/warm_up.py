"""Compiling the CPU kernels ahead of the first step. Never compiles one twice: numba keeps them on disk."""

from .cpu import activation, attention, integer, norm, rope, sampling
from .cpu.entry import entries


def warm_up() -> None:
    """Compiles every CPU kernel, about ten seconds the first time on a machine, or loads them from numba's cache."""
    for entry in entries(activation, attention, integer, norm, rope, sampling):
        entry.compile()
