import itertools
import re
from functools import cache

import numpy as np
import pytest
from phloem.constrained import GrammarError, GrammarTooComplex, Vocabulary, compile
from phloem.constrained.code_points import ANY
from phloem.constrained.expressions import EMPTY, NOTHING, Expressions
from phloem.constrained.regex_syntax import compile_regex

from .conftest import takes


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


def test_long_repeats_and_enums_take_few_expressions() -> None:
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


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("", 1), ("a|b|ab", 3), ("[a-c]{2}", 9), ("[a-c]{0,2}", 13), ("é|ü", 2), ("a*", 50), (".{2}", 50), ("a{60}|b", 2)],
)
def test_texts_are_counted_up_to_a_bound(pattern: str, count: int) -> None:
    ex = Expressions()
    assert ex.num_texts(compile_regex(pattern, ex, anchored=True), 50) == count


def test_a_byte_without_a_token_is_in_no_language() -> None:
    vocabulary = Vocabulary([b"a", b"xz", b"</s>"], {2}, 2)
    with pytest.raises(GrammarError, match="no text of this vocabulary's bytes"):
        compile("regex", "z+", vocabulary)
    assert takes(compile("regex", "a|z", vocabulary), "a")


@pytest.mark.parametrize(
    ("left", "right", "meet"),
    [
        ("a*b", "ab*", True),
        ("a+", "b+", False),
        (".*a.*", "[^a]*", False),
        ("(ab)*", "(ba)*", True),
        ("a{3}", "(aa)*", False),
    ],
)
def test_intersections_and_subsets_of_languages(left: str, right: str, meet: bool) -> None:
    ex = Expressions()
    one, other = (compile_regex(pattern, ex, anchored=True) for pattern in (left, right))
    both = ex.intersect(one, other)
    assert ex.is_nonempty(both) == meet == (ex.alive(both) != NOTHING)
    assert ex.is_subset(both, one) and ex.is_subset(one, ex.union(one, other))
    assert not ex.is_subset(ex.union(one, other), both)


@pytest.mark.parametrize("first", ["[^a]", "[b-é]", "[aé]"])
@pytest.mark.parametrize(
    "pattern",
    [
        "[^,]{1,3}(-[^b]{1,2}){0,2}",
        "(a|bé?|é){2,3}b*",
        "a?b?é",
        "(ab|ba|éa)x?",
        "(a?b)*",
        "é|(aé)+|b.*",
        "(ab?|é.){0,2}",
    ],
)
def test_texts_of_a_language_that_begin_with_some_characters_are_one_condition(first: str, pattern: str) -> None:
    ex = Expressions()
    language = compile_regex(pattern, ex, anchored=True)
    both = ex.intersect(language, compile_regex(f"^{first}", ex, anchored=False))
    assert ex.is_plain[both]
    anything = compile_regex("^[^x]", ex, anchored=False)
    assert ex.intersect(anything, both) == ex.intersect(both, anything) and ex.is_plain[ex.intersect(both, anything)]
    for count in range(6):
        for chars in itertools.product("abé-", repeat=count):
            text = "".join(chars)
            assert ex.matches(both, text.encode()) == bool(re.match(first, text) and re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("left", "without", "same"),
    [
        ("(ab?)*", (0, 3), (4, 6)),
        ("(ab?)*", (5, None), (0, 4)),
        ("(ab?)*", (1, None), (0, 0)),
        ("(ab?)*", (0, None), None),
        ("(ab?)*", (0, 9), None),
    ],
)
def test_a_language_without_its_texts_of_some_lengths_is_that_of_the_others(
    left: str, without: tuple[int, int | None], same: tuple[int, int] | None
) -> None:
    ex = Expressions()
    words, some = compile_regex(left, ex, anchored=True), ex.repeat(ex.any_char, 0, 6)
    refused = ex.intersect(words, ex.repeat(ex.any_char, *without))
    rest = ex.intersect(words, some, ex.complement(refused))
    assert ex.intersect(words, ex.complement(ex.text)) == NOTHING
    assert rest == (NOTHING if same is None else ex.intersect(words, ex.repeat(ex.any_char, *same)))
    assert ex.at_least(rest) == (same[0] if same else ex.at_least(NOTHING))
    every = [bytes(chars) for count in range(9) for chars in itertools.product(b"ab", repeat=count)]
    kept = [word for word in every if ex.matches(words, word) and len(word) <= 6 and not ex.matches(refused, word)]
    assert kept == [word for word in every if ex.matches(rest, word)]


