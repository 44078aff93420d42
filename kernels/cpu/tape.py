"""Recorded kernel calls, made again in one go. Never checks shapes: what was recorded is what runs.

A decode step of a small model is some three hundred calls of a few microseconds each; made from Python, each costs as
much again. On a tape they follow one another in compiled code, and Python's lock is free meanwhile.
"""

import numpy as np
from numba import njit

from .entry import OUTPUTS
from .machine_code import c_call, machine_code
from .pool import Pool, give_job
from .recording import Arena, Recording
from .timing import CallTime, KernelTimes, clock_ns, open_times
from .vector import call_function, get_i64, put_i64

# Words of a call on the tape: its function, where its arguments begin and how many there are, and its threads.
_FUNCTION, _BEGIN, _NUM_WORDS, _THREADS, _WORDS = 0, 1, 2, 3, 4


class Tape:
    """Calls that may be made again while the memory of their arguments is what it was: the arena's is kept."""

    def __init__(self, recording: Recording) -> None:
        assert recording.foreign is None, recording.foreign
        words = [np.frombuffer(call.block, dtype=np.int64) for call in recording.calls]
        lengths = [len(block) for block in words]
        begins = np.cumsum([0, *lengths])[:-1]
        self._calls = np.array(
            [
                (call.function, begin, length, call.threads)
                for call, begin, length in zip(recording.calls, begins, lengths, strict=True)
            ],
            dtype=np.int64,
        ).reshape(-1, _WORDS)
        self._blocks = np.concatenate(words) if words else np.zeros(0, dtype=np.int64)
        self._used = np.empty_like(self._blocks)
        self._arena: Arena = recording.arena
        self._code = machine_code(_replay, 6)
        self._call = c_call(self._code.address, 6)

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self, pool: Pool | None) -> None:
        """Every call once more, in order, on the pool's threads or on this one alone."""
        times = open_times()
        if pool is None:
            self._make(0, 0, times)
        else:
            with pool.alone() as address:
                self._make(address, pool.num_threads - 1, times)

    def _make(self, pool: int, num_workers: int, times: KernelTimes | None) -> None:
        calls, rest = self._calls.ctypes.data, (self._blocks.ctypes.data, self._used.ctypes.data)
        if times is None:
            self._call(pool, num_workers, calls, len(self._calls), *rest)
            return
        first_ns, calls_ns = clock_ns(), 0
        for i, (function, begin, num_words, _) in enumerate(self._calls.tolist()):
            num_outputs = int(self._blocks[begin + OUTPUTS]) if num_words > OUTPUTS else 0
            start_ns = clock_ns()
            self._call(pool, num_workers, calls + 8 * _WORDS * i, 1, *rest)
            end_ns = clock_ns()
            times.calls.append(CallTime(function, num_outputs, start_ns, end_ns))
            calls_ns += end_ns - start_ns
        times.watching_ns += clock_ns() - first_ns - calls_ns


_give_job = njit(give_job)


def _replay(pool: int, num_workers: int, calls: int, count: int, blocks: int, used: int) -> None:
    for i in range(count):
        at = _WORDS * i
        function, begin = get_i64(calls, at + _FUNCTION), get_i64(calls, at + _BEGIN)
        for word in range(begin, begin + get_i64(calls, at + _NUM_WORDS)):
            put_i64(used, word, get_i64(blocks, word))
        others = min(get_i64(calls, at + _THREADS) - 1, num_workers)
        if pool != 0 and others > 0:
            _give_job(pool, function, used + 8 * begin, others)
        else:
            call_function(function, used + 8 * begin)
