"""``run_agent``: turns of tool calls and results until the model answers.

All turns are one growing text, so each turn finds the KV of those before it in the cache. The error of a tool is a
result that the model reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...protocol.errors import InvalidRequest
from ..api import assistant
from ..expressions import SglConstantText, SglExprList
from ..function import SglFunction
from ..gen import gen
from ..state import ProgramState
from .calls import ToolCall, ToolCalls, ToolResult
from .expressions import SglToolPrompt
from .tool import as_tools


@dataclass(slots=True)
class AgentRun:
    """``answer``: the text of the last turn. ``finished``: the model answered before ``max_turns`` forced it to.

    ``turns`` counts the generations; ``names`` are their variables in the program.
    """

    answer: str = ""
    finished: bool = False
    turns: int = 0
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    state: Any = None

    def _take(self, calls: ToolCalls) -> bool:
        """Count one turn. Whether it has calls to run."""
        self.turns += 1
        self.calls += calls
        self.answer = calls.text
        return bool(calls)


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
    """Answer the conversation in ``s``, calling tools as often as the model wants, with at most ``max_turns`` gens.

    The last turn cannot call tools, so there is always an answer. ``tool_choice`` other than auto applies to the first
    turn. Turn i is the variable ``f"{name}{i}"``; ``s[name]`` is the answer. ``sampling`` goes to every ``gen``.
    """
    run = AgentRun(state=s)
    for turn in _turns(run, tools, name, max_turns, tool_choice, parallel_tool_calls, sampling):
        if run._take(s[turn]):
            run.results += s.run_tools(turn)
    return run


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
    """``run_agent`` for an async program. The async tools of one turn run at the same time."""
    run = AgentRun(state=s)
    for turn in _turns(run, tools, name, max_turns, tool_choice, parallel_tool_calls, sampling):
        if run._take(await s.get(turn)):
            run.results += await s.run_tools_async(turn)
    return run


def _turns(
    run: AgentRun,
    tools: Iterable[Any],
    name: str,
    max_turns: int,
    tool_choice: str,
    parallel: bool,
    sampling: dict[str, Any],
) -> Iterator[str]:
    """Append one turn after another to ``run.state``; yields the variable of each, for the caller to take its calls."""
    if max_turns < 1:
        raise InvalidRequest(f"max_turns={max_turns}: must be 1 or more")
    s, checked = run.state, as_tools(tools)
    while True:
        turn, num_calls = f"{name}{run.turns}", len(run.calls)
        choice = "auto" if run.turns and tool_choice != "none" else tool_choice  # only the first is forced to call
        if run.turns + 1 >= max_turns:
            choice = "none"  # the last has to answer
        s += assistant(gen(turn, tools=checked, tool_choice=choice, parallel_tool_calls=parallel, **sampling))
        run.names.append(turn)
        yield turn
        if len(run.calls) == num_calls:
            run.finished = choice != "none" or tool_choice == "none"
            s[name] = run.answer
            return


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
    """Answer one question with ``tools``: a whole program around ``run_agent``.

    ``sampling`` goes to ``run()``: ``temperature=``, ``max_new_tokens=``, ``deadline_s=`` and so on.
    """
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
    """Append the system message: ``system``, then the description of the tools."""
    checked = as_tools(tools)
    if system or checked:
        s.system(SglExprList((SglConstantText(system), SglToolPrompt(checked))))
