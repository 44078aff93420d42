import random

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.lark_grammar import read_lark

from .conftest import mismatches, takes

EXPRESSIONS = r"""
start: stmt+
stmt: "return" NAME ";" | NAME "=" expr ";"
?expr: expr "+" atom | atom
?atom: NAME | NUMBER | "(" expr ")" | ESCAPED_STRING | atom "and" atom
NAME: /[a-z_]\w*/
%import common.NUMBER
%import common.ESCAPED_STRING
%import common.WS
%ignore WS
"""


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("return acc;", True),
        ("return acc ;", True),
        ('x = (1 + y) + 2.5; z="a\\"b" and acc;', True),
        ('x="a\\"b" and "the" ;return x;', True),
        ("x = (1 + y + 2.5;", False),
        ("return ;", False),
        ("returns = 1;", True),
    ],
)
def test_lark_with_ignored_white_space(vocabulary: Vocabulary, text: str, valid: bool) -> None:
    assert takes(compile("lark", EXPRESSIONS, vocabulary), text) == valid


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start "b" | "ab"',
        "start: item (\",\" item)*\nitem: /[0-9]+/ | \"[\" start \"]\"\n%ignore \" \"",
        'start: start start | "a" | "b" "a"',
        'start: ("x" | "y")~2..4 "z"?',
        "start: A B? C\nA: \"a\"+\nB.2: \"ab\"\nC: /a|c/i",
    ],
)  # fmt: skip
def test_lark_takes_what_lark_parses(vocabulary: Vocabulary, grammar: str) -> None:
    lark = pytest.importorskip("lark")
    reference = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")

    def parses(text: str) -> bool:
        try:
            reference.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    compiled = compile("lark", grammar, vocabulary)
    assert mismatches(compiled, parses, walks=8) == []
    rng = random.Random(5)
    for _ in range(150):
        text = "".join(rng.choice("abcxyz1,[] A") for _ in range(rng.randrange(1, 7)))
        assert takes(compiled, text) == parses(text), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: nothing", "Lark cannot read the grammar"),
        ("start: A\nA: /a(?=b)/", "look-ahead"),
        ("start: start", "no text matches rule"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(vocabulary: Vocabulary, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile("lark", text, vocabulary)


def test_lark_reads_no_file_but_its_own_library(vocabulary: Vocabulary, tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.lark").write_text("WORD: /secret/\n")
    monkeypatch.chdir(tmp_path)
    for what in (".mine.WORD", "mine.WORD", ".mine (WORD)"):
        with pytest.raises(GrammarError, match=r"mine: only Lark's own grammars can be imported"):
            compile("lark", f"%import {what}\nstart: WORD", vocabulary)
    assert takes(compile("lark", "%import python.NAME\n%import common.INT\nstart: NAME INT", vocabulary), "a1")


def test_what_the_start_does_not_reach_is_defined_but_not_kept() -> None:
    loaded = read_lark('start: A\nA: "a"\nB: "b"\nrest: B', start="start")
    assert loaded.defined == ["start", "rest", "A", "B"]
    assert [t.name for t in loaded.terminals] == ["A"] and [r.origin.name for r in loaded.rules] == ["start"]
