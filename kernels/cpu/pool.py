"""The kernels' own threads. A job never waits for a thread that has not started on it.

A job is a compiled function of one address that takes its tasks by number until there are none. The caller works on it
too; workers that are looking for work join in. The caller returns when no task is left and every worker that joined is
done. So a busy core costs its help and nothing more. An OpenMP region, by contrast, ends when every thread of the team
has been there: where another process holds a core, a region of microseconds takes a time slice, which is milliseconds.

Workers stay in compiled code, without Python's lock. They look for work for about 200 microseconds, longer than the
gaps within a step, and then sleep until they are woken.
"""

import atexit
import ctypes
import os
import sys
import threading

import numpy as np
from numba import types

from .machine_code import c_call, machine_code
from .vector import (
    c_function,
    call_function,
    get_i64,
    give_number,
    pause,
    put_i64,
    take_number,
    watch,
)

# Places in the pool's int64 words. Words that several threads write have a cache line each.
_TICKET = 0  # odd while a job is open, and another for every job
_FUNCTION, _CALL, _WANTED = 1, 2, 3  # of the open job; workers numbered below _WANTED may join
_INSIDE = 8  # workers that check the open job or work on it
_STOP = 16
_WORKERS = 24  # for each worker a line of words: whether it sleeps, then the semaphore on which it sleeps
_LINE, _SEMAPHORE = 8, 4

_LOOKS = 6_000
_LOOKS_A_TURN = 50  # after so many, the worker yields its core

_sched_yield = c_function("sched_yield", 0)
_sem_wait, _sem_post = c_function("sem_wait", 1), c_function("sem_post", 1)


def has_pool() -> bool:
    """Whether this system has the semaphores that workers sleep on."""
    return sys.platform == "linux"


class Pool:
    """``num_threads`` threads, the caller's among them. One job at a time: a second caller works alone."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        others = num_threads - 1
        self._words = np.zeros(_WORKERS + others * _LINE, dtype=np.int64)
        self._address = self._words.ctypes.data
        self._busy = threading.Lock()
        self._process = os.getpid()
        for i in range(others):
            if ctypes.CDLL(None).sem_init(ctypes.c_void_p(self._semaphore(i)), 0, 0):
                raise OSError("sem_init failed: no semaphore for a kernel thread to sleep on")
        codes = [machine_code(give_job, *(types.int64,) * 4), machine_code(_work, types.int64, types.int64)]
        self._codes = codes  # own the machine code
        self._give, work = (c_call(code.address, n) for code, n in zip(codes, (4, 2), strict=True))
        self._threads = [
            threading.Thread(target=work, args=(self._address, i), name=f"kernels-{i + 1}", daemon=True)
            for i in range(others)
        ]
        for thread in self._threads:
            thread.start()
        # A worker that still reads these words after the interpreter has freed them would read freed memory.
        atexit.register(self.close)

    def run(self, function: int, argument: int, num_threads: int) -> None:
        """Calls function(argument), both addresses, on up to ``num_threads`` threads; returns when the work is done."""
        if not self._busy.acquire(blocking=False):
            c_call(function, 1)(argument)
            return
        try:
            others = min(num_threads, self.num_threads) - 1
            # Threads do not live on in a forked process.
            self._give(self._address, function, argument, others if self._process == os.getpid() else 0)
        finally:
            self._busy.release()

    def take(self) -> int:
        """The pool's address for many calls of ``give_job``, until ``give_back``; 0 while another caller has it."""
        return self._address if self._process == os.getpid() and self._busy.acquire(blocking=False) else 0

    def give_back(self) -> None:
        self._busy.release()

    def close(self) -> None:
        """Ends the threads."""
        atexit.unregister(self.close)
        self._words[_STOP] = 1
        for i, thread in enumerate(self._threads):
            ctypes.CDLL(None).sem_post(ctypes.c_void_p(self._semaphore(i)))
            thread.join()
        self._threads = []

    def _semaphore(self, index: int) -> int:
        return self._address + 8 * (_WORKERS + index * _LINE + _SEMAPHORE)


def give_job(pool: int, function: int, call: int, wanted: int) -> None:
    """Compiled: runs function(call) here and on up to ``wanted`` of the pool's workers, until it is done."""
    put_i64(pool, _FUNCTION, function)
    put_i64(pool, _CALL, call)
    put_i64(pool, _WANTED, wanted)
    take_number(pool, _TICKET)  # odd: open
    for i in range(wanted):
        line = _WORKERS + i * _LINE
        if watch(pool, line) != 0:
            put_i64(pool, line, 0)
            _sem_post(pool + 8 * (line + _SEMAPHORE))
    call_function(function, call)
    take_number(pool, _TICKET)  # even: closed. A worker that comes later sees it; one that came before is counted
    while watch(pool, _INSIDE) != 0:
        pause()


def _work(pool: int, index: int) -> None:
    line = _WORKERS + index * _LINE
    looks, seen = 0, 0
    while watch(pool, _STOP) == 0:
        ticket = watch(pool, _TICKET)
        if ticket != seen and ticket % 2 == 1:
            seen, looks = ticket, 0
            if get_i64(pool, _WANTED) > index:
                take_number(pool, _INSIDE)
                if watch(pool, _TICKET) == ticket:
                    # The caller waits for this worker now, so the job cannot change.
                    call_function(get_i64(pool, _FUNCTION), get_i64(pool, _CALL))
                give_number(pool, _INSIDE)
        elif looks < _LOOKS:
            looks += 1
            pause()
            if looks % _LOOKS_A_TURN == 0:
                _sched_yield()
        else:
            # Either the caller sees this worker asleep, or this worker sees the job that the caller opened before.
            take_number(pool, line)
            ticket = watch(pool, _TICKET)
            if (ticket == seen or ticket % 2 == 0) and watch(pool, _STOP) == 0:
                _sem_wait(pool + 8 * (line + _SEMAPHORE))
            put_i64(pool, line, 0)
            looks = 0
