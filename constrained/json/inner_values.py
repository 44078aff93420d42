"""The kinds of JSON values, and what arrays and objects ask of the values inside them."""

from collections.abc import Callable, Hashable, Sequence, Set
from decimal import Decimal
from typing import Literal, Protocol

from ..expressions import Expressions
from ..machine import Machine
from .documents import Json
from .formulas import Formulas
from .layouts import Layout, Layouts
from .scalars import Scalars

Kind = Literal["null", "true", "false", "string", "number", "array", "object"]
Scalar = str | bool | None | Decimal
KINDS: tuple[Kind, ...] = ("null", "true", "false", "string", "number", "array", "object")


class InnerValues(Protocol):
    """Any JSON value; formulas are over schemas. ``values.Values`` is the implementation, which holds the arrays and
    objects that ask."""

    machine: Machine
    ex: Expressions
    formulas: Formulas
    scalars: Scalars
    layouts: Layouts

    def expression(self, formula: int, kind: Kind) -> int:
        """The language of the formula's strings (their content) or numbers."""
        ...

    def satisfiable(self, formula: int) -> bool:
        """Whether any value satisfies the formula."""
        ...

    def is_surely_impossible(self, formula: int) -> bool:
        """Whether no value satisfies the formula, told without looking into arrays and objects."""
        ...

    def num_values(self, formula: int, most: int) -> int:
        """A lower bound of how many different values satisfy the formula, at most ``most``."""
        ...

    def num_of_each_kind(self, formula: int, most: int) -> int:
        """A lower bound of how many values of each kind, literals aside, satisfy the formula, at most ``most``."""
        ...

    def listed(self, formula: int) -> tuple[Scalar, ...] | None:
        """The values that satisfy the formula if they are all of a list of strings, literals and numbers; else None."""
        ...

    def spellings(self, formula: int, number: Decimal) -> int:
        """The language of the spellings of one of the numbers that satisfy the formula."""
        ...

    def weakest(self, asked: Sequence[int], holds: Callable[[Set[int], Set[int], bool], bool], what: str) -> int:
        """The formula of just those values whose answers to the schemas in ``asked`` make something hold."""
        ...

    def prove(self, key: Hashable, rule: Callable[[], bool]) -> bool:
        """The answer of ``rule``, remembered by ``key``; False where it depends on itself."""
        ...

    def constant(self, value: Json) -> int:
        """The formula that a value equals ``value``."""
        ...

    def layout_of(self, must: int, around: Layout) -> Layout:
        """``around``, or the plain layout if no value that satisfies the formula has a bracket."""
        ...

    def value(
        self,
        must: int,
        observers: tuple[int, ...] = (),
        *,
        layout: Layout,
        space: int,
        choices: Layout | None = None,
        or_close: bool = False,
    ) -> int:
        """The state before a value that satisfies ``must``; its result has a bit for each observer it satisfies.

        ``layout`` is that of the bracket around the value, ``space`` the white space before it.
        """
        ...
