"""Instances put in another order: a value refused for its order alone is distinguished from an invalid one."""

import json

import pytest
from phloem.benchmarks.reordered import is_order_alone
from phloem.constrained import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}, "c": {"items": {"$ref": "#/$defs/b"}}},
    "required": ["a"],
    "$defs": {"b": {"allOf": [{"properties": {"x": {}, "y": {"type": "null"}}}]}},
}


@pytest.mark.parametrize(
    ("value", "is_order"),
    [
        ({"b": {}, "a": 1}, True),
        ({"a": 1, "other": 2, "c": [{"y": None, "x": [1, {"z": "é"}]}]}, True),
        ({"b": {"y": None, "x": 1, "more": True}, "a": 1}, True),
        ({"b": {}}, False),
        ({"b": {"y": 1, "x": 1}, "a": 1}, False),
        ([{"a": 1}], False),
    ],
)
def test_order_is_the_reason_if_some_order_is_taken(value: object, is_order: bool) -> None:
    vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b""], special={256}, eos=256)
    options = {"property_order": "schema", "numbers": "any"}
    assert is_order_alone(vocabulary, json.dumps(SCHEMA), json.dumps(value), options) == is_order
