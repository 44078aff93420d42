import itertools

import pytest
from phloem.constrained.expressions import NOTHING, Expressions
from phloem.constrained.prefixes import contains_all_texts_of, without_far_bounds
from phloem.constrained.regex_syntax import compile_regex

TEXTS = ["".join(t) for n in range(6) for t in itertools.product("ab", repeat=n)]


@pytest.mark.parametrize("pattern", ["a{0,3}", "a{0,9}b", "(a|b){0,20}", "a{2,9}", "b(a{0,5}|b{0,30})", "(ab){0,4}a?"])
@pytest.mark.parametrize("length", [0, 2, 4])
def test_prefixes_and_texts_up_to_a_length_stay(pattern: str, length: int) -> None:
    ex = Expressions()
    exact = compile_regex(pattern, ex, anchored=True)
    freed = without_far_bounds(ex, exact, length)
    for text in TEXTS:
        if len(text) <= length:
            ways_on = []
            for expr in (exact, freed):
                for byte in text.encode():
                    expr = ex.derive(expr, byte)
                ways_on.append((expr != NOTHING, ex.nullable[expr]))
            assert ways_on[0] == ways_on[1], text


def test_bounds_that_are_far_are_dropped_and_near_ones_are_kept() -> None:
    ex = Expressions()
    far, near = (compile_regex(pattern, ex, anchored=True) for pattern in ("a{0,50}b", "a{0,5}b"))
    assert without_far_bounds(ex, far, 20) == compile_regex("a*b", ex, anchored=True)
    assert without_far_bounds(ex, near, 20) == near


@pytest.mark.parametrize(
    ("pattern", "run"), [("(?s).*", 1 << 30), ("(?s).{0,7}", 7), ("(?s).{2,7}x", 7), ("a*", None), ("a|(?s).{0,4}", 4)]
)
def test_runs_of_any_character_are_seen(pattern: str, run: int | None) -> None:
    ex = Expressions()
    assert contains_all_texts_of(ex, compile_regex(pattern, ex, anchored=True)) == run


def test_all_texts_but_some_have_every_text_as_a_prefix() -> None:
    ex = Expressions()
    assert contains_all_texts_of(ex, ex.text_without(ex.one_of([b"a", b"bc"]))) == 1 << 30
