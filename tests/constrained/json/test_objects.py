import json
import random
from typing import Any

import pytest
from phloem.constrained import GrammarError, GrammarTooComplex, Vocabulary, compile

from ..conftest import reachable, takes

jsonschema = pytest.importorskip("jsonschema")


def test_schema_order_is_the_order_of_properties(vocabulary: Vocabulary) -> None:
    schema = json.dumps({"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a"]})
    grammar = compile("json_schema", schema, vocabulary)
    assert takes(grammar, '{"b": 1, "a": 2, "more": 3}') and takes(grammar, '{"a": 2}')
    assert not takes(grammar, '{"a": 1, "b": 2}')


@pytest.mark.parametrize("order", ["any", "schema"])
@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("{}", False),
        ('{"a":1}', True),
        ('{"a":1,}', False),
        ('{,"a":1}', False),
        ('{"a":1 "c":1}', False),
        ('{"a":1,"a":1}', False),
        ('{"a":1,"x1":2}', True),
        ('{"a":1,"x1":"2"}', False),
        ('{"a":1,"c":"2"}', True),
        ('{"a":1,"c":2}', False),
        ('{"a":1,"b":1,"c":""}', False),
    ],
)
def test_objects_are_taken_with_their_properties_alone(
    vocabulary: Vocabulary, order: str, text: str, valid: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 1}},
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
        "required": ["a"],
        "maxProperties": 2,
    }
    assert takes(compile("json_schema", json.dumps(schema), vocabulary, property_order=order), text) == valid


