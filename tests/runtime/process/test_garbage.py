"""A full garbage collection runs while the engine is idle, or when very many objects have been made."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from phloem.runtime.process import garbage as garbage_module
from phloem.runtime.process.garbage import Garbage


class Node:
    """A cycle of its own."""

    def __init__(self) -> None:
        self.itself = self
        self.others: list[list] = []


@pytest.fixture
def whole() -> Iterator[list[int]]:
    """A list that grows by one with each full collection."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(1)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def grow(num_passes: int) -> list[list]:
    """Make so many lasting objects that the young generation is collected so often."""
    kept: list[list] = []
    before = gc.get_count()[2]
    while gc.get_count()[2] < before + num_passes:
        kept += [[] for _ in range(1_000)]
    return kept


def test_nothing_is_held_up_while_there_is_work_and_an_idle_moment_is_used(whole):
    before = gc.get_threshold()
    garbage = Garbage()
    whole.clear()
    try:
        kept = grow(3 * garbage_module.IDLE_PASSES)  # Python by itself would have looked several times
        garbage.after_step(is_idle=False)
        assert not whole
        garbage.after_step(is_idle=True)
        assert len(whole) == 1
        garbage.after_step(is_idle=True)
        assert len(whole) == 1 and kept
    finally:
        garbage.close()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_under_load_memory_has_an_end(whole, monkeypatch):
    monkeypatch.setattr(garbage_module, "BUSY_PASSES", 20)
    garbage = Garbage()
    whole.clear()
    try:
        for _ in range(3):
            kept = grow(20)
            garbage.after_step(is_idle=False)
        assert len(whole) == 3 and kept
    finally:
        garbage.close()


def test_cycles_dropped_meanwhile_are_freed(whole):
    garbage = Garbage()
    try:
        nodes = [Node() for _ in range(10)]
        seen = [weakref.ref(node) for node in nodes]
        grow(garbage_module.IDLE_PASSES)  # they are old by now
        del nodes
        garbage.after_step(is_idle=True)
        assert not any(node() for node in seen)
    finally:
        garbage.close()


def test_frozen_cycles_are_freed_in_an_idle_moment_once_there_are_some(whole):
    garbage = Garbage()
    try:
        lasting = gc.get_freeze_count()
        node = Node()
        seen = weakref.ref(node)
        node.others = [[] for _ in range(lasting // 2)]
        grow(garbage_module.BUSY_PASSES)
        garbage.after_step(is_idle=False)
        del node
        grow(garbage_module.BUSY_PASSES)
        garbage.after_step(is_idle=False)
        assert seen() is not None
        grow(garbage_module.IDLE_PASSES)
        garbage.after_step(is_idle=True)
        assert seen() is None and gc.get_freeze_count() < 1.25 * lasting
    finally:
        garbage.close()


def test_frozen_cycles_stay_bounded_under_a_load_that_never_pauses(whole, monkeypatch):
    monkeypatch.setattr(garbage_module, "BUSY_PASSES", 2)
    garbage = Garbage()
    try:
        lasting = gc.get_freeze_count()
        most, seen = 0, []
        for _ in range(12):  # six times the lasting objects, all of them garbage
            node = Node()
            seen.append(weakref.ref(node))
            node.others = [[] for _ in range(lasting // 2)]
            grow(2)
            garbage.after_step(is_idle=False)
            most = max(most, gc.get_freeze_count())
        assert most < 4 * lasting and sum(node() is not None for node in seen) < 7
    finally:
        garbage.close()


def test_a_collection_under_load_looks_at_what_is_new(whole):
    garbage = Garbage()
    try:
        kept = grow(garbage_module.BUSY_PASSES)
        garbage.after_step(is_idle=False)
        assert gc.get_freeze_count() > len(kept) and len(gc.get_objects()) < len(kept)
    finally:
        garbage.close()
