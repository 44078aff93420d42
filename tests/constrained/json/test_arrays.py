# ruff: noqa: E501
"""Arrays, mainly ``uniqueItems``: no item repeats another, whichever tokens spell the items."""

import json
import random
from typing import Any

import numpy as np
import pytest
from phloem.constrained import Compiler, GrammarError, GrammarSpec, GrammarTooComplex, Matcher, Vocabulary, compile

from ..conftest import as_json, is_set, mismatches, takes

jsonschema = pytest.importorskip("jsonschema")

# Tokens that end an item and go into the next one, or hold items whole.
CROSSING = [
    b'","', b'", "', b'",', b'"]', b",1", b"1,1", b"1,2", b',"', b'"a","a"', b'["a","b"', b"[1,1", b"[1,2]", b"],[",
    b"]]", b"},{", b"ab", b'","a', b",[", b'"],["', b"true,null", b'"b",', b"2,1,", b"0.5", b',""', b'"a":1', b',{"',
]  # fmt: skip
APART = Vocabulary([bytes([b]) for b in range(256)] + CROSSING + [b"</s>"], {256 + len(CROSSING)}, 256 + len(CROSSING))
STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
VALUES: list[Any] = [
    "a",
    "b",
    "ab",
    "",
    1,
    2,
    1.0,
    0.5,
    None,
    True,
    False,
    [],
    [1],
    [1, 1],
    {},
    {"a": 1},
    {"a": 1, "b": 2},
]
SCHEMAS: list[dict[str, Any]] = [
    STRINGS,
    {"uniqueItems": True},
    {"type": "array", "items": {"type": "string", "maxLength": 2}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"enum": ["a", "b", *range(30)]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "string", "pattern": "^[ab]{1,2}$"}, "uniqueItems": True, "maxItems": 7},
    {"type": "array", "items": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 1}, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "boolean"}], "uniqueItems": True},
    {"type": "array", "items": {"type": "object", "properties": {"a": {}, "b": {}}}, "uniqueItems": True},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "uniqueItems": True},
    {"type": "object", "properties": {"x": STRINGS, "y": {"uniqueItems": True}}, "required": ["x"]},
    {"type": "array", "items": STRINGS},
    {"anyOf": [{"type": "null"}, STRINGS]},
    {"$defs": {"t": STRINGS}, "allOf": [{"$ref": "#/$defs/t"}, {"maxItems": 3}]},
    {"anyOf": [STRINGS, {"type": "array", "items": {"type": "integer"}, "minItems": 2}]},
    {"anyOf": [{"properties": {"x": STRINGS}}, {"properties": {"y": {"uniqueItems": True}}, "required": ["y"]}]},
    {"oneOf": [{"properties": {"x": STRINGS, "k": {"const": k}}, "required": ["k"]} for k in "ab"]},
    {"properties": {"x": STRINGS}, "dependentSchemas": {"x": {"properties": {"y": {"uniqueItems": True}}}}},
    {"not": STRINGS},
    {"not": {"uniqueItems": True}, "type": "array", "maxItems": 3},
    {"not": {"uniqueItems": True}, "type": "array", "items": {"enum": ["a", "b", 1]}, "minItems": 1, "maxItems": 2},
    {"oneOf": [STRINGS, {"type": "array", "minItems": 2}]},
    {"oneOf": [{"uniqueItems": True}, {"type": "array", "maxItems": 3}]},
    {"oneOf": [{"type": "string"}, {**STRINGS, "items": {"enum": ["a", "b"]}}]},
    {"anyOf": [{"type": "array", "items": {"enum": ["a", 1]}, "uniqueItems": True}, {"maxItems": 2}]},
    {"if": STRINGS, "then": {"maxItems": 2}, "type": "array"},
    {"if": {"uniqueItems": True}, "then": {"minItems": 2}, "else": {"maxItems": 2}, "type": "array"},
    {**STRINGS, "contains": {"const": "a"}},
    {"if": {"type": "array", "contains": {"const": 1}}, "then": {"not": {"uniqueItems": True}}},
    {"type": "array", "uniqueItems": True, "contains": {"type": "integer"}, "maxContains": 1},
    {"type": "array", "items": STRINGS, "uniqueItems": True},
    {"type": "array", "items": {"not": STRINGS}},
    {"type": "array", "contains": {"type": "array", "uniqueItems": True, "minItems": 1}},
    {"type": "object", "properties": {"x": STRINGS}, "not": {"properties": {"y": {"const": 1}}}},
    {"type": "object", "properties": {"x": {"items": {"enum": ["a", "b"]}, "uniqueItems": True}}},
    {"type": "array", "items": {"enum": ["a", "b", "ab", "", None, True]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "prefixItems": [{"enum": ["a", "b"]}, {"enum": ["b", "ab"]}], "items": False, "uniqueItems": True},
]  # fmt: skip


