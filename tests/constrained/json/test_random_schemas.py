# ruff: noqa: E501
"""Random schemas of all keywords, with references: no value is judged other than by the reference validator."""

import json
import random
from typing import Any

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile

jsonschema = pytest.importorskip("jsonschema")

NAMES = ["a", "b", "foo", "x1", "é"]
ATOMS: list[Any] = [
    None, True, False, 0, 1, 2, -1, 2.5, 1.0, 10, 0.1, "", "a", "ab", "foo", "é", "2024", [], [1], [1, 1], ["a", "b"], {},
    {"a": 1}, {"b": []}, {"a": {"a": 1}}, [[]], [{}],
]  # fmt: skip
LEAVES: list[Any] = [
    True, False, {}, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "array"}, {"type": "object"},
    {"type": ["null", "boolean"]}, {"minimum": 1}, {"maximum": 2.5, "type": "number"}, {"exclusiveMinimum": 1}, {"multipleOf": 0.5},
    {"multipleOf": 2}, {"minLength": 1}, {"maxLength": 2}, {"pattern": "^a"}, {"pattern": "^[a-z]*$"}, {"maxItems": 1},
    {"minItems": 1}, {"minProperties": 1}, {"maxProperties": 1}, {"required": ["a"]}, {"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"},
]  # fmt: skip
# the parts that a schema can be made of; each is given a source of subschemas
PARTS: list[Any] = [
    lambda r, sub: {"type": r.choice(["object", "array", "string", ["object", "array"], ["object", "string", "null"]])},
    lambda r, sub: {"properties": {n: sub() for n in r.sample(NAMES, r.randrange(1, 4))}},
    lambda r, sub: {"additionalProperties": r.choice([False, sub()])},
    lambda r, sub: {"patternProperties": {p: sub() for p in r.sample(["^a", "o", "^.$", "1$"], r.randrange(1, 3))}},
    lambda r, sub: {"required": r.sample(NAMES, r.randrange(1, 3))},
    lambda r, sub: {"minProperties": 1, "maxProperties": r.randrange(1, 3)},
    lambda r, sub: {"propertyNames": r.choice([{"maxLength": 1}, {"enum": ["a", "b", "foo"]}, sub()])},
    lambda r, sub: {"dependentRequired": {r.choice(NAMES): r.sample(NAMES, 1)}},
    lambda r, sub: {"dependentSchemas": {r.choice(NAMES): sub()}},
    lambda r, sub: {"items": r.choice([False, sub(), sub()])},
    lambda r, sub: {"prefixItems": [sub() for _ in range(r.randrange(1, 3))]},
    lambda r, sub: {"contains": sub(), "minContains": r.randrange(3)},
    lambda r, sub: {"contains": sub(), "maxContains": r.randrange(1, 3)},
    lambda r, sub: {"minItems": r.randrange(2), "maxItems": r.randrange(1, 3)},
    lambda r, sub: {"uniqueItems": True},
    lambda r, sub: {r.choice(["anyOf", "oneOf", "allOf"]): [sub() for _ in range(r.randrange(1, 4))]},
    lambda r, sub: {"not": sub()},
    lambda r, sub: {"if": sub(), "then": sub(), "else": sub()},
    lambda r, sub: {"unevaluatedProperties": r.choice([False, False, sub()])},
    lambda r, sub: {"unevaluatedItems": r.choice([False, False, sub()])},
    lambda r, sub: {"$ref": r.choice(["#", "#/$defs/d0", "#/$defs/d1"])},
    lambda r, sub: {"enum": [random_value(r, 2), random_value(r, 2)]},
]
KNOWN_REFUSALS = (
    "unsupported: uniqueItems",
    "refers to itself without end",
    "uniqueItems with minItems",
    "references nest too deep",
    "uniqueItems where an array has to repeat an item",
)


def random_value(r: random.Random, depth: int) -> Any:
    kind = r.random()
    if depth == 0 or kind < 0.5:
        return r.choice(ATOMS)
    if kind < 0.72:
        return [random_value(r, depth - 1) for _ in range(r.randrange(4))]
    return {name: random_value(r, depth - 1) for name in r.sample(NAMES, r.randrange(4))}


def random_schema(r: random.Random, depth: int) -> Any:
    if depth == 0:
        return r.choice(LEAVES)
    made: dict[str, Any] = {}
    for part in r.sample(PARTS, r.choice([1, 1, 2, 2, 3, 4])):
        made |= part(r, lambda: random_schema(r, depth - 1))
    return made


def is_taken(grammar: Any, text: str) -> bool | None:
    """Whether the grammar takes the text; None if it is too complex to follow, which the error says."""
    matcher = grammar.matcher()
    for byte in text.encode():
        if not matcher.accept(byte):  # the first 256 tokens are the bytes
            if "does not allow it" in str(matcher.error):
                return False
            assert any(known in str(matcher.error) for known in KNOWN_REFUSALS), matcher.error
            return None
    return matcher.is_accepting()


@pytest.mark.parametrize("seed", range(6))
def test_random_schemas_judge_as_the_reference_does(vocabulary: Vocabulary, seed: int) -> None:
    num_judged = 0
    for number in range(seed * 1_000, seed * 1_000 + 40):
        r = random.Random(number)
        schema = {**random_schema(r, r.choice([1, 2, 2, 3])), "$defs": {f"d{i}": random_schema(r, 1) for i in range(2)}}
        validator = jsonschema.Draft202012Validator(schema)
        values = [random_value(r, r.choice([1, 2, 3])) for _ in range(30)]
        try:
            verdicts = [validator.is_valid(value) for value in values]
        except BaseException as error:  # the reference's own stack overflows, also in its parts that are not Python
            assert "Recursion" in repr(error)
            continue
        options = {"property_order": "any", "numbers": "any", "format": "annotate", "whitespace": "flexible"}
        try:
            grammar = compile("json_schema", json.dumps(schema), vocabulary, **options)
        except GrammarError as error:
            if "no value satisfies" in str(error):
                assert not any(verdicts), schema
            else:
                assert any(known in str(error) for known in KNOWN_REFUSALS), error
            continue
        for value, verdict in zip(values, verdicts, strict=True):
            taken = is_taken(grammar, json.dumps(value, ensure_ascii=False))
            assert taken in (verdict, None), (schema, value, verdict)
            num_judged += taken is not None
    assert num_judged > 600
