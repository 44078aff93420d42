"""Progress bars on stderr for long work: fetching models, compiling kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich import progress as rich

Progress = Callable[[str, int, int], None]


class Bars:
    """A progress bar on stderr. It is made and drawn when the first progress is reported: most starts report none."""

    def __init__(self, unit: Literal["bytes", "count"]) -> None:
        self._unit = unit
        self._shown = ""

    @cached_property
    def _bars(self) -> rich.Progress:
        from rich import progress as rich
        from rich.console import Console

        is_bytes = self._unit == "bytes"
        amount = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if is_bytes else (rich.MofNCompleteColumn(),)
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *amount, rich.TimeRemainingColumn())
        return rich.Progress(*columns, console=Console(stderr=True))

    @cached_property
    def _task(self) -> rich.TaskID:
        return self._bars.add_task("", start=False, visible=False)

    def show(self, what: str, done: int, total: int) -> None:
        if not self._shown:
            self._bars.start()
        if what != self._shown:
            self._shown = what
            self._bars.reset(self._task, description=what, visible=True)
        self._bars.update(self._task, completed=done, total=total or None)

    def stop(self) -> None:
        if self._shown:
            self._bars.stop()
            self._shown = ""


@contextmanager
def progress_bars(unit: Literal["bytes", "count"] = "bytes") -> Iterator[Progress]:
    bars = Bars(unit)
    try:
        yield bars.show
    finally:
        bars.stop()
