"""Tracing: running a body without a model, with holes for its arguments and values.

A traced body may append an unknown value. Branching on it or formatting it raises ``TraceError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..protocol.tool_format import ToolFormat
from .backend.base_backend import BaseBackend
from .expressions import SglConstantText, SglExpr, SglExprList, SglVariable, TraceError
from .nodes import DefaultSystemNode, Leading, Node, RoleNode, TextNode
from .program import ProgramRun, SequenceLog
from .session import Session
from .state import ProgramState
from .values import Leaf, TextSpan

_tracing: ContextVar[TracerProgramState | None] = ContextVar("phloem_tracing", default=None)


class TraceSession:
    """Has the role texts of a backend and ships nothing to it."""

    def __init__(self, session: Session) -> None:
        self.decides_custom_choices = session.decides_custom_choices
        self.eos_ids = session.eos_ids
        self.closed = session.closed
        self._session = session

    def default_system(self) -> tuple[str, str] | None:
        return self._session.default_system()

    def role_text(self, role: str, *, is_begin: bool, messages: list[dict[str, Any]]) -> str:
        return self._session.role_text(role, is_begin=is_begin, messages=messages)

    def tool_format(self) -> ToolFormat:
        return self._session.tool_format()

    def ship(self, nodes: list[Node], *, is_awaited: bool = False) -> None:
        """The nodes stay in the log of the run."""

    def cancel(self, leaf: Leaf | None = None) -> None:
        pass


class TraceProgram(ProgramRun):
    """A run whose values stay unknown. ``exprs``: (sequence, expression) in the order in which they were appended."""

    def __init__(self, backend: BaseBackend) -> None:
        super().__init__(backend)
        self.session = TraceSession(self.session)
        self.exprs: list[tuple[int, SglExpr]] = []

    def wait_leaves(self, leaves: Any, timeout_s: float | None = None) -> None:
        for leaf in leaves:
            raise TraceError(
                f"the value of {leaf.name!r} is not known while the program is traced; "
                f"paste it with s.ref({leaf.name!r}), or run the program instead of compiling it"
            )

    def allow_waiting(self, expr: object) -> None:
        raise TraceError(
            f"{expr!r} waits for what it generates, so it can be neither traced nor compiled; run the program instead"
        )


class TracerProgramState(ProgramState):
    """``s`` of a traced body: reading a variable returns a reference to it."""

    def __iadd__(self, other: SglExpr | str) -> ProgramState:
        super().__iadd__(other)
        expr = other if isinstance(other, SglExpr) else SglConstantText(other)
        parts = expr.expr_list if isinstance(expr, SglExprList) else (expr,)
        program = self.program
        assert isinstance(program, TraceProgram)
        program.exprs += [(self._sequence.seq, part) for part in parts]
        return self

    def __getitem__(self, name: str | None) -> Any:
        value = self._sequence.value(name)
        if not list(value.leaves()) and not isinstance(value, TextSpan):
            return value.read()
        return self.ref(name) if name is not None else SglVariable("None", value)

    def text(self, *, partial: bool = False) -> Any:
        return SglVariable("text()", TextSpan(tuple(self._sequence.pieces)))

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> Any:
        group = super().fork(size, position_ids_offset)
        group.states = [TracerProgramState(state._sequence) for state in group.states]
        return group

    @property
    def variables(self) -> dict[str | None, SglVariable]:
        return {name: SglVariable(str(name), value) for name, value in self._sequence.variables.items()}

    def flatten_nodes(self) -> list[SglExpr]:
        """Every expression in the order in which the body appended it."""
        return [expr for _, expr in self._exprs]

    @property
    def _exprs(self) -> list[tuple[int, SglExpr]]:
        program = self.program
        assert isinstance(program, TraceProgram)
        return program.exprs

    @property
    def last_node(self) -> TracerProgramState:
        return self

    def print_graph_dfs(self) -> str:
        """The trace as text, one expression a line. Prints nothing, as in SGLang."""
        return "".join(f"%{i} = seq {seq}: {expr!r}\n" for i, (seq, expr) in enumerate(self._exprs))


@contextmanager
def TracingScope(state: TracerProgramState) -> Iterator[None]:
    """Programs called inside this block become sequences of the trace of ``state``."""
    token = _tracing.set(state)
    try:
        yield
    finally:
        _tracing.reset(token)


def current_trace() -> TracerProgramState | None:
    return _tracing.get()


def trace_program(body: Callable[..., Any], arguments: Mapping[str, Any], backend: BaseBackend) -> TracerProgramState:
    """Trace ``body``. ``arguments`` may be ``SglArgument`` holes."""
    program = TraceProgram(backend)
    state = TracerProgramState(program.root)
    with TracingScope(state):
        state.ret_value = body(state, **arguments)
    for sequence in program.sequences:
        if sequence is not None:
            sequence.close()
    program.is_over = True
    return state


def trace_call(
    outer: TracerProgramState, body: Callable[..., Any], args: tuple[Any, ...], arguments: Mapping[str, Any]
) -> TracerProgramState:
    """Trace ``body``, called from a body that is being traced, as one more sequence of ``outer``'s trace."""
    state = TracerProgramState(SequenceLog(outer.program))
    state.ret_value = body(state, *args, **arguments)
    return state


def leading_nodes(body: Callable[..., Any], arguments: Mapping[str, Any], backend: BaseBackend) -> list[Leading]:
    """The nodes that every run begins with: the constants before the first argument, value or fork."""
    program = TraceProgram(backend)
    state = TracerProgramState(program.root)
    try:
        with TracingScope(state):
            body(state, **arguments)
    except Exception:
        pass  # a body that reads a value cannot be traced further; the nodes before that are in the log
    leading: list[Leading] = []
    for node in program.log:
        if node.seq != 0 or not isinstance(node, TextNode | RoleNode | DefaultSystemNode):
            break
        leading.append(node)
    return leading


def state_of(sequence: SequenceLog) -> ProgramState:
    """A state to write on ``sequence`` with: a tracing one where its program is traced."""
    return TracerProgramState(sequence) if isinstance(sequence.program, TraceProgram) else ProgramState(sequence)
