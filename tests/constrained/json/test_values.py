import json
from decimal import Decimal
from typing import Any

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.json.json_schema import Schemas

from ..conftest import takes


def test_answers_of_too_many_cases_are_refused_with_their_number(vocabulary: Vocabulary) -> None:
    branches = [{"contains": {"required": [c]}, "maxContains": 1} for c in "abcdefghijkl"]
    schema = json.dumps({"type": "array", "items": {"type": "object"}, "allOf": branches})
    with pytest.raises(GrammarError, match="asked 13 schemas at once, .* more than 256 cases"):
        compile("json_schema", schema, vocabulary)


def formula(schemas: Schemas, schema: Any) -> int:
    return schemas.compile(json.dumps(schema), check_after=False)[0]


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"enum": [1, 2.0, 2, "a", None]}, 4),
        ({"type": "boolean"}, 2),
        ({"type": "integer", "minimum": 3, "maximum": 5}, 3),
        ({"type": "string", "pattern": "^[ab]{1,2}$"}, 6),
        ({"type": "array", "maxItems": 1, "items": {"type": "boolean"}}, 2),
        (
            {
                "type": "object",
                "properties": {"a": {"enum": [1, 2, 3]}},
                "required": ["a"],
                "additionalProperties": False,
            },
            3,
        ),
        ({"type": "string"}, 50),
    ],
)
def test_values_are_counted_from_below(schemas: Schemas, schema: Any, count: int) -> None:
    assert schemas.values.num_values(formula(schemas, schema), 50) == count


def test_a_schema_that_requires_a_value_of_itself_has_none() -> None:
    """A schema that needs a value of itself has none; with a way out it has."""
    vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b"</s>"], {256}, 256)
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/b"}},
               "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}  # fmt: skip
    with pytest.raises(GrammarError, match="no value satisfies the schema"):
        compile("json_schema", json.dumps(endless), vocabulary)
    endless["$defs"]["b"]["required"] = []
    assert takes(compile("json_schema", json.dumps(endless), vocabulary), '[{"a": [{}]}]')


def test_the_values_of_each_kind_are_counted_and_lists_are_found(schemas: Schemas) -> None:
    values = schemas.values
    for schema, num, listed in [
        ({"type": ["string", "null"]}, 9, None),
        ({"enum": [1, "a", "b"]}, 1, ("a", "b", Decimal(1))),
        ({"type": "integer", "minimum": -1, "maximum": 1}, 3, (Decimal(0), Decimal(1), Decimal(-1))),
        ({"type": "integer", "minimum": 0, "maximum": 999}, 9, None),
        ({"type": "number", "minimum": 0, "maximum": 1}, 9, None),
        ({"enum": ["a", "b", True]}, 2, ("a", "b", True)),
        ({"anyOf": [{"const": "a"}, {"const": "b"}, {"type": "boolean"}]}, 2, ("a", "b", True, False)),
        ({"type": "null"}, 0, (None,)),
        ({"enum": ["a", []]}, 1, None),
        (True, 9, None),
    ]:
        found = formula(schemas, schema)
        assert (values.num_of_each_kind(found, 9), values.listed(found)) == (num, listed), schema


def test_formulas_without_values_are_found_without_looking_into_objects(schemas: Schemas) -> None:
    values, conjunction = schemas.values, schemas.formulas.conjunction
    assert values.is_surely_impossible(conjunction([values.constant(1), values.constant(2)]))
    assert not values.is_surely_impossible(
        conjunction([formula(schemas, {"type": "object"}), values.constant({"a": 1})])
    )
