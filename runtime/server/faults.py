"""Errors as HTTP: the status, the body (OpenAI's or Anthropic's shape) and the headers each error is answered with.

InvalidRequest 400 (UnknownModel 404, PromptTooLong 400 ``context_length_exceeded``)   Overloaded 429 + Retry-After
Cancelled 499   DeadlineExceeded 504   EngineLost 503 + Retry-After   everything else 500
"""

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from ...protocol import errors

LEAST_RETRY_AFTER_S = {429: 1, 503: 5}  # by status; an engine takes seconds to start again


@dataclass(frozen=True, slots=True)
class Fault:
    """The answer to an error. ``type`` groups, ``code`` is for programs, ``param`` names the field at fault.

    ``retry_after_s``: of a 429 or 503, when to try again; 0 where that is not known.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 0.0

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def messages_body(self, request_id: str | None = None) -> bytes:
        """The body in the shape of Anthropic's API."""
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    @property
    def headers(self) -> dict[str, str]:
        if (least_s := LEAST_RETRY_AFTER_S.get(self.status)) is not None:
            return {"retry-after": str(max(math.ceil(self.retry_after_s), least_s))}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TYPE_NAMES = ("str", "int", "float", "bool")
_FIELD_NAME = re.compile(r"[a-z0-9_]+")


class HttpError(Exception):
    """An error of the HTTP edge itself: a bad key, body or content type."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


# the first entry that an error is an instance of: status, type, code
_ANSWERS: tuple[tuple[type[errors.PhloemError], int, str, str | None], ...] = (
    (errors.UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (errors.PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.InvalidGrammar, 400, "invalid_request_error", "invalid_grammar"),
    (errors.InvalidParams, 400, "invalid_request_error", "invalid_value"),
    (errors.LimitExceeded, 400, "invalid_request_error", "limit_exceeded"),
    (errors.Unsupported, 400, "invalid_request_error", "unsupported"),
    (errors.InvalidRequest, 400, "invalid_request_error", "invalid_request"),
    (errors.RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.Overloaded, 429, "rate_limit_error", "overloaded"),
    (errors.Cancelled, 499, "cancelled_error", "cancelled"),
    (errors.DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (errors.EngineLost, 503, "server_error", "engine_lost"),
    (errors.PhloemError, 500, "server_error", "internal_error"),
)


def of_error(error: errors.PhloemError) -> Fault:
    """The fault that an error of the runtime is answered with; ``where`` is a field's name if it looks like one."""
    _, status, type_, code = next(row for row in _ANSWERS if isinstance(error, row[0]))
    message = error.message.removesuffix(f", in {error.where}") if error.where else error.message
    if status >= 500:  # the lines after the first are the engine's log, which clients do not get
        message = message.partition("\n")[0].removesuffix("; its log ends:")
    param = error.where if error.where.replace("_", "").replace(".", "").isalnum() else None
    retry_after_s = error.retry_after_s if isinstance(error, errors.Overloaded) else 0.0
    return Fault(status, message, type_, param, code, retry_after_s)


def of_validation(error: ValidationError, model: type[BaseModel]) -> Fault:
    """The first invalid field with all its errors."""
    found = error.errors(include_url=False)
    first = found[0]
    path = _path(first["loc"])
    here = [e for e in found if _path(e["loc"]) == path]
    first = next((e for e in here if e["type"] in ("unsupported", "too_long")), first)
    kind, context = first["type"], first.get("ctx") or {}
    if kind == "json_invalid":
        return Fault(400, f"the body is not valid JSON: {context['error']}", code="invalid_json")
    if kind == "extra_forbidden":
        name = ".".join(filter(None, [_path(first["loc"][:-1]), str(first["loc"][-1])]))
        return Fault(400, _unknown_field(name, first["loc"], model), param=name, code="unknown_field")
    if kind == "missing":
        return Fault(400, f"the field {path!r} is required", param=path, code="missing_field")
    if kind == "unsupported":
        return Fault(400, first["msg"], param=path, code="unsupported")
    if kind == "conflict":
        return Fault(400, first["msg"], param=context["param"], code="invalid_value")
    if kind == "too_long":
        message = f"{path}: more than {context['max_length']:,} items; send fewer"
        return Fault(400, message, param=path, code="limit_exceeded")
    if not path:
        return Fault(400, "the body must be a JSON object", code="invalid_json")
    reasons = list(dict.fromkeys(_reason(e) for e in here))
    value = first["input"]
    shown = f"={value!r}" if isinstance(value, str | int | float) and len(repr(value)) <= 60 else ""
    return Fault(400, f"{path}{shown}: {', or '.join(reasons)}", param=path, code="invalid_value")


def _reason(error: Any) -> str:
    text: str = error["msg"].removeprefix("Value error, ")
    return text.replace("Input should be", "must be")


def _path(loc: tuple[int | str, ...]) -> str:
    """``messages.0.content`` without the union branches (``str``, ``list[int]``, ``ChatMessage``) of pydantic."""
    names = []
    for part in loc:
        if isinstance(part, str) and (part in _TYPE_NAMES or not _FIELD_NAME.fullmatch(part)):
            if part[:1].isupper():
                continue
            break
        names.append(str(part))
    return ".".join(names)


def _unknown_field(path: str, loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    message = f"unknown field {path!r}: nothing here reads it, so it is refused rather than ignored"
    if len(loc) == 1:
        close = get_close_matches(str(loc[0]), model.model_fields, n=1)
        if close:
            message += f"; did you mean {close[0]!r}?"
    return message
