"""Compiling the CPU kernels ahead of the first step. Never compiles one twice: numba keeps them on disk."""

from .cpu import activation, attention, attention_plan, edits, norm, rope, sampling
from .cpu.entry import entries


def warm_up() -> None:
    """Compiles the CPU kernels, about ten seconds the first time on a machine, or loads them from numba's cache.

    The products of ``PackedLinear`` compile when the first layer of their kind is made.
    """
    for entry in entries(activation, attention, attention_plan, edits, norm, rope, sampling):
        entry.compile()
