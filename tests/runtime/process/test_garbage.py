"""Garbage collections look at new objects, and at all of them once memory has grown."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
from phloem.runtime.process import garbage as garbage_module
from phloem.runtime.process.garbage import Garbage
from phloem.tests.runtime.process.frozen_cycles import Node, grow


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


def test_a_few_new_objects_hold_nothing_up_and_many_are_looked_at_under_load_too(whole):
    before = gc.get_threshold()
    garbage = Garbage()
    whole.clear()
    try:
        kept = grow(garbage_module.PASSES - 1)
        garbage.after_step(is_idle=False)
        garbage.after_step(is_idle=True)
        assert not whole
        kept += grow(garbage_module.PASSES)  # Python by itself would have looked at all objects
        garbage.after_step(is_idle=False)
        assert len(whole) == 1
        garbage.after_step(is_idle=False)
        garbage.after_step(is_idle=True)
        assert len(whole) == 1 and kept
    finally:
        garbage.close()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_cycles_dropped_meanwhile_are_freed(whole):
    garbage = Garbage()
    try:
        nodes = [Node() for _ in range(10)]
        seen = [weakref.ref(node) for node in nodes]
        grow(garbage_module.PASSES)  # they are old by now
        del nodes
        garbage.after_step(is_idle=True)
        assert not any(node() for node in seen)
    finally:
        garbage.close()


def found_by(function: str) -> list[int]:
    """What ``function`` of ``frozen_cycles`` finds in a new process, which begins with few objects."""
    code = f"from phloem.tests.runtime.process import frozen_cycles; print(frozen_cycles.{function}())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_frozen_cycles_are_freed_in_an_idle_moment_once_there_are_some():
    lasting, alive_under_load, alive_when_idle, blocks = found_by("freed_when_idle")
    assert (alive_under_load, alive_when_idle) == (1, 0)
    assert blocks < 1.25 * lasting


def test_frozen_cycles_stay_bounded_under_a_load_that_never_pauses():
    lasting, most, num_rounds, alive = found_by("bounded_under_load")
    assert num_rounds == 20 and alive < 13
    assert most < 8 * lasting


def test_a_collection_under_load_looks_at_what_is_new(whole):
    garbage = Garbage()
    try:
        kept = grow(garbage_module.PASSES)
        garbage.after_step(is_idle=False)
        assert gc.get_freeze_count() > len(kept) and len(gc.get_objects()) < len(kept)
    finally:
        garbage.close()


def test_frozen_objects_are_not_counted(monkeypatch):
    """Counting a million of them takes 50 ms, in which every sequence waits."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("frozen objects are counted"))
    garbage = Garbage()
    try:
        monkeypatch.setattr(garbage_module, "BUSY_GROWTH", 0.0)
        for _ in range(2):
            kept = grow(garbage_module.PASSES)
            garbage.after_step(is_idle=False)
            assert gc.get_count()[2] == 0 and kept
    finally:
        garbage.close()
