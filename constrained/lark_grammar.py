"""Lark's grammar syntax: Lark's own loader reads it; rules become productions and terminals become lexemes.

A text is in the language if it can be cut into terminals (with ignored ones between) that the rules derive, as with
Lark's ``earley`` parser and ``dynamic_complete`` lexer. Priorities choose among readings, so they are ignored.
"""

import re
from typing import Any, NamedTuple, cast

from .earley import Parser
from .machine import Masks
from .productions import ContextFreeGrammar
from .regex_syntax import compile_regex
from .spec import GrammarError

# The pattern of ``common.ESCAPED_STRING``: anything up to the first quote that no backslash precedes.
_LAZY_STRING = re.compile(r"\.\*\?\(\?<!\\\\\)\(\\\\\\\\\)\*\?(\\?[\"'])")


class Loaded(NamedTuple):
    """What Lark's loader makes of a grammar, less what the start rule never reaches.

    ``terminals`` are Lark's ``TerminalDef``, ``rules`` its ``Rule``, ``ignored`` names of terminals; ``defined`` names
    all rules and terminals of the text.
    """

    terminals: list[Any]
    rules: list[Any]
    ignored: list[str]
    defined: list[str]


def compile_lark(text: str, masks: Masks, *, start: str = "start") -> Parser:
    """The parser of the grammar's texts. Raises GrammarError."""
    loaded = read_lark(text, start=start)
    with masks.machine.lock:
        return _build(loaded, masks, start)


def read_lark(text: str, *, start: str) -> Loaded:
    """Read a grammar with Lark's loader. Raises GrammarError."""
    from lark.exceptions import LarkError
    from lark.load_grammar import load_grammar

    try:
        grammar, _ = load_grammar(text, "<grammar>", [_refuse_files], False)
        defined = [name for name, *_ in (*grammar.rule_defs, *grammar.term_defs)]
        # lark.Lark(text) would also build parse tables, in time quadratic in the rules.
        terminals, rules, ignored = grammar.compile([start], set())
        loaded = Loaded(terminals, rules, ignored, defined)
    except (LarkError, OSError) as error:
        raise GrammarError(f"Lark cannot read the grammar: {str(error).strip()}") from None
    except re.error as error:
        raise GrammarError(f"a terminal's regex: {error}") from None
    if not any(rule.origin.name == start for rule in loaded.rules):
        raise GrammarError(f"Lark cannot read the grammar: there is no rule {start!r}")
    return loaded


def _refuse_files(base_path: object, path: str) -> tuple[object, str]:
    """Lark asks this before it opens an import: only Lark's own library may be imported, no file of this machine."""
    from lark.load_grammar import PackageResource, stdlib_loader

    if isinstance(base_path, PackageResource):  # an import within the library
        raise OSError("the library is asked next")
    name = path.removesuffix(".lark").replace("/", ".")
    try:
        if base_path is not None:
            raise OSError("the grammar is not a file, so no file is relative to it")
        return cast(tuple[object, str], stdlib_loader(None, path))
    except OSError:
        raise GrammarError(
            f"%import {'.' if base_path is not None else ''}{name}: only Lark's own grammars can be imported "
            "(common, python, unicode); write the rules out"
        ) from None


def _build(loaded: Loaded, masks: Masks, start: str) -> Parser:
    ex = masks.machine.expressions
    lexemes: dict[str, int] = {}
    for terminal in loaded.terminals:
        pattern, flags = terminal.pattern.value, set(terminal.pattern.flags)
        if terminal.pattern.type == "str" and not flags:
            lexemes[terminal.name] = ex.literal(pattern.encode())
            continue
        if terminal.pattern.type == "str":
            pattern = re.escape(pattern)
        if refused := flags - {"i", "s", "m", "u"}:
            raise GrammarError(f"flag {''.join(sorted(refused))!r} is not supported", where=terminal.name)
        pattern = _LAZY_STRING.sub(lambda m: rf"(?:[^{m[1]}\\\n]|\\.)*{m[1]}", pattern)
        lexemes[terminal.name] = compile_regex(
            pattern, ex, anchored=True, where=terminal.name, ignore_case="i" in flags, dot_all="s" in flags,
            is_whole=False,
        )  # fmt: skip
    for name, lexeme in lexemes.items():
        if ex.nullable[lexeme]:
            raise GrammarError("a terminal may not match the empty text; make it optional in the rules", where=name)
    grammar = ContextFreeGrammar(ex)
    numbers: dict[str, int] = {}
    top = grammar.rule(start)
    for rule in loaded.rules:
        for symbol in rule.expansion:
            if symbol.is_term and symbol.name not in lexemes:
                raise GrammarError(f"terminal {symbol.name} is declared but not defined")
        if rule.origin.name not in numbers:
            numbers[rule.origin.name] = grammar.rule(rule.origin.name)
    grammar.add(top, [("rule", numbers[start])])
    for rule in loaded.rules:
        grammar.add(
            numbers[rule.origin.name],
            [("lexeme", lexemes[s.name]) if s.is_term else ("rule", numbers[s.name]) for s in rule.expansion],
        )
    for name in loaded.ignored:
        grammar.ignore(lexemes[name])
    return Parser(grammar, masks)
