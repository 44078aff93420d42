"""Cycles that are frozen and then dropped, in numbers that depend on how many objects the process has."""

import gc
import weakref

from phloem.runtime.process import garbage as garbage_module
from phloem.runtime.process.garbage import Garbage


class Node:
    """A cycle of its own."""

    def __init__(self) -> None:
        self.itself = self
        self.others: list[list] = []


def grow(num_passes: int) -> list[list]:
    """Make so many lasting objects that the young generation is collected so often."""
    kept: list[list] = []
    before = gc.get_count()[2]
    while gc.get_count()[2] < before + num_passes:
        kept += [[] for _ in range(1_000)]
    return kept


def freed_when_idle() -> list[int]:
    """Frozen objects at the start; whether a dropped cycle lives on under load, and when idle; frozen objects then."""
    gc.collect()
    garbage = Garbage()
    lasting = gc.get_freeze_count()
    node = Node()
    seen = weakref.ref(node)
    node.others = [[] for _ in range(lasting // 2)]
    grow(garbage_module.PASSES)
    garbage.after_step(is_idle=False)
    del node
    grow(garbage_module.PASSES)
    garbage.after_step(is_idle=False)
    under_load = seen() is not None
    grow(garbage_module.PASSES)
    garbage.after_step(is_idle=True)
    return [lasting, int(under_load), int(seen() is not None), gc.get_freeze_count()]


def bounded_under_load() -> list[int]:
    """Frozen objects at the start and at most; rounds, each with a dropped cycle of half as many; cycles that live."""
    gc.collect()
    garbage = Garbage()
    lasting = gc.get_freeze_count()
    most, seen = 0, []
    for _ in range(20):  # ten times the lasting objects, all of them garbage
        node = Node()
        seen.append(weakref.ref(node))
        node.others = [[] for _ in range(lasting // 2)]
        grow(garbage_module.PASSES)
        garbage.after_step(is_idle=False)
        most = max(most, gc.get_freeze_count())
    return [lasting, most, len(seen), sum(node() is not None for node in seen)]
