"""Requests and their programs leave spans in the caller's trace: at a recorder of ours, and at OpenTelemetry's SDK."""

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from phloem.cli import otel_tracer
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InvalidRequest, Overloaded
from phloem.protocol.program_call import OpFailed
from phloem.runtime.server.logs import JsonLines
from phloem.runtime.server.otel import OtelTracer, otlp_tracer
from phloem.runtime.server.tenants import Keys, Tenant, hash_of
from phloem.runtime.server.tracing import ProgramSpans, TraceContext, read_context
from phloem.tests.runtime.server.doubles import ScriptedClient, failing, rejecting
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
ASK = {"prompt": "a secret prompt", "max_tokens": 3}


@dataclass
class Ended:
    """A span that has ended. ``parent``: its parent's id, empty without one."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: str
    start_ns: int
    end_ns: int
    about: dict[str, Any]
    error: str


@dataclass
class Recorder:
    """The tracer of these tests: it keeps the spans that have ended, if their trace is sampled."""

    ended: list[Ended] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(self, name, parent, *, kind="internal", start_ns=None):
        trace_id = f"{next(self.ids):032x}" if parent is None else parent.trace_id
        sampled = parent is None or parent.is_sampled
        context = TraceContext(trace_id, f"{next(self.ids):016x}", sampled, "" if parent is None else parent.state)
        above = "" if parent is None else parent.span_id
        return RecordedSpan(
            self, context, Ended(name, trace_id, context.span_id, above, kind, start_ns or 0, 0, {}, "")
        )

    def spans(self) -> list[Ended]:
        return self.ended


class RecordedSpan:
    def __init__(self, recorder, context, ended):
        self._recorder, self.context, self._ended = recorder, context, ended

    def end(self, attributes, *, name="", error="", end_ns=None):
        assert not self._ended.about and not self._ended.end_ns, "it has ended"
        self._ended.about, self._ended.error = dict(attributes), error
        self._ended.name, self._ended.end_ns = name or self._ended.name, end_ns or 0
        if self.context.is_sampled:
            self._recorder.ended.append(self._ended)


class Sdk(OtelTracer):
    """OpenTelemetry's SDK with its exporter to memory."""

    def __init__(self):
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        super().__init__(SimpleSpanProcessor(self._exporter), version="1.2.3")

    def spans(self) -> list[Ended]:
        return [
            Ended(
                span.name,
                f"{span.context.trace_id:032x}",
                f"{span.context.span_id:016x}",
                f"{span.parent.span_id:016x}" if span.parent is not None else "",
                span.kind.name.lower(),
                span.start_time,
                span.end_time,
                dict(span.attributes),
                span.status.description or "",
            )
            for span in self._exporter.get_finished_spans()
        ]


@pytest.fixture(params=["recorder", pytest.param("sdk", marks=pytest.mark.otel)])
def tracer(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "recorder":
        yield Recorder()
        return
    pytest.importorskip("opentelemetry.sdk", reason="phloem[otel] is not installed")
    sdk = Sdk()
    yield sdk
    sdk.close()


def named(tracer: Any, count: int) -> dict[str, Ended]:
    """The ``count`` spans by name, once they have ended: a request's own ends after its answer was read."""
    wait_until(lambda: len(tracer.spans()) >= count)
    assert len(tracer.spans()) == count
    return {span.name: span for span in tracer.spans()}


# -- traceparent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{CALLER}-01", True),
        (f" 00-{TRACE}-{CALLER}-00 ", False),
        (f"00-{TRACE}-{CALLER}-03", True),
        (f"cc-{TRACE}-{CALLER}-01-what-may-come", True),
        (f"cc-{TRACE}-{CALLER}-01", True),
    ],
)
def test_a_traceparent_is_read(header: str, sampled: bool) -> None:
    headers = {b"traceparent": header.encode(), b"tracestate": b"a=1,b=2"}
    found = read_context(headers)
    assert found == TraceContext(TRACE, CALLER, sampled, "a=1,b=2")
    assert found.traceparent.decode() == f"00-{TRACE}-{CALLER}-{'01' if sampled else '00'}"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{CALLER}",
        f"00-{TRACE}-{CALLER}-01-more",
        f"00-{TRACE}-{CALLER}-01.",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{CALLER}-01",
        f"00-{TRACE[1:]}-{CALLER}-01",
        f"0x-{TRACE}-{CALLER}-01",
    ],
)
def test_a_traceparent_that_is_not_valid_counts_as_none(header: str) -> None:
    assert read_context({b"traceparent": header.encode()}) is None


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_its_program_and_its_generation_are_spans_of_the_callers_trace(
    serve: Callable[..., Any], tracer: Any
) -> None:
    keys = Keys({"garden": Tenant(keys=(hash_of("phloem-key"),))})
    server = serve(StringEngine(reply=lambda prompt, op: "a b"), keys=keys, tracer=tracer)
    headers = SENT | {"authorization": "Bearer phloem-key", "x-request-id": "mine"}
    answer = server.http.post("/v1/completions", json=ASK, headers=headers)
    spans = named(tracer, 6)
    request, program, gen = spans["POST /v1/completions"], spans["program"], spans["gen"]
    assert {span.trace_id for span in spans.values()} == {TRACE}
    assert (request.parent, program.parent, gen.parent) == (CALLER, request.span_id, program.span_id)
    assert {spans[name].parent for name in ("queue", "prefill", "decode")} == {gen.span_id}
    assert [span.kind for span in (request, program, gen)] == ["server", "internal", "internal"]
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.span_id}-01"
    assert request.about == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "phloem.request_id": "mine",
        "phloem.tenant": "garden",
    }
    assert program.about["gen_ai.request.model"] == "string" and program.about["gen_ai.usage.input_tokens"] == 3
    assert list(gen.about["gen_ai.response.finish_reasons"]) == ["stop"]
    assert gen.about["gen_ai.usage.output_tokens"] == 2 and gen.about["phloem.op"] == 1
    assert "secret" not in str(spans) and not any(span.error for span in spans.values())


