import json
import random
import re
from decimal import Decimal
from itertools import product
from typing import Any

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.json.json_schema import Schemas

from ..conftest import takes

jsonschema = pytest.importorskip("jsonschema")


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
        ({"type": "array", "maxItems": 1, "items": {"type": "boolean"}}, 3),
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
        ({"type": "array", "maxItems": 4, "items": {"type": "boolean"}}, 31),
        ({"type": "array", "items": {"const": 1}}, 50),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, 16),
        ({"type": "array", "minItems": 60, "items": {"type": "integer"}, "uniqueItems": True}, 50),
        ({"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, 2, 3]}], "items": False}, 9),
        ({"anyOf": [{"type": "array", "maxItems": n, "items": {"type": "boolean"}} for n in (1, 2)]}, 7),
        ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {}}, "required": ["a"]}, 50),
        (
            {"type": "object", "properties": {n: {"type": "boolean"} for n in "abc"}, "additionalProperties": False},
            27,
        ),
        ({"type": "object", "additionalProperties": {"const": 1}, "propertyNames": {"pattern": "^[ab]$"}}, 4),
        ({"type": "object", "additionalProperties": {"const": 1}, "propertyNames": {"pattern": "^a+$"}}, 50),
    ],
)
def test_values_are_counted_from_below(schemas: Schemas, schema: Any, count: int) -> None:
    assert schemas.values.num_values(formula(schemas, schema), 50) == count


ITEMS = (True, False, "x", 1)
INNER: list[Any] = [{"type": "boolean"}, {"enum": ["x", 1]}, {"const": "x"}, {"enum": list(ITEMS)}, False]
LISTS = [list(items) for n in range(4) for items in product(ITEMS, repeat=n)]
OBJECTS = [
    {name: value for name, value in zip("abc", chosen, strict=True) if value is not None}
    for chosen in product((None, *ITEMS), repeat=3)
]


def counted(schemas: Schemas, schema: Any) -> int:
    try:
        found = formula(schemas, schema)
    except GrammarError as error:
        assert re.search("no value satisfies the schema|fewer than . different values", str(error))
        return 0
    return schemas.values.num_values(found, 1000)


def array_of(r: random.Random) -> dict[str, Any]:
    made = {"type": "array", "items": r.choice(INNER), "minItems": r.randrange(3), "maxItems": r.randrange(1, 4)}
    if r.random() < 0.5:
        made["prefixItems"] = r.choices(INNER, k=r.randrange(1, 3))
    return made


def object_of(r: random.Random) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: r.choice(INNER) for name in "abc"},
        "required": r.sample("abc", r.randrange(3)),
        "additionalProperties": False,
        "minProperties": r.randrange(3),
        "maxProperties": r.randrange(1, 4),
    }


@pytest.mark.parametrize("seed", range(60))
def test_arrays_and_objects_are_counted_as_they_are_when_listed(schemas: Schemas, seed: int) -> None:
    r = random.Random(seed)
    schema = r.choice([array_of, object_of])(r)
    universe: list[Any] = [*(LISTS if schema["type"] == "array" else OBJECTS)]
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    count = sum(map(is_valid, universe))
    assert counted(schemas, schema) == count
    if schema["type"] == "array":  # each item leaves out those before it: from below, where they are not all alike
        is_valid = jsonschema.Draft202012Validator(schema | {"uniqueItems": True}).is_valid
        found = counted(schemas, schema | {"uniqueItems": True})
        count = sum(map(is_valid, universe))
        assert found <= count
        assert "prefixItems" in schema or found == count


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
