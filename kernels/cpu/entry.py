"""Compiled functions that Python may call, on one thread or on a team. Never looks at what they compute.

An entry is a function of one address, that of its call's arguments, 8 bytes each: two counters that start at 0, for
``take_number``, then integers (addresses among them) and then floats. Every thread of the team runs the whole function
and takes its share of the work by number:

    TASK, THREAD = 0, 1
    task = take_number(call, TASK)
    while task < num_tasks: ...
"""

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cached_property

from ..threads import team
from .machine_code import machine_code
from .recording import Call, open_recording
from .timing import CallTime, clock_ns, open_times

TASK = 0  # the next task that nobody has taken
THREAD = 1  # the next thread that has no number
ARGS = 2  # the first argument
OUTPUTS = ARGS + 5  # of a matrix product: how many outputs a row has


class Entry:
    """``entry(*integers_then_floats, threads=n)``. Compiled at its first call, or loaded from numba's cache on disk."""

    def __init__(self, function: Callable[[int], None], *, ints: int, floats: int = 0) -> None:
        self.function = function
        self._pack = struct.Struct(f"=qq{ints}q{floats}d")
        self._block = ctypes.c_char * self._pack.size

    @cached_property
    def _compiled(self) -> tuple[int, Callable[..., None]]:
        code = machine_code(self.function, 1)
        self._code = code  # owns the machine code
        address: int = code.address
        return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def compile(self) -> bool:
        """Whether it had to be compiled: it was neither in memory nor on disk."""
        if "_compiled" in vars(self):
            return False
        _ = self._compiled
        return self._code.cache_hits == 0

    def __call__(self, *args: float, threads: int = 1) -> None:
        packed = self._pack.pack(0, 0, *args)
        address, call = self._compiled
        recording = open_recording()
        if recording is not None:
            recording.calls.append(Call(address, packed, threads))
        block = self._block.from_buffer_copy(packed)
        times = open_times()
        start_ns = 0 if times is None else clock_ns()
        if threads > 1:
            team().run(address, ctypes.addressof(block), threads)
        else:
            call(block)
        if times is not None:
            num_outputs = int(args[OUTPUTS - ARGS]) if len(args) > OUTPUTS - ARGS else 0
            times.calls.append(CallTime(address, num_outputs, start_ns, clock_ns()))

    @property
    def address(self) -> int:
        """Of the compiled function, 0 before it is compiled."""
        return self._compiled[0] if "_compiled" in vars(self) else 0


def entry(*, ints: int, floats: int = 0) -> Callable[[Callable[[int], None]], Entry]:
    """Makes a function of ``ints`` integers and ``floats`` floats an ``Entry``."""
    return lambda function: Entry(function, ints=ints, floats=floats)


def entries(*modules: object) -> Iterator[Entry]:
    """The entries of these modules."""
    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, Entry))
