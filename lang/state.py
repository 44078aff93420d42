"""``s``, the state that a program's body writes on, and the group of its forks.

Appending does not wait. Reading a value ships what is queued and waits for that value alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from ..protocol.errors import InvalidRequest
from ..protocol.ops import JoinMode
from . import expressions as ir
from .program import ProgramRun, SequenceLog
from .sampling_params import SAMPLING_NAMES, sampling_overrides
from .tools.calls import ToolCalls, ToolResult
from .values import DrawnText, Gathered, Leaf, Picked, TextSpan, Value

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


class ProgramState:
    """One sequence of a running or finished program. ``program`` is the run that it belongs to."""

    __slots__ = ("__dict__", "__weakref__", "_sequence", "program", "ret_value")

    def __init__(self, sequence: SequenceLog) -> None:
        self._sequence = sequence
        self.program = sequence.program
        self.ret_value: Any = None

    # -- writing ------------------------------------------------------------------------------------------------------

    def __iadd__(self, other: ir.SglExpr | str) -> ProgramState:
        if other is None:
            raise InvalidRequest("s += None: there is nothing to append; did a function forget to return its text?")
        self._sequence.append(other)
        return self

    async def append_async(self, expr: ir.SglExpr | str) -> None:
        """``s += expr`` of an async program, for expressions that wait: ``gen(retries=...)``, ``beam(...)``."""
        if expr is None:
            self += expr
        for part in expr.expr_list if isinstance(expr, ir.SglExprList) else (expr,):
            if (steps := self._sequence.steps_of(part)) is None:
                self._sequence.append(part)
            else:
                await self.program.run_steps_async(steps)

    def __setitem__(self, name: str, value: Any) -> None:
        self._sequence.set(name, value)

    def set_var(self, name: str, value: Any) -> None:
        self._sequence.set(name, value)

    def _role(self, role: str, expr: ir.SglExpr | str | None) -> Any:
        if expr is None:
            return self._role_block(role)
        parts = expr if isinstance(expr, ir.SglExpr) else ir.SglConstantText(expr)
        self._sequence.append(ir.SglExprList((ir.SglRoleBegin(role), parts, ir.SglRoleEnd(role))))
        return None

    @contextmanager
    def _role_block(self, role: str) -> Iterator[None]:
        self._sequence.append(ir.SglRoleBegin(role))
        try:
            yield
        finally:
            if self._sequence.role == role and not self._sequence.is_closed:
                self._sequence.append(ir.SglRoleEnd(role))

    def system(self, expr: ir.SglExpr | str | None = None) -> Any:
        """``s.system("...")``, or ``with s.system():`` around the appends that make up the message."""
        return self._role("system", expr)

    def user(self, expr: ir.SglExpr | str | None = None) -> Any:
        return self._role("user", expr)

    def assistant(self, expr: ir.SglExpr | str | None = None) -> Any:
        return self._role("assistant", expr)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """``s[name]`` becomes the text appended inside the block."""
        self._sequence.append(ir.SglVarScopeBegin(name))
        yield
        self._sequence.append(ir.SglVarScopeEnd(name))

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> ProgramStateGroup:
        """``size`` states that continue independently from here and share the KV computed so far."""
        _refuse_offset(position_ids_offset)
        if size < 1:
            raise InvalidRequest(f"fork({size}): must make 1 state or more")
        children = [ProgramState(child) for child in self._sequence.fork(size)]
        return ProgramStateGroup(children, self)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """A fork of one for the length of a block. After it, its variables are lists of one value."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()

    @contextmanager
    def sampling(self, **parameters: Any) -> Iterator[None]:
        """Sampling defaults of every gen inside the block. Forks made inside keep them.

        ``with s.sampling(temperature=0.0, top_p=0.9): ...``
        """
        sequence = self._sequence
        unknown = [name for name in parameters if name not in SAMPLING_NAMES]
        if unknown:
            known = ", ".join(sorted(SAMPLING_NAMES))
            raise InvalidRequest(f"s.sampling({unknown[0]}=...): there is no such parameter; there are {known}")
        given = sampling_overrides(parameters)
        if "seed" in given:
            raise InvalidRequest("s.sampling(seed=...): a seed belongs to a whole run, run(seed=...), or to one gen")
        outside = sequence.sampling
        sequence.sampling = {**outside, **given}
        try:
            yield
        finally:
            sequence.sampling = outside

    # -- tools --------------------------------------------------------------------------------------------------------

    def run_tools(self, name: str) -> list[ToolResult]:
        """Run the calls that ``gen(name, tools=...)`` generated, in order, and append their results as turns.

        Waits for the calls. If a tool raises, its result tells the model of the error.
        """
        results = [call.result() for call in _calls(self[name], name)]
        self._append_results(results)
        return results

    async def run_tools_async(self, name: str) -> list[ToolResult]:
        """``run_tools`` for an async program. The async tools of one turn run at the same time."""
        calls = _calls(await self.get(name), name)
        results = list(await asyncio.gather(*[call.result_async() for call in calls]))
        self._append_results(results)
        return results

    def _append_results(self, results: Sequence[ToolResult]) -> None:
        """Append the turns in which the model reads ``results``."""
        format = self.program.session.tool_format()
        role = format.template.result_role
        for content in format.result_turns([result.text for result in results]):
            self += ir.SglRoleBegin(role) + content + ir.SglRoleEnd(role)

    # -- reading ------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str | None) -> Any:
        return self.program.read(self._sequence.value(name))

    def get_var(self, name: str | None) -> Any:
        return self[name]

    def raw(self, name: str) -> str:
        """The text from which a typed variable was parsed."""
        value = self._sequence.value(name)
        self.program.wait_leaves(value.leaves())
        return value.text()

    def __contains__(self, name: str) -> bool:
        self.program.wait_body()
        return name in self._sequence.variables

    def ref(self, name: str, index: int = 0, *, sep: str = "") -> ir.SglVariable:
        """The variable's text, which need not be known yet: ``s += "..." + s.ref("x")`` does not wait.

        ``index`` picks a candidate of a gen with ``n > 1``. ``sep`` goes between the values of a joined variable.
        """
        if name not in self._sequence.variables:  # bound earlier in the same expression
            return ir.SglVariable(name, lambda: self._pick(name, index), sep)
        return ir.SglVariable(name, self._pick(name, index), sep)

    def _pick(self, name: str, index: int) -> Value:
        value: Value = self._sequence.value(name)
        if isinstance(value, Leaf) and index:
            if not 0 <= index < value.n:
                raise InvalidRequest(f"ref({name!r}, {index}): {name!r} has {value.n} candidate(s)")
            return DrawnText(value, index)
        return value.values[index] if isinstance(value, Gathered) and index else value

    def text(self, *, partial: bool = False) -> str:
        """The whole text. ``partial``: a generation that failed contributes its text so far instead of raising."""
        sequence = self._sequence
        self.program.wait_body()
        pieces = list(sequence.pieces)
        self.program.wait_leaves(leaf for p in pieces if not isinstance(p, str) for leaf in p.leaves())
        if partial:
            return "".join([p if isinstance(p, str) else p.partial_text() for p in pieces])
        return "".join([p if isinstance(p, str) else p.text() for p in pieces])

    def messages(self) -> list[dict[str, Any]]:
        """The chat so far, one entry per role that has ended."""
        self.program.wait_body()
        messages = list(self._sequence.messages)
        self.program.wait_leaves(leaf for message in messages for leaf in message.content.leaves())
        return [message.read() for message in messages]

    def sync(self) -> None:
        """Wait until everything appended here has been computed."""
        self.program.wait_body()
        self.program.wait_leaves(list(self._sequence.leaves))

    def error(self) -> BaseException | None:
        """The first error on this state or in the body, after waiting for all of it; None if there was none."""
        self.sync()
        for leaf in self._sequence.leaves:
            if leaf.error is not None:
                return leaf.error
        return self.program.error

    def get_meta_info(self, name: str | None, timeout: float | None = None) -> Any:
        """The backend's report on a variable; None for an unknown one, a list after a join."""
        self.program.wait_body()
        value = self._sequence.variables.get(name)
        if value is None:
            return None
        self.program.wait_leaves(value.leaves(), timeout)
        return _meta(value)

    # -- reading from an event loop -----------------------------------------------------------------------------------

    async def get(self, name: str) -> Any:
        """``s[name]`` for an async program."""
        program = self.program
        changed = program.changed
        if changed is not None and not program.is_inside:
            await changed.wait_for_async(lambda: name in self._sequence.variables or program.is_over)
        value = self._sequence.value(name)
        await program.wait_leaves_async(value.leaves())
        return value.read()

    async def sync_async(self) -> None:
        """``sync()`` for an async program."""
        await self.program.wait_body_async()
        await self.program.wait_leaves_async(list(self._sequence.leaves))

    async def text_async(self, *, partial: bool = False) -> str:
        """``text()`` for an async program."""
        await self.sync_async()
        await self.program.wait_leaves_async(TextSpan(self._sequence.pieces).leaves())
        return self.text(partial=partial)

    async def messages_async(self) -> list[dict[str, Any]]:
        """``messages()`` for an async program."""
        await self.sync_async()
        await self.program.wait_leaves_async(TextSpan(self._sequence.pieces).leaves())
        return self.messages()

    async def error_async(self) -> BaseException | None:
        """``error()`` for an async program."""
        await self.sync_async()
        return self.error()

    async def stats_async(self) -> dict[str, Any]:
        """``stats()`` for an async program."""
        await self.program.wait_body_async()
        closed = self.program.session.closed
        await closed.wait_for_async(closed.done)
        return self.stats()

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """``text_iter`` for ``async for``.

        ``return_meta_data``: items are (text, meta information or None). The last item always has the meta
        information; its text is empty if the engine's report comes after the last piece of text.
        """
        program, sequence = self.program, self._sequence
        changed = program.changed
        if var_name is not None:
            if changed is not None and not program.is_inside:
                await changed.wait_for_async(lambda: var_name in sequence.variables or program.is_over)
            value = sequence.value(var_name)
            is_reported = False
            async for chunk in _chunks_of_async(program, value):
                is_reported = all(leaf.is_done for leaf in value.leaves())
                yield (chunk, _meta(value) if is_reported else None) if return_meta_data else chunk
            if return_meta_data and not is_reported:
                yield "", _meta(value)
            return
        if return_meta_data:
            raise InvalidRequest("return_meta_data needs the name of a variable: text_async_iter('x', True)")
        if changed is None:
            yield await self.text_async()
            return
        inside = program.is_inside
        taken = 0
        while True:
            if not inside:
                await changed.wait_for_async(partial(sequence.has_news, taken))
            if taken >= len(sequence.pieces):
                break
            piece = sequence.pieces[taken]
            taken += 1
            if isinstance(piece, str):
                yield piece
            else:
                async for chunk in _chunks_of_async(program, piece):
                    yield chunk
        if program.error is not None and not inside:
            raise program.error

    # -- control ------------------------------------------------------------------------------------------------------

    def cancel(self, name: str | None = None) -> None:
        """Cancel the whole run, or one variable's generation. Its text so far stays readable."""
        program = self.program
        program.flush()
        if name is None:
            program.session.cancel()
            return
        for leaf in self._sequence.value(name).leaves():
            for source in leaf.sources():
                if not source.is_done:
                    program.session.cancel(source)

    def stats(self) -> dict[str, Any]:
        """The cost of the run as the runtime counts it, and ``messages``: how many messages the program sent.

        Of a run of ``Models`` also ``model``, ``rule``, ``reason`` and ``tries``; the cost is that of the last try.
        """
        program = self.program
        if program.is_inside:
            raise InvalidRequest("stats() is about a finished run; call it on the state that run() returned")
        program.wait_body()
        program.session.closed.wait_for(program.session.closed.done)
        turn = {} if program.turn is None else program.turn.report()
        return {"messages": program.num_messages, **(program.session.closed.meta or {}), **turn}

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """New text as it is generated, constants included, or only that of one variable.

        Without ``run(stream=True)`` it yields one item with the whole text.
        """
        program, sequence = self.program, self._sequence
        changed = program.changed
        if changed is None:
            yield self.text() if var_name is None else _as_text(self[var_name])
            return
        if var_name is not None:
            yield from program.read_chunks(sequence.value(var_name))
            return
        inside = program.is_inside
        for text, _ in sequence.read_as_generated():
            yield text
        if program.error is not None and not inside:
            raise program.error

    # -- seeing -------------------------------------------------------------------------------------------------------

    def trace_html(self, path: str | Path, *, title: str = "program") -> None:
        """Write the run as one self-contained HTML page: operations, timeline, text coloured by origin.

        After ``run(..., trace=True)`` the page has each token's origin and probability.
        """
        from .views.page import write_page
        from .views.record import record_of

        write_page(record_of(self.program, title), path)

    def show(self, console: Console | None = None) -> None:
        """Print the run in colours. The text of a streaming run appears as it is generated."""
        from .views.terminal import show

        show(self._sequence, console)

    def __rich__(self) -> Any:
        from .views.record import record_of
        from .views.terminal import render

        return render(record_of(self.program))

    def _repr_html_(self) -> str | None:
        """The text and its cost, for a notebook; None while the program runs."""
        if not self.program.is_over:
            return None
        from .views.page import fragment
        from .views.record import record_of

        return fragment(record_of(self.program))

    @property
    def stream_executor(self) -> Any:
        """This state as a ``BaseBackend`` sees it. A runtime of Phloem has none."""
        return self.program.session.executor(self._sequence.seq)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"ProgramState({self.text(partial=True)!r})" if self.program.is_over else "ProgramState(running)"


