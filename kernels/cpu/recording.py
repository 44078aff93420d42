"""Recording kernel calls instead of making them, so that a ``Tape`` can make them without Python.

While a ``Recording`` is open on this thread, every compiled kernel adds its call to it and computes nothing, and
torch's allocations come from the recording's ``Arena``, so addresses stay valid. torch may make views. Anything else
that torch computes is no kernel call and would be missing from a replay: the first such op ends the recording, and
``foreign`` holds its name, or the name of a kernel whose call must not be replayed (``forbid_replay``).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 22
_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_VIEWS = frozenset(f"aten::{name}" for name in ("view", "slice", "select", "split_with_sizes", "unsqueeze", "expand"))


_open: ContextVar[Recording | None] = ContextVar("recording", default=None)


@dataclass(frozen=True, slots=True)
class HostCall:
    """A function of Python between two kernel calls: its result has the shape and the type of its argument."""

    run: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a compiled kernel, or of a ``host``."""

    function: int  # its address; 0 for a host's
    block: bytes  # its call record; for a host the addresses of argument and result
    threads: int
    num_outputs: int  # of a matrix product, else 0
    host: HostCall | None = None


@dataclass(frozen=True, slots=True)
class TensorPlaces:
    """Where the tensors of a recording lie, in order of addresses. None of them overlaps another."""

    begins: np.ndarray  # int64 [n]
    ends: np.ndarray  # int64 [n]

    def around(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [m]: where the tensor begins in which each address (int64 [m]) lies, and its bytes; 0 where in none."""
        at = np.searchsorted(self.begins, addresses, side="right") - 1
        is_inside = (at >= 0) & (addresses < self.ends[at])
        begins = np.where(is_inside, self.begins[at], 0)
        return begins, np.where(is_inside, self.ends[at], 0) - begins


class ArenaSpan(NamedTuple):
    """Bytes of one of an arena's chunks."""

    chunk: int
    start: int
    end: int


class Arena:
    """Memory for the tensors of recordings. It grows and never moves.

    A tensor's memory is free again once nobody holds the tensor, and then serves tensors of the same size. So the
    layers of a model reuse the same few hundred kilobytes, which stay in the processor's cache, and after the first
    ones they find the same addresses again. After ``restart`` the next recording uses the memory of the one before, so
    only one tape of an arena may run at a time.
    """

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self._used: list[int] = []  # bytes of each chunk that have been taken
        self._free: defaultdict[int, list[ArenaSpan]] = defaultdict(list)  # by length; finalizers add to it
        self._taken: list[ArenaSpan] = []  # since the restart, each once
        self._turn = 0
        self._spare = 0.0
        self._words = np.empty(0, dtype=np.int64)

    def restart(self, *, spare: float = 0.0) -> None:
        """``spare``: how much more memory each tensor gets, as a part of its own size."""
        self._spare = spare
        self._turn += 1
        self._taken.clear()
        self._used = [0] * len(self._chunks)
        self._free.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        span = self._take(max(1, -(-(size + int(self._spare * size)) // _ALIGNMENT)) * _ALIGNMENT)
        memory = self._chunks[span.chunk][span.start : span.start + size]
        known = _NUMPY.get(dtype)
        if known is not None:  # a view of torch's takes longer, and more so inside a recording
            memory = memory.view(known).reshape(shape)
        weakref.finalize(memory, self._give_back, self._turn, span).atexit = False  # a view keeps ``memory`` alive too
        made = torch.from_numpy(memory)
        return made if known is not None else made.view(dtype).view(shape)

    def words(self, count: int) -> np.ndarray:
        """int64 [count], shared by all tapes of this arena."""
        if len(self._words) < count:
            self._words = np.empty(count, dtype=np.int64)
        return self._words[:count]

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that lies there now; it keeps no memory from being reused."""
        size = math.prod(shape) * dtype.itemsize
        chunk = next(one for one in self._chunks if 0 <= address - one.ctypes.data < len(one))
        start = address - chunk.ctypes.data
        return torch.from_numpy(chunk[start : start + size]).view(dtype).view(shape)

    @property
    def places(self) -> TensorPlaces:
        """All tensors since ``restart``. Tensors that had one place after another are one."""
        chunks = [chunk.ctypes.data for chunk in self._chunks]
        taken = sorted((chunks[span.chunk] + span.start, chunks[span.chunk] + span.end) for span in self._taken)
        begins, ends = np.array(taken, dtype=np.int64).reshape(-1, 2).T
        return TensorPlaces(np.ascontiguousarray(begins), np.ascontiguousarray(ends))

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def _take(self, size: int) -> ArenaSpan:
        if self._free[size]:
            first = min(self._free[size])  # always the first, so that layers soon use memory in the same way
            self._free[size].remove(first)
            return first
        at = next((i for i, chunk in enumerate(self._chunks) if self._used[i] + size <= len(chunk)), len(self._chunks))
        if at == len(self._chunks):
            self._chunks.append(_aligned_bytes(max(size, _CHUNK_BYTES)))
            self._used.append(0)
        start = self._used[at]
        self._used[at] += size
        self._taken.append(ArenaSpan(at, start, start + size))
        return self._taken[-1]

    def _give_back(self, turn: int, span: ArenaSpan) -> None:
        if turn == self._turn:
            self._free[span.end - span.start].append(span)


def _aligned_bytes(size: int) -> np.ndarray:
    memory = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


_NUMPY = {torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8}


class _Unrecordable(Exception):
    """Ends the recording that is open."""


class Recording:
    """A context: calls of kernels inside it are kept in ``calls`` and not made. One at a time on a thread.

    What is computed from the kernels' results inside it has no meaning.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.calls: list[Call] = []
        self.foreign: str | None = None
        self._scratch: dict[str, Tensor] = {}
        self._mode: _Watch | None = None  # while it is open: the two refer to each other
        self._token: Token[Recording | None] | None = None

    def __enter__(self) -> Self:
        assert _open.get() is None, "a recording is open on this thread already"
        self._token = _open.set(self)
        self._mode = _Watch(self)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        assert self._token is not None and self._mode is not None
        self._mode.__exit__(kind, error, at)
        self._mode = None
        _open.reset(self._token)
        return isinstance(error, _Unrecordable)

    def stop(self, name: str) -> NoReturn:
        """End the recording: it would lack what ``name`` computes."""
        self.foreign = name
        raise _Unrecordable(name)

    def call_host(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Where ``run(x)`` will lie when a tape has called it. ``x`` is a kernel's result, and ``run`` keeps it."""
        assert x.is_contiguous()
        out = self.arena.empty(tuple(x.shape), x.dtype)
        block = np.array([x.data_ptr(), out.data_ptr()], np.int64).tobytes()
        self.calls.append(Call(0, block, 1, 0, HostCall(run, tuple(x.shape), x.dtype)))
        return out

    def scratch(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for the duration of one call, shared by all calls that give this name."""
        kept = self._scratch.get(name)
        if kept is None or kept.dtype != dtype or kept.numel() < size:
            kept = self._scratch[name] = self.arena.empty((size,), dtype)
        return kept


def open_recording() -> Recording | None:
    return _open.get()


def forbid_replay(name: str) -> None:
    """Called by a kernel that takes memory which a tape would not keep: ends an open recording."""
    recording = _open.get()
    if recording is not None:
        recording.stop(name)


def scratch(name: str, size: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory [size or more] for one kernel call."""
    recording = _open.get()
    return torch.empty(size, dtype=dtype) if recording is None else recording.scratch(name, size, dtype)


class _Watch(TorchDispatchMode):
    """Sees every torch op: lets views through, allocates in the arena, and ends the recording at any other op."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would import its compiler: two seconds and a hundred megabytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, _ = func.name().partition(".")
        if name in _VIEWS:
            return func(*args, **(kwargs or {}))
        if name not in _ALLOCATIONS and not func.is_view:
            self._recording.stop(name)
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS:
            assert result.is_contiguous(), name
            return self._recording.arena.empty(tuple(result.shape), result.dtype)
        if not _is_in(result, args):  # in inference mode ``reshape`` and ``to`` come as they are, and may copy
            self._recording.stop(name)
        return result


def _is_in(result: Any, args: Any) -> bool:
    """Whether every tensor of the result lies in one of the arguments' memory."""
    made = result if isinstance(result, tuple | list) else (result,)
    given = {_memory(arg) for arg in args if isinstance(arg, Tensor) and arg.layout == torch.strided}
    return all(isinstance(x, Tensor) and _memory(x) in given for x in made)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
