"""The HTTP server's metrics, and the text that Prometheus scrapes: the server's numbers and the engine's."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .jobs import Result, RunningJob

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.responses = Counter(
            "phloem_http_responses", "Responses by route and status.", ("route", "status"), registry=registry
        )
        self.in_flight = Gauge("phloem_http_requests_in_flight", "Requests being answered.", registry=registry)
        self._first_text = Histogram(
            "phloem_http_time_to_first_text_seconds",
            "From a generation's submission to its first text (streams only).",
            buckets=_SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            "phloem_http_generation_seconds",
            "From a generation's submission to its end.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._prompt = Counter("phloem_http_prompt_tokens", "Prompt tokens of finished generations.", registry=registry)
        self._cached = Counter(
            "phloem_http_cached_prompt_tokens", "Those of them found in the cache.", registry=registry
        )
        self._generated = Counter("phloem_http_completion_tokens", "Tokens generated.", registry=registry)

    def count_generation(self, generation: RunningJob, results: Sequence[Result]) -> None:
        self._duration.observe(time.perf_counter() - generation.opened_s)
        if generation.first_text_s is not None:
            self._first_text.observe(generation.first_text_s - generation.opened_s)
        for result in results:
            self._prompt.inc(result.meta.prompt_tokens)
            self._cached.inc(result.meta.cached_tokens)
            self._generated.inc(sum(c.completion_tokens for c in result.meta.candidates))

    def text(self, engine: Any) -> bytes:
        """Everything in Prometheus' text format; ``engine`` is its answer to the query ``metrics``, or None."""
        plain = dict(engine) if isinstance(engine, Mapping) else {}
        labelled = CollectorRegistry(auto_describe=False)
        labelled.register(_Labelled(usage=plain.pop("usage", {}), queue=plain.pop("queue_seconds", None)))
        lines = []
        for name, value in sorted(_flat("phloem_engine", plain)):
            lines.append(f"# TYPE {name} untyped\n{name} {float(value)!r}\n")
        return generate_latest(self._registry) + generate_latest(labelled) + "".join(lines).encode()


class _Labelled(Collector):
    """The engine's numbers that have labels: usage by tenant and by program, and a histogram of queue times."""

    def __init__(self, *, usage: Mapping[str, Any], queue: Mapping[str, Any] | None) -> None:
        self._usage = usage
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        if self._queue is not None:
            name, text = "phloem_engine_queue_seconds", "From a sequence's arrival to its first step."
            waits = HistogramMetricFamily(name, text)
            total, buckets = 0, []
            for bound, count in zip([*map(str, self._queue["bounds"]), "+Inf"], self._queue["counts"], strict=True):
                total += count
                buckets.append((bound, total))
            waits.add_metric([], buckets, self._queue["total"])
            yield waits
        for kind, label in (("tenants", "tenant"), ("programs", "program")):
            rows = self._usage.get(kind, {})
            tokens = CounterMetricFamily(
                f"phloem_engine_{label}_tokens", f"Tokens by {label} and origin.", labels=(label, "origin")
            )
            for name, row in rows.items():
                for origin, value in row["tokens"].items():
                    tokens.add_metric((name, origin), value)
            yield tokens
            for key, text in _USAGE.items():
                family = CounterMetricFamily(f"phloem_engine_{label}_{key}", f"{text} by {label}.", labels=(label,))
                for name, row in rows.items():
                    family.add_metric((name,), row[key])
                yield family


_USAGE = {
    "runs": "Programs begun,",
    "queue_seconds": "Time that ops waited for their first step,",
    "prefill_seconds": "Time from there to the first token,",
    "decode_seconds": "Time from there to the end,",
    "preemptions": "Sequences that had to give up their slots,",
}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings, named by their joined keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}_{re.sub('[^a-zA-Z0-9_]', '_', str(key))}", inner)
    elif isinstance(value, int | float):  # a bool counts as 0 or 1
        yield prefix, value
