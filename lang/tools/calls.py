"""The tool calls that a model generated: their typed arguments, running them, and their results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ...protocol.errors import InvalidRequest
from ...protocol.tool_format import ToolFormat
from ...protocol.tool_splitter import ArgumentsPiece, CallBegun, TextPiece
from ..types import ParseError
from .tool import Tool


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``text``: the result as the model reads it. ``value``: what the tool returned. ``error``: what it raised."""

    call: ToolCall
    text: str
    value: Any = None
    error: BaseException | None = None

    @property
    def is_error(self) -> bool:
        return self.error is not None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments_json`` is valid for the tool's schema, because the grammar allows nothing else."""

    tool: Tool
    arguments_json: str

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as values of the function's types. Raises ``ParseError`` if a validator of a type fails."""
        try:
            return self.tool.read(self.arguments_json)
        except ValueError as error:
            reason = str(error).replace("\n", " ")
            raise ParseError(f"arguments of {self.name}(): {reason}", raw=self.arguments_json) from error

    def run(self) -> Any:
        """Call the tool and let its exceptions through. An async tool returns a coroutine."""
        return self.tool(**self.arguments)

    def result(self) -> ToolResult:
        """Call the tool. An exception becomes a result that tells the model of it."""
        if self.tool.is_async:
            raise InvalidRequest(
                f"tool {self.name!r} is async; use await s.run_tools_async(...) in an async program, or a plain def"
            )
        try:
            return self._returned(self.run())
        except Exception as error:
            return self._raised(error)

    async def result_async(self) -> ToolResult:
        try:
            value = self.run()
            return self._returned(await value if self.tool.is_async else value)
        except Exception as error:
            return self._raised(error)

    def _returned(self, value: Any) -> ToolResult:
        return ToolResult(self, as_text(value), value)

    def _raised(self, error: Exception) -> ToolResult:
        what = error.args[0] if isinstance(error, ParseError) else f"{type(error).__name__}: {error}"
        return ToolResult(self, json.dumps({"error": what}, ensure_ascii=False), None, error)

    def __repr__(self) -> str:
        return f"ToolCall({self.name}({self.arguments_json}))"


class ToolCalls(Sequence[ToolCall]):
    """The calls of one generation, in order. ``text``: the text around them, which without calls is the answer."""

    __slots__ = ("_calls", "text")

    def __init__(self, calls: Sequence[ToolCall], text: str) -> None:
        self._calls = tuple(calls)
        self.text = text

    @overload
    def __getitem__(self, index: int) -> ToolCall: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ToolCall]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._calls[index]

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[ToolCall]:
        return iter(self._calls)

    def __repr__(self) -> str:
        return f"ToolCalls({list(self._calls)}, text={self.text!r})"


def read_calls(text: str, format: ToolFormat, tools: Sequence[Tool]) -> ToolCalls:
    """The calls in a generated text. Raises ValueError if the last call is not complete."""
    splitter = format.splitter([tool.name for tool in tools])
    by_name = {tool.name: tool for tool in tools}
    said: list[str] = []
    names: list[str] = []
    arguments: list[str] = []
    for event in (*splitter.push(text), *splitter.finish()):
        match event:
            case TextPiece():
                said.append(event.text)
            case CallBegun():
                names.append(event.name)
                arguments.append("")
            case ArgumentsPiece():
                arguments[-1] += event.text
    if splitter.is_inside_call:
        raise ValueError(f"the call of {names[-1]}() is not complete")
    calls = [ToolCall(by_name[name], raw) for name, raw in zip(names, arguments, strict=True)]
    return ToolCalls(calls, "".join(said))


def as_text(value: Any) -> str:
    """A tool's return value as the model reads it: a str unchanged, anything else as JSON."""
    if isinstance(value, str):
        return value
    from pydantic_core import to_json

    return to_json(value, fallback=str).decode()
