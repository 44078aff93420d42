"""Growth: after any token a text needs at most so many bytes more than before it."""

import random

import pytest
from phloem.constrained import compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.grammar import MARGIN, SPELLING
from phloem.constrained.growth import growth_of
from phloem.constrained.regex_syntax import compile_regex


def growth(pattern: str) -> int | None:
    ex = Expressions()
    return growth_of(ex, compile_regex(pattern, ex, anchored=True))


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("[a-z]{3}", 0),
        ("[a-z]{3,9}", 1),
        ("x(long|s)", 4),
        ("(, [A-Z][a-z]{2}){0,5}", 5),
        ('{"town": "[A-Z][a-z]{3,14}", "year": 1[0-9]{3}}', 1),
        ("(yes|no), because [a-z]{1,5}", 3),
        ("é?", 5),
    ],
)
def test_the_growth_of_a_pattern(pattern, most):
    assert growth(pattern) == most


@pytest.mark.parametrize("pattern", ["a*a{50}b", "(a?){3}b", "(?=ab)[a-z]*"])
def test_patterns_whose_bytes_do_not_tell_the_part_have_none(pattern):
    assert growth(pattern) is None


def pattern_of(rng: random.Random, depth: int) -> str:
    match rng.randrange(6 if depth else 2):
        case 0:
            return rng.choice(["a", "b", "the", "name", "é", ", ", "1"])
        case 1:
            return rng.choice(["[ab]", "[a-z]", "[0-9é]", "[^,]"])
        case 2 | 3:
            return "".join(pattern_of(rng, depth - 1) for _ in range(rng.randint(2, 4)))
        case 4:
            return "(" + "|".join(pattern_of(rng, depth - 1) for _ in range(rng.randint(2, 3))) + ")"
    low = rng.randint(0, 3)
    return f"({pattern_of(rng, depth - 1)}){{{low},{rng.choice(['', low + rng.randint(0, 4)])}}}"


def test_no_token_adds_more_bytes_than_the_growth(vocabulary):
    rng = random.Random(4)
    num_known = 0
    while num_known < 60:
        grammar = compile("regex", pattern_of(rng, 3), vocabulary)
        if grammar.growth is None:
            continue
        num_known += 1
        matcher, endings = grammar.matcher(), grammar.endings
        for _ in range(12):
            needed = len(endings.of(matcher.state).word)
            row = matcher.mask()
            allowed = [t for t in range(len(vocabulary)) if row[t >> 5] >> (t & 31) & 1 and t != vocabulary.eos]
            if not allowed:
                break
            for token in rng.sample(allowed, min(len(allowed), 8)):
                assert matcher.accept(token)
                assert len(endings.of(matcher.state).word) <= needed + grammar.growth, grammar.spec.text
                matcher.rollback(1)
            matcher.accept(rng.choice(allowed))


def test_the_limit_of_tokens_is_looked_at_later_where_the_growth_is_known(vocabulary):
    grammar = compile("regex", "[a-z]{3,20}", vocabulary)
    assert grammar.margin == 1 + SPELLING < MARGIN
    matcher = grammar.matcher(max_tokens=40)
    assert not matcher.is_short and matcher.free_until > 1
