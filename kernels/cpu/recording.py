"""Kernel calls being taken down while they run, so that they can be made again without Python. Never computes.

While a ``Recording`` is open on this thread, every compiled kernel that is called adds its call to it, and what torch
would allocate comes from the recording's ``Arena``: addresses then stay what they are. torch may make views; whatever
else it computes would be missing from the calls, and is remembered in ``foreign``.
"""

from __future__ import annotations

import math
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 22
_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})

_open: ContextVar[Recording | None] = ContextVar("recording", default=None)


@dataclass(frozen=True, slots=True)
class Call:
    """A compiled function's address, its block of arguments as it was before the call, and the threads it is worth."""

    function: int
    block: bytes
    threads: int


class Arena:
    """Memory for recordings, one after the other: the next begins where this one began, so only one may be in use.

    It grows and never moves. ``owners`` of addresses in it keep the arena, not tensors.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk = self._used = 0

    def restart(self) -> None:
        self._chunk = self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        while self._chunk < len(self._chunks) and self._used + size > len(self._chunks[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            with _disable_current_modes():  # an open recording would take this allocation from here as well
                self._chunks.append(torch.empty(max(size, _CHUNK_BYTES), dtype=torch.uint8))
        start = self._used
        self._used = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        return self._chunks[self._chunk][start : start + size].view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)


class Recording:
    """A context: what is called inside is run and kept in ``calls``. One at a time on a thread."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.calls: list[Call] = []
        self.foreign: str | None = None
        self._scratch: dict[str, Tensor] = {}
        self._mode = _Watch(self)
        self._token: Token[Recording | None] | None = None

    def __enter__(self) -> Self:
        assert _open.get() is None, "a recording is open on this thread already"
        self._token = _open.set(self)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._token is not None
        self._mode.__exit__(kind, error, at)
        _open.reset(self._token)

    def scratch(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory whose contents end with the call, so that all calls of that name have the same."""
        kept = self._scratch.get(name)
        if kept is None or kept.dtype != dtype or len(kept) < size:
            kept = self._scratch[name] = self.arena.empty((size,), dtype)
        return kept[:size]


def open_recording() -> Recording | None:
    return _open.get()


def scratch(name: str, size: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory [size] for one kernel call."""
    recording = _open.get()
    return torch.empty(size, dtype=dtype) if recording is None else recording.scratch(name, size, dtype)


class _Watch(TorchDispatchMode):
    """Sees every torch op; lets views through and moves allocations."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would import its compiler: two seconds and a hundred megabytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _ALLOCATIONS:
            assert result.is_contiguous(), name
            return self._recording.arena.empty(tuple(result.shape), result.dtype)
        if (func._schema.is_mutable or not _is_view(result, args)) and self._recording.foreign is None:
            self._recording.foreign = name
        return result


def _is_view(result: Any, args: Any) -> bool:
    """Whether every tensor of the result lies in one of the arguments' memory."""
    made = result if isinstance(result, tuple | list) else (result,)
    given = {_memory(arg) for arg in args if isinstance(arg, Tensor) and arg.layout == torch.strided}
    return all(isinstance(x, Tensor) and _memory(x) in given for x in made)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
