"""A grammar before it is compiled, and the errors of a bad one."""

from dataclasses import dataclass, field
from typing import Literal, get_args

GrammarKind = Literal["json_schema", "json", "regex", "ebnf", "lark", "choices", "structural_tags"]
GRAMMAR_KINDS: tuple[str, ...] = get_args(GrammarKind)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as messages carry it: equal kind, text and options mean the same language.

    ``text`` is JSON for ``json_schema``, ``choices`` (a list of strings) and ``structural_tags``, the pattern for
    ``regex``, the grammar's source for ``ebnf`` and ``lark``, and empty for ``json``.
    """

    kind: GrammarKind
    text: str = ""
    options: dict[str, str | int | bool] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A text that two specs share only if they are equal."""
        return f"{self.kind}\n{sorted(self.options.items())}\n{self.text}"


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message names the place (``where``), the value and the limit."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(f"{message} (at {where})" if where else message)
        self.where = where

    def twin(self) -> "GrammarError":
        """An equal error without a traceback, to be raised again."""
        again = type(self)(str(self))
        again.where = self.where
        return again

    def at(self, where: str) -> "GrammarError":
        """The error with ``where`` added, unless it names a place already."""
        return self if self.where else type(self)(str(self), where=where)

    def within(self, where: str) -> "GrammarError":
        """The error of a part, placed in the whole: the part stands at ``where``."""
        message = str(self).removesuffix(f" (at {self.where})")
        return type(self)(message, where=where + self.where.removeprefix("#"))


class GrammarTooComplex(GrammarError):
    """Compiling or walking the grammar needs more steps, states or cases than the limit."""


def grammar_error(error: GrammarError | RecursionError) -> GrammarError:
    """``error`` as an error of the grammar."""
    return error if isinstance(error, GrammarError) else GrammarTooComplex("the grammar nests too deep to be followed")
