"""Spans made by OpenTelemetry's SDK and exported over OTLP; needs the extra ``phloem[otel]``."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from ...protocol.errors import InvalidRequest
from .tracing import Attributes, OpenSpan, SpanKind, TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

logger = logging.getLogger(__name__)

PROTOCOL = "http/protobuf"
CLOSE_S = 5.0


def otlp_tracer(url: str, *, version: str, protocol: str = "") -> OtelTracer | None:
    """Exports spans to ``url`` in batches, on a thread; None, and a warning, where the extra is not installed."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"the address for spans is {url!r}; set OTEL_EXPORTER_OTLP_ENDPOINT to http://HOST:4318")
    if protocol not in ("", PROTOCOL):
        message = f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: spans are exported as {PROTOCOL} only"
        raise InvalidRequest(f"{message}; set it so, with the collector's port for HTTP (4318)")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        logger.warning("no spans are exported to %s: %s; install phloem[otel]", url, error)
        return None
    return OtelTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), version=version)


class OtelTracer:
    """Hands spans that have ended to ``processor``. The SDK samples them, and reads its own environment variables."""

    def __init__(self, processor: SpanProcessor, *, version: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._api = trace
        ours = Resource({"service.name": "phloem", "service.version": version})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("phloem", version)

    def start(
        self, name: str, parent: TraceContext | None, *, kind: SpanKind = "internal", start_ns: int | None = None
    ) -> OpenSpan:
        api = self._api
        of_parent = api.INVALID_SPAN_CONTEXT  # a trace begins here
        if parent is not None:
            flags = api.TraceFlags(parent.is_sampled)
            state = api.TraceState.from_header([parent.state])
            of_parent = api.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags, state)
        context = api.set_span_in_context(api.NonRecordingSpan(of_parent), {})
        span = self._tracer.start_span(name, context, api.SpanKind[kind.upper()], start_time=start_ns)
        return _OtelSpan(span, api.Status, api.StatusCode.ERROR)

    def close(self) -> None:
        """Export what has ended, for at most ``CLOSE_S``: the SDK would try for half a minute where nothing answers."""
        closing = threading.Thread(target=self._provider.shutdown, name="phloem-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _OtelSpan:
    def __init__(self, span: Any, status: Any, failed: Any) -> None:
        """``status`` and ``failed``: the SDK's ``Status`` and its code of an error."""
        self._span = span
        self._status, self._failed = status, failed

    @property
    def context(self) -> TraceContext:
        found = self._span.get_span_context()
        return TraceContext(
            f"{found.trace_id:032x}", f"{found.span_id:016x}", found.trace_flags.sampled, found.trace_state.to_header()
        )

    def end(self, attributes: Attributes, *, name: str = "", error: str = "", end_ns: int | None = None) -> None:
        self._span.set_attributes(dict(attributes))
        if name:
            self._span.update_name(name)
        if error:
            self._span.set_status(self._status(self._failed, error))
        self._span.end(end_ns)
