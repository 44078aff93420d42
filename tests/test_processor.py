"""What is known of the processor, also on systems that say less."""

import ctypes
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_windows_tells_both_memories(monkeypatch):
    """By a stand-in of kernel32 that writes where Microsoft's documentation has the fields."""

    def words(structure):
        return ctypes.cast(structure, ctypes.POINTER(ctypes.c_uint64))

    def status(structure):
        assert words(structure)[0] == 64, "dwLength of MEMORYSTATUSEX, and no load"
        words(structure)[1] = 16 << 30
        return 1

    def process(handle, structure, size):
        assert (handle.value, size) == (ctypes.c_void_p(-1).value, 72)
        words(structure)[2] = 5 << 20
        return 1

    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=status, K32GetProcessMemoryInfo=process)
    monkeypatch.setattr(ctypes, "WinDLL", lambda name: {"kernel32": kernel32}[name], raising=False)
    assert (processor.memory_bytes(), processor.resident_bytes()) == (16 << 30, 5 << 20)
    kernel32.GlobalMemoryStatusEx = kernel32.K32GetProcessMemoryInfo = lambda *_: 0
    assert (processor.memory_bytes(), processor.resident_bytes()) == (0, 0), "where Windows refuses"


def test_macos_tells_the_memory_of_this_process(monkeypatch):
    def proc_pidinfo(pid, kind, argument, structure, size):
        assert (pid, kind, argument.value, size) == (os.getpid(), 4, 0, 96)
        ctypes.cast(structure, ctypes.POINTER(ctypes.c_uint64))[1] = 7 << 20
        return size

    on(monkeypatch, "arm64", "darwin", SimpleNamespace(proc_pidinfo=proc_pidinfo))
    assert processor.resident_bytes() == 7 << 20


LINUX = {16: 1 << 1 | 1 << 20, 26: 1 << 14}  # asimd and asimddp; bf16
APPLE = {b"hw.optional.AdvSIMD": 1, b"hw.optional.arm.FEAT_DotProd": 1, b"hw.optional.arm.FEAT_I8MM": 0}


def test_linux_tells_the_features_of_an_arm_cpu(monkeypatch):
    library = SimpleNamespace(getauxval=lambda word: LINUX[word])
    on(monkeypatch, "aarch64", "linux", library)
    found = {"neon": True, "dotprod": True, "sve": False, "i8mm": False, "bf16": True}
    assert processor.arm_features() == found


def test_macos_tells_them_and_a_name_that_it_does_not_know_is_none(monkeypatch):
    def sysctlbyname(key, value, *_):
        if key in APPLE:
            ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = APPLE[key]
        return 0 if key in APPLE else -1

    on(monkeypatch, "arm64", "darwin", SimpleNamespace(sysctlbyname=sysctlbyname))
    found = {"neon": True, "dotprod": True, "sve": False, "i8mm": False, "bf16": False}
    assert processor.arm_features() == found


@pytest.mark.parametrize(("machine", "system"), [("x86_64", "linux"), ("ARM64", "win32"), ("arm64", "freebsd14")])
def test_other_systems_and_cpus_are_not_asked(machine, system, monkeypatch):
    on(monkeypatch, machine, system, None)
    assert processor.arm_features() == {}


def on(monkeypatch, machine, system, library):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