def instances(rng: random.Random, schema: dict[str, Any], *, in_order: bool) -> Any:
    def array() -> list[Any]:
        found = rng.choices(VALUES, k=rng.randrange(4))
        return [*found, found[0]] if found and rng.random() < 0.3 else found

    if "properties" in json.dumps(schema) and "items" not in schema:
        found = {"k": rng.choice("abc"), "x": array(), "y": array()}
        names = rng.sample("xky", rng.randrange(1, 4))
        if in_order:  # those that are listed first
            names.sort(key="xky".index if "oneOf" in schema else "xyk".index)
        return {name: found[name] for name in names}
    return [array(), array()] if schema.get("items") is STRINGS else array()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
@pytest.mark.parametrize("order", ["any", "schema"])
def test_arrays_are_taken_as_the_reference_judges_them(schema: dict[str, Any], order: str) -> None:
    rng = random.Random(3)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    grammar = compile("json_schema", json.dumps(schema), APART, property_order=order, numbers="any")
    for _ in range(40):
        value = instances(rng, schema, in_order=order == "schema")
        assert takes(grammar, as_json(value), rng) == valid(value), value
    compact = compile("json_schema", json.dumps(schema), APART, property_order=order, whitespace="compact")
    assert mismatches(compact, lambda text: valid(json.loads(text)), walks=6) == []


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_a_token_is_allowed_exactly_where_its_bytes_are(schema: dict[str, Any]) -> None:
    single = Vocabulary([bytes([b]) for b in range(256)] + [b"</s>"], {256}, 256)
    rng = random.Random(1)
    options = {"property_order": "any", "whitespace": "compact"}
    bytewise = Compiler(single).compile(GrammarSpec("json_schema", json.dumps(schema), options))
    grammar = compile("json_schema", json.dumps(schema), APART, **options)
    for _ in range(2):
        matcher, slow = grammar.matcher(), bytewise.matcher()
        for _ in range(25):
            mask = matcher.mask()
            for token, data in enumerate(CROSSING, start=256):
                ahead = slow.clone()
                by_bytes = all(is_set(ahead.mask(), byte) and ahead.accept(byte) for byte in data)
                assert is_set(mask, token) == by_bytes, (slow, data)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            likely = [t for t in allowed if t >= 256 or t in b'[]{}",:ab12']
            token = rng.choice(likely or allowed)
            assert matcher.accept(token)
            if token == APART.eos:
                break
            assert all(slow.accept(byte) for byte in APART.tokens[token])


def test_equal_items_are_found_however_they_are_spelled(vocabulary: Vocabulary) -> None:
    anything = compile("json_schema", '{"uniqueItems": true}', vocabulary, numbers="any")
    for text, is_valid in [
        ('["a", "\\u0061"]', False),
        ("[1, 1.0]", False),
        ("[1, true, 0, false, null, []]", True),
        ('[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', False),
        ("[[1, 2], [2, 1], [1, 2]]", False),
        ('["\\"", "\\\\", "\\"]"]', True),
        ('["1", 1, 1e0]', False),
    ]:
        assert takes(anything, text) == is_valid, text


