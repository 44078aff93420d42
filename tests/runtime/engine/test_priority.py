"""Threads for grammars leave the processors to steps."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from phloem.runtime.engine.mask_thread import MaskThread
from phloem.runtime.engine.priority import NICER, behind_steps


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class Noting:
    """Stands in for a matcher: notes the niceness of the thread that prepares it."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def knows(self, token_ids: list[int]) -> bool:
        return bool(self.seen)

    def prepare_at_once(self, token_ids: list[int]) -> bool:
        return False

    def clone(self) -> "Noting":
        return self

    def prepare(self, token_ids: list[int]) -> None:
        self.seen.append(niceness())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_only_the_thread_itself_is_lowered_and_the_mask_thread_is():
    before = niceness()
    with ThreadPoolExecutor(1, initializer=behind_steps) as pool:
        assert pool.submit(niceness).result() == min(before + NICER, 19)
    masks, matcher = MaskThread(budget_s=0.0), Noting()
    try:
        future = masks.prepare(matcher, [])
        assert future is not None
        future.result()
    finally:
        masks.close()
    assert matcher.seen == [min(before + NICER, 19)]
    assert niceness() == before


def test_a_system_without_priorities_of_threads_changes_nothing(monkeypatch):
    def refuse(*args: int) -> None:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    behind_steps()


def test_elsewhere_than_on_linux_no_process_is_lowered(monkeypatch):
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "setpriority", lambda *args: asked.append(args))
    monkeypatch.setattr(sys, "platform", "darwin")
    behind_steps()
    assert asked == []
    monkeypatch.setattr(sys, "platform", "linux")
    behind_steps()
    assert [one[:2] for one in asked] == [(os.PRIO_PROCESS, threading.get_native_id())]
