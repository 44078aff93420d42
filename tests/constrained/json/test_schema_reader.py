# ruff: noqa: E501
import json
from typing import Any

import pytest
from phloem.constrained import Vocabulary, compile

from ..conftest import as_json, takes


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 2]),
        ({"definitions": {"x": {"type": "string"}}, "properties": {"a": {"$ref": "#/definitions/x"}}}, {"a": ""}, {"a": 1}),
        ({"dependencies": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
        ({"dependencies": {"a": {"properties": {"c": {"type": "null"}}}}}, {"a": 1, "c": None}, {"a": 1, "c": 1}),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/x", "maximum": 1, "x": {"type": "integer"}}, 5, "a"),
    ],
)  # fmt: skip
def test_keywords_of_older_drafts(vocabulary: Vocabulary, schema: Any, good: Any, bad: Any) -> None:
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    assert takes(grammar, as_json(good)) and not takes(grammar, as_json(bad))


UNEVALUATED: list[Any] = [
    {"$defs": {"t": {"properties": {"a": True}}}, "$ref": "#/$defs/t", "unevaluatedProperties": False},
    {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "else": {"properties": {"b": True}}, "unevaluatedProperties": False},
    {"dependentSchemas": {"a": {"properties": {"a": True, "b": True}}}, "unevaluatedProperties": False},
    {"patternProperties": {"^a": True}, "unevaluatedProperties": {"type": "null"}},
    {"not": {"required": ["a"], "properties": {"b": {"const": 1}}}, "unevaluatedProperties": {"type": "null"}},
    {"anyOf": [{"prefixItems": [True]}, {"prefixItems": [True, {"const": 1}]}], "unevaluatedItems": False},
    {"contains": {"const": "a"}, "unevaluatedItems": {"type": "integer"}},
    {"if": {"prefixItems": [{"const": 1}]}, "then": {"items": True}, "unevaluatedItems": False},
]  # fmt: skip
VALUES = [
    {},
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {"a": 1, "b": 1},
    {"a": None},
    {"c": None},
    [],
    [1],
    [2],
    ["a", 1],
    [1, 1],
    [1, "a", 2],
    [2, 2],
]


@pytest.mark.parametrize("schema", UNEVALUATED, ids=lambda schema: json.dumps(schema)[:60])
def test_unevaluated_items_and_properties_are_those_of_the_reference(vocabulary: Vocabulary, schema: Any) -> None:
    valid = pytest.importorskip("jsonschema").Draft202012Validator(schema).is_valid
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    assert [takes(grammar, as_json(value)) for value in VALUES] == [valid(value) for value in VALUES]
