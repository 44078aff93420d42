"""A stand-in for a GPU: it offers copies, waits and graphs on a CPU, and refuses what would break on a real GPU.

Work is done at once on the CPU, but results can be read only through ``wait``. A replay of a graph runs its function
again, which has to make exactly the captured calls at the captured addresses. ``HostReads`` finds the calls that would
make the host wait for a GPU.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import phloem
import torch
from phloem.kernels import Groups
from phloem.kernels.backend import Backend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(phloem.__file__).resolve().parent


class StandIn:
    """``log``: names of the calls, in order; ``graphs``: the captured graphs."""

    def __init__(self, *, memory: tuple[int, int] = (1 << 30, 1 << 30), peak_bytes: int = 0) -> None:
        """``memory``: (free, total) bytes; ``peak_bytes``: of every step."""
        self.memory, self.peak = memory, peak_bytes
        self.trials: list[Callable[[], object]] = []
        self.device = torch.device("cpu")
        self.log: list[str] = []
        self.graphs: list[StandInGraph] = []
        self.host_memory: set[int] = set()
        self.is_capturing = False
        self.held: list[torch.Tensor] = []

    def upload(self, array: np.ndarray) -> torch.Tensor:
        self.ask("upload")
        return torch.from_numpy(array.copy())

    def write(self, array: np.ndarray, into: torch.Tensor) -> None:
        self.ask("write")
        into[: len(array)].copy_(torch.from_numpy(array))

    def download(self, tensors: Sequence[torch.Tensor]) -> "StandInReadback":
        self.ask("download")
        return StandInReadback(self, [x.clone() for x in tensors])

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple["StandInGraph", torch.Tensor]:
        self.ask("capture")
        run()
        graph = StandInGraph(self, run)
        self.graphs.append(graph)
        return graph, graph.result

    def free_and_total_bytes(self) -> tuple[int, int]:
        return self.memory

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self.trials.append(run)
        run()
        return self.peak

    def ask(self, what: str) -> None:
        assert not self.is_capturing, f"{what} inside a graph"
        self.log.append(what)


class StandInReadback:
    def __init__(self, device: StandIn, values: list[torch.Tensor]) -> None:
        self._device, self._values = device, values

    def wait(self) -> list[torch.Tensor]:
        self._device.ask("wait")
        self._device.held = self._values
        self._device.host_memory = {x.untyped_storage().data_ptr() for x in self._values}
        return self._values


class StandInGraph:
    def __init__(self, device: StandIn, run: Callable[[], torch.Tensor]) -> None:
        self._device, self._run = device, run
        self.calls: list[tuple[object, ...]] = []
        self.result, self.calls = self._traced()
        self.num_replays = 0

    def replay(self) -> None:
        self._device.ask("replay")
        result, calls = self._traced()
        assert calls == self.calls, "a replay would not do what was captured"
        self.result.copy_(result)
        self.num_replays += 1

    def _traced(self) -> tuple[torch.Tensor, list[tuple[object, ...]]]:
        self._device.is_capturing = True
        try:
            with Trace() as trace, HostReads(self._device) as reads:
                result = self._run()
        finally:
            self._device.is_capturing = False
        assert not reads.found, reads.found
        return result, trace.calls


class Trace(TorchDispatchMode):
    """Records the calls of torch's operators and of traced kernels: names, shapes, and addresses from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []
        self._made: set[int] = set()
        self._kept: list[torch.Tensor] = []  # keeps their memory from being reused

    def __enter__(self) -> "Trace":
        _thread.trace = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _thread.trace = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.made(out)
        return out

    def note(self, called: object, arguments: object) -> None:
        self.calls.append((called, *map(self._shown, _leaves(arguments))))

    def made(self, out: object) -> None:
        for x in _leaves(out):
            if isinstance(x, torch.Tensor):
                self._made.add(x.untyped_storage().data_ptr())
                self._kept.append(x)

    def _shown(self, x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        inside = x.untyped_storage().data_ptr() in self._made
        return (tuple(x.shape), tuple(x.stride()), "made" if inside else x.data_ptr())


class _Thread(threading.local):
    trace: Trace | None = None


_thread = _Thread()


def _leaves(value: object) -> list[object]:
    found: list[object] = []
    _add_leaves(value, found)
    return found


_LISTED = (list, tuple)


def _add_leaves(value: object, found: list[object]) -> None:
    if isinstance(value, _LISTED):
        for item in value:
            _add_leaves(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _add_leaves(item, found)
    elif isinstance(value, Groups):
        found += (value.ids, value.num_groups)
    else:
        found.append(value)


def traced(backend: Backend) -> Backend:
    """``backend`` with calls that a trace records too."""

    ops = {field.name: getattr(backend, field.name) for field in fields(backend)}
    return replace(backend, **{name: one_call(name, op) for name, op in ops.items() if callable(op)})


def one_call(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` as a trace records it: torch's calls inside are not part of the graph."""

    def call(*args: Any, **options: Any) -> Any:
        trace = _thread.trace
        if trace is None:
            return op(*args, **options)
        trace.note(name, (args, options))
        trace.__exit__(None, None, None)
        try:
            out = op(*args, **options)
        finally:
            trace.__enter__()
        trace.made(out)
        return out

    return call


@dataclass(frozen=True, slots=True)
class Place:
    what: str
    file: str
    line: int


# What a host waits for on a GPU: a value, or pageable memory that is being copied.
_READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "unique")
}
_READS |= {torch.nonzero, torch.masked_select, torch.unique, torch.tensor, torch.as_tensor}
_LISTS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class HostReads(TorchFunctionMode):
    """``found``: places in the product where the host waits, except in ``wait`` and in CPU kernels."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.found: list[Place] = []
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_list = func in _LISTS and any(isinstance(x, list) for x in _indices(args[1]))
        if (func in _READS or by_list) and not self._is_host(args):
            place = _caller(getattr(func, "__name__", str(func)))
            if place is not None:
                self.found.append(place)
        return func(*args, **(kwargs or {}))

    def _is_host(self, args: Any) -> bool:
        x = args[0] if args else None
        return isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in self._device.host_memory


def _indices(index: object) -> list[object]:
    return list(index) if isinstance(index, tuple) else [index]


def _caller(what: str) -> Place | None:
    """The line of the product that called torch; None if other code called it, or a kernel that runs on the host."""
    frame: FrameType | None = sys._getframe(2)
    inner = (str(Path(torch.__file__).parent), __file__)
    while frame is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    if frame is None:
        return None
    file = Path(frame.f_code.co_filename).resolve()
    if not file.is_relative_to(ROOT):
        return None
    inside = file.relative_to(ROOT).as_posix()
    if inside.startswith(("kernels/cpu/", "tests/", ".venv/")):
        return None
    return Place(what, inside, frame.f_lineno)
