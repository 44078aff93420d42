"""Compiled kernels that Python may call, on one thread or on a team of threads.

A kernel is a function of one *call record*: the block of memory that holds its arguments. The record is described once,
as a NamedTuple of ints (addresses among them) and floats. The caller fills it in by position, which takes a quarter of
the time that it takes by name; the kernel reads its fields by name:

    class SiluCall(NamedTuple):
        x: int  # [rows, 2 * width]
        num_rows: int
        width: int

    @entry
    def _silu(call: SiluCall) -> None:
        x, width = call.x, call.width
        row = take_number(counters(call), TASK)
        while row < call.num_rows: ...

    _silu(SiluCall(x.data_ptr(), 2, 64), threads=4)

Every thread of the team runs the whole function and takes its share of the work by number. Four counters, zero at the
start, lie before the fields for that. A field is 8 bytes wide and is loaded wherever it is named, so a kernel copies
what its loops need to local variables.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any, Generic, TypeVar, get_type_hints

from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

from ..threads import team
from .llvm import F64, I64, at, number
from .machine_code import inlined, is_on_disk, machine_code
from .recording import Call, open_recording
from .timing import CallTime, clock_ns, open_times

Record = TypeVar("Record", bound=tuple[Any, ...])  # a NamedTuple of ints and floats

# The counters of a call.
TASK = 0  # the next task that no thread has taken
THREAD = 1  # the next thread that has no number
FIRST_TASK = 2  # the next task of a kernel's first phase, where it has two
FIRST_DONE = 3  # tasks of the first phase that are done
_COUNTERS = 4


class Entry(Generic[Record]):
    """``entry(record, threads=n)``. Compiled at its first call, or loaded from numba's cache on disk.

    While a ``Recording`` is open, a call is recorded and not made.
    """

    def __init__(self, function: Callable[[Record], None]) -> None:
        self.function = function
        (record,) = (kind for name, kind in get_type_hints(function).items() if name != "return")
        fields = get_type_hints(record)
        self._type = CallRecord(record.__name__, tuple((name, kind is float) for name, kind in fields.items()))
        letters = "".join("d" if kind is float else "q" for kind in fields.values())
        self._pack = struct.Struct(f"={_COUNTERS}q{letters}")
        self._block = ctypes.c_char * self._pack.size

    @cached_property
    def _compiled(self) -> tuple[int, Callable[..., None]]:
        code = machine_code(self.function, self._type)
        self._code = code  # owns the machine code
        address: int = code.address
        return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def compile(self) -> bool:
        """Whether it had to be compiled: it was neither in memory nor on disk."""
        if "_compiled" in vars(self):
            return False
        _ = self._compiled
        return self._code.is_new

    @property
    def name(self) -> str:
        """Of the function, with its module's."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def is_on_disk(self) -> bool:
        """Whether ``compile`` would load it. True where nothing can be kept on disk."""
        return is_on_disk(self.function, self._type)

    def __call__(self, record: Record, *, threads: int = 1) -> None:
        packed = self._pack.pack(0, 0, 0, 0, *record)
        address, call = self._compiled
        recording = open_recording()
        if recording is not None:
            recording.calls.append(Call(address, packed, threads, getattr(record, "num_outputs", 0)))
            return
        block = self._block.from_buffer_copy(packed)
        times = open_times()
        start_ns = 0 if times is None else clock_ns()
        if threads > 1:
            team().run(address, ctypes.addressof(block), threads)
        else:
            call(block)
        if times is not None:
            times.calls.append(CallTime(address, getattr(record, "num_outputs", 0), start_ns, clock_ns()))

    @property
    def address(self) -> int:
        """Of the compiled function, 0 before it is compiled."""
        return self._compiled[0] if "_compiled" in vars(self) else 0


def entry(function: Callable[[Record], None]) -> Entry[Record]:
    """Makes a function of one call record an ``Entry``."""
    return Entry(function)


def entries(*modules: ModuleType) -> Iterator[Entry[Any]]:
    """The entries of these modules, without those that they import."""
    for module in modules:
        found = (value for value in vars(module).values() if isinstance(value, Entry))
        yield from (one for one in found if one.function.__module__ == module.__name__)


# -- tasks that lie side by side in memory ----------------------------------------------------------------------------
#
# What a core reads from memory it reads at its best in one long run: what is fetched ahead is then what it takes next.
# So neighbouring numbers of TASK are tasks of different *regions*, one for each thread: threads that take numbers by
# turns go through a region each. None waits for its region: one that is delayed still leaves its work to others.


@inlined
def end_of_numbers(num_tasks: int, regions: int) -> int:
    """The numbers below it stand for all tasks; some of the last ones for none."""
    return (num_tasks + regions - 1) // regions * regions


@inlined
def task_of(number: int, num_tasks: int, regions: int) -> int:
    """The task of a number; ``num_tasks`` for none."""
    region = number % regions
    task = region * num_tasks // regions + number // regions
    return task if task < (region + 1) * num_tasks // regions else num_tasks


# -- call records in compiled code ------------------------------------------------------------------------------------


class CallRecord(types.Type):
    """numba's type of a call record: its address. The name holds the layout, so the cache on disk knows it too."""

    def __init__(self, name: str, fields: tuple[tuple[str, bool], ...]) -> None:
        self.places = {field: i for i, (field, _) in enumerate(fields)}
        self.floats = frozenset(field for field, is_float in fields if is_float)
        kinds = {True: "float", False: "int"}
        super().__init__(name=f"{name}({', '.join(f'{field}: {kinds[is_float]}' for field, is_float in fields)})")


@register_model(CallRecord)
class _CallRecordModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, I64)


@infer_getattr
class _CallRecordFields(AttributeTemplate):
    key = CallRecord

    def generic_resolve(self, record: CallRecord, name: str) -> types.Type | None:  # type: ignore[override]
        if name not in record.places:
            return None
        return types.float64 if name in record.floats else types.int64


@lower_getattr_generic(CallRecord)
def _load_field(context: Any, builder: Any, record: CallRecord, address: Any, name: str) -> Any:
    kind = F64 if name in record.floats else I64
    return builder.load(at(builder, kind, address, number(_COUNTERS + record.places[name])))


def _counters(typing: Any, call: Any) -> Any:
    if not isinstance(call, CallRecord):
        return None
    return types.int64(call), lambda context, builder, signature, values: values[0]


counters: Any = intrinsic(_counters)  # (call): the address of its counters, for ``take_number`` and ``watch``
