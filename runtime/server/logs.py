"""Log lines: as text or JSON, each with the id of its request, and the lines that a request leaves."""

import json
import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from ...protocol.ops import AnyOp, Special, Text
from .tenants import sender_of_request

LogFormat = Literal["text", "json"]
LogRequests = Literal["none", "lines", "prompts"]
MAX_PROMPT_CHARS = 10_000  # of one program in the log

# Their levels are set by one flag, not by the level of the other loggers.
_requests = logging.getLogger("phloem.requests")
_prompts = logging.getLogger("phloem.prompts")


def set_up_logs(format: LogFormat, requests: LogRequests) -> None:
    """Give the root's handlers their format, and say what a request leaves: prompts only if asked for."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines() if format == "json" else TextLines())
    _requests.setLevel(logging.WARNING if requests == "none" else logging.INFO)
    _prompts.setLevel(logging.INFO if requests == "prompts" else logging.WARNING)


class TextLines(logging.Formatter):
    """``I 2026-01-31 12:00:00,000 phloem.requests: POST /generate 200 [the request's id] seconds=0.1``."""

    def __init__(self) -> None:
        super().__init__("%(levelname).1s %(asctime)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value!r}" for name, value in _fields(record).items())
        request_id = _request_id()
        return super().formatMessage(record) + (f" [{request_id}]" if request_id else "") + fields


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, ids, the line's fields.

    The ids are ``request_id`` and, of a request that belongs to a trace, ``trace_id``.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request_id():
            line["request_id"] = request_id
        if (sender := sender_of_request()) is not None and sender.trace is not None:
            line["trace_id"] = sender.trace.trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | _fields(record), ensure_ascii=False)


def log_request(method: str, path: str, status: int, **fields: Any) -> None:
    """The line of a request that has ended. It holds nothing of the request's body or query."""
    _requests.info("%s %s %d", method, path, status, extra={"fields": fields})


def log_prompt(program: str, ops: Iterable[AnyOp]) -> None:
    """The texts of ``ops``, token ids as a list, where prompts are logged."""
    if _prompts.isEnabledFor(logging.INFO):
        shown = (op for op in ops if isinstance(op, Text | Special))
        text = "".join(str(list(op.ids)) if isinstance(op, Special) else op.text for op in shown)
        fields = {"program": program, "prompt": text[:MAX_PROMPT_CHARS]}
        _prompts.info("prompt", extra={"fields": fields})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _request_id() -> str:
    sender = sender_of_request()
    return "" if sender is None else sender.request_id