def test_a_request_without_a_caller_begins_a_trace_and_others_than_posts_have_none(
    serve: Callable[..., Any], tracer: Any
) -> None:
    server = serve(tracer=tracer)
    assert "traceparent" not in server.http.get("/v1/models").headers
    answer = server.http.post("/v1/completions", json=ASK, headers={"traceparent": "nonsense"})
    spans = named(tracer, 6)
    request = spans["POST /v1/completions"]
    assert request.parent == "" and answer.headers["traceparent"] == f"00-{request.trace_id}-{request.span_id}-01"
    assert server.http.get("/v1/models", headers=SENT).headers["traceparent"].startswith(f"00-{TRACE}-")
    wait_until(lambda: len(tracer.spans()) == 7)


def test_a_trace_that_is_not_sampled_leaves_no_spans(serve: Callable[..., Any], tracer: Any) -> None:
    server = serve(tracer=tracer)
    answer = server.http.post("/v1/completions", json=ASK, headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-") and answer.headers["traceparent"].endswith("-00")
    server.http.post("/v1/completions", json=ASK)
    assert TRACE not in {span.trace_id for span in named(tracer, 6).values()}


def test_a_server_without_a_tracer_answers_with_the_callers_traceparent(serve: Callable[..., Any]) -> None:
    server = serve()
    assert server.http.post("/v1/completions", json=ASK, headers=SENT).headers["traceparent"] == SENT["traceparent"]
    assert "traceparent" not in server.http.post("/v1/completions", json=ASK).headers


def test_errors_are_in_the_spans(serve: Callable[..., Any], tracer: Any) -> None:
    server = serve(client=ScriptedClient(failing(InvalidRequest("no"))), tracer=tracer)
    assert server.http.post("/v1/completions", json=ASK).status_code == 400
    spans = named(tracer, 2)
    assert spans["program"].error == "InvalidRequest"
    request = spans["POST /v1/completions"]  # the client's error is not the server's
    assert request.about["error.type"] == "invalid_request" and request.error == ""


def test_a_refused_program_ends_its_span(serve: Callable[..., Any], tracer: Any) -> None:
    server = serve(client=ScriptedClient(rejecting(Overloaded("full"))), tracer=tracer)
    server.http.post("/v1/completions", json=ASK)
    spans = named(tracer, 2)
    assert spans["program"].error == "Overloaded" and spans["program"].parent == spans["POST /v1/completions"].span_id


def test_a_program_over_http_has_a_span_for_each_of_its_operations(serve: Callable[..., Any], tracer: Any) -> None:
    ops = [
        {"t": "text", "op": 0, "seq": 0, "text": "a"},
        {"t": "gen", "op": 1, "seq": 0, "params": {"max_tokens": 2}},
        {"t": "select", "op": 2, "seq": 0, "choices": ["yes", "no"]},
        {"t": "close", "op": 3, "seq": 0},
    ]
    server = serve(tracer=tracer)
    body = {"m": "submit", "program": "mine", "ops": ops, "settings": {"name": "poem"}}
    answer = server.http.post("/v1/programs", json=body, headers=SENT)
    assert answer.status_code == 200, answer.text
    wait_until(lambda: "POST /v1/programs" in {span.name for span in tracer.spans()})
    spans = tracer.spans()
    (program,) = [span for span in spans if span.name == "program"]
    assert program.about["phloem.program"] == "mine" and program.about["phloem.name"] == "poem"
    assert sorted(span.name for span in spans if span.parent == program.span_id) == ["gen", "select"]


def test_lines_of_the_log_name_the_trace(
    serve: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(caplog.handler, "emit", lambda record: lines.append(json.loads(JsonLines().format(record))))
    with caplog.at_level("INFO", "phloem.requests"):
        server = serve()
        server.http.post("/v1/completions", json=ASK, headers=SENT)
        server.http.post("/v1/completions", json=ASK)
        wait_until(lambda: len(lines) == 2)
    assert [line.get("trace_id") for line in lines] == [TRACE, None]


# -- programs ---------------------------------------------------------------------------------------------------------


def test_an_operations_times_lie_one_after_another_and_end_when_its_result_comes(tracer: Any) -> None:
    above = tracer.start("above", None)
    spans = ProgramSpans(tracer, above.context, program="p", name="", model="tiny")
    spans.submit([o.Gen(op=1, seq=0)])
    candidate = m.CandidateMeta(finish_reason="length", completion_tokens=5, token_ids=(1,) * 5)
    spans.take(m.Done("p", 1, ["text"], m.GenMeta(9, 4, (candidate,), queue_s=0.25, prefill_s=0.5, decode_s=1.0)))
    spans.take(m.Closed("p", m.ProgramStats(prompt_tokens=9, cached_tokens=4, generated_tokens=5)))
    spans.take(m.Closed("p", m.ProgramStats()))
    above.end({})
    found = named(tracer, 6)
    parts = [found[name] for name in ("queue", "prefill", "decode")]
    assert [part.end_ns - part.start_ns for part in parts] == [250_000_000, 500_000_000, 1_000_000_000]
    assert parts[0].end_ns == parts[1].start_ns and parts[1].end_ns == parts[2].start_ns
    assert (parts[0].start_ns, parts[2].end_ns) == (found["gen"].start_ns, found["gen"].end_ns)
    assert found["program"].about == {
        "phloem.program": "p",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 5,
        "phloem.cached_tokens": 4,
    }


def test_the_first_error_of_a_program_is_its_spans() -> None:
    tracer = Recorder()
    spans = ProgramSpans(tracer, TraceContext(TRACE, CALLER), program="p", name="", model="tiny")
    for error in (Overloaded("first"), InvalidRequest("second")):
        spans.take(OpFailed(1, error))
    spans.take(m.Closed("p", m.ProgramStats()))
    assert [(span.name, span.error) for span in tracer.ended] == [("program", "Overloaded")]


# -- export -----------------------------------------------------------------------------------------------------------


def test_an_address_or_a_protocol_that_cannot_be_used_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'collector:4318'; set OTEL_EXPORTER_OTLP_ENDPOINT to http://HOST:4318"):
        otlp_tracer("collector:4318", version="1")
    with pytest.raises(InvalidRequest, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc: spans are exported as http/protobuf"):
        otlp_tracer("http://127.0.0.1:4317", version="1", protocol="grpc")


def test_without_the_extra_the_server_says_why_it_exports_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318/")
    with otel_tracer() as tracer:
        assert tracer is None
    assert "no spans are exported to http://127.0.0.1:4318/v1/traces" in caplog.text
    assert "install phloem[otel]" in caplog.text
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    caplog.clear()
    with otel_tracer() as tracer:
        assert tracer is None and not caplog.text


@pytest.mark.otel
def test_spans_arrive_at_the_collector_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="phloem[otel] is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-phloem")
    try:
        with otel_tracer() as tracer:
            httpx.post(f"{serve(tracer=tracer).url}/v1/completions", json=ASK, headers=SENT)
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    assert {path for path, _ in bodies} == {"/v1/traces"}
    names = set()
    for _, body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {item.key: item.value.string_value for item in resource.resource.attributes}
            assert about["service.name"] == "our-phloem"
            for span in [span for scope in resource.scope_spans for span in scope.spans]:
                assert span.trace_id.hex() == TRACE
                names.add(span.name)
    assert {"program", "gen", "queue", "prefill", "decode"} <= names
