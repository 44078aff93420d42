"""The expressions of a program: frozen values that add up with ``+``. ``program.SequenceLog`` appends them."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from ..constrained.spec import GrammarSpec
from ..protocol.errors import InvalidRequest
from .choices import ChoicesSamplingMethod, token_length_normalized
from .grammar import Grammar
from .sampling_params import SglSamplingParams, to_sgl_params
from .types import Ending

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""
REGEX_OF_DTYPE: dict[Any, str] = {
    int: REGEX_INT,
    "int": REGEX_INT,
    float: REGEX_FLOAT,
    "float": REGEX_FLOAT,
    bool: REGEX_BOOL,
    "bool": REGEX_BOOL,
    str: REGEX_STR,
    "str": REGEX_STR,
}


class TraceError(InvalidRequest, TypeError):
    """A program read a value that is not known yet."""


# -- expressions ------------------------------------------------------------------------------------------------------


class SglExpr(msgspec.Struct, frozen=True, eq=False):
    """Anything that can be appended to a program's text."""

    def __add__(self, other: "SglExpr | str") -> "SglExprList":
        parts = _parts(other)
        return NotImplemented if parts is None else SglExprList((*(_parts(self) or ()), *parts))

    def __format__(self, spec: str) -> str:
        raise TraceError(f'{self!r} cannot go into an f-string, where it would be lost: write "..." + gen(...) + "..."')

    def __radd__(self, other: "SglExpr | str") -> "SglExprList":
        parts = _parts(other)
        return NotImplemented if parts is None else SglExprList((*parts, *(_parts(self) or ())))


class SglMacro(SglExpr, frozen=True, eq=False):
    """Becomes other expressions when it is appended, because only then the backend is known."""

    def append_to(self, sequence: Any) -> None:
        raise NotImplementedError


WaitingSteps = Generator[Any, Any, None]


class SglWaiting(SglMacro, frozen=True, eq=False):
    """A macro that waits for values while it is appended.

    ``steps`` yields what it has to wait for: leaves, or an awaitable, whose result is sent back to it.
    """

    def steps(self, sequence: Any) -> WaitingSteps:
        raise NotImplementedError

    def append_to(self, sequence: Any) -> None:
        sequence.program.allow_waiting(self)
        sequence.program.run_steps(self.steps(sequence))


def _parts(value: object) -> tuple["SglExpr", ...] | None:
    if isinstance(value, SglExprList):
        return value.expr_list
    if isinstance(value, SglExpr):
        return (value,)
    return (SglConstantText(value),) if isinstance(value, str) else None


class SglExprList(SglExpr, frozen=True, eq=False):
    expr_list: tuple[SglExpr, ...]

    def __repr__(self) -> str:
        return f"ExprList({list(self.expr_list)})"


class SglConstantText(SglExpr, frozen=True, eq=False, gc=False):
    value: str

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


class SglGen(SglExpr, frozen=True, eq=False, gc=False):
    """A generation. ``overrides``: its own sampling, under the names of ``SamplingParams`` (and ``n``, ``dtype``)."""

    name: str | None = None
    overrides: dict[str, Any] = {}
    grammar: GrammarSpec | None = None
    parse: Callable[[str], Any] | None = None
    retries: int = 0
    captures: Grammar | None = None
    ending: Ending | None = None

    def free_ended(self) -> tuple[GrammarSpec | None, tuple[str, ...]]:
        """The grammar, and patterns that end the text before them: a number ends where the model stops writing it."""
        if self.ending is None or self.grammar is None:
            return self.grammar, ()
        return replace(self.grammar, text=f"({self.grammar.text}){self.ending.rest}"), (self.ending.pattern,)

    @property
    def sampling_params(self) -> SglSamplingParams:
        return to_sgl_params({}, self.overrides, self.grammar)

    def __repr__(self) -> str:
        return f"Gen({self.name!r})"


class SglSelect(SglExpr, frozen=True, eq=False, gc=False):
    name: str | None
    choices: tuple[str, ...]
    temperature: float = 0.0
    choices_method: ChoicesSamplingMethod = token_length_normalized

    def __repr__(self) -> str:
        return f"Select({self.name!r}, choices={list(self.choices)})"


class SglImage(SglExpr, frozen=True, eq=False, gc=False):
    path: str | bytes

    def __repr__(self) -> str:
        return f"Image({self.path if isinstance(self.path, str) else len(self.path)})"