class ProgramStateGroup:
    """The states of one fork, in order."""

    def __init__(self, states: list[ProgramState], src_state: ProgramState | None = None) -> None:
        self.states = states
        self.src_state = src_state

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Close the forks. Their variables become lists on the source, or their text is appended to it."""
        if mode not in get_args(JoinMode):
            raise InvalidRequest(f"join mode {mode!r}; it is one of {', '.join(get_args(JoinMode))}")
        if self.src_state is None:
            raise InvalidRequest("these states were not made by fork(), so there is nothing to join them to")
        self.src_state._sequence.join([state._sequence for state in self.states], mode)

    def ref(self, name: str) -> ir.SglVariables:
        """The variable of each fork, which need not be known yet, to append to any state of the program."""
        return ir.SglVariables(tuple([state.ref(name) for state in self.states]))

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        if value is not self.states[index]:
            raise InvalidRequest("a fork cannot be replaced; append to it with forks[i] += ...")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(
        self, other: ir.SglExpr | Sequence[ir.SglExpr | str] | Callable[[int], ir.SglExpr | str]
    ) -> ProgramStateGroup:
        if isinstance(other, ir.SglExpr):
            for state in self.states:
                state += other
        elif isinstance(other, list | tuple):
            if len(other) != len(self.states):
                raise InvalidRequest(f"{len(other)} items for {len(self.states)} forks; give one each")
            for state, item in zip(self.states, other, strict=True):
                state += item
        elif callable(other):
            for i, state in enumerate(self.states):
                state += other(i)
        else:
            raise InvalidRequest(
                f"forks += {other!r}: append an expression to all, a list with one item each, or a function of the "
                "index (a str is none of these; write forks += lambda i: ...)"
            )
        return self


def _calls(value: Any, name: str) -> ToolCalls:
    if not isinstance(value, ToolCalls):
        raise InvalidRequest(f"run_tools({name!r}): {name!r} was not made by gen({name!r}, tools=[...])")
    return value


def _refuse_offset(offset: object) -> None:
    if offset is not None:
        raise InvalidRequest("position_ids_offset is not supported: positions follow from the text; leave it out")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else value[0] if isinstance(value, list) else str(value)


async def _chunks_of_async(program: ProgramRun, value: Any) -> AsyncIterator[str]:
    if program.is_inside:
        await program.ship_async()
    if isinstance(value, Leaf):
        async for chunk in value.read_chunks_async():
            yield chunk
    else:
        await program.wait_leaves_async(value.leaves())
        yield value.text()


def _meta(value: Any) -> Any:
    match value:
        case Leaf():
            value.raise_error()
            return value.report()
        case DrawnText():
            return _meta(value.leaf)
        case Picked():
            return _meta(value.value())
        case Gathered():
            return [_meta(item) for item in value.values]
        case _:
            return None
