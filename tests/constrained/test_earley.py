import pytest
from phloem.constrained import GrammarTooComplex, Vocabulary, compile

from .conftest import takes
from .oracle import check_walks, small_vocabulary

ARITHMETIC = r"""
root ::= expr                      # left-recursive through term
expr ::= expr ("+" | "-") term | term
term ::= [0-9]{1,3} | "(" expr ")"
"""
BALANCED = 'root ::= "" | "a" root "b" root'
AMBIGUOUS = 'root ::= root root | "a" | "aa"'


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


def test_masks_are_what_the_definition_says_at_every_state_of_random_walks() -> None:
    """A hundred thousand walks take minutes: ``python -m phloem.tests.constrained.oracle``."""
    assert check_walks(small_vocabulary(), grammars=12, walks=6, longest=7, seed=1) > 100


def test_a_text_of_too_many_parser_states_ends_with_an_error(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    grammar = compile("ebnf", 'root ::= "(" root ")" | "x"', fresh)
    monkeypatch.setattr("phloem.constrained.earley.MAX_SETS", 20)
    matcher = grammar.matcher()
    with pytest.raises(GrammarTooComplex, match="more than 20 different parser states"):
        grammar.machine.advance_bytes(grammar.start, b"(" * 50)
    while matcher.error is None:
        assert matcher.accept(ord("(")) or matcher.error is not None
    assert "more than 20 different parser states" in matcher.error
