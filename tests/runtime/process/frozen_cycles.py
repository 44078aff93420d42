"""Cycles that are frozen and then dropped, in numbers that depend on how many blocks of memory the process has."""

import gc
import sys
import weakref

from phloem.runtime.process import garbage as garbage_module
from phloem.runtime.process.garbage import Garbage


class Node:
    """A cycle of its own."""

    def __init__(self) -> None:
        self.itself = self
        self.others: list[object] = []


def grow(num_passes: int) -> list[list]:
    """Make so many lasting objects that the young generation is collected so often."""
    kept: list[list] = []
    before = gc.get_count()[2]
    while gc.get_count()[2] < before + num_passes:
        kept += [[] for _ in range(1_000)]
    return kept


def freed_when_idle() -> list[int]:
    """Blocks at the start; whether a dropped cycle lives on under load, and when idle; blocks then."""
    gc.collect()
    garbage = Garbage()
    lasting = sys.getallocatedblocks()
    node = Node()
    seen = weakref.ref(node)
    node.others = [object() for _ in range(lasting // 2)]
    grow(garbage_module.PASSES)
    garbage.after_step(is_idle=False)
    del node
    grow(garbage_module.PASSES)
    garbage.after_step(is_idle=False)
    under_load = seen() is not None
    grow(garbage_module.PASSES)
    garbage.after_step(is_idle=True)
    return [lasting, int(under_load), int(seen() is not None), sys.getallocatedblocks()]


def bounded_under_load() -> list[int]:
    """Blocks at the start and at most; rounds, each with a dropped cycle of half as many; cycles that live."""
    gc.collect()
    garbage = Garbage()
    lasting = sys.getallocatedblocks()
    most, seen = 0, []
    for _ in range(20):  # ten times the lasting blocks, all of them garbage
        node = Node()
        seen.append(weakref.ref(node))
        node.others = [object() for _ in range(lasting // 2)]
        grow(garbage_module.PASSES)
        garbage.after_step(is_idle=False)
        most = max(most, sys.getallocatedblocks())
    return [lasting, most, len(seen), sum(node() is not None for node in seen)]
