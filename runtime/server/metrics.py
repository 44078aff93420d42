"""The HTTP server's metrics, and the text that Prometheus scrapes: the server's numbers and the engine's."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...cluster.supervisor import Replica
from ...protocol.model_rules import Savings
from .jobs import Result, RunningJob
from .tenants import Keys, sender_of_request

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServerMetrics:
    """``keys``: whose tenants are counted; their names are the label, so the number of rows is the key file's.

    ``savings``: of the rules between the server's models, where it has several.
    """

    def __init__(self, keys: Keys, savings: Savings | None = None) -> None:
        self._registry = CollectorRegistry()
        self._savings = savings
        registry = self._registry
        registry.register(_Tenants(keys))
        if savings is not None:
            registry.register(_Rules(savings))
        self.responses = Counter(
            "phloem_http_responses", "Responses by route and status.", ("route", "status"), registry=registry
        )
        self.errors = Counter(
            "phloem_http_errors", "Requests that ended with an error, by its code.", ("code",), registry=registry
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
        self._per_token = Histogram(
            "phloem_http_time_per_output_token_seconds",
            "From a generation's first token to its last, divided by the tokens after the first.",
            buckets=_TOKEN_SECONDS,
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
        sender = sender_of_request()
        for result in results:
            self._prompt.inc(result.meta.prompt_tokens)
            self._cached.inc(result.meta.cached_tokens)
            generated = [candidate.completion_tokens for candidate in result.meta.candidates]
            self._generated.inc(sum(generated))
            if max(generated) > 1:
                self._per_token.observe(result.meta.decode_s / (max(generated) - 1))
                if self._savings is not None and sender is not None:
                    self._savings.add_speed(sender.model, tokens=max(generated) - 1, seconds=result.meta.decode_s)
            if sender is not None:
                sender.prompt_tokens += result.meta.prompt_tokens
                sender.completion_tokens += sum(generated)

    def count_prompt(self, num_tokens: int) -> None:
        """Of a request that generates nothing."""
        self._prompt.inc(num_tokens)
        if (sender := sender_of_request()) is not None:
            sender.prompt_tokens += num_tokens

    def text(
        self,
        engines: Mapping[str, Any],
        *,
        replicas: Sequence[Replica] = (),
        fleet: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Everything in Prometheus' text format.

        ``engines``: each replica's answer to the query ``metrics``, None where it has not answered. ``fleet``: the
        client's answer to the query ``fleet``.
        """
        plain = {replica: dict(engine or {}) | {"up": engine is not None} for replica, engine in engines.items()}
        labelled = CollectorRegistry(auto_describe=False)
        labelled.register(
            _Labelled(
                usage={replica: engine.pop("usage", {}) for replica, engine in plain.items()},
                queues={replica: engine.pop("queue_seconds", None) for replica, engine in plain.items()},
                restarts={replica.name: replica.restarts for replica in replicas},
                placements=(fleet or {}).get("placements", {}),
            )
        )
        lines: dict[str, list[str]] = {}
        for replica, engine in plain.items():
            model, number = split_name(replica)
            labels = f'model="{model}",replica="{number}"' if model else f'replica="{number}"'
            for name, value in _flat("phloem_engine", engine):
                lines.setdefault(name, []).append(f"{name}{{{labels}}} {float(value)!r}\n")
        for name, value in _flat("phloem_fleet", {k: v for k, v in (fleet or {}).items() if k != "placements"}):
            lines.setdefault(name, []).append(f"{name} {float(value)!r}\n")
        untyped = "".join(f"# TYPE {name} untyped\n{''.join(lines[name])}" for name in sorted(lines))
        return generate_latest(self._registry) + generate_latest(labelled) + untyped.encode()