def test_a_search_of_too_many_states_is_refused_with_the_limit() -> None:
    ex = Expressions()
    guess = compile_regex("(a|b)*a(a|b){18}", ex, anchored=True)
    with pytest.raises(GrammarTooComplex, match="more than 10,000 states"):
        ex.is_nonempty(ex.intersect(guess, compile_regex("(a|b)*b(a|b){18}", ex, anchored=True)))


def test_a_long_text_is_found_without_all_shorter_ones() -> None:
    ex = Expressions()
    words = compile_regex("[a-c]{1,9}(-[a-c]{1,9}){0,90}[.]", ex, anchored=True)
    long = ex.intersect(words, ex.repeat(ex.any_char, 200, 202))
    assert ex.is_nonempty(long, fuel=5_000)


@pytest.mark.parametrize(
    "pattern",
    [
        "a{1,3}(-a{1,4}){2,5}",
        "(ab|c){2,6}[.]?",
        "(abc|d{2,5}){1,3}e{0,2}",
        "(a|bcd|ef){1,4}",
        "((ab){1,3}c?){2,3}",
        "é{1,2}(ü-){0,4}",
    ],
)
def test_bounds_on_lengths_hold_for_all_that_may_follow(pattern: str) -> None:
    ex = Expressions()
    language = compile_regex(pattern, ex, anchored=True)
    spread = ex.spread(language)
    assert spread is not None

    @cache
    def lengths(expr: int) -> frozenset[int]:
        """How many characters may begin before the end."""
        ways = [(not 0x80 <= lo < 0xC0, to) for lo, _, to in ex.moves(expr)]
        return frozenset(
            {n + begins for begins, to in ways for n in lengths(to)} | ({0} if ex.nullable[expr] else set())
        )

    met, todo = {(language, 0)}, [(language, 0)]
    for expr, begun in todo:
        after = sorted(lengths(expr))
        assert after[0] <= spread.most_shortest
        assert begun + after[-1] >= spread.least_longest, (begun, after)
        assert all(b - a <= spread.gap for a, b in itertools.pairwise(after)), after
        for lo, _, to in ex.moves(expr):
            following = (to, begun + (not 0x80 <= lo < 0xC0))
            if following not in met:
                met.add(following)
                todo.append(following)


def test_multiples_are_those_of_arithmetic() -> None:
    ex = Expressions()
    digits = compile_regex("-?[0-9]+([.][0-9]{1,2})?", ex, anchored=True)
    for modulus, scale in ((7, 0), (25, 2), (3, 1)):
        found = ex.intersect(digits, ex.multiple_of(modulus, scale))
        for hundredths in range(0, 2_000, 5):
            text = f"{hundredths // 100}.{hundredths % 100:02}"
            assert ex.matches(found, text.encode()) == (hundredths * 10**scale % (modulus * 100) == 0), (text, modulus)


def test_a_full_store_is_refused_with_its_limit() -> None:
    ex = Expressions(max_expressions=20)
    with pytest.raises(GrammarTooComplex, match="more than 20 states"):
        compile_regex("(a|bb)*c{3}d{4}(ef)*g{5,9}h*(ij){2}k{3}l+", ex, anchored=True)


def test_the_counts_that_a_text_may_have_reached_are_one_range() -> None:
    ex = Expressions()
    for pattern in (r"(\w+\s?){1,30}", "(a|ab){0,50}c?", "([a-z]{1,5},?){1,99}"):
        expr = compile_regex(pattern, ex, anchored=True)
        before = len(ex.nodes)
        for byte in b"abababababababababab":
            expr = ex.derive(expr, byte)
        assert expr != NOTHING and len(ex.nodes) - before < 200


@pytest.mark.parametrize(
    "pattern", ["a|bc", "(ab?,){2}", "[é-ü]+x", "(a|bb)*c{3}", "(a,)*b?", "é(x|ab)|bca", "(ab|a){3}"]
)
def test_the_lengths_of_texts_are_known(pattern: str) -> None:
    ex = Expressions()
    expr = compile_regex(pattern, ex, anchored=True)
    texts = {"".join(t) for n in range(6) for t in itertools.product("abcé,x", repeat=n)}
    matches = [text for text in texts if re.fullmatch(pattern, text)]
    assert ex.longest(expr) == max(map(len, matches)) or ex.longest(expr) > 5
    for text in {match[:at] for match in matches for at in range(len(match) + 1)}:
        rest = expr
        for byte in text.encode():
            rest = ex.derive(rest, byte)
        left = [len(match) - len(text) for match in matches if match.startswith(text)]
        assert ex.shortest(rest) == min(left), text
        others = [n for n, match in zip(left, [m for m in matches if m.startswith(text)], strict=True) if n != 1]
        if others:  # an intersection, whose shortest text is searched for
            intersection = ex.intersect(rest, ex.complement(ex.any_char))
            assert ex.at_least(intersection) <= min(others), text  # before the search
            assert ex.shortest(intersection) == ex.at_least(intersection) == min(others), text


