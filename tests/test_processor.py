"""What is known of the processor, also on systems that say less."""

import os
import platform
from pathlib import Path

import pytest
from phloem import processor


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch):
    """A system without /proc, without affinity and without sysconf."""

    def missing(*_: object) -> str:
        raise FileNotFoundError

    processor.field.cache_clear()
    monkeypatch.setattr(Path, "read_text", missing)
    for name in ("sched_getaffinity", "sysconf"):
        monkeypatch.delattr(os, name, raising=False)
    yield
    processor.field.cache_clear()


def test_cores_are_those_of_this_process():
    assert 1 <= processor.num_cores() <= (os.cpu_count() or 1)
    assert processor.memory_bytes() > 1 << 28 and processor.name()


def test_a_system_that_says_nothing_has_a_name_and_cores(elsewhere, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert (processor.name(), processor.field("flags"), processor.memory_bytes()) == ("arm64", "", 0)
    assert processor.num_cores() == (os.cpu_count() or 1)


def test_the_memory_of_this_process_is_a_part_of_the_machines():
    resident = processor.resident_bytes()
    assert resident == 0 or 1_000_000 < resident < processor.memory_bytes()
