# ruff: noqa: E501
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.regex_syntax import compile_regex

from .conftest import mismatches, takes

PATTERNS = [
    "a(-a)*", "a|b|ab", "(a|b)*abb", "[a-c]{2,3}", "[^a-c]", "a{0}", "a{2,}", "a{,2}", "(ab?)+c", "\\d+\\.\\d*", "\\w+@\\w+",
    "[\\w.-]+", "x*?y+?", "(?i)straSSe", "(?:a|)(b|)", "é|ü+", ".", "a.c", "(?s).", "[]a]", "[a\\]]", "\\x41\\u00e9", "()",
    "(a|b|c|d){5}", "[+-]?[0-9]+", "\\(\\)\\[\\]", "(a*)*", "(a*b*)*", "a++"[:2], "(?i:A)b", "\\$\\^", "[\\d\\s]", "{", "a{x}",
]  # fmt: skip
TEXTS = [
    "", "a", "b", "ab", "abb", "aabb", "a-a", "a-", "abc", "aaa", "c", "aa", "x", "y", "xxyy", "1.", "12.5", "a@b", "a.b-c",
    "STRASSE", "strasse", "é", "üü", "\n", "a\nc", "axc", "]", "Aé", "abcde", "-12", "+", "()[]", "Ab", "AB", "$^", " ", "{",
    "a{x}", "bb", "aé", "ddddd", "abcda",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_language_is_what_re_matches(pattern: str) -> None:
    ex = Expressions()
    whole, part = (compile_regex(pattern, ex, anchored=anchored) for anchored in (True, False))
    for text in TEXTS:
        assert ex.matches(whole, text.encode()) == bool(re.fullmatch(pattern, text, re.ASCII)), text
        assert ex.matches(part, text.encode()) == bool(re.search(pattern, text, re.ASCII)), text


def test_alternatives_that_are_words_are_one_list_of_words() -> None:
    ex = Expressions()
    words = sorted(f"w{i * 7919 % 10_007}" for i in range(3_000))
    found = compile_regex("|".join(reversed(words)), ex, anchored=True)
    assert ex.words_of(found) == tuple(word.encode() for word in words)
    before = ex.fuel.spent
    assert all(ex.matches(found, word.encode()) for word in words[:10]) and not ex.matches(found, b"w12x")
    assert ex.fuel.spent - before < 200
    mixed = compile_regex("ab|[ab]c|abd?|b", ex, anchored=True)
    for text in ("ab", "ac", "bc", "abd", "b", "a", "abc", ""):
        assert ex.matches(mixed, text.encode()) == bool(re.fullmatch("ab|[ab]c|abd?|b", text)), text


@pytest.mark.parametrize(
    "pattern",
    ["^a", "a$", "^a$|b", "(^|x)a", "a(y|$)", "^$", "^(a|b)$", "(^a)?b", "a^b", "x*^a", "a$|$b",
     "b?(?:^a)?", "(?:a$)?b?", "$(^a|b)?", "a?$^b?", "(^a){0}b"]
)  # fmt: skip
def test_anchors_bind_a_search(pattern: str) -> None:
    ex = Expressions()
    whole, found = (compile_regex(pattern, ex, anchored=anchored) for anchored in (True, False))
    for text in [*TEXTS, "xa", "ay", "xay", "zxa", "ayz", "ba"]:
        if text != "\n":
            assert ex.matches(found, text.encode()) == bool(re.search(pattern, text)), text
            assert ex.matches(whole, text.encode()) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("\\p{L}+", "aéß漢", "1"),
        ("\\p{Lu}", "É", "é"),
        ("\\P{L}", "1", "a"),
        ("\\p{Script=Greek}", "α", "a"),
        ("\\p{Nd}", "٣", "x"),
    ],
)
def test_unicode_classes(pattern: str, inside: str, outside: str) -> None:
    ex = Expressions()
    found = compile_regex(pattern, ex, anchored=True)
    assert ex.matches(found, inside.encode()) and not ex.matches(found, outside.encode())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)", "look-ahead"), ("(?!a)", "look-ahead"), ("(?<=a)", "look-behind"), ("(?<!a)", "look-behind"),
        ("\\bword", "word boundary"), ("(a)\\1", "back-reference"), ("a*+", "possessive"), ("(?>a)", "atomic"),
        ("[a", "ends too early"), ("a)", "unbalanced"), ("(a", "never closed"), ("*", "nothing to repeat"),
        ("a{100001}", "limit of 100,000"), ("\\p{Klingon}", "unknown Unicode class 'Klingon'"), ("[z-a]", "wrong way round"),
        ("(?x)a", "inline flags 'x'"), ("\\q", "unknown escape"), ("(^a)*", "anchor inside a repeated group"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_regex(pattern, Expressions(), anchored=True, where="#/pattern")


def test_long_repeats_and_enums_cost_little() -> None:
    ex = Expressions()
    long = compile_regex(".{0,5000}", ex, anchored=True)
    words = ex.one_of([f"word{i}".encode() for i in range(2000)])
    assert len(ex.nodes) < 20
    assert ex.matches(long, b"x" * 5000) and not ex.matches(long, b"x" * 5001)
    assert ex.matches(words, b"word1999") and not ex.matches(words, b"word2000")


def test_bounded_repeats_side_by_side_do_not_multiply() -> None:
    ex = Expressions()
    found = compile_regex("(.{0,200}){3}x?", ex, anchored=True)
    assert ex.matches(found, b"y" * 600)
    assert not ex.matches(found, b"y" * 602)


atoms = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "é", "\\d", "(a|b)", "(ab|a)", "()"])
regexes = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "{2}"])).map(lambda p: f"({p[0]}){p[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(regexes, st.lists(st.text("abé1x", max_size=6), min_size=5, max_size=5))
def test_any_regex_agrees_with_re(pattern: str, texts: list[str]) -> None:
    ex = Expressions()
    found = compile_regex(pattern, ex, anchored=True)
    negated = ex.text_without(found)
    for text in texts:
        expected = bool(re.fullmatch(pattern, text, re.ASCII))
        assert ex.matches(found, text.encode()) == expected
        assert ex.matches(negated, text.encode()) == (not expected)


@pytest.mark.parametrize("pattern", ["a(-a)*", "[a-cé]{2,5}", "(10|12|00)+x", "[^x]{1,8}", "(?i)the( an)?"])
def test_random_walks_match(vocabulary: Vocabulary, pattern: str) -> None:
    assert (
        mismatches(compile("regex", pattern, vocabulary), lambda text: bool(re.fullmatch(pattern, text)), walks=20)
        == []
    )


def test_a_byte_without_a_token_is_in_no_language() -> None:
    vocabulary = Vocabulary([b"a", b"xz", b"</s>"], {2}, 2)
    with pytest.raises(GrammarError, match="no text of this vocabulary's bytes"):
        compile("regex", "z+", vocabulary)
    assert takes(compile("regex", "a|z", vocabulary), "a")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("", 1), ("a|b|ab", 3), ("[a-c]{2}", 9), ("[a-c]{0,2}", 13), ("é|ü", 2), ("a*", 50), (".{2}", 50), ("a{60}|b", 2)],
)
def test_texts_are_counted_up_to_a_bound(pattern: str, count: int) -> None:
    ex = Expressions()
    assert ex.num_texts(compile_regex(pattern, ex, anchored=True), 50) == count