def test_the_shortest_rest_of_a_word_that_may_have_ended_is_empty() -> None:
    ex = Expressions()
    words = ex.one_of([b"a", b"abc", b"ad"])
    rest = ex.derive(words, ord("a"))
    assert (ex.shortest(words), ex.shortest(rest), ex.shortest(ex.concat(rest, words))) == (1, 0, 1)


def test_the_moves_of_an_expression_are_its_derivatives() -> None:
    ex = Expressions()
    patterns = [r"(\S+\s+){0,9}\S+", "(?i)[a-fé]{2,5}|x.*y", "(a|b)*(ab|cd)", "word|words|wort"]
    exprs = [compile_regex(p, ex, anchored=True) for p in patterns]
    exprs += [ex.intersect(exprs[0], exprs[1]), ex.text_without(exprs[3]), ex.complement(exprs[2])]
    for expr in exprs:
        found = dict.fromkeys(range(256), NOTHING)
        for lo, hi, to in ex.moves(expr):
            found.update(dict.fromkeys(range(lo, hi), to))
        assert found == {byte: ex.derive(expr, byte) for byte in range(256)}


@pytest.mark.parametrize("missing", [(), (0x41, 0xC3, 0xE1, 0xF0)])
def test_the_moves_of_a_character_are_its_derivatives(missing: tuple[int, ...]) -> None:
    has_byte = np.ones(256, dtype=bool)
    has_byte[list(missing)] = False
    ex = Expressions(has_byte)
    sets = [
        ANY,
        ((0x7F, 0x80),),
        ((0xE9, 0xFC), (0x3BF, 0x1040), (0x10000, 0x10FFFF)),
        ((0x20, 0xD7FF), (0x1F600, 0x1F64F)),
    ]
    todo = [ex.chars(ranges) for ranges in sets]
    for expr in todo:
        found = dict.fromkeys(range(256), NOTHING)
        for lo, hi, to in ex.moves(expr):
            found.update(dict.fromkeys(range(lo, hi), to))
        available = [byte for byte in range(256) if byte not in missing]
        assert [found[byte] for byte in available] == [ex.derive(expr, byte) for byte in available]
        todo += {to for to in found.values() if to not in (NOTHING, EMPTY, *todo)}
    assert len(todo) > 10


def test_alternatives_that_are_finite_by_themselves_are_not_counted() -> None:
    ex = Expressions()
    address = compile_regex("(?:[0-9a-f]{1,4}:){2}[0-9a-f]{1,4}|::[0-9a-f]{1,4}|::", ex, anchored=True)
    assert ex.counted(address) is None
    bounded = compile_regex("(?:[0-9a-f]{1,4}:){2}|[0-9a-f]{0,40}", ex, anchored=True)
    assert ex.counted(bounded) is not None


def test_characters_are_counted_beside_few_states() -> None:
    ex = Expressions()
    ends, short, long = compile_regex("-$", ex, anchored=False), *(ex.repeat(ex.any_char, 0, n) for n in (140, 200))
    names = compile_regex("^([a-z]{1,9}-?){1,99}$", ex, anchored=False)
    assert ex.counted(ex.intersect(ends, short)) == (ends, 0, 140)
    assert ex.counted(ex.intersect(ex.complement(ends), long)) is not None
    assert ex.counted(ex.intersect(ex.complement(ex.intersect(ends, short)), long)) is None
    assert ex.counted(ex.intersect(names, long)) == (names, 0, 200)  # which is plain
    assert ex.counted(ex.intersect(names, ex.complement(ends), long)) is None
    assert ex.counted(ex.union(ex.intersect(names, ex.complement(ends), short), ex.intersect(ends, long))) is None


