"""A tape: recorded kernel calls, replayed in one go by compiled code.

A decode step of a small model is about 300 kernel calls of a few microseconds each. Called from Python, each costs as
much again. A tape makes them one after the other in compiled code, and Python's lock is free meanwhile. Calls of a host
are made from Python, between pieces of the tape. It checks no
shapes: the caller replays a tape only for a step of the shape that was recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit, types
from torch import Tensor

from .machine_code import c_call, machine_code
from .pool import Pool, give_job
from .recording import Arena, Call
from .timing import CallTime, KernelTimes, clock_ns, open_times
from .vector import call_function, get_i64, put_i64

# Words of a call on the tape: its function, where its arguments begin and how many there are, and its threads.
_FUNCTION, _BEGIN, _NUM_WORDS, _THREADS, _WORDS = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Stop:
    """A host's call after the first ``after`` kernel calls of a tape: ``into`` becomes ``run(x)``."""

    after: int
    run: Callable[[Tensor], Tensor]
    x: Tensor
    into: Tensor


class Tape:
    """Recorded calls, on addresses of the arena, which the tape keeps alive."""

    def __init__(self, recorded: Sequence[Call], arena: Arena, words: np.ndarray | None = None) -> None:
        """``words`` (int64): the calls' records one after the other, where they are others than those recorded."""
        if words is None:
            words = np.frombuffer(b"".join(call.block for call in recorded), dtype=np.int64)
        lengths = np.array([len(call.block) // 8 for call in recorded], dtype=np.int64)
        assert lengths.sum() == len(words), (lengths.sum(), len(words))
        calls = [call for call in recorded if call.host is None]
        self._stops = []
        if len(calls) < len(recorded):
            is_host = np.array([call.host is not None for call in recorded])
            self._stops = _stops(recorded, np.cumsum(lengths) - lengths, words, arena)
            words, lengths = words[np.repeat(~is_host, lengths)], lengths[~is_host]
        self._calls = np.empty((len(calls), _WORDS), dtype=np.int64)
        self._calls[:, _FUNCTION] = [call.function for call in calls]
        self._calls[:, _BEGIN] = np.cumsum(lengths) - lengths
        self._calls[:, _NUM_WORDS] = lengths
        self._calls[:, _THREADS] = [call.threads for call in calls]
        self._num_outputs = [call.num_outputs for call in calls]
        self._blocks = words
        self._used = arena.words(len(words))
        self._arena = arena
        self._code = machine_code(_replay, *(types.int64,) * 6)
        self._call = c_call(self._code.address, 6)
        self._first = self._calls.ctypes.data
        self._rest = self._blocks.ctypes.data, self._used.ctypes.data

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self, pool: Pool | None) -> None:
        """Makes every call, in order, on the pool's threads; on this thread alone without a pool that is free."""
        times = open_times()
        address = 0 if pool is None else pool.take()
        if pool is None or not address:
            self._make_all(0, 0, times)
            return
        try:
            self._make_all(address, pool.num_threads - 1, times)
        finally:
            pool.give_back()

    def _make_all(self, pool: int, num_workers: int, times: KernelTimes | None) -> None:
        begin = 0
        for stop in self._stops:
            self._make(pool, num_workers, range(begin, stop.after), times)
            stop.into.copy_(stop.run(stop.x))
            begin = stop.after
        self._make(pool, num_workers, range(begin, len(self._calls)), times)

    def _make(self, pool: int, num_workers: int, numbers: range, times: KernelTimes | None) -> None:
        calls, rest = self._first, self._rest
        if times is None:
            self._call(pool, num_workers, calls + 8 * _WORDS * numbers.start, len(numbers), *rest)
            return
        first_ns, calls_ns = clock_ns(), 0
        for i, function in zip(numbers, self._calls[numbers.start : numbers.stop, _FUNCTION].tolist(), strict=True):
            start_ns = clock_ns()
            self._call(pool, num_workers, calls + 8 * _WORDS * i, 1, *rest)
            end_ns = clock_ns()
            times.calls.append(CallTime(function, self._num_outputs[i], start_ns, end_ns))
            calls_ns += end_ns - start_ns
        times.watching_ns += clock_ns() - first_ns - calls_ns


def _stops(recorded: Sequence[Call], begins: np.ndarray, words: np.ndarray, arena: Arena) -> list[Stop]:
    """The hosts' calls, whose words begin at ``begins``."""
    found: list[Stop] = []
    for i, (call, begin) in enumerate(zip(recorded, begins.tolist(), strict=True)):
        if call.host is not None:
            x, into = words[begin : begin + 2].tolist()
            like = call.host.shape, call.host.dtype
            found.append(Stop(i - len(found), call.host.run, arena.tensor(x, *like), arena.tensor(into, *like)))
    return found


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
