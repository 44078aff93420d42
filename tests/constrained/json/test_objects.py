import json

import pytest
from phloem.constrained import Vocabulary, compile

from ..conftest import takes


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