def test_what_follows_a_byte_is_one_of_the_partial_derivatives() -> None:
    ex = Expressions()
    patterns = ["((a|ab){0,3}c){1,2}", "(a?b){2,5}|a{3}", "(ab|a)*b", "é{1,3}a?", ""]
    for expr in (compile_regex(pattern, ex, anchored=True) for pattern in patterns):
        form = ex.linear_form(expr)
        assert form is not None
        for text in (b"".join(parts) for n in range(6) for parts in itertools.product((b"a", b"b", b"c"), repeat=n)):
            rests = [rest for bits, rest in form if text and bits >> text[0] & 1]
            assert any(ex.matches(rest, text[1:]) for rest in rests) == (bool(text) and ex.matches(expr, text))
    for part in (ex.complement(expr), ex.concat(ex.literal(b"a"), ex.text_without(expr)), ex.multiple_of(7, 0)):
        rest = ex.derive(part, ord("a")) if ex.nodes[part][0] == "cat" else part
        assert ex.linear_form(rest) is None


def test_a_likely_text_is_found_only_where_the_language_has_a_text() -> None:
    patterns = ["a{3,5}", "[ab ]{1,4}", "(a|b)*a", "( |-){2}", "0[01]{0,3}", "aé?", "(ab){1,2}", "a|b|c", ".{0,4}"]
    letters = ("a", "b", " ", "-", "0", "1", "é", "c")
    texts = [text for n in range(5) for text in map("".join, itertools.product(letters, repeat=n))]
    ex = Expressions()
    exprs = [compile_regex(pattern, ex, anchored=True) for pattern in patterns]
    members = [{text for text in texts if re.fullmatch(pattern, text)} for pattern in patterns]
    for one, two, three in itertools.permutations(range(len(patterns)), 3):
        meet = ex.intersect(ex.text, exprs[one], ex.complement(exprs[two]), ex.complement(exprs[three]))
        either = ex.union(meet, ex.intersect(exprs[two], ex.text_without(exprs[one])))
        left = members[one] - members[two] - members[three]
        if left:
            assert ex.is_nonempty(meet)
        elif patterns[one] not in ("a{3,5}", "(a|b)*a"):  # these have longer texts too
            assert not ex.is_nonempty(meet)
        if left or members[two] - members[one]:
            assert ex.is_nonempty(either)


@pytest.mark.parametrize("head", ["a", "[ab]", "(?:a|b)+", "[é-ü]", "a{0,3}", "ab"])
def test_alternatives_with_one_beginning_are_that_and_what_may_follow(head: str) -> None:
    ex = Expressions()
    rests = ["a{0,2}b", "a{1,4}b", "[ab]*", "b", "(?:ba){0,3}"]
    begun = compile_regex(head, ex, anchored=True)
    for chosen in itertools.combinations(rests, 3):
        parts = [compile_regex(rest, ex, anchored=True) for rest in chosen]
        found = ex.union(*[ex.concat(begun, part) for part in parts])
        whole = re.compile(f"{head}(?:{'|'.join(f'(?:{rest})' for rest in chosen)})")
        for length in range(6):
            for text in map("".join, itertools.product("abé", repeat=length)):
                assert ex.matches(found, text.encode()) == bool(whole.fullmatch(text)), (chosen, text)


def test_long_texts_that_are_no_text_are_none() -> None:
    ex = Expressions()
    assert not ex.is_nonempty(ex.intersect(ex.repeat(ex.any_char, 2, None), ex.complement(ex.text)))
    assert ex.is_nonempty(ex.intersect(ex.repeat(ex.any_char, 2, None), ex.complement(ex.literal(b"ab"))))


@pytest.mark.parametrize(
    "pattern", ["(a{9}){0,4}", "(ab|c{7}){2,5}", "a{2,4}(b{10}c{0,8}){0,3}x", "(a{6}|a{20})(b{7}){0,2}", "(a{3}){2,}"]
)
def test_a_language_has_a_text_of_a_bounded_length_where_one_of_its_texts_fits(pattern: str) -> None:
    ex = Expressions()
    expr = compile_regex(pattern, ex, anchored=True)
    level, lengths = {expr}, set()
    for length in range(80):
        if any(ex.nullable[rest] for rest in level):
            lengths.add(length)
        level = {to for rest in level for _, _, to in ex.moves(rest)}
    for low in range(40):
        for high in (*range(low, low + 14), None):
            found = ex.is_nonempty(ex.intersect(expr, ex.repeat(ex.any_char, low, high)))
            assert found == any(low <= n and (high is None or n <= high) for n in lengths), (low, high)


def test_the_texts_of_a_finite_language_are_listed_each_once() -> None:
    ex = Expressions(np.array([b != ord("c") for b in range(256)]))
    found = ex.texts(compile_regex("[a-d]{0,2}|é|a(b|bd)?", ex, anchored=True))
    assert len(found) == len(set(found)) == 1 + 3 + 9 + 1 + 1
    assert {b"", b"dd", "é".encode(), b"abd"} < set(found) and ex.texts(NOTHING) == []