INTEGER: dict[str, Any] = {"type": "integer"}
TWO: dict[str, Any] = {"type": "object", "minProperties": 2}
THREE = TWO | {"minProperties": 3}
CLOSED = {"additionalProperties": False}
FOUR = {"patternProperties": {"^[ab]{2}$": INTEGER}} | CLOSED
SHORT = {"maxProperties": 2, "propertyNames": {"pattern": "^[ab]{1,2}$"}}
TEXTS = {"type": "array", "uniqueItems": True, "items": {"type": "string"}, "minItems": 1}
OBJECT = {"type": "object", "additionalProperties": INTEGER}
NAMED_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
INTEGER_OR_A = {"enum": [1, 2, "a"]}
COUNTED: list[dict[str, Any]] = [
    TWO,
    TWO | OBJECT,
    TWO | {"propertyNames": {"maxLength": 1}, "additionalProperties": {"enum": [1, "a"]}},
    THREE | {"maxProperties": 3, "additionalProperties": {"enum": [1, "a"]}},
    THREE | {"properties": {"a": INTEGER, "aa": INTEGER}, "required": ["a"], "additionalProperties": TWO},
    TWO | {"patternProperties": {"^[ab]$": INTEGER}} | CLOSED,
    TWO | {"minProperties": 4} | FOUR,
    THREE | {"properties": {"x": INTEGER}, "patternProperties": {"^[ab]$": INTEGER}} | CLOSED,
    THREE | {"patternProperties": {"^[ab]$": INTEGER, "^[bc]$": {"minimum": 0}}} | CLOSED,
    TWO | {"patternProperties": {"^\n$|^a$": INTEGER}} | CLOSED,
    TWO | {"additionalProperties": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    TWO | {"additionalProperties": TEXTS},
    {"type": "array", "minItems": 1, "items": TWO | {"additionalProperties": {"type": "array", "items": TWO}}},
    {"type": "array", "minItems": 2, "uniqueItems": True, "items": TWO | SHORT},
    {"type": "array", "minItems": 1, "contains": TWO, "items": OBJECT},
    OBJECT | {"not": {"maxProperties": 1}},
    {"oneOf": [{"type": "object", "maxProperties": 1}, THREE | OBJECT]},
    OBJECT | {"if": {"maxProperties": 2}, "then": {"required": ["a"]}},
    {"anyOf": [TWO | {"patternProperties": {"^a": INTEGER}} | CLOSED, TWO | {"required": ["b"]}]},
    {"type": "object", "not": NAMED_TEXTS},
    {"type": "object", "not": {"patternProperties": {"^[ab]$": {"type": "string"}}}},
    {"type": "object", "oneOf": [{"additionalProperties": INTEGER_OR_A}, {"additionalProperties": {"enum": [1, "b"]}}]},
    {"type": "object", "if": NAMED_TEXTS, "then": {"required": ["b"]}, "else": {"maxProperties": 2}},
    {
        "type": "object",
        "anyOf": [{"patternProperties": {"^a": {"type": "string"}}}, {}],
        "unevaluatedProperties": INTEGER_OR_A,
    },
    {"type": "array", "contains": NAMED_TEXTS, "maxContains": 1, "items": {"type": "object"}, "minItems": 2},
]
TOKENS = [
    b'"a"', b'"a":', b' "a":', b'"ab":1', b'{"a":1,"a":', b'{"a":1,"b":', b'{"a":1,', b'{"', b',"a":', b', "a',
    b'1,"a"', b'":1,"a":', b'a":', b'a"', b"ab", b'b"', b'":', b'": ', b'","', b'","a', b'"},{"a":1,"a"',
    b'},{"a":1,"a":', b'}, "a":', b'],"a"', b"1}", b'": {"a": 1, "a":', b'[{"a":1,"a":1', b"\\n", b"a\\", b'": 1, "',
    b"aa", b'1,"a":1,"', b'"":1', b'":{"', b'": "a", "a"', b'a, "b": 1',
]  # fmt: skip
OPTIONS = ({"whitespace": "compact"}, {}, {"property_order": "any", "whitespace": "flexible"})


@pytest.fixture(scope="module")
def tokens_of_names() -> Vocabulary:
    """Every byte, and tokens that hold a name, end one, or cross from one property into another."""
    tokens = [*(bytes([b]) for b in range(256)), *TOKENS, b"</s>"]
    return Vocabulary(tokens, {len(tokens) - 1}, len(tokens) - 1)


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        (TWO, '{"a":1,"ab":2,"a":3}', True),  # two differ
        (TWO, '{"ab":1,"a":2}', True),
        (TWO, '{"a":{"a":"a\\",","a":1', False),
        (TWO, '{"a":{"a":"\\"a"},"b":[{"a":1}]}', True),
        (TWO, '{"\\n":1,"\\n"', False),
        (TWO | {"properties": {"a": {}}}, '{"a":1,"b":2,"b":3}', True),
        (THREE, '{"a":{"b":"","c":["",{"a":""}]},"b":["a","b"],"a"', False),
        (THREE | {"properties": {"a": {}}}, '{"a":1,"b":2,"b"', False),
        (TWO | {"additionalProperties": TWO}, '{"a":{"a":1,"b":2},"b":{"c":1,"c"', False),
        (TWO | {"additionalProperties": TWO}, '{"a":{"a":1,"b":2},"b":{"a":1,"b":2}}', True),
        ({"type": "array", "items": TWO}, '[{"a":1,"b":2},{"a":1,"b":2},{"a":1,"a"', False),
        ({"type": "array", "items": TWO, "uniqueItems": True}, '[{"a":1,"b":2},{"b":2,"a":1}', False),
        ({"type": "object", "not": {"maxProperties": 1}}, '{"a":1,"a"', False),
        ({"contains": TWO, "type": "array"}, '[{"a":1,"a"', False),
        ({"type": "object", "minProperties": 1}, '{"a":1,"a":2}', True),  # the count is met
        ({"type": "object", "maxProperties": 2}, '{"a":1,"a":2}', True),
        ({"type": "object", "not": OBJECT}, '{"a":"x","a"', False),  # the last value would count
        ({"type": "object", "not": OBJECT}, '{"a":1,"b":"x"}', True),
        ({"type": "object", "not": {"patternProperties": {"^a": INTEGER}}}, '{"b":1,"a1":"","b"', False),
        ({"type": "object", "not": {"additionalProperties": False}}, '{"a":1,"a":2}', True),  # any value breaks it
        ({"type": "object", "anyOf": [OBJECT, {"additionalProperties": {"type": "string"}}]}, '{"a":1,"a":2}', True),
    ],
)
def test_names_differ_where_properties_are_counted_or_a_value_has_to_be_wrong(
    vocabulary: Vocabulary, schema: dict[str, Any], text: str, valid: bool
) -> None:
    grammar = compile("json_schema", json.dumps(schema), vocabulary, whitespace="compact", property_order="any")
    assert takes(grammar, text) == valid
    matcher = grammar.matcher()
    assert all(matcher.accept(byte) for byte in text[:-1].encode())  # it is refused no earlier


