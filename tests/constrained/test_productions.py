import pytest
from phloem.constrained import GrammarError
from phloem.constrained.expressions import EMPTY, Expressions
from phloem.constrained.productions import ContextFreeGrammar, reduced


@pytest.fixture
def grammar() -> ContextFreeGrammar:
    made = ContextFreeGrammar(Expressions())
    made.rule("root")
    return made


def lexeme(grammar: ContextFreeGrammar, text: str) -> tuple[str, int]:
    return ("lexeme", grammar.ex.literal(text.encode()))


def test_rules_that_no_text_completes_are_left_out(grammar: ContextFreeGrammar) -> None:
    a, dead = lexeme(grammar, "a"), grammar.rule("dead")
    grammar.add(0, [a])
    grammar.add(0, [("rule", dead)])
    grammar.add(dead, [a, ("rule", dead)])
    assert reduced(grammar) == ([(0, (a,))], set())


def test_a_grammar_without_a_text_is_refused_by_its_start(grammar: ContextFreeGrammar) -> None:
    loop = grammar.rule("loop")
    grammar.add(0, [("rule", loop)])
    grammar.add(loop, [("rule", loop)])
    with pytest.raises(GrammarError, match="no text matches rule 'root'"):
        reduced(grammar)


def test_a_lexeme_that_may_be_empty_becomes_an_optional_rule(grammar: ContextFreeGrammar) -> None:
    ex = grammar.ex
    grammar.add(0, [("lexeme", ex.repeat(ex.literal(b"a"), 0, None))])
    productions, nullable = reduced(grammar)
    assert all(not ex.nullable[value] for _, symbols in productions for kind, value in symbols if kind == "lexeme")
    assert nullable == {0, 1} and (1, ()) in productions


def test_nothing_but_the_empty_text_is_no_lexeme(grammar: ContextFreeGrammar) -> None:
    grammar.add(0, [("lexeme", EMPTY)])
    grammar.ignore(EMPTY)
    assert reduced(grammar) == ([(0, ())], {0}) and grammar.ignored == []


def test_an_operator_whose_operands_are_its_own_rule_becomes_left_recursive(grammar: ContextFreeGrammar) -> None:
    plus, number, e = lexeme(grammar, "+"), lexeme(grammar, "1"), grammar.rule("e")
    grammar.add(0, [("rule", e)])
    grammar.add(e, [("rule", e), plus, ("rule", e)])
    grammar.add(e, [number])
    productions, _ = reduced(grammar)
    operand = ("rule", 2)
    assert set(productions) == {
        (0, (("rule", e),)),
        (e, (operand,)),
        (e, (("rule", e), plus, operand)),
        (2, (number,)),
    }


def test_productions_that_differ_in_one_lexeme_are_merged(grammar: ContextFreeGrammar) -> None:
    a, b, c = (lexeme(grammar, text) for text in "abc")
    grammar.add(0, [a, c])
    grammar.add(0, [b, c])
    (production,) = reduced(grammar)[0]
    union = grammar.ex.union(a[1], b[1])
    joined = grammar.ex.concat(union, c[1])
    assert production in [(0, (("lexeme", union), c)), (0, (("lexeme", joined),))]
