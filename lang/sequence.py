"""One text of a program as Python sees it: a growing list of pieces, and the variables bound along it.

Appending is immediate and sends nothing: it leaves nodes in the log. Waits for a value only where its docstrings say.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..protocol.errors import InvalidRequest, PhloemError
from ..protocol.ops import JoinMode
from .deciding import append_decided, is_decided_here
from .expressions import (
    SglArgument,
    SglCommitLazy,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglGen,
    SglImage,
    SglLooking,
    SglMacro,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglSeparateReasoning,
    SglVariable,
    SglVariables,
    SglVarScopeBegin,
    SglVarScopeEnd,
    SglVideo,
    sampling_of_fork,
)
from .nodes import (
    CloseNode,
    DefaultSystemNode,
    ForkNode,
    GenNode,
    HoleNode,
    ImageNode,
    JoinNode,
    MarkNode,
    PasteNode,
    PinNode,
    RoleNode,
    RollbackNode,
    SelectNode,
    SettleNode,
    TextNode,
)
from .types import ParseError
from .values import Candidate, Captured, Constant, Gathered, Hole, Leaf, Picked, Piece, Span, Value

if TYPE_CHECKING:
    from .program import Program

_RETRY_TEMPERATURE = 0.7


class UnknownVariable(PhloemError, KeyError):
    """No variable of that name has been set."""

    __str__ = PhloemError.__str__


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: ``content`` is a span of the text, its leading blanks not counted."""

    role: str
    content: Span
    images: tuple[str, ...] = ()

    def read(self) -> dict[str, Any]:
        text = self.content.read().lstrip()
        if not self.images:
            return {"role": self.role, "content": text}
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": self.role, "content": parts}