def test_a_name_is_not_begun_where_all_that_it_may_become_are_written(vocabulary: Vocabulary) -> None:
    matcher = compile("json_schema", json.dumps(THREE | FOUR), vocabulary, whitespace="compact").matcher()
    for byte in b'{"ab":1,"aa":2,"':
        assert matcher.accept(byte)
    assert [t for t in reachable(matcher) if t < 256] == [ord("b")]
    twin = matcher.clone()
    assert not twin.accept(ord("a")) and matcher.accept(ord("b")) and matcher.accept(ord("a"))
    matcher.rollback(len(b',"ba'))
    for byte in b',"bb":2,"a':  # three differ: the fourth may be any
        assert matcher.accept(byte), matcher.error


def test_the_names_of_a_small_class_are_counted(vocabulary: Vocabulary) -> None:
    """Two names that match the pattern are not enough for three properties."""
    few = THREE | {"patternProperties": {"^[ab]$": INTEGER}} | CLOSED
    with pytest.raises(GrammarError, match="no value satisfies the schema"):
        compile("json_schema", json.dumps(few), vocabulary)
    grammar = compile("json_schema", json.dumps(few | {"properties": {"x": INTEGER}}), vocabulary)
    assert takes(grammar, '{"x": 1, "a": 2, "b": 3}') and not takes(grammar, '{"a": 1, "b": 2}')
    many = few | {"minProperties": 20_000, "patternProperties": {"^[a-k][0-9]{3}$": INTEGER}}
    with pytest.raises(GrammarTooComplex, match="minProperties 20,000 where a pattern has 11,000 names"):
        compile("json_schema", json.dumps(many), vocabulary)


def test_an_object_may_ask_for_all_names_of_a_class(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "minProperties": 100, "propertyNames": {"pattern": "^[0-9]{2}$"}}
    grammar = compile(
        "json_schema", json.dumps(schema | {"additionalProperties": INTEGER}), vocabulary, whitespace="compact"
    )
    ending = grammar.endings.of(grammar.start)
    assert ending is not None and json.loads(ending.word).keys() == {f"{n:02}" for n in range(100)}


@pytest.mark.parametrize("at", range(len(COUNTED)))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masks_of_counted_properties_are_the_tokens_that_are_taken(
    tokens_of_names: Vocabulary, at: int, options: dict[str, Any]
) -> None:
    """Random texts, every second one within a limit of tokens: every token is tried, at once and byte by byte."""
    grammar = compile("json_schema", json.dumps(COUNTED[at]), tokens_of_names, **options)
    validator = jsonschema.Draft202012Validator(COUNTED[at])
    eos, machine, least = tokens_of_names.eos, grammar.machine, grammar.least_tokens
    assert least is not None
    for seed in range(4):
        rng = random.Random(f"{at}/{seed}")
        most = least + rng.choice([0, 1, 3, 20])
        free, matcher = grammar.matcher(), grammar.matcher(max_tokens=most) if seed % 2 else grammar.matcher()
        text = b""
        for _ in range(most if seed % 2 else 25):
            allowed = set(reachable(free)) - {eos}
            for token in range(eos):
                after, bytewise = machine.advance(free.state, token), free.state
                for byte in tokens_of_names.tokens[token]:
                    bytewise = machine.advance_bytes(bytewise, bytes([byte])) if bytewise >= 0 else -1
                assert after == bytewise and (after >= 0) == (token in allowed), (text, tokens_of_names.tokens[token])
            choices = list(reachable(matcher))
            weights = [4 if t >= 256 else 2 if chr(t) in 'ab"1,:{}[] ' else 0.05 for t in choices]
            (token,) = rng.choices(choices, weights)
            assert matcher.accept(token), matcher.error
            if token == eos:
                break
            assert free.accept(token)
            text += tokens_of_names.tokens[token]
        if not seed % 2 and not matcher.is_finished():
            ending = grammar.endings.of(matcher.state)
            assert ending is not None, text
            text += ending.word
        assert validator.is_valid(json.loads(text)), text
