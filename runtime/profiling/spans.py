"""Nested, named spans of one thread's time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

clock_ns = time.perf_counter_ns


class TimedSpan(NamedTuple):
    """``own_ns`` excludes the spans inside it. ``root``: number of its step. ``about``: text for the trace."""

    name: str
    start_ns: int
    end_ns: int
    own_ns: int
    root: int
    about: str = ""


class Spans:
    """Collects spans. Outermost spans (``step``) are numbered, and can be marked with a kind of step."""

    def __init__(self) -> None:
        self.spans: list[TimedSpan] = []
        self.marks: dict[int, str] = {}
        self.num_roots = 0
        self._inside: list[int] = []  # for each open span, the time of the spans that ended inside it

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start_ns = clock_ns()
        self._inside.append(0)
        try:
            yield
        finally:
            self._end(name, start_ns, clock_ns(), self._inside.pop())

    def add(self, name: str, start_ns: int, end_ns: int, *, about: str = "") -> None:
        """Add a span that has ended; it lies inside the open span."""
        self._end(name, start_ns, end_ns, 0, about)

    def set_apart(self, name: str, spent_ns: int) -> None:
        """Count ``spent_ns`` of the open span's own time under another name; the trace does not show it."""
        self.spans.append(TimedSpan(name, 0, 0, spent_ns, self.num_roots))
        self._inside[-1] += spent_ns

    def _end(self, name: str, start_ns: int, end_ns: int, inner_ns: int, about: str = "") -> None:
        self.spans.append(TimedSpan(name, start_ns, end_ns, end_ns - start_ns - inner_ns, self.num_roots, about))
        if self._inside:
            self._inside[-1] += end_ns - start_ns
        else:
            self.num_roots += 1

    def clear(self) -> None:
        self.spans.clear()
        self.marks.clear()
        self.num_roots = 0

    def mark(self, kind: str) -> None:
        """Set the kind of the outermost open span."""
        self.marks[self.num_roots] = kind

    def milliseconds(self, kind: str) -> tuple[int, dict[str, float]]:
        """(number of steps of that kind, own milliseconds a step by name).

        The milliseconds are means over the middle half of the steps by length, so that outliers do not count.
        """
        lengths: dict[int, int] = {root: 0 for root, found in self.marks.items() if found == kind}
        for span in self.spans:
            if span.root in lengths:
                lengths[span.root] += span.own_ns
        by_length = sorted(lengths, key=lengths.__getitem__)
        cut = len(by_length) // 4
        middle = set(by_length[cut : len(by_length) - cut])
        totals: dict[str, float] = {}
        for span in self.spans:
            if span.root in middle:
                totals[span.name] = totals.get(span.name, 0.0) + span.own_ns / 1e6 / len(middle)
        return len(lengths), totals

    def write_trace(self, path: Path) -> None:
        """Chrome's trace format: open it at chrome://tracing or ui.perfetto.dev."""
        shown = [span for span in self.spans if span.end_ns > span.start_ns]
        first = min((span.start_ns for span in shown), default=0)
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "phloem engine"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "step loop"}},
        ]
        for span in shown:
            kind = self.marks.get(span.root, "")
            about = {"about": span.about} if span.about else {}
            events.append(
                {
                    "name": span.name,
                    "cat": kind,
                    "ph": "X",
                    "ts": (span.start_ns - first) / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                    "pid": 1,
                    "tid": 1,
                    "args": {"step": span.root, "kind": kind, **about},
                }
            )
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
