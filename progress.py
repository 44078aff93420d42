"""Progress bars on stderr for long work: fetching models, compiling kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Progress = Callable[[str, int, int], None]


class Bars:
    """A progress bar on stderr. It is drawn when the first progress is reported."""

    def __init__(self, unit: Literal["bytes", "count"]) -> None:
        from rich import progress as rich
        from rich.console import Console

        is_bytes = unit == "bytes"
        amount = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if is_bytes else (rich.MofNCompleteColumn(),)
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *amount, rich.TimeRemainingColumn())
        self._bars = rich.Progress(*columns, console=Console(stderr=True))
        self._task = self._bars.add_task("", start=False, visible=False)
        self._shown = ""

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
