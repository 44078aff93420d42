import random

import numpy as np
import pytest
from phloem.constrained import GrammarError, Vocabulary, compile

from .conftest import mismatches, takes
from .oracle import check_walks, small_vocabulary

ARITHMETIC = r"""
root ::= expr                      # left-recursive through term
expr ::= expr ("+" | "-") term | term
term ::= [0-9]{1,3} | "(" expr ")"
"""
BALANCED = 'root ::= "" | "a" root "b" root'
AMBIGUOUS = 'root ::= root root | "a" | "aa"'
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
    ("grammar", "text", "valid"),
    [
        (ARITHMETIC, "1", True),
        (ARITHMETIC, "(1+22)-(333)", True),
        (ARITHMETIC, "(1+22)-(3333)", False),
        (ARITHMETIC, "((1)", False),
        (ARITHMETIC, "1+", False),
        (BALANCED, "", True),
        (BALANCED, "aabbab", True),
        (BALANCED, "aab", False),
        (BALANCED, "ba", False),
        (AMBIGUOUS, "a" * 12, True),
        ('root ::= "x"* "y"{2} ("z" | root)?', "xxyyxyyz", True),
        ('root ::= "x"* "y"{2} ("z" | root)?', "xxyxy", False),
        ('root ::= item ("," item){0,2}\nitem ::= [a-c]+ | "[" root "]"', "a,[b,cc],c", True),
        ('root ::= item ("," item){0,2}\nitem ::= [a-c]+ | "[" root "]"', "a,b,c,a", False),
        ('root ::= [^"\\x5c]+ "\\u00e9"', "xé", True),
    ],
)
def test_ebnf(vocabulary: Vocabulary, grammar: str, text: str, valid: bool) -> None:
    compiled = compile("ebnf", grammar, vocabulary)
    assert takes(compiled, text) == valid
    assert takes(compiled, text, random.Random(3)) == valid


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


@pytest.mark.parametrize("grammar", [ARITHMETIC, BALANCED, AMBIGUOUS])
def test_long_texts_need_no_new_states_once_nesting_repeats(vocabulary: Vocabulary, grammar: str) -> None:
    compiled = compile("ebnf", grammar, vocabulary)
    text = {ARITHMETIC: "1+(2-3)+", BALANCED: "aabb", AMBIGUOUS: "a"}[grammar]
    tail = {ARITHMETIC: "1", BALANCED: "", AMBIGUOUS: "a"}[grammar]
    if grammar is ARITHMETIC:
        assert takes(compiled, text * 3 + tail)
        before = compiled.machine.num_states
        assert takes(compiled, text * 30 + tail)
        assert compiled.machine.num_states == before
    else:
        assert takes(compiled, text * 10 + tail)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("ebnf", "", "no rule 'root'"),
        ("ebnf", "root ::= other", "rule 'other' is used but not defined \\(at line 1\\)"),
        ("ebnf", 'root ::= "a', "never closed"),
        ("ebnf", 'root ::= ("a"', "'\\(' is never closed"),
        ("ebnf", 'root = "a"', "'::=' expected after 'root'"),
        ("ebnf", 'root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice \\(at line 2\\)"),
        ("ebnf", 'root ::= "a" root', "no text matches rule"),
        ("ebnf", "root ::= [z-a]", "wrong way round"),
        ("ebnf", 'root ::= "a"{3,1}', "must rise"),
        ("lark", "start: nothing", "Lark cannot read the grammar"),
        ("lark", "start: A\nA: /a(?=b)/", "look-ahead"),
        ("lark", "start: start", "no text matches rule"),
    ],
)
def test_bad_grammars_are_refused_by_name(vocabulary: Vocabulary, kind: str, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile(kind, text, vocabulary)


def test_another_start_rule(vocabulary: Vocabulary) -> None:
    assert takes(compile("ebnf", 'root ::= "a"\nother ::= "b"', vocabulary, start="other"), "b")
    with pytest.raises(GrammarError, match="unknown option 'begin'"):
        compile("ebnf", 'root ::= "a"', vocabulary, begin="root")


def brute_force(vocabulary: Vocabulary, is_prefix, text: bytes) -> set[int]:
    return {t for t in range(len(vocabulary)) if vocabulary.is_text[t] and is_prefix(text + vocabulary.tokens[t])}


@pytest.mark.parametrize("kind", ["choices", "regex", "ebnf", "json_schema"])
def test_masks_are_what_trying_every_token_finds(vocabulary: Vocabulary, kind: str) -> None:
    """The oracle: a finite language, its prefixes listed, every token tried at every state of random walks."""
    words = ["a", "ab", "abba", "name", "na", "then", "the", "10", "00-", "é", "returned", "return acc", 'a"b', "a\\b"]
    if kind == "json_schema":
        import json

        texts = {json.dumps(w, ensure_ascii=False).encode() for w in words}
        grammar = compile(kind, json.dumps({"enum": words}), vocabulary, whitespace="compact")
    else:
        import json
        import re

        texts = {w.encode() for w in words}
        source = {
            "choices": json.dumps(words),
            "regex": "|".join(re.escape(w) for w in words),
            "ebnf": "root ::= " + " | ".join(json.dumps(w, ensure_ascii=False) for w in words),
        }[kind]
        grammar = compile(kind, source, vocabulary)
    prefixes = {t[:n] for t in texts for n in range(len(t) + 1)}
    rng = random.Random(0)
    for _ in range(300):
        matcher = grammar.matcher()
        text = b""
        while True:
            expected = brute_force(vocabulary, prefixes.__contains__, text)
            bits = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            assert set(bits.tolist()) - {vocabulary.eos} == expected, text
            assert matcher.is_accepting() == (text in texts)
            if not expected:
                break
            token = rng.choice(sorted(expected))
            assert matcher.accept(token)
            text += vocabulary.tokens[token]


def test_masks_are_what_the_definition_says_at_every_state_of_random_walks() -> None:
    """A hundred thousand walks take minutes: ``python -m phloem.tests.constrained.oracle``."""
    assert check_walks(small_vocabulary(), grammars=12, walks=6, longest=7, seed=1) > 100


def test_lark_reads_no_file_but_its_own_library(vocabulary: Vocabulary, tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.lark").write_text("WORD: /secret/\n")
    monkeypatch.chdir(tmp_path)
    for what in (".mine.WORD", "mine.WORD", ".mine (WORD)"):
        with pytest.raises(GrammarError, match=r"mine: only Lark's own grammars can be imported"):
            compile("lark", f"%import {what}\nstart: WORD", vocabulary)
    assert takes(compile("lark", "%import python.NAME\n%import common.INT\nstart: NAME INT", vocabulary), "a1")
