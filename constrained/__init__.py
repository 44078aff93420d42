"""Grammar in, token bitmask out: JSON Schema, regex, EBNF, Lark, choices.

Names load on first use, so that clients, which only describe grammars, do not import numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..cpu_isa import tell_numba
from .spec import GRAMMAR_KINDS, GrammarError, GrammarKind, GrammarSpec, GrammarTooComplex

if TYPE_CHECKING:
    from .checker import GrammarReport, check
    from .compiler import Compiler, compile, compiler_of
    from .grammar import CompiledGrammar, Matcher, fill_masks
    from .vocabulary import Vocabulary

_HOMES = {
    "CompiledGrammar": ".grammar",
    "Compiler": ".compiler",
    "Matcher": ".grammar",
    "GrammarReport": ".checker",
    "Vocabulary": ".vocabulary",
    "check": ".checker",
    "compile": ".compiler",
    "compiler_of": ".compiler",
    "fill_masks": ".grammar",
}

__all__ = [
    "GRAMMAR_KINDS",
    "CompiledGrammar",
    "Compiler",
    "GrammarError",
    "GrammarKind",
    "GrammarSpec",
    "GrammarTooComplex",
    "Matcher",
    "GrammarReport",
    "Vocabulary",
    "check",
    "compile",
    "compiler_of",
    "fill_masks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    tell_numba()
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
