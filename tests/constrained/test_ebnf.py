import random

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.ebnf import read_ebnf, rules_used

from .conftest import takes

ARITHMETIC = r"""
root ::= expr                      # left-recursive through term
expr ::= expr ("+" | "-") term | term
term ::= [0-9]{1,3} | "(" expr ")"
"""
BALANCED = 'root ::= "" | "a" root "b" root'
AMBIGUOUS = 'root ::= root root | "a" | "aa"'


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
    ("text", "message"),
    [
        ("", "no rule 'root'"),
        ("root ::= other", "rule 'other' is used but not defined \\(at line 1\\)"),
        ('root ::= "a', "never closed"),
        ('root ::= ("a"', "'\\(' is never closed"),
        ('root = "a"', "'::=' expected after 'root'"),
        ('root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice \\(at line 2\\)"),
        ('root ::= "a" root', "no text matches rule"),
        ("root ::= [z-a]", "wrong way round"),
        ('root ::= "a"{3,1}', "must rise"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(vocabulary: Vocabulary, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile("ebnf", text, vocabulary)


def test_the_start_rule_is_an_option(vocabulary: Vocabulary) -> None:
    assert takes(compile("ebnf", 'root ::= "a"\nother ::= "b"', vocabulary, start="other"), "b")
    with pytest.raises(GrammarError, match="unknown option 'begin'"):
        compile("ebnf", 'root ::= "a"', vocabulary, begin="root")


def test_the_rules_that_the_start_refers_to_are_used() -> None:
    rules = read_ebnf('root ::= (a | "x")* b?\na ::= c{2}\nb ::= root\nc ::= "c"\nspare ::= a')
    assert list(rules) == ["root", "a", "b", "c", "spare"]
    assert rules_used(rules, "root") == {"root", "a", "b", "c"} and rules_used(rules, "c") == {"c"}
