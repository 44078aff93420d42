import json
import random
from typing import Any

import pytest
from phloem.constrained import Compiler, GrammarError, GrammarSpec, Vocabulary, compile
from phloem.constrained.json.completions import Completions, ObjectContext, classes_of
from phloem.constrained.json.formulas import FALSE
from phloem.constrained.json.json_schema import Schemas
from phloem.constrained.json.scalars import Scalars
from phloem.constrained.machine import Machine

from ..conftest import as_json, takes

jsonschema = pytest.importorskip("jsonschema")


def test_a_property_may_be_asked_many_schemas_that_exclude_each_other(vocabulary: Vocabulary) -> None:
    """Eleven branches ask about ``kind`` and ``x``: of 2,048 sets of answers twelve are possible."""
    kinds = [f"k{i}" for i in range(11)]
    branches = [{"properties": {"kind": {"const": k}, "x": {"const": i}}} for i, k in enumerate(kinds)]
    schema = {"type": "object", "required": ["kind", "x"], "oneOf": branches, "additionalProperties": False}
    schema["properties"] = {"kind": {"type": "string"}, "x": {"type": "integer"}}
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    for value in ({"kind": "k3", "x": 3}, {"x": 10, "kind": "k10"}):
        assert takes(grammar, as_json(value))
    for value in ({"kind": "k3", "x": 4}, {"x": 10, "kind": "k9"}, {"kind": "k11", "x": 0}):
        assert not takes(grammar, as_json(value))


def test_branches_that_a_required_property_tells_apart_cost_little(
    vocabulary: Vocabulary,
) -> None:
    kinds = [{"properties": {"type": {"enum": [f"k{i}"]}, f"a{i}": {"type": "integer"}}} for i in range(40)]
    schema = {"type": "object", "required": ["type"], "allOf": [{"oneOf": kinds}], "minProperties": 2}
    apart = Compiler(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos))
    grammar = apart.compile(GrammarSpec("json_schema", json.dumps(schema), {"property_order": "any"}))
    for text, valid in [
        ('{"type":"k7","a7":1}', True),
        ('{"a7":1,"type":"k7"}', True),
        ('{"a7":"x","type":"k8"}', True),
        ('{"a7":"x","type":"k7"}', False),
        ('{"type":"k7","a7":"x"}', False),
        ('{"type":"k7"}', False),
        ('{"type":"k99","b":1}', False),
        ('{"a7":1}', False),
    ]:
        assert takes(grammar, text) == valid, text
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == valid
    assert grammar.machine.fuel.spent < 100_000


def kinds_of_alternatives() -> dict[str, dict]:
    """Objects whose alternatives overlap, so that a search through all their combinations would not end."""
    return {
        "oneOf": {
            "oneOf": [
                {"properties": {f"p{i}": {"type": "string"}, "x": {"minimum": i}}, "required": [f"p{i}"]}
                for i in range(12)
            ]
        },
        "if": {
            "allOf": [
                {
                    "if": {"properties": {"k": {"const": f"v{i}"}}, "required": ["k"]},
                    "then": {"properties": {f"a{i}": {"type": "string"}}, "required": [f"a{i}"]},
                }
                for i in range(30)
            ]
        },
        "if else": {
            "properties": {"k": {"enum": [f"v{i}" for i in range(16)]}},
            "required": ["k"],
            "allOf": [
                {
                    "if": {"properties": {"k": {"const": f"v{i}"}}},
                    "then": {"required": [f"a{i % 7}"]},
                    "else": {"properties": {f"b{i}": {"type": "integer"}}},
                }
                for i in range(16)
            ],
        },
        "anyOf": {
            "anyOf": [
                {
                    "properties": {f"a{i}": {"type": "string"}, "x": {"minimum": i}},
                    "required": [f"a{i}"],
                    "additionalProperties": False,
                }
                for i in range(60)
            ]
        },
        "dependentRequired": {
            "properties": {f"a{i}": {"type": "string"} for i in range(300)},
            "dependentRequired": {f"a{i}": [f"a{i + 1}"] for i in range(40)},
        },
        "minProperties": {
            "properties": {f"a{i}": {"type": "string"} for i in range(300)},
            "additionalProperties": False,
            "minProperties": 3,
        },
    }


@pytest.mark.parametrize("kind", kinds_of_alternatives())
def test_alternatives_that_overlap_are_followed_with_little_work(vocabulary: Vocabulary, kind: str) -> None:
    schema = {"type": "object", **kinds_of_alternatives()[kind]}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    rng = random.Random(7)
    apart = Compiler(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos))
    options = {"property_order": "any", "numbers": "any"}
    grammar = apart.compile(GrammarSpec("json_schema", json.dumps(schema), options))
    fuel, num_valid = grammar.machine.fuel, 0
    assert fuel.spent < 60_000
    for _ in range(40):
        letters = rng.choice(["a", "a", "p", "ab", "ap"])
        names = [*rng.choice([[], ["k", "x"]]), "a50", *(f"{letter}{i}" for letter in letters for i in range(4))]
        given = {"k": f"v{rng.randrange(4)}", "x": rng.randrange(4)}
        chosen = rng.sample(names, rng.choice([1, 1, 2, 3, 4, 5]))
        value = {name: given.get(name, rng.choice("st") if rng.random() < 0.9 else 1) for name in chosen}
        before = fuel.spent
        assert takes(grammar, as_json(value)) == valid(value), value
        assert fuel.spent - before < 60_000, value
        num_valid += valid(value)
    assert num_valid >= 2


