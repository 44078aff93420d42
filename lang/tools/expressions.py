"""The expressions of tools: their description for the model, and a generation that may call them."""

from __future__ import annotations

from typing import Any

import msgspec

from ...protocol.tool_format import ToolFormat
from ..expressions import SglGen, SglMacro
from .calls import ToolCalls, read_calls
from .tool import Tool


class SglToolPrompt(SglMacro, frozen=True, eq=False):
    """The description of the tools in the model's own format."""

    tools: tuple[Tool, ...]

    def append_to(self, sequence: Any) -> None:
        if self.tools:
            format: ToolFormat = sequence.program.session.tool_format()
            has_text = sequence.role is None or len(sequence.pieces) > sequence.role_start
            sequence.append(format.prompt([tool.schema() for tool in self.tools], is_first=not has_text))

    def __repr__(self) -> str:
        return f"Tools({', '.join(tool.name for tool in self.tools)})"


class SglToolGen(SglMacro, frozen=True, eq=False):
    """A generation that may call ``tools``."""

    gen: SglGen
    tools: tuple[Tool, ...]
    choice: str
    parallel: bool

    def append_to(self, sequence: Any) -> None:
        format: ToolFormat = sequence.program.session.tool_format()
        grammar = format.grammar([tool.schema() for tool in self.tools], self.choice, parallel=self.parallel)
        tools = () if grammar is None else self.tools

        def parse(text: str) -> ToolCalls:
            return read_calls(text, format, tools)

        sequence.append(msgspec.structs.replace(self.gen, grammar=grammar, parse=parse))

    def __repr__(self) -> str:
        return f"Gen({self.gen.name!r}, tools={[tool.name for tool in self.tools]})"
