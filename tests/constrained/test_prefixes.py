import itertools

import pytest
from phloem.constrained import Vocabulary
from phloem.constrained.expressions import NOTHING, Expressions
from phloem.constrained.prefixes import TokenReach, contains_all_texts_of
from phloem.constrained.regex_syntax import compile_regex

TEXTS = ["".join(t) for n in range(6) for t in itertools.product("ab", repeat=n)]


TOKENS = [*(bytes([b]) for b in range(256)), b"aa", b"aaaa", b"abab", b"ba", b"a,b,", b"</s>"]


@pytest.fixture(scope="module")
def prefixes() -> TokenReach:
    vocabulary = Vocabulary(TOKENS, {len(TOKENS) - 1}, len(TOKENS) - 1)
    return TokenReach(Expressions(), vocabulary)


def allowed(ex: Expressions, expr: int) -> list[tuple[bool, bool]]:
    """For each token whether it is allowed, and whether the text may end after it."""
    found = []
    for token in TOKENS[:-1]:
        after = expr
        for byte in token:
            after = ex.derive(after, byte)
        found.append((after != NOTHING, ex.nullable[after]))
    return found


PATTERNS = [
    "a{0,3}", "a{0,9}b", "(a|b){0,20}", "a{2,9}", "a{7,9}b", "b(a{0,5}|b{0,30})", "(ab){0,4}a?", "(ab){9,40}",
    "(a,){3,30}b", "((a,){0,9}b){5,30}", "(a|ab){0,50}", "(a|aa){20}", "(a{1,9},){0,99}a",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_tokens_of_a_language_stay_where_far_bounds_are_dropped(prefixes: TokenReach, pattern: str) -> None:
    ex = prefixes.ex
    expr = compile_regex(pattern, ex, anchored=True)
    for text in TEXTS:
        rest = expr
        for byte in text.encode():
            rest = ex.derive(rest, byte)
        assert allowed(ex, prefixes.without_far_bounds(rest)) == allowed(ex, rest), text


@pytest.mark.parametrize(("pattern", "most"), list(itertools.product(PATTERNS, (2, 7, 40))))
def test_what_is_observed_is_the_same_for_texts_as_short_as_tokens(
    prefixes: TokenReach, pattern: str, most: int
) -> None:
    ex = prefixes.ex
    words, shorter = compile_regex(pattern, ex, anchored=True), ex.repeat(ex.any_char, 0, most)
    exact = ex.union(ex.intersect(words, shorter), ex.intersect(ex.text_without(words), ex.complement(shorter)))
    observed = prefixes.observed(exact)
    for token in (b"", *TOKENS[:-1]):
        assert ex.matches(observed, token) == ex.matches(exact, token), token
    assert most < 40 or observed != exact or words == prefixes.without_far_bounds(words)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_tokens_of_a_language_lie_between_those_of_its_stand_ins(prefixes: TokenReach, pattern: str) -> None:
    ex = prefixes.ex
    expr = compile_regex(pattern, ex, anchored=True)
    agreed = 0
    for text in TEXTS:
        rest = expr
        for byte in text.encode():
            rest = ex.derive(rest, byte)
        exact = allowed(ex, rest)
        for (lower,), (upper,), _ in prefixes.stand_ins((rest,)):
            below, above = allowed(ex, lower), allowed(ex, upper)
            for low, here, high in zip(below, exact, above, strict=True):
                assert low[0] <= here[0] <= high[0] and low[1] <= here[1] <= high[1], text
            agreed += below == above
    assert agreed or not prefixes.has_large_counts((expr,))


def test_bounds_that_are_far_are_dropped_and_near_ones_are_kept(prefixes: TokenReach) -> None:
    ex = prefixes.ex
    near = {"a{0,4}b": "a{0,4}b", "a{0,5}b": "a*b", "a{30,50}b": "a{5,}b", "(a{0,9}b){2}": "(a*b){2}"}
    for pattern, freed in near.items():
        expr = compile_regex(pattern, ex, anchored=True)
        assert prefixes.without_far_bounds(expr) == compile_regex(freed, ex, anchored=True)


def test_a_backslash_may_spell_any_character() -> None:
    tokens = [*(bytes([b]) for b in range(256)), rb"\u0061\u0061\u0061", b"</s>"]
    prefixes = TokenReach(Expressions(), Vocabulary(tokens, {257}, 257))
    near, far = (compile_regex(f"a{{0,{n}}}", prefixes.ex, anchored=True) for n in (18, 19))
    assert prefixes.without_far_bounds(near) == near and prefixes.without_far_bounds(far) != far


@pytest.mark.parametrize(
    ("pattern", "run"), [("(?s).*", 1 << 30), ("(?s).{0,7}", 7), ("(?s).{2,7}x", 7), ("a*", None), ("a|(?s).{0,4}", 4)]
)
def test_runs_of_any_character_are_seen(pattern: str, run: int | None) -> None:
    ex = Expressions()
    assert contains_all_texts_of(ex, compile_regex(pattern, ex, anchored=True)) == run


def test_all_texts_but_some_have_every_text_as_a_prefix() -> None:
    ex = Expressions()
    assert contains_all_texts_of(ex, ex.text_without(ex.one_of([b"a", b"bc"]))) == 1 << 30
