"""Two kernels that take little time to compile, for another process to import."""

from typing import NamedTuple

from phloem.kernels.cpu.entry import entry
from phloem.kernels.cpu.vector import get_i64, put_i64


class AddCall(NamedTuple):
    numbers: int  # int64 [1]
    added: int


@entry
def add(call: AddCall) -> None:
    put_i64(call.numbers, 0, get_i64(call.numbers, 0) + call.added)


@entry
def subtract(call: AddCall) -> None:
    put_i64(call.numbers, 0, get_i64(call.numbers, 0) - call.added)
