"""The kernels' threads: every task of a job runs once, on any number of threads."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numba import cfunc, types
from numba.core.errors import TypingError
from phloem import kernels, processor
from phloem.kernels import threads
from phloem.kernels.cpu import machine_code
from phloem.kernels.cpu.entry import Entry, end_of_numbers, task_of
from phloem.kernels.cpu.pool import Pool, has_pool
from phloem.kernels.cpu.vector import get_i64, put_f64, put_i64, take_number

needs_pool = pytest.mark.skipif(
    not has_pool(), reason="no pool here: kernels run on torch's threads, see tests/kernels/test_ops.py"
)


@pytest.mark.parametrize("regions", [1, 2, 3, 4, 7, 64])
def test_numbers_stand_for_every_task_once_and_taken_by_turns_for_runs_of_them(regions: int) -> None:
    for num_tasks in range(1, 40):
        numbers = range(end_of_numbers.py_func(num_tasks, regions))
        tasks = [task_of.py_func(number, num_tasks, regions) for number in numbers]
        assert sorted(task for task in tasks if task < num_tasks) == list(range(num_tasks))
        for thread in range(regions):
            own = [task for task in tasks[thread::regions] if task < num_tasks]
            assert own == list(range(own[0], own[0] + len(own)) if own else [])
            assert abs(len(own) - num_tasks / regions) < 1


@cfunc(types.void(types.int64))
def fill(call: int) -> None:
    """Word 0: the next task, 1: the number of tasks, 2: threads that took part; task i adds 1 to word 8 + i."""
    take_number(call, 2)
    task = take_number(call, 0)
    while task < get_i64(call, 1):
        put_i64(call, 8 + task, get_i64(call, 8 + task) + 1)
        task = take_number(call, 0)


def run_tasks(run: threads.Run, num_tasks: int, num_threads: int) -> np.ndarray:
    words = np.zeros(8 + num_tasks, dtype=np.int64)
    words[1] = num_tasks
    run(fill.address, words.ctypes.data, num_threads)
    return words


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(3)
    yield pool
    pool.close()


@needs_pool
def test_every_task_of_every_job_is_done_once_before_run_returns(pool: Pool) -> None:
    for job in range(2000):
        words = run_tasks(pool.run, job % 90, 1 + job % 4)
        assert (words[8:] == 1).all() and 1 <= words[2] <= min(1 + job % 4, 3)


@needs_pool
def test_workers_wake_after_sleep(pool: Pool) -> None:
    for _ in range(5):
        time.sleep(0.01)
        assert (run_tasks(pool.run, 1000, 3)[8:] == 1).all()


@needs_pool
def test_two_callers_at_once_are_both_served(pool: Pool) -> None:
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(i for i in range(300) if not (run_tasks(pool.run, 50, 3)[8:] == 1).all())

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@needs_pool
def test_a_closed_pool_leaves_no_thread() -> None:
    before = threading.active_count()
    pool = Pool(4)
    assert threading.active_count() == before + 3
    pool.close()
    assert threading.active_count() == before


@needs_pool
def test_a_process_ends_with_its_pool_at_work() -> None:
    use = "import torch\nfrom phloem import kernels\nkernels.set_kernel_threads(3)\n"
    code = use + "kernels.silu_mul(torch.zeros(99, 4096))"
    done = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_made_for_the_occasion_do_every_task() -> None:
    assert (run_tasks(threads.python_run, 100, 3)[8:] == 1).all()


def test_torch_s_own_runtime_does_every_task() -> None:
    run = threads.openmp_run()
    if run is None:
        pytest.skip("torch's runtime has no GOMP_parallel here")
    words = run_tasks(run, 100, 3)
    assert (words[8:] == 1).all() and words[2] == 3


def test_the_number_of_threads_is_torch_s_or_our_own() -> None:
    before = torch.get_num_threads()
    try:
        assert kernels.set_threads(2) == 2
        assert threads.team().size == torch.get_num_threads() == 2
        assert kernels.set_kernel_threads(3) == 3
        assert threads.team().size == 3
        if has_pool():
            assert torch.get_num_threads() == 1
        x = torch.randn(64, 2048)
        ours = kernels.silu_mul(x)
        assert kernels.set_kernel_threads(1) == 1 and threads.team().size == 1
        assert torch.equal(kernels.silu_mul(x), ours)
        assert kernels.set_threads(0) == processor.num_cores()
        with pytest.raises(ValueError, match="num_threads=-1"):
            kernels.set_threads(-1)
    finally:
        kernels.set_threads(before)


def test_warm_up_compiles_what_a_step_needs() -> None:
    code = (
        "import torch\nfrom numba.core import event\nfrom phloem import kernels\nkernels.warm_up()\n"
        "with event.install_recorder('numba:compile') as compiled:\n    kernels.silu_mul(torch.randn(2, 64))\n"
        "print(len(compiled.buffer))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "0\n"


def test_entries_keep_integers_and_floats_apart() -> None:
    probe = Entry(_copy_float)
    to = ctypes.c_double(0.0)
    probe(CopyCall(to=ctypes.addressof(to), value=0.1))
    assert to.value == 0.1


class CopyCall(NamedTuple):
    to: int
    value: float


def _copy_float(call: CopyCall) -> None:
    put_f64(call.to, 0, call.value)


def test_a_field_that_a_record_does_not_have_is_an_error_of_the_compiler() -> None:
    with pytest.raises(TypingError, match="valeu"):
        Entry(_misspelt).compile()


def _misspelt(call: CopyCall) -> None:
    put_f64(call.to, 0, call.valeu)  # type: ignore[attr-defined]


def test_without_a_place_for_numba_s_cache_kernels_compile_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cache(function: Any) -> Any:
        raise RuntimeError("cannot cache function '_add_one': no locator available for file 'x.py'")

    monkeypatch.setattr(machine_code, "_Cache", no_cache)
    assert machine_code.machine_code.__wrapped__(_add_one, types.int64).address


def test_a_kernel_is_compiled_again_when_a_source_that_it_may_call_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machine_code.py").write_text("")
    (tmp_path / "vector.py").write_text("def callee(): return 1")
    monkeypatch.setattr(machine_code, "__file__", str(tmp_path / "machine_code.py"))

    def is_new() -> bool:
        machine_code.sources_digest.cache_clear()  # as in a new process
        code = machine_code.machine_code.__wrapped__(_add_one, types.int64)
        number = np.array([4], dtype=np.int64)
        machine_code.c_call(code.address, 1)(number.ctypes.data)
        assert number == [5]
        return code.is_new

    is_new()
    assert not is_new()
    (tmp_path / "vector.py").write_text("def callee(): return 2")
    assert [is_new(), is_new()] == [True, False]
    machine_code.sources_digest.cache_clear()


def _add_one(address: int) -> None:
    put_i64(address, 0, get_i64(address, 0) + 1)
