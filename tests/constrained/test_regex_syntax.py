# ruff: noqa: E501
import itertools
import re

import interegular
import pytest
from hypothesis import given
from hypothesis import strategies as st
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.regex_syntax import alternatives, compile_regex

from .conftest import mismatches

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
        ("((?!a)b)+", "look-ahead in this repeated group"), ("a(?=^b)", "'\\^' in a look-ahead"), ("(?<=a)", "look-behind"), ("(?<!a)", "look-behind"),
        ("\\bword", "word boundary"), ("(a)\\1", "back-reference"), ("a*+", "possessive"), ("(?>a)", "atomic"),
        ("[a", "ends too early"), ("a)", "unbalanced"), ("(a", "never closed"), ("*", "nothing to repeat"),
        ("a{100001}", "limit of 100,000"), ("\\p{Klingon}", "unknown Unicode class 'Klingon'"), ("[z-a]", "wrong way round"),
        ("(?x)a", "inline flags 'x'"), ("\\q", "unknown escape"), ("(^a)*", "anchor inside a repeated group"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_regex(pattern, Expressions(), anchored=True, where="#/pattern")


LOOK_AHEADS = [
    "^(?!ab)[ab]+$", "(?!ab)a", "^(?=.*a)(?=.*b).{2,}$", "^a(?=b|$)", "a(?!b)", "^(?:(?!ab).)*$", "^(a|(?=b)b(?!b)|aa)$",
    "(?=ab)a|(?!a)b", "^((?=a)ab?){0,2}$", "(?!.*bb)^a", "^(?!(?!a)b)", "^(?=a$)", "b$(?!a)", "^(?![^b]*b$)a", "(?!$)a?b",
    "^(?!(ab|ba)$)[ab]{2}$", "^(?:(?!aa)[ab])*", "^(?!a$|b$).*$", "(a|b(?=b)){2}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", LOOK_AHEADS)
def test_look_aheads_are_those_of_python(pattern: str) -> None:
    ex = Expressions()
    found = compile_regex(pattern, ex, anchored=False)
    whole = compile_regex(f"(?:{pattern})", ex, anchored=True)
    for text in ["".join(t) for n in range(6) for t in itertools.product("abc", repeat=n)]:
        assert ex.matches(found, text.encode()) == bool(re.search(pattern, text)), text
        assert ex.matches(whole, text.encode()) == bool(re.fullmatch(pattern, text)), text


def test_a_look_ahead_in_a_part_of_a_text_is_refused() -> None:
    with pytest.raises(GrammarError, match="look-ahead is not supported in a part of a text"):
        compile_regex("a(?=b)", Expressions(), anchored=True, is_whole=False)


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


# interegular makes finite automata of regexes by its own reader and its own construction (Thompson's, not derivatives).
# Both are walked side by side over these characters: every pair of states that a text reaches has to agree.
CHARACTERS = "abcAB109-+.@_ \né漢{}()$"
ORACLE_PATTERNS = [
    pattern
    for pattern in PATTERNS
    if pattern not in ("[]a]", "a{x}", "\\x41\\u00e9")  # read otherwise, or refused
]


def differing_text(pattern: str) -> str | None:
    """A text that one of the two languages has and the other has not; None if they are equal."""
    ex = Expressions()
    fsm = interegular.parse_pattern(pattern).to_fsm()
    begin = (compile_regex(pattern, ex, anchored=True), fsm.initial)
    seen, queue = {begin}, [(begin, "")]
    for (expr, state), text in queue:
        if ex.nullable[expr] != (state in fsm.finals):
            return text
        for character in CHARACTERS:
            following = expr
            for byte in character.encode():
                following = ex.derive(following, byte)
            pair = (following, None if state is None else fsm.map[state].get(fsm.alphabet[character]))
            if pair not in seen:
                seen.add(pair)
                queue.append((pair, text + character))
    return None


@pytest.mark.parametrize("pattern", ORACLE_PATTERNS)
def test_languages_are_those_of_interegular(pattern: str) -> None:
    assert differing_text(pattern) is None


@given(regexes)
def test_any_language_is_that_of_interegular(pattern: str) -> None:
    assert differing_text(pattern) is None


@given(regexes, regexes)
def test_languages_meet_and_contain_each_other_as_interegular_finds(left: str, right: str) -> None:
    ex = Expressions()
    one, other = (compile_regex(pattern, ex, anchored=True) for pattern in (left, right))
    a, b = (interegular.parse_pattern(pattern).to_fsm() for pattern in (left, right))
    # interegular's ``isdisjoint`` is wrong where two automata have different alphabets (0.3.3)
    assert ex.is_nonempty(ex.intersect(one, other)) != a.intersection(b).empty()
    assert ex.is_subset(one, other) == a.issubset(b)
    assert ex.is_subset(other, one) == b.issubset(a)


def test_parts_that_come_again_are_read_as_the_first_time() -> None:
    ex = Expressions()
    again = ("(?:[a-c\\]x]{2}|y(?i:[d-f]|z)+)", "(?:[a-c\\]x]{2}|y(?i:[d-f]|z)*)")  # they begin alike
    for left, right in itertools.product(again, again):
        whole = compile_regex(f"{left}-{right}", ex, anchored=True)
        assert whole == ex.concat(*[compile_regex(part, ex, anchored=True) for part in (left, "-", right)])
    assert compile_regex("(?i:(?:[a-b]c))(?:[a-b]c)", ex, anchored=True) == compile_regex(
        "(?:[A-Ba-b][Cc])(?:[a-b]c)", ex, anchored=True
    )
    assert alternatives("(?:a|bc)-(?:a|bc)") == [["a", "bc"], ["a", "bc"]]
