"""Turns of calls and results until the model answers: one growing text, so each turn finds all before it computed.

Never retries and never judges: a tool's error is a result like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ...protocol.errors import InvalidRequest
from ...protocol.tool_format import ToolFormat
from ..expressions import (
    SglConstantText,
    SglExprList,
    SglGen,
    SglMacro,
    SglRoleBegin,
    SglRoleEnd,
)
from .calls import ToolCall, ToolCalls, ToolResult, read_calls
from .tool import Tool, as_tools

if TYPE_CHECKING:
    from ..state import ProgramState


class SglToolPrompt(SglMacro, frozen=True, eq=False):
    """What the model is told of its tools, in its own way."""

    tools: tuple[Tool, ...]

    def append_to(self, sequence: Any) -> None:
        if self.tools:
            format: ToolFormat = sequence.program.session.tool_format()
            has_text = sequence.role is None or len(sequence.pieces) > sequence.role_start
            sequence.append(format.prompt([tool.schema() for tool in self.tools], is_first=not has_text))

    def __repr__(self) -> str:
        return f"Tools({', '.join(tool.name for tool in self.tools)})"


class SglToolGen(SglMacro, frozen=True, eq=False):
    """A generation in which ``tools`` may be called."""

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


# -- results ----------------------------------------------------------------------------------------------------------


def run_tools(state: ProgramState, name: str) -> list[ToolResult]:
    results = [call.result() for call in _calls(state[name], name)]
    append_results(state, results)
    return results


async def run_tools_async(state: ProgramState, name: str) -> list[ToolResult]:
    calls = _calls(await state.get(name), name)
    results = list(await asyncio.gather(*[call.result_async() for call in calls]))
    append_results(state, results)
    return results


def append_results(state: ProgramState, results: Sequence[ToolResult]) -> None:
    """The turns in which the model reads ``results``."""
    format = state._sequence.program.session.tool_format()
    role = format.template.result_role
    for content in format.result_turns([result.text for result in results]):
        state += SglRoleBegin(role) + content + SglRoleEnd(role)


def _calls(value: Any, name: str) -> ToolCalls:
    if not isinstance(value, ToolCalls):
        raise InvalidRequest(f"run_tools({name!r}): {name!r} was not made by gen({name!r}, tools=[...])")
    return value


# -- the loop ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AgentRun:
    """``answer`` is the last turn's text. ``finished``: the model gave it of itself, before ``max_turns`` was reached.

    ``turns`` counts generations; ``names`` are their variables in the program.
    """

    answer: str = ""
    finished: bool = False
    turns: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    state: Any = None

    def _choice(self, tool_choice: str, max_turns: int) -> str:
        """Of the next turn: a forced call is forced once, and the last turn allowed has to answer."""
        if self.turns + 1 >= max_turns:
            return "none"
        return "auto" if self.turns and tool_choice != "none" else tool_choice

    def _take(self, calls: ToolCalls, name: str) -> None:
        self.turns += 1
        self.names.append(name)
        self.calls += calls
        self.answer = calls.text


def run_agent(
    s: ProgramState,
    *,
    tools: Iterable[Any],
    name: str = "agent",
    max_turns: int = 8,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    **sampling: Any,
) -> AgentRun:
    """Answer what ``s`` ends with, calling tools as often as the model wants, in at most ``max_turns`` generations.

    The last turn allowed cannot call, so there is always an answer. ``tool_choice`` other than auto holds for the first
    turn. Turn i is the variable ``f"{name}{i}"``; ``s[name]`` is the answer. ``sampling`` goes to every ``gen``.
    """
    run = _new_run(s, max_turns)
    checked = as_tools(tools)
    while True:
        turn = f"{name}{run.turns}"
        choice = run._choice(tool_choice, max_turns)
        _append_turn(s, turn, checked, choice, parallel_tool_calls, sampling)
        calls = s[turn]
        run._take(calls, turn)
        if not calls:
            run.finished = choice != "none" or tool_choice == "none"
            s[name] = run.answer
            return run
        run.results += run_tools(s, turn)


async def run_agent_async(
    s: ProgramState,
    *,
    tools: Iterable[Any],
    name: str = "agent",
    max_turns: int = 8,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    **sampling: Any,
) -> AgentRun:
    """``run_agent`` in an async program; the calls of one turn run at the same time where the tools are async."""
    run = _new_run(s, max_turns)
    checked = as_tools(tools)
    while True:
        turn = f"{name}{run.turns}"
        choice = run._choice(tool_choice, max_turns)
        _append_turn(s, turn, checked, choice, parallel_tool_calls, sampling)
        calls = await s.get(turn)
        run._take(calls, turn)
        if not calls:
            run.finished = choice != "none" or tool_choice == "none"
            s[name] = run.answer
            return run
        run.results += await run_tools_async(s, turn)


def _new_run(s: ProgramState, max_turns: int) -> AgentRun:
    if max_turns < 1:
        raise InvalidRequest(f"max_turns={max_turns}: must be 1 or more")
    return AgentRun(state=s)


def _append_turn(
    s: ProgramState, name: str, tools: tuple[Tool, ...], choice: str, parallel: bool, sampling: dict[str, Any]
) -> None:
    from ..api import assistant
    from ..gen import gen

    s += assistant(gen(name, tools=tools, tool_choice=choice, parallel_tool_calls=parallel, **sampling))


def agent(
    prompt: str,
    *,
    tools: Iterable[Any],
    system: str = "",
    max_turns: int = 8,
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    backend: Any = None,
    **sampling: Any,
) -> AgentRun:
    """One question, answered with ``tools``: a whole program around ``run_agent``.

    ``sampling`` as for ``run()``: ``temperature=``, ``max_new_tokens=``, ``deadline_s=`` and so on.
    """
    from ..function import SglFunction

    checked = as_tools(tools)

    def program(s: ProgramState) -> AgentRun:
        begin_conversation(s, checked, system)
        s.user(prompt)
        return run_agent(
            s,
            tools=checked,
            max_turns=max_turns,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )

    state = SglFunction(program).run(backend=backend, **sampling)
    run: AgentRun = state.ret_value
    return run


def begin_conversation(s: ProgramState, tools: Iterable[Any], system: str = "") -> None:
    """The system message: ``system``, then what the model has to know of its tools."""
    checked = as_tools(tools)
    if system or checked:
        s.system(SglExprList((SglConstantText(system), SglToolPrompt(checked))))
