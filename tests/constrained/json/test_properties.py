import json

import pytest
from phloem.constrained import GrammarTooComplex, Vocabulary, compile
from phloem.constrained.json.formulas import FALSE, TRUE
from phloem.constrained.json.json_schema import Schemas
from phloem.constrained.json.properties import MAX_PATTERNS, NamePartition, Properties

from ..conftest import takes

jsonschema = pytest.importorskip("jsonschema")


def read(schemas: Schemas, schema: dict) -> tuple[int, NamePartition]:
    """What a schema asks of objects, and the names that it tells apart."""
    root, _, _ = schemas.compile(json.dumps(schema), check_after=False)
    formula = schemas.values.expand(root, "object")
    return formula, schemas.values.objects.properties.partition((formula,))


def test_names_fall_into_classes_that_some_name_has(schemas: Schemas) -> None:
    properties = schemas.values.objects.properties
    _, partition = read(
        schemas, {"properties": {"a": {}, "b": {}}, "patternProperties": {"^x": {"minimum": 1}, "y$": {"minimum": 2}}}
    )
    assert partition.names == ("a", "b")
    assert properties.other_classes(partition) == (0, 3, 4, 5)  # neither pattern, ^x, y$, both
    starts, ends = partition.patterns
    assert properties.matches(starts, partition, 3) and not properties.matches(ends, partition, 3)
    assert properties.matches(ends, partition, 5) and not properties.matches(starts, partition, 1)
    _, apart = read(schemas, {"patternProperties": {"^x": {"minimum": 1}, "^y": {"minimum": 2}}})
    assert properties.other_classes(apart) == (0, 1, 2)  # no name matches both


def test_a_name_is_not_written_twice(schemas: Schemas) -> None:
    _, partition = read(schemas, {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": {"minimum": 1}})
    properties = schemas.values.objects.properties
    in_order = Properties(schemas.values, any_order=False)
    assert properties.seen_after(partition, 0b001, 3) == 0b101 and properties.seen_after(partition, 0b001, 0) == 0b001
    assert in_order.seen_after(partition, 0, 2) == 0b011 and in_order.seen_after(partition, 0, 0) == 0b111
    assert properties.unseen_classes(partition, 0b101) == [2, 0]


def test_a_property_takes_from_a_formula_what_it_answers(schemas: Schemas) -> None:
    properties, formulas = schemas.values.objects.properties, schemas.formulas
    formula, partition = read(
        schemas, {"required": ["a", "b"], "maxProperties": 2, "properties": {"a": {"minimum": 1}}}
    )
    assert not properties.ends(formula)
    after_a = properties.step(formula, partition, 0, 1, None)
    assert ("has", "a") not in dict(formulas.leaves(after_a)).values() and ("maxp", 1) in dict(
        formulas.leaves(after_a)
    ).values()
    after_b = properties.step(after_a, partition, 1, 2, None)
    assert properties.ends(after_b) and properties.step(after_b, partition, 3, 0, None) == FALSE
    assert properties.step(formula, partition, 0, 1, set()) == FALSE  # the value of a is below its minimum
    assert properties.step(TRUE, partition, 0, 1, set()) == TRUE


def test_too_many_patterns_are_refused_with_their_number(schemas: Schemas) -> None:
    patterns = {f"^{i}_": {"minimum": i} for i in range(41)}
    with pytest.raises(
        GrammarTooComplex, match=f"41 patterns of property names apply to one object; the limit is {MAX_PATTERNS}"
    ):
        read(schemas, {"type": "object", "patternProperties": patterns})


def test_patterns_cost_the_classes_that_have_names(vocabulary: Vocabulary) -> None:
    """Fifteen patterns that exclude each other make 16 classes, not 32,768; seven that all overlap are refused."""
    apart = {f"^k{i:02}_": {"type": "integer", "minimum": i} for i in range(15)}
    schema = {"type": "object", "patternProperties": apart, "additionalProperties": False}
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    assert takes(grammar, json.dumps({f"k{i:02}_x": i for i in range(15)}))
    assert not takes(grammar, '{"k07_x": "a"}') and not takes(grammar, '{"k15_": 1}')
    overlapping = {c: {"minimum": i} for i, c in enumerate("abcdefg")}
    with pytest.raises(
        GrammarTooComplex, match="the 7 patterns of one object's property names overlap in more than 64"
    ):
        matcher = compile("json_schema", json.dumps({"type": "object", "patternProperties": overlapping}), vocabulary)
        assert takes(matcher, '{"a": 1}')


def test_patterns_with_equal_schemas_are_one(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "patternProperties": {**{c: {"type": "string"} for c in "abcdefghijkl"}, "m": {"type": "integer"}},
        "unevaluatedProperties": False,
    }
    valid = jsonschema.Draft202012Validator(schema).is_valid
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    for value in ({"ab": "x", "l": "y"}, {"al": 1}, {"m": 1}, {"am": 1}, {"am": "x"}, {"z": 1}, {}):
        assert takes(grammar, json.dumps(value)) == valid(value), value