PARTS = [
    {"required": ["a"]},
    {"required": ["b", "c"]},
    {"properties": {"a": {"type": "string"}, "b": {"minimum": 2}}},
    {"properties": {"c": {"const": 1}}, "additionalProperties": {"type": "integer"}},
    {"properties": {"a": {}, "d": {"enum": [1, "x"]}}, "additionalProperties": False},
    {"patternProperties": {"^[ae]": {"type": "integer"}}},
    {"propertyNames": {"maxLength": 1}},
    {"maxProperties": 2},
    {"minProperties": 2},
    {"properties": {"b": False}},
]


@pytest.mark.parametrize("any_order", [True, False])
def test_names_are_allowed_exactly_where_some_value_may_follow(vocabulary: Vocabulary, *, any_order: bool) -> None:
    rng, num_compared = random.Random(5), 0
    for _ in range(150):
        machine_schemas = schemas_of(vocabulary, any_order=any_order)

        def some(depth: int) -> dict:
            if depth == 0:
                return dict(rng.choice(PARTS))
            key = rng.choice(["oneOf", "anyOf", "allOf", "not", "if", "leaf"])
            if key == "leaf":
                return dict(rng.choice(PARTS))
            if key == "not":
                return {"not": some(depth - 1)}
            if key == "if":
                return {part: some(depth - 1) for part in ("if", "then", "else")}
            return {key: [some(depth - 1) for _ in range(rng.randrange(2, 4))]}

        schema = {"type": "object", **some(2)}
        try:
            root, _, _ = machine_schemas.compile(json.dumps(schema), check_after=False)
        except GrammarError as error:
            assert "no value satisfies" in str(error)
            continue
        completions = machine_schemas.values.objects.completions
        properties = completions.properties
        formula = completions.settled(machine_schemas.values.expand(root, "object"))
        partition = properties.partition((formula,))
        context = ObjectContext(partition, 0, (formula,))
        for _ in range(3):
            names, others = completions.allowed(context)
            allowed = {*classes_of(names), *others}
            unseen = properties.unseen_classes(partition, context.seen)
            assert allowed == {c for c in unseen if completions.demand(context, c)[0] != FALSE}, (schema, context)
            num_compared += 1
            if not allowed:
                break
            cls = rng.choice(sorted(allowed))
            after = properties.step(context.formulas[0], partition, context.seen, cls, None)
            seen = properties.seen_after(partition, context.seen, cls)
            if not completions.is_alive(partition, seen, after):
                break
            context = ObjectContext(partition, seen, (after,))
    assert num_compared > 150


def test_what_is_left_to_ask_after_a_required_property_is_told_as_if_asked_anew(vocabulary: Vocabulary) -> None:
    rng = random.Random(11)
    schemas = schemas_of(vocabulary, any_order=True)
    completions = schemas.values.objects.completions
    num_compared = 0
    for _ in range(40):
        names = [f"n{i}" for i in range(rng.randrange(1, 7))]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {n: {"type": rng.choice(["string", "null"])} for n in names},
            "required": sorted({rng.choice([*names, "other"]) for _ in range(4)}),
            "additionalProperties": rng.choice([True, {"type": ["string", "null"]}]),
        }
        root, _, _ = schemas.compile(json.dumps(schema), check_after=False)
        formula = completions.settled(schemas.values.expand(root, "object"))
        context = ObjectContext(completions.properties.partition((formula,)), 0, (formula,))
        while (allowed := completions.allowed(context)[0]) and rng.random() < 0.9:
            cls = rng.choice(classes_of(allowed))
            formulas = completions.after_plain(context, cls)
            assert formulas is not None
            seen = completions.properties.seen_after(context.partition, context.seen, cls)
            context = ObjectContext(context.partition, seen, formulas)
            anew = Completions(schemas.values, completions.properties)
            assert completions.allowed(context) == anew.allowed(context), schema
            missing = {*schema["required"]} - {n for n, i in context.partition.index.items() if seen >> i & 1}
            assert completions.properties.ends(formulas[0]) == (not missing), schema
            num_compared += 1
    assert num_compared > 80


def schemas_of(vocabulary: Vocabulary, *, any_order: bool) -> Schemas:
    machine = Machine(vocabulary)
    scalars = Scalars(machine)
    return Schemas(machine, scalars, white_space="compact", any_order=any_order, canonical=False, enforce_formats=False)
