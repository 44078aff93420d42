import json
import random

import numpy as np
import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.json import scalars, text_automaton
from phloem.constrained.json.text_automaton import TextParts, Unsuitable, byte_classes, leading_on, reached
from phloem.constrained.regex_syntax import compile_regex

PATTERNS = ["(a|ab)*c", "[ab]{2,3}", "a.*b", "é+|x", "(?!ab)[a-c]+", ""]


def texts(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choice("aabcéx") for _ in range(rng.randrange(6))) for _ in range(count)]


def test_a_string_is_in_the_languages_that_its_state_says() -> None:
    ex, rng = Expressions(), random.Random(0)
    exprs = [compile_regex(pattern, ex, anchored=True) for pattern in PATTERNS]
    parts = TextParts(ex)
    conditions = [parts.add(expr) for expr in exprs]
    tags = {b"ab": 3, b"a": 0, "é".encode(): 1}
    words = parts.add_tagged(tags)
    found = parts.automaton([])
    for text in ["", *texts(rng, 300)]:
        state = 0
        for byte in text.encode():
            state = int(found.after[state, found.class_of[byte]])
        for expr, condition in zip(exprs, conditions, strict=True):
            assert scalars.evaluated(condition, found.has)[state] == ex.matches(expr, text.encode()), text
        assert found.has[words, state] == (text.encode() in tags)
        assert found.tags[state] == tags.get(text.encode(), -1)
    assert ex.matches(parts.rest(0, found.sets[found.after[0, found.class_of[ord("a")]]]), b"bc")


def test_a_state_that_no_required_language_goes_on_from_is_left_out() -> None:
    ex = Expressions()
    parts = TextParts(ex)
    numbers = [parts.add(ex.literal(word)) for word in (b"ab", b"ac")]
    found = parts.automaton(numbers)
    first = int(found.after[0, found.class_of[ord("a")]])
    assert first > 0 and (found.after[0] >= 0).sum() == 1 and (found.after[first] == -1).all()
    is_end = (found.has[numbers[0]] & found.has[numbers[1]]).astype(np.uint8)
    assert not leading_on(found.after, is_end).any()
    alone = parts.automaton([numbers[0]])
    assert alone.after[first, alone.class_of[ord("b")]] > 0


def test_languages_of_other_kinds_and_large_ones_are_unsuitable(monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions()
    for expr in (ex.multiple_of(7, 0), ex.repeat(ex.any_char, 0, 2_000)):
        with pytest.raises(Unsuitable):
            TextParts(ex).add(expr)
    with pytest.raises(Unsuitable):
        TextParts(ex).add_tagged({b"%04d" % i: i for i in range(2_000)})
    parts = TextParts(ex)
    parts.add(compile_regex("(a|b)*a(a|b){7}", ex, anchored=True))
    assert len(parts.automaton([]).sets) == 2**8 + 2
    for limit in ("MAX_STATES", "MAX_WORK"):
        with monkeypatch.context() as patch:
            patch.setattr(text_automaton, limit, 256)
            with pytest.raises(Unsuitable):
                parts.automaton([])


def test_bytes_of_a_class_are_in_the_same_sets() -> None:
    members = np.zeros((2, 256), np.uint8)
    members[0, 10:30], members[1, 20:40] = 1, 1
    class_of, classes = byte_classes(members)
    assert classes.shape == (2, 4) and (classes[:, class_of] == members).all()


def test_only_states_before_an_exit_are_reached() -> None:
    after = np.full((4, 256), -1, np.int32)
    after[0, 5], after[1, 7], after[0, 9] = 1, 2, 3
    alive, is_exit = np.array([1, 1, 1, 0], np.uint8), np.array([0, 1, 0, 0], np.uint8)
    assert reached(after, alive, is_exit).tolist() == [1, 1, 0, 0]


STRINGS = [
    {"pattern": "^(a|ab)*c$"},
    {"pattern": "foo"},
    {"pattern": '^["\\\\\\n\\u0001-\\u0003a]{2,3}$'},
    {"pattern": "^[^/]*/.*$"},
    {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    {"format": "email"},
    {"format": "uri"},
    {"format": "ipv6"},
    {"format": "uri", "pattern": "^a:"},
    {"allOf": [{"pattern": "^[a-c]+$"}, {"pattern": "^(..)*$"}]},
    {"pattern": "^[^b]*$", "not": {"pattern": "^a\\\\*c"}},
    {"allOf": [{"pattern": '^[^/]*"x'}, {"pattern": "^(.a)*"}]},
    {"anyOf": [{"pattern": "^[a-c]+$"}, {"format": "ipv4"}]},
]
OBJECTS = [
    {"patternProperties": {"^x-": {"type": "null"}}, "properties": {"xy": {"type": "null"}, "a": {"type": "null"}}},
    {"patternProperties": {"^a.*b$": {}, "c": {"type": "null"}}, "additionalProperties": False, "required": ["acb"]},
    {"patternProperties": {"b": {"type": "null"}}, "properties": {'a"': {}, "\t": {"type": "null"}, "é": {}}},
    {"propertyNames": {"pattern": "^[ab]*$"}, "properties": {"a": {"type": "null"}, "ab": {}}},
    {"if": {"properties": {"a": {"pattern": "^b"}}, "required": ["a"]}, "then": {"required": ["b"]}},
]


@pytest.mark.parametrize("schema", STRINGS + OBJECTS, ids=lambda schema: json.dumps(schema)[:40])
def test_masks_are_those_of_states_that_are_made_one_by_one(
    vocabulary: Vocabulary, schema: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = []
    for most in (-1, scalars.MOST_COUNTED_WHOLE):
        monkeypatch.setattr(scalars, "MOST_COUNTED_WHOLE", most)
        fresh = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
        text = json.dumps({"type": "string" if schema in STRINGS else "object", **schema})
        grammars.append(compile("json_schema", text, fresh, property_order="any"))
    rng = random.Random(1)
    preferred = {vocabulary.tokens.index(c.encode()) for c in '{}":,abcx-\\u0/@.\n'}
    for _ in range(12):
        matchers = [grammar.matcher() for grammar in grammars]
        for _ in range(24):
            one, other = (matcher.mask() for matcher in matchers)
            assert (one == other).all()
            allowed = np.flatnonzero(np.unpackbits(one.view(np.uint8), bitorder="little")).tolist()
            liked = [token for token in allowed if token in preferred]
            token = rng.choice(liked if liked and rng.random() < 0.7 else allowed)
            assert all(matcher.accept(token) for matcher in matchers)
            if token == vocabulary.eos:
                break
