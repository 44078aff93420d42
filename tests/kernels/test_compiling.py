"""Kernels that another process compiles are on disk; where it dies, the caller has what is left."""

from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest
from phloem.kernels.compiling import Compiling, begin_compiling
from phloem.kernels.cpu.arrays import address_of
from phloem.kernels.cpu.entry import entry
from phloem.tests.kernels import small_kernels
from phloem.tests.kernels.small_kernels import AddCall


class NoCall(NamedTuple):
    number: int


@entry
def of_this_process(call: NoCall) -> None: ...


def test_a_process_compiles_until_it_dies_and_the_caller_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    add, subtract = small_kernels.add, small_kernels.subtract
    of_this_process.function.__qualname__ = "nothing_has_this_name"
    assert not add.is_on_disk() and not subtract.is_on_disk()
    begun = Compiling([add, of_this_process, subtract], cpu_isa="auto", num_processes=1)
    begun.wait()
    assert add.is_on_disk() and not subtract.is_on_disk() and begun.num_left == 1
    assert begun.take() is subtract and begun.take() is None
    begun.close()
    assert subtract.compile() and not add.compile()
    numbers = np.array([40], np.int64)
    add(AddCall(address_of(numbers), 5))
    subtract(AddCall(address_of(numbers), 3))
    assert numbers.item() == 42


def test_one_thread_or_few_missing_kernels_begin_no_process() -> None:
    assert begin_compiling((small_kernels,), cpu_isa="auto", num_threads=1) is None
    assert begin_compiling((small_kernels,), cpu_isa="auto", num_threads=8) is None
