"""Reading of the bodies of each API: the prompt of a request, and the answers of a response."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .tenants import CHARS_PER_TOKEN


class AnswerText(NamedTuple):
    """``text`` is None of an answer that calls tools. ``is_cut``: it has stopped at its token limit."""

    text: str | None
    is_cut: bool


def prompt_of(body: Mapping[str, Any]) -> str:
    """The texts of the prompt or conversation, a line each; token ids count as blanks, four each. No images."""
    return "\n".join(text for name in _PROMPTS for text in _texts(body.get(name)))


_PROMPTS = ("system", "instructions", "messages", "prompt", "input", "text", "input_ids")
_TEXTS = frozenset(("content", "text", "arguments", "output", "input"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name in _TEXTS:
                yield from _texts(inner)
    elif isinstance(value, Sequence):
        if value and isinstance(value[0], int):
            yield " " * (CHARS_PER_TOKEN * len(value))
        else:
            for inner in value:
                yield from _texts(inner)


def _chat(body: Any) -> Iterator[AnswerText]:
    for choice in body["choices"]:
        message = choice["message"]
        text = None if message.get("tool_calls") else message.get("content") or ""
        yield AnswerText(text, choice["finish_reason"] == "length")


def _completions(body: Any) -> Iterator[AnswerText]:
    for choice in body["choices"]:
        yield AnswerText(choice["text"], choice["finish_reason"] == "length")


def _messages(body: Any) -> Iterator[AnswerText]:
    calls = any(part["type"] == "tool_use" for part in body["content"])
    text = "".join(part.get("text", "") for part in body["content"])
    yield AnswerText(None if calls else text, body["stop_reason"] == "max_tokens")


def _responses(body: Any) -> Iterator[AnswerText]:
    items = [item for item in body["output"] if item["type"] == "message"]
    calls = any(item["type"] == "function_call" for item in body["output"])
    text = "".join(part.get("text", "") for item in items for part in item["content"])
    yield AnswerText(None if calls else text, body["status"] == "incomplete")


def _generated(body: Any) -> Iterator[AnswerText]:
    for one in body if isinstance(body, list) else [body]:
        yield AnswerText(one["text"], one["meta_info"]["finish_reason"]["type"] == "length")


# The paths whose requests a rule can answer, and how their answers are read.
ANSWERS: dict[str, Callable[[Any], Iterator[AnswerText]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
    "/generate": _generated,
}