class Sequence:
    """Pieces, variables, messages and the open role of one sequence."""

    __slots__ = (
        "_program",
        "fork_at",
        "fresh",
        "images",
        "is_closed",
        "leaves",
        "log",
        "messages",
        "pieces",
        "role",
        "role_start",
        "sampling",
        "scopes",
        "seq",
        "variables",
    )

    def __init__(self, program: Program, parent: Sequence | None = None) -> None:
        self._program = weakref.ref(program)  # a state holds its program, which holds its sequences
        self.log = program.log
        self.seq = program.new_seq(self)
        self.is_closed = False
        self.fresh: dict[str | None, None] = {}  # names bound here, not inherited
        self.leaves: list[Leaf] = []  # of this sequence alone, for error()
        self.pieces: list[Piece] = [] if parent is None else parent.pieces.copy()
        self.variables: dict[str | None, Value] = {} if parent is None else parent.variables.copy()
        self.messages: tuple[Message, ...] = () if parent is None else parent.messages
        self.images: tuple[str, ...] = () if parent is None else parent.images
        self.scopes: dict[str, int] | None = None if parent is None or not parent.scopes else parent.scopes.copy()
        self.sampling: Mapping[str, Any] = program.sampling if parent is None else parent.sampling
        self.role: str | None = None if parent is None else parent.role
        self.role_start: int = 0 if parent is None else parent.role_start
        self.fork_at = len(self.pieces)

    @property
    def program(self) -> Program:
        program = self._program()
        assert program is not None, "a sequence outlived its program"
        return program

    def has_news(self, taken: int) -> bool:
        """Whether more than ``taken`` pieces are there, or none will come."""
        return self.program.is_over or len(self.pieces) > taken

    # -- appending ----------------------------------------------------------------------------------------------------

    def append(self, expr: SglExpr | str) -> None:
        if self.is_closed:
            raise InvalidRequest(
                "nothing can be appended here any more: "
                + ("the program has ended" if self.program.is_over else "this fork was joined; append before join()")
            )
        append = _appender(expr)
        if append is None:
            raise InvalidRequest(
                f"cannot append {expr!r} of type {type(expr).__name__} to a program; "
                "append a str, gen(...), select(...), a role, or a sum of these"
            )
        append(self, expr)
        self.program.tell()

    def _append_str(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.log.append(TextNode(self.seq, text))

    def _append_constant(self, expr: SglConstantText) -> None:
        self._append_str(expr.value)

    def _append_list(self, expr: SglExprList) -> None:
        for part in expr.expr_list:
            append = _appender(part)
            assert append is not None, part
            append(self, part)

    def _append_gen(self, expr: SglGen) -> None:
        program = self.program
        if expr.retries:
            program.allow_looking(expr)
            program.follow(self._gen_checked(expr))
            return
        defaults, overrides = sampling_of_fork(self.sampling, self.seq), expr.overrides
        n = overrides.get("n") or defaults.get("n", 1)
        leaf = Leaf(program.lock, expr.name, n=n, parse=expr.parse)
        self.pieces.append(leaf)
        self.leaves.append(leaf)
        self.bind(expr.name, leaf)
        self.log.append(GenNode(self.seq, leaf, expr, defaults, n, program.stream))
        if expr.captures is not None:
            for name in expr.captures.names:
                self.bind(name, Captured(leaf, expr.captures, name))

    def steps_of(self, expr: object) -> Generator[Any, Any, None] | None:
        """Of what looks at values as it is appended; None for what does not."""
        if isinstance(expr, SglLooking):
            return expr.steps(self)
        return self._gen_checked(expr) if isinstance(expr, SglGen) and expr.retries else None

    def _gen_checked(self, expr: SglGen) -> Generator[list[Leaf], None, None]:
        """Generate, look, and go back to generate again while the value is wrong and tries are left.

        Again means warmer and with another seed: a greedy generation would only repeat itself.
        """
        program = self.program
        once = msgspec.structs.replace(expr, retries=0)
        for attempt in range(expr.retries + 1):
            mark = Leaf(program.lock, None)
            self.log.append(MarkNode(self.seq, mark))
            num_pieces = len(self.pieces)
            self._append_gen(once)
            if attempt == expr.retries:
                return
            leaf = self.leaves[-1]
            yield [leaf]
            try:
                leaf.read()
                return
            except ParseError:
                pass
            self.leaves.pop()
            del self.pieces[num_pieces:]
            self.log.append(RollbackNode(self.seq, mark))
            given = {**self.sampling, **expr.overrides}
            warmer = {
                "temperature": max(given.get("temperature", 1.0), _RETRY_TEMPERATURE),
                "seed": given.get("seed", 0) + attempt + 1,
            }
            once = msgspec.structs.replace(once, overrides={**expr.overrides, **warmer})

    def _append_select(self, expr: SglSelect) -> None:
        program = self.program
        if is_decided_here(expr) and not program.session.decides_custom_choices:
            append_decided(self, expr)
            return
        leaf = Leaf(program.lock, expr.name)
        self.leaves.append(leaf)
        self.bind(expr.name, leaf)
        self.pieces.append(leaf)
        self.log.append(SelectNode(self.seq, leaf, expr.choices, expr.choices_method, expr.temperature))

    def _append_argument(self, expr: SglArgument) -> None:
        self.pieces.append(Hole(expr.name))
        self.log.append(HoleNode(self.seq, expr.name))

    def _append_variable(self, expr: SglVariable) -> None:
        source = expr.source
        self.paste(source() if callable(source) else source, sep=expr.sep)

    def _append_variables(self, expr: SglVariables) -> None:
        for item in expr.items:
            self._append_variable(item)

    def paste(self, value: Value, *, sep: str = "") -> None:
        """Append the text of ``value``, known or not."""
        match value:
            case Leaf() | Candidate():
                leaf = value if isinstance(value, Leaf) else value.leaf
                if not leaf.belongs_to(self.program.lock):
                    self.program.read(value)  # another program's: it has to be known before it can be sent
                    self._append_str(value.text())
                    return
                self.pieces.append(value)
                index = 0 if isinstance(value, Leaf) else value.index
                self.log.append(PasteNode(self.seq, leaf, index))
            case Span():
                for piece in value.pieces:
                    if isinstance(piece, str):
                        self._append_str(piece)
                    else:
                        self.paste(piece)
            case Gathered():
                for i, item in enumerate(value.values):
                    if i and sep:
                        self._append_str(sep)
                    self.paste(item)
            case Hole():
                self.pieces.append(value)
                self.log.append(HoleNode(self.seq, value.name))
            case Picked():
                from .decoders import PickedLeaf

                text = PickedLeaf(self.program.lock, value)
                self.pieces.append(text)
                self.log.append(SettleNode(self.seq, text))
            case Captured():
                self.program.read(value)  # a part of a text is known with that text
                self._append_str(value.text())
            case _:
                self._append_str(value.text())

    def _append_role_begin(self, expr: SglRoleBegin) -> None:
        if self.role is not None:
            raise InvalidRequest(
                f"role {expr.role!r} begins inside the open role {self.role!r}; roles do not nest: "
                f"end it first (s += {self.role}_end(), or leave its with block)"
            )
        session = self.program.session
        if not self.messages and expr.role != "system":
            default = session.default_system()
            if default is not None:
                content, text = default
                self.messages += (Message("system", Span((content,))),)
                self.pieces.append(text)
                self.log.append(DefaultSystemNode(self.seq, content, text))
        text = session.role_text(expr.role, is_begin=True, messages=self._history())
        self.role = expr.role
        if text:
            self.pieces.append(text)
        self.log.append(RoleNode(self.seq, expr.role, True, text))
        self.role_start = len(self.pieces)
        self.images = ()

    def _append_role_end(self, expr: SglRoleEnd) -> None:
        if self.role != expr.role:
            open_role = "no role is open" if self.role is None else f"the open role is {self.role!r}"
            raise InvalidRequest(f"role {expr.role!r} ends, but {open_role}; begin it first")
        session = self.program.session
        text = session.role_text(expr.role, is_begin=False, messages=self._history())
        self.messages += (Message(expr.role, Span(self.pieces[self.role_start :]), self.images),)
        self.role = None
        self.images = ()
        if text:
            self.pieces.append(text)
        self.log.append(RoleNode(self.seq, expr.role, False, text))

    def _history(self) -> list[dict[str, Any]]:
        """The messages' roles: all that a template's role text may depend on before the values are known."""
        return [{"role": message.role, "content": ""} for message in self.messages]

    def _append_scope_begin(self, expr: SglVarScopeBegin) -> None:
        if self.scopes is None:
            self.scopes = {}
        self.scopes[expr.name] = len(self.pieces)

    def _append_scope_end(self, expr: SglVarScopeEnd) -> None:
        start = self.scopes.pop(expr.name, None) if self.scopes else None
        if start is None:
            raise InvalidRequest(f"var_scope {expr.name!r} ends, but it was not begun")
        self.bind(expr.name, Span(self.pieces[start:]))

    def _append_image(self, expr: SglImage) -> None:
        from .images import data_url, load_image

        self._append_frame(load_image(expr.path), data_url)

    def _append_video(self, expr: SglVideo) -> None:
        from .images import data_url, load_frames

        for frame in load_frames(expr.path, expr.num_frames):
            self._append_frame(frame, data_url)

    def _append_frame(self, data: bytes, data_url: Any) -> None:
        self.images += (data_url(data),)
        self.log.append(ImageNode(self.seq, hashlib.sha256(data).hexdigest(), data))

    def _append_reasoning(self, expr: SglSeparateReasoning) -> None:
        from .reasoning import append_separated

        append_separated(self, expr)

    def _append_macro(self, expr: SglMacro) -> None:
        expr.append_to(self)

    def _append_commit(self, expr: SglCommitLazy) -> None:
        self.program.flush()

    # -- variables ----------------------------------------------------------------------------------------------------

    def bind(self, name: str | None, value: Value) -> None:
        self.variables[name] = value
        self.fresh[name] = None

    def value(self, name: str | None) -> Value:
        """What ``name`` holds, known or not. Waits only where the body runs on another thread and may still set it."""
        program = self.program
        if name not in self.variables and program.changed is not None and not program.is_inside:
            program.changed.wait_for(lambda: name in self.variables or program.is_over)
        found = self.variables.get(name)
        if found is None:
            if program.error is not None:
                raise program.error
            known = ", ".join(sorted(repr(n) for n in self.variables if n is not None)) or "none"
            raise UnknownVariable(f"no variable {name!r} in this program; it has: {known}")
        return found

    def set(self, name: str, value: Any) -> None:
        self.bind(name, Constant(value))
        self.program.tell()

    def pin(self, ttl_s: float) -> Leaf:
        leaf = Leaf(self.program.lock, None)
        self.log.append(PinNode(self.seq, leaf, ttl_s))
        return leaf

    # -- branching ----------------------------------------------------------------------------------------------------

    def fork(self, size: int) -> list[Sequence]:
        if self.is_closed:
            raise InvalidRequest("this sequence has ended and cannot be forked")
        children = [Sequence(self.program, self) for _ in range(size)]
        self.log.append(ForkNode(self.seq, tuple([child.seq for child in children])))
        return children

    def join(self, children: list[Sequence], mode: JoinMode) -> None:
        """Take back what the children made, and end them."""
        ids = tuple([child.seq for child in children])
        if mode == "gather_variable":
            names = dict.fromkeys(name for child in children for name in child.fresh)
            for name in names:
                self.bind(name, Gathered([child.variables[name] for child in children if name in child.fresh]))
        else:
            for child in children:
                self.pieces += child.pieces[child.fork_at :]
        for child in children:
            self.leaves += child.leaves
        self.log.append(JoinNode(self.seq, ids, mode))
        for child in children:
            child.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.log.append(CloseNode(self.seq))


_APPENDERS: dict[type, Any] = {
    str: Sequence._append_str,
    SglConstantText: Sequence._append_constant,
    SglExprList: Sequence._append_list,
    SglGen: Sequence._append_gen,
    SglSelect: Sequence._append_select,
    SglArgument: Sequence._append_argument,
    SglVariable: Sequence._append_variable,
    SglVariables: Sequence._append_variables,
    SglRoleBegin: Sequence._append_role_begin,
    SglRoleEnd: Sequence._append_role_end,
    SglVarScopeBegin: Sequence._append_scope_begin,
    SglVarScopeEnd: Sequence._append_scope_end,
    SglImage: Sequence._append_image,
    SglVideo: Sequence._append_video,
    SglSeparateReasoning: Sequence._append_reasoning,
    SglCommitLazy: Sequence._append_commit,
}


def _appender(expr: object) -> Any:
    found = _APPENDERS.get(type(expr))
    return Sequence._append_macro if found is None and isinstance(expr, SglMacro) else found