class _Tenants(Collector):
    """Requests, tokens and refusals of each tenant of the key file."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        accounts = [account for account in self._keys.accounts if account.name]
        running = GaugeMetricFamily("phloem_tenant_running", "Requests being answered, by tenant.", labels=("tenant",))
        requests = CounterMetricFamily("phloem_tenant_requests", "Requests let in, by tenant.", labels=("tenant",))
        tokens = CounterMetricFamily(
            "phloem_tenant_tokens", "Tokens of ended programs, by tenant and kind.", labels=("tenant", "kind")
        )
        refused = CounterMetricFamily(
            "phloem_tenant_refused", "Requests beyond a limit, by tenant and limit.", labels=("tenant", "limit")
        )
        for account in accounts:
            running.add_metric((account.name,), account.num_running)
            requests.add_metric((account.name,), account.used.requests)
            for kind in ("prompt", "cached", "completion"):
                tokens.add_metric((account.name, kind), getattr(account.used, f"{kind}_tokens"))
            for limit, count in account.used.refused.copy().items():
                refused.add_metric((account.name, limit), count)
        yield from (running, requests, tokens, refused)


class _Labelled(Collector):
    """The numbers that have more labels than their replica's, or a type.

    Usage by tenant and by program and a histogram of queue times, by replica; restarts; placements by reason.
    """

    def __init__(
        self,
        *,
        usage: Mapping[str, Mapping[str, Any]],
        queues: Mapping[str, Mapping[str, Any] | None],
        restarts: Mapping[str, int],
        placements: Mapping[str, int],
    ) -> None:
        self._usage = usage
        self._queues = queues
        self._restarts = restarts
        self._placements = placements

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            family.samples = [_with_model(sample) for sample in family.samples]
            yield family

    def _families(self) -> Iterator[Metric]:
        name, text = "phloem_engine_queue_seconds", "From a sequence's arrival to its first step."
        waits = HistogramMetricFamily(name, text, labels=("replica",))
        for replica, queue in self._queues.items():
            if queue is None:
                continue
            total, buckets = 0, []
            for bound, count in zip([*map(str, queue["bounds"]), "+Inf"], queue["counts"], strict=True):
                total += count
                buckets.append((bound, total))
            waits.add_metric((replica,), buckets, queue["total"])
        yield waits
        for kind, label in (("tenants", "tenant"), ("programs", "program")):
            rows = [
                (replica, name, row)
                for replica, usage in self._usage.items()
                for name, row in usage.get(kind, {}).items()
            ]
            tokens = CounterMetricFamily(
                f"phloem_engine_{label}_tokens", f"Tokens by {label} and origin.", labels=("replica", label, "origin")
            )
            for replica, name, row in rows:
                for origin, value in row["tokens"].items():
                    tokens.add_metric((replica, name, origin), value)
            yield tokens
            for key, text in _USAGE.items():
                family = CounterMetricFamily(
                    f"phloem_engine_{label}_{key}", f"{text} by {label}.", labels=("replica", label)
                )
                for replica, name, row in rows:
                    family.add_metric((replica, name), row[key])
                yield family
        restarts = CounterMetricFamily("phloem_engine_restarts", "Engines started again.", labels=("replica",))
        for replica, count in self._restarts.items():
            restarts.add_metric((replica,), count)
        yield restarts
        placements = CounterMetricFamily("phloem_fleet_placements", "Programs placed, by reason.", labels=("reason",))
        for reason, count in self._placements.items():
            placements.add_metric((reason,), count)
        yield placements


class _Rules(Collector):
    """What rules have chosen and saved."""

    def __init__(self, savings: Savings) -> None:
        self._savings = savings

    def collect(self) -> Iterator[Metric]:
        labels = ("rule", "model", "reason")
        routed = CounterMetricFamily("phloem_routed", "Answers by rule, model and the rule's reason.", labels=labels)
        cheap = CounterMetricFamily(
            "phloem_routed_cheap_tokens", "Tokens of the cheap model's answers, by rule.", labels=("rule",)
        )
        dropped = CounterMetricFamily(
            "phloem_routed_dropped_tokens", "Those of its answers that failed the check.", labels=("rule",)
        )
        saved = GaugeMetricFamily(
            "phloem_routed_saved_seconds_estimate",
            "Cheap tokens times the difference of the models' decode seconds of a token, minus the dropped answers.",
            labels=("rule",),
        )
        for rule, counts in self._savings.report().items():
            for (model, reason), count in counts.answered.items():
                routed.add_metric((rule, model, reason), count)
            cheap.add_metric((rule,), counts.cheap_tokens)
            dropped.add_metric((rule,), counts.dropped_tokens)
            if counts.saved_s is not None:
                saved.add_metric((rule,), counts.saved_s)
        yield from (routed, cheap, dropped, saved)


def split_name(replica: str) -> tuple[str, str]:
    """The model and the number of ``small/0``; a server of one model has replicas without its name."""
    model, _, number = replica.rpartition("/")
    return model, number


def _with_model(sample: Sample) -> Sample:
    """The name of a replica as two labels, where it has its model's name."""
    model, number = split_name(sample.labels.get("replica", ""))
    return sample._replace(labels={"model": model, **sample.labels, "replica": number}) if model else sample


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