def test_rollback_and_clones_keep_the_text_of_the_item_under_way(vocabulary: Vocabulary) -> None:
    matcher = compile("json_schema", json.dumps(STRINGS), vocabulary, whitespace="compact").matcher()
    for byte in b'["ab","a':
        assert matcher.accept(byte)
    twin = matcher.clone()
    assert not is_set(matcher.mask(), ord("b")) or (matcher.accept(ord("b")) and not is_set(matcher.mask(), ord('"')))
    assert is_set(twin.mask(), ord('"')) and twin.accept(ord('"')) and twin.accept(ord("]"))
    twin.rollback(3)
    assert twin.accept(ord("c")) and is_set(twin.mask(), ord('"'))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "prefixItems": [{"type": "string"}], "not": {"uniqueItems": True}},
        {"oneOf": [{"uniqueItems": True}, {"type": "array", "contains": {"const": 1}}]},
        {"not": {"type": "array", "uniqueItems": True, "contains": {"const": 1}}, "contains": {"const": 2}},
    ],
)
def test_repeats_that_cannot_be_followed_are_refused_with_their_place(
    vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    text = json.dumps({"type": "object", "properties": {"v": schema}})
    with pytest.raises(
        GrammarError, match=r'unsupported: uniqueItems where an array may have to repeat .*"check_after"'
    ) as caught:
        compile("json_schema", text, vocabulary)
    assert caught.value.where.startswith("#/properties/v")
    grammar = compile("json_schema", text, vocabulary, on_unsupported="check_after")
    assert grammar.unchecked and grammar.unchecked[0].startswith("uniqueItems")


def test_more_items_than_there_are_values_are_refused_with_their_number(vocabulary: Vocabulary) -> None:
    items = {"type": "integer", "minimum": 1, "maximum": 3}
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": 4}
    with pytest.raises(GrammarTooComplex, match="uniqueItems with minItems 4"):
        compile("json_schema", json.dumps(schema), vocabulary)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {
                "items": {
                    "type": "object",
                    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 3}, "b": {"enum": ["x", "y"]}},
                    "required": ["a", "b"],
                    "additionalProperties": False,
                },
                "minItems": 5,
            },
            json.dumps([{"a": a, "b": b} for a in (1, 2, 3) for b in "xy"]),
        ),
        (
            {"items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "minItems": 6},
            "[[], [true], [false], [true, true], [true, false], [false, true], [false, false]]",
        ),
        (
            {"prefixItems": [{"type": "boolean"}, {"type": "integer"}], "items": {"type": "integer"}, "minItems": 4},
            "[true, 1, 2, 3]",
        ),
    ],
)
def test_all_values_of_items_can_be_written_and_none_twice(
    vocabulary: Vocabulary, schema: dict[str, Any], text: str
) -> None:
    schema = {"type": "array", "uniqueItems": True, **schema}
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    assert takes(grammar, text)
    items = json.loads(text)
    assert not takes(grammar, json.dumps([*items, items[1]]))
    assert not takes(grammar, json.dumps(items[: schema["minItems"] - 1]))


def test_grammars_with_and_without_unique_items_use_different_machines(vocabulary: Vocabulary) -> None:
    unique = compile("json_schema", json.dumps(STRINGS), vocabulary)
    plain = compile("json_schema", json.dumps({"type": "array", "items": {"type": "string"}}), vocabulary)
    assert unique.machine.item_readers and not plain.machine.item_readers


def test_a_comma_is_refused_where_no_value_is_left() -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[ab]$"}, "uniqueItems": True}
    tokens = [*(bytes([b]) for b in range(256)), b',"b",', b',"b"]', b'["a","b",', b'b",', b'a","b",', b"</s>"]
    vocabulary = Vocabulary(tokens, {261}, 261)
    matcher = compile("json_schema", json.dumps(schema), vocabulary, whitespace="compact").matcher()
    assert not is_set(matcher.mask(), 258) and matcher.accept(ord("[")) and matcher.accept(ord('"'))
    assert not is_set(matcher.mask(), 260) and is_set(matcher.mask(), 259)
    assert matcher.accept(ord("a")) and matcher.accept(ord('"'))
    assert not is_set(matcher.mask(), 256) and is_set(matcher.mask(), 257)
    assert matcher.accept(ord(",")) and matcher.accept(ord('"'))
    assert not is_set(matcher.mask(), 259) and is_set(matcher.mask(), ord("b"))


@pytest.mark.parametrize(
    ("items", "good", "bad"),
    [
        ({"enum": ["a", "ab", 1, None]}, [[], ["ab", "a"], [1, None, "a", "ab"]], [["a", "a"], [1, "a", 1], [1, "a", 1.0]]),
        ({"type": "boolean"}, [[True, False], [False]], [[True, True], [False, True, False]]),
        ({"const": "x"}, [["x"]], [["x", "x"]]),
        ({"enum": [1, True, 0, False]}, [[1, True], [False, 0, True]], [[True, True], [0, 0]]),
        ({"type": "integer", "minimum": -1, "maximum": 12}, [[12, 1, -1, 10], [0, 1.0]], [[1, 1.0], [0, -0.0], [11, 1, 11]]),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 1}, [[0.5, 1, 0.0]], [[0.5, 0.50], [0, 1, 0.0]]),
        ({"type": ["integer", "boolean", "null"], "minimum": 3, "maximum": 5}, [[None, 3, True, 5]], [[None, None], [4, 4]]),
    ],
)  # fmt: skip
def test_items_of_few_values_are_unique(vocabulary: Vocabulary, items: Any, good: list[Any], bad: list[Any]) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True}
    grammar = compile("json_schema", json.dumps(schema), vocabulary, numbers="any")
    assert not grammar.unchecked
    assert all(takes(grammar, as_json(value)) for value in good)
    assert not any(takes(grammar, as_json(value)) for value in bad)
    assert (
        mismatches(grammar, lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), walks=5)
        == []
    )


