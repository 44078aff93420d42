"""Grammar in, token bitmask out: JSON Schema, regex, EBNF, Lark, choices."""

from .compiler import Compiler, compile, compiler_of
from .grammar import CompiledGrammar, Matcher, fill_masks
from .spec import GRAMMAR_KINDS, GrammarError, GrammarKind, GrammarSpec, GrammarTooComplex
from .vocabulary import Vocabulary

__all__ = [
    "GRAMMAR_KINDS",
    "CompiledGrammar",
    "Compiler",
    "GrammarError",
    "GrammarKind",
    "GrammarSpec",
    "GrammarTooComplex",
    "Matcher",
    "Vocabulary",
    "compile",
    "compiler_of",
    "fill_masks",
]
