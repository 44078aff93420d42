"""Nested stretches of one thread's time, by name. Never looks at what happens in them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

clock_ns = time.perf_counter_ns


class Span(NamedTuple):
    """``own_ns``: without the spans inside it. ``root``: the number of its outermost span."""

    name: str
    start_ns: int
    end_ns: int
    own_ns: int
    root: int


class Spans:
    """Collects spans; roots (``step``) are numbered, and may be marked as a kind of step."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.marks: dict[int, str] = {}
        self.num_roots = 0
        self._inside: list[int] = []  # of each open span, the time of those that have ended in it

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start_ns = clock_ns()
        self._inside.append(0)
        try:
            yield
        finally:
            self._end(name, start_ns, clock_ns(), self._inside.pop())

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """A span that has ended, inside the open one."""
        self._end(name, start_ns, end_ns, 0)

    def _end(self, name: str, start_ns: int, end_ns: int, inner_ns: int) -> None:
        self.spans.append(Span(name, start_ns, end_ns, end_ns - start_ns - inner_ns, self.num_roots))
        if self._inside:
            self._inside[-1] += end_ns - start_ns
        else:
            self.num_roots += 1

    def clear(self) -> None:
        self.spans.clear()
        self.marks.clear()
        self.num_roots = 0

    def mark(self, kind: str) -> None:
        """Says what kind of root is open."""
        self.marks[self.num_roots] = kind

    def milliseconds(self, kind: str) -> tuple[int, dict[str, float]]:
        """(number of roots of that kind, own milliseconds by name over all of them)."""
        roots = {root for root, found in self.marks.items() if found == kind}
        totals: dict[str, float] = {}
        for span in self.spans:
            if span.root in roots:
                totals[span.name] = totals.get(span.name, 0.0) + span.own_ns / 1e6
        return len(roots), totals

    def write_trace(self, path: Path) -> None:
        """Chrome's trace format: open it at chrome://tracing or ui.perfetto.dev."""
        first = min((span.start_ns for span in self.spans), default=0)
        events = [
            {
                "name": span.name,
                "ph": "X",
                "ts": (span.start_ns - first) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "pid": 1,
                "tid": 1,
                "args": {"step": span.root, "kind": self.marks.get(span.root, "")},
            }
            for span in self.spans
        ]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