def test_numbers_of_a_list_are_told_apart_without_their_texts(vocabulary: Vocabulary) -> None:
    items = {"type": "integer", "minimum": 1, "maximum": 31}
    schema = json.dumps({"type": "array", "items": items, "uniqueItems": True})
    for numbers in ("canonical", "any"):
        matcher = compile("json_schema", schema, vocabulary, whitespace="compact", numbers=numbers).matcher()
        for byte in f"[{','.join(map(str, range(1, 31)))},3".encode():
            assert matcher.accept(byte)
        allowed = {byte for byte in range(256) if is_set(matcher.mask(), byte)}
        assert allowed == set(b"1") and matcher.accept(ord("1"))  # 31 is the only one left, without a comma after it
        assert not is_set(matcher.mask(), ord(",")) and is_set(matcher.mask(), ord("]"))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}, {"type": "integer"}]},
        {"anyOf": [{"items": {"$ref": "#"}, "uniqueItems": True}, {"type": "array", "maxItems": 2}]},
    ],
)
def test_unique_items_below_a_root_that_is_its_own_item(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    grammar = compile("json_schema", json.dumps(schema), vocabulary, whitespace="flexible", numbers="any")
    valid = jsonschema.Draft202012Validator(schema).is_valid
    texts = ["[1,2]", "[1,[2],3]", "[[1],[1]]", "[[1],[2, 1]]", "[[[]],[]]", "[[[],[]]]", "[[ 1 , 2 ] , [ 2 ],1 ]",
             "[[1,1],[1,1]]", "[[1,1],[1,1],3]", "[[[1],[1]],2,3]"]  # fmt: skip
    for text in texts:
        assert takes(grammar, text) == valid(json.loads(text)), text


def test_constants_with_unique_items_are_those_whose_items_differ(vocabulary: Vocabulary) -> None:
    schema = {"enum": [[1, 1.0], [1, True], [[2], [2]], [[2], [3]], "x"], "uniqueItems": True}
    grammar = compile("json_schema", json.dumps(schema), vocabulary, numbers="any")
    taken = [takes(grammar, as_json(value)) for value in schema["enum"]]
    assert taken == [False, True, False, True, True]
    with pytest.raises(GrammarError, match="no value satisfies the schema"):
        compile("json_schema", '{"const": [["a"], ["a"]], "uniqueItems": true}', vocabulary)


@pytest.mark.parametrize("style", ["neat", "flexible", "compact"])
@pytest.mark.parametrize(
    ("items", "text"),
    [
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, "[[ false ],[ false ,"),
        ({"type": "array", "items": {"type": "integer"}}, "[\n  [\n    1\n  ],\n  [\n    1\n  ,"),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, '[{ "a": true },{ "b": true },{ "a": true ,'),
    ],
)
def test_white_space_that_only_a_repeated_item_could_end_is_not_allowed(
    vocabulary: Vocabulary, items: dict[str, Any], text: str, style: str
) -> None:
    """In the style neat white space after a value leads to the closing bracket alone, whatever other grammars have."""
    schema = json.dumps({"type": "array", "items": items, "uniqueItems": True})
    compile("json_schema", schema, vocabulary, whitespace="flexible").matcher().mask()
    grammar = compile("json_schema", schema, vocabulary, whitespace=style)
    taken: list[int] = []

    def matcher() -> Matcher:
        found = grammar.matcher()
        assert all(map(found.accept, taken))
        return found

    for byte in text.encode():
        row = matcher().mask()
        for token in range(len(vocabulary)):
            if vocabulary.is_text[token]:
                assert matcher().accept(token) == is_set(row, token), (bytes(taken), vocabulary.tokens[token])
        if not is_set(row, byte):
            break
        taken.append(byte)
    assert (style == "flexible") == (len(taken) == len(text))
