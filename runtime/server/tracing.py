"""Traces of requests: the W3C header ``traceparent``, and the spans of requests, their programs and operations.

    POST /v1/completions               a request, until its answer has ended
      └─ program                       from its first submit until it is closed
           └─ gen, select or score     an operation of the model, until its result has come
                └─ queue, prefill, decode: its time in the engine, as the engine has measured it

Spans hold names, counts and times, and no text of a prompt or an answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...protocol.messages import Closed, Done, EmbeddingMeta, GenMeta, SelectMeta
from ...protocol.ops import AnyOp, Embedding, Gen, Score, Select
from ...protocol.program_call import OpFailed, ProgramEvent, SubmitRefused

SpanKind = Literal["server", "internal"]
Attributes = Mapping[str, str | int | Sequence[str]]

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace, by which other processes refer to it. The ids are 32 and 16 lower-case hex digits."""

    trace_id: str
    span_id: str
    is_sampled: bool = True
    state: str = ""  # ``tracestate``: of other tracing systems, passed on as it came

    @property
    def traceparent(self) -> bytes:
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}".encode()


class OpenSpan(Protocol):
    """A span that has begun. ``error`` says why it failed, ``name`` replaces the name that it began with.

    Times are Unix nanoseconds; None: now.
    """

    @property
    def context(self) -> TraceContext: ...
    def end(self, attributes: Attributes, *, name: str = "", error: str = "", end_ns: int | None = None) -> None: ...


class Tracer(Protocol):
    """Makes spans and exports those that have ended. Its methods may be called on any thread and return at once."""

    def start(
        self, name: str, parent: TraceContext | None, *, kind: SpanKind = "internal", start_ns: int | None = None
    ) -> OpenSpan: ...


def read_context(headers: Mapping[bytes, bytes]) -> TraceContext | None:
    """Of the caller's span; None without a valid ``traceparent``, as W3C Trace Context says."""
    found = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b"").strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == b"ff" or (version == b"00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = headers.get(b"tracestate", b"").decode("latin-1")
    return TraceContext(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1), state)


class ProgramSpans:
    """The spans of one program and its operations. Lives on the event loop."""

    def __init__(self, tracer: Tracer, parent: TraceContext, *, program: str, name: str, model: str) -> None:
        """``name``: of its settings, for example a function's."""
        self._tracer = tracer
        self._span: OpenSpan | None = tracer.start("program", parent)
        self._about = {"phloem.program": program, "gen_ai.request.model": model}
        if name:
            self._about["phloem.name"] = name
        self._kinds: dict[int, str] = {}  # of the model's ops, by id
        self._error = ""

    def submit(self, ops: Sequence[AnyOp]) -> None:
        self._kinds.update(
            (op.op, type(op).__name__.lower()) for op in ops if isinstance(op, Gen | Select | Score | Embedding)
        )

    def take(self, event: ProgramEvent) -> None:
        match event:
            case Done(meta=GenMeta() | SelectMeta() | EmbeddingMeta()):
                self._end_op(event)
            case OpFailed(error=error) | SubmitRefused(error=error):
                self._error = self._error or type(error).__name__
            case Closed(stats=stats):
                tokens = {
                    "gen_ai.usage.input_tokens": stats.prompt_tokens,
                    "gen_ai.usage.output_tokens": stats.generated_tokens,
                    "phloem.cached_tokens": stats.cached_tokens,
                }
                self.end(tokens)

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """A second call does nothing."""
        span, self._span = self._span, None
        if span is not None:
            span.end(self._about | dict(attributes), error=error or self._error)

    def _end_op(self, done: Done) -> None:
        if self._span is None:
            return
        meta = done.meta
        assert meta is not None
        parts = {"queue": meta.queue_s, "prefill": meta.prefill_s}
        about: dict[str, str | int | Sequence[str]] = {
            "phloem.op": done.op,
            "gen_ai.usage.input_tokens": meta.prompt_tokens,
            "phloem.cached_tokens": meta.cached_tokens,
        }
        if isinstance(meta, GenMeta):
            parts["decode"] = meta.decode_s
            about["gen_ai.usage.output_tokens"] = sum(one.completion_tokens for one in meta.candidates)
            about["gen_ai.response.finish_reasons"] = [one.finish_reason for one in meta.candidates]
        end_ns = time.time_ns()
        at_ns = end_ns - sum(round(1e9 * seconds) for seconds in parts.values())
        span = self._tracer.start(self._kinds.get(done.op, "op"), self._span.context, start_ns=at_ns)
        for name, seconds in parts.items():
            part = self._tracer.start(name, span.context, start_ns=at_ns)
            at_ns += round(1e9 * seconds)
            part.end({}, end_ns=at_ns)
        span.end(about, end_ns=end_ns)