class SglVideo(SglExpr, frozen=True, eq=False, gc=False):
    path: str
    num_frames: int

    def __repr__(self) -> str:
        return f"Video({self.path!r}, {self.num_frames})"


class SglRoleBegin(SglExpr, frozen=True, eq=False, gc=False):
    role: str

    def __repr__(self) -> str:
        return f"RoleBegin({self.role})"


class SglRoleEnd(SglExpr, frozen=True, eq=False, gc=False):
    role: str

    def __repr__(self) -> str:
        return f"RoleEnd({self.role})"


class SglVarScopeBegin(SglExpr, frozen=True, eq=False, gc=False):
    name: str


class SglVarScopeEnd(SglExpr, frozen=True, eq=False, gc=False):
    name: str


class SglCommitLazy(SglExpr, frozen=True, eq=False):
    """Send everything that is queued. Only programs written for SGLang need it: a fork or a read does the same."""


class SglSeparateReasoning(SglExpr, frozen=True, eq=False):
    """A gen whose reasoning (``<think>...</think>``) becomes a variable of its own."""

    expr: SglExpr
    model_type: str = ""

    def process_name_for_reasoning(self, name: str) -> str:
        return f"{name}_reasoning_content"


class SglVariable(SglExpr, frozen=True, eq=False):
    """The text of a variable that may not be known yet; appending it does not wait.

    ``source`` is a value of ``values.py``, or a function that returns it when this is appended. The items of a list are
    pasted with ``sep`` between them.
    """

    name: str
    source: Any
    sep: str = ""

    def __str__(self) -> str:
        raise TraceError(
            f"the text of {self.name!r} is not known yet, so it cannot go into an f-string or str(); "
            f's += "..." + s.ref({self.name!r}) pastes it, s[{self.name!r}] waits for it'
        )

    def __format__(self, spec: str) -> str:
        return str(self)

    def __bool__(self) -> bool:
        raise TraceError(f"{self.name!r} is not known yet; use s[{self.name!r}], which waits, to branch on it")

    def __getitem__(self, index: int) -> "SglVariable":
        """The variable of one fork, if a join made this variable a list."""
        values = getattr(self.source, "values", None)
        if values is None:
            raise TraceError(f"{self.name!r} is not known yet: no part {index!r}; read s[{self.name!r}] first")
        return SglVariable(f"{self.name}[{index}]", values[index])

    def __iter__(self) -> Iterator["SglVariable"]:
        values = getattr(self.source, "values", None)
        if values is None:
            raise TraceError(f"{self.name!r} is not known yet and cannot be iterated; read s[{self.name!r}] first")
        return (SglVariable(f"{self.name}[{i}]", value) for i, value in enumerate(values))

    def __repr__(self) -> str:
        return f"Variable({self.name!r})"


class SglArgument(SglExpr, frozen=True, eq=False):
    """An argument of a program that is being traced: a hole, filled when the program runs."""

    name: str

    def _refuse(self, what: str) -> Any:
        raise TraceError(
            f"{what}: argument {self.name!r} is not known while the program is traced; give it to compile() or trace() "
            f"as a constant ({self.name}=...), or write the program so that it is only appended"
        )

    def __format__(self, spec: str) -> str:
        raise TraceError(
            "Cannot put argument inside a f-string. This is not compatible with the tracer: "
            f'write s += "..." + {self.name} instead of f"...{{{self.name}}}"'
        )

    def __str__(self) -> str:
        return self._refuse("str()")

    def __bool__(self) -> bool:
        return self._refuse("a branch")

    def __len__(self) -> int:
        return self._refuse("len()")

    def __iter__(self) -> Iterator[Any]:
        return self._refuse("a loop")

    def __getitem__(self, index: Any) -> Any:
        return self._refuse("indexing")

    def __eq__(self, other: object) -> bool:
        return self._refuse("a comparison")

    def __int__(self) -> int:
        return self._refuse("int()")

    def __float__(self) -> float:
        return self._refuse("float()")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Argument({self.name})"


class SglVariables(SglExpr, frozen=True, eq=False):
    """One ``SglVariable`` per fork. Appending this pastes all of them in order."""

    items: tuple[SglVariable, ...]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[SglVariable]:
        return iter(self.items)

    def __getitem__(self, index: int) -> SglVariable:
        return self.items[index]

    def join(self, sep: str) -> SglExprList:
        """All of them with ``sep`` between."""
        parts: list[SglExpr] = []
        for i, item in enumerate(self.items):
            parts += [SglConstantText(sep), item] if i else [item]
        return SglExprList(tuple(parts))
