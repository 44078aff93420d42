# ruff: noqa: E501
"""Every keyword: the grammar accepts exactly the values that the reference validator ``jsonschema`` accepts."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from phloem.constrained import GrammarError, GrammarTooComplex, Vocabulary, compile

from ..conftest import as_json, mismatches, takes

jsonschema = pytest.importorskip("jsonschema")

O = {"type": "object"}  # noqa: E741
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 5, 7.5, 10, 1.0, 100, "", "a", "ab", "abc", "foo", "é", "2024-02-29", [], [1], [1, 2],
    [1, "a"], ["a", "b", "c"], [1, 2, 3], [[1]], [5, 6], {}, {"a": 1}, {"a": "x"}, {"b": 2}, {"a": 1, "b": 2}, {"foo": 1},
    {"a": 1, "foo": "x"}, {"a": 1, "b": "y", "c": None}, {"foo": {"foo": {}}}, {"a": {"a": 1}}, {"x1": 1, "x2": "b"}, {"kind": "p", "n": 1},
    {"kind": "q", "s": "a"}, {"kind": "q", "n": 1},
]  # fmt: skip
SCHEMAS: list[Any] = [
    True, {}, {"type": "integer"}, {"type": ["string", "null"]}, {"minimum": 2}, {"maximum": 2, "exclusiveMinimum": 0},
    {"multipleOf": 2.5}, {"type": "integer", "multipleOf": 5}, {"minLength": 2}, {"type": "string", "maxLength": 1}, {"pattern": "^a"},
    {"pattern": "b$"}, {"pattern": "b", "maxLength": 2}, {"enum": [1, "a", None, [1], {"a": 1}]}, {"const": {"a": 1, "b": 2}}, {"const": 1},
    {"not": {"type": "string"}}, {"not": {"enum": [1, "a"]}}, {"allOf": [{"minimum": 1}, {"maximum": 5}]}, {"anyOf": [{"type": "string"}, {"minimum": 5}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"if": {"type": "integer"}, "then": {"minimum": 2}, "else": {"type": "string"}}, {"items": {"type": "integer"}},
    {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, {"prefixItems": [{"type": "integer"}]},
    {"minItems": 1, "maxItems": 2}, {"contains": {"const": 1}}, {"contains": {"type": "integer"}, "minContains": 2, "maxContains": 2},
    {"contains": {"minimum": 5}, "minContains": 0}, {"not": {"items": {"type": "integer"}}}, {"not": {"contains": {"type": "integer"}}},
    {"properties": {"a": {"type": "integer"}}}, {**O, "properties": {"a": {}}, "additionalProperties": False}, {**O, "required": ["a", "foo"]},
    {"patternProperties": {"^x": {"type": "integer"}}}, {"patternProperties": {"^x": {"type": "integer"}}, "properties": {"x2": {"type": "string"}}},
    {"patternProperties": {"a": {"type": "integer"}, "^b": True}, "additionalProperties": False}, {"additionalProperties": {"type": "integer"}},
    {"propertyNames": {"maxLength": 1}}, {"propertyNames": {"enum": ["a", "b"]}}, {"minProperties": 2}, {"maxProperties": 1},
    {**O, "minProperties": 1, "maxProperties": 1, "properties": {"a": {"type": "string"}}}, {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}}, {"not": {"required": ["a"]}}, {"not": {"properties": {"a": {"type": "integer"}}}},
    {**O, "not": {"additionalProperties": {"type": "integer"}}}, {"$ref": "#/$defs/t", "$defs": {"t": {"type": "string"}}},
    {"properties": {"foo": {"$ref": "#"}}, "additionalProperties": False}, {"$anchor": "x", "properties": {"a": {"$ref": "#x"}}, "type": ["object", "integer"]},
    {"anyOf": [{"properties": {"kind": {"const": "p"}, "n": {"type": "integer"}}, "required": ["kind", "n"]},
               {"properties": {"kind": {"const": "q"}, "s": {"type": "string"}}, "required": ["kind", "s"]}]},
    {"oneOf": [{"properties": {"kind": {"const": "p"}}, "required": ["kind"]}, {"properties": {"kind": {"const": "q"}}, "required": ["kind"]}]},
    {"properties": {"a": True}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": True}}], "properties": {"b": True}, "unevaluatedProperties": False},
    {"anyOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": True}, "required": ["b"]}], "unevaluatedProperties": False},
    {"if": {"required": ["a"]}, "then": {"properties": {"a": True, "b": True}}, "unevaluatedProperties": {"type": "integer"}},
    {"prefixItems": [True], "unevaluatedItems": False}, {"contains": {"type": "integer"}, "unevaluatedItems": {"type": "string"}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": False}}, {"minProperties": 1, "propertyNames": {"pattern": "^[a-c]$"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
def test_takes_exactly_the_valid_values(vocabulary: Vocabulary, schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    grammar = compile(
        "json_schema", json.dumps(schema), vocabulary, property_order="any", format="annotate", numbers="any"
    )
    for value in VALUES:
        assert takes(grammar, as_json(value)) == validator.is_valid(value), value


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
@pytest.mark.parametrize("order", ["schema", "any"])
def test_random_walks_are_valid(vocabulary: Vocabulary, schema: Any, order: str) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order=order, format="annotate")
    assert mismatches(grammar, lambda text: validator.is_valid(json.loads(text)) or is_rounded(text), walks=3) == []


def has_twin(text: str) -> bool:
    """Whether an object writes a name twice: the grammar does not compare names that no keyword mentions or counts."""
    twins: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        twins.extend({k for k, _ in found if [n for n, _ in found].count(k) > 1})
        return dict(found)

    json.loads(text, object_pairs_hook=pairs)
    return bool(twins)


def is_rounded(text: str) -> bool:
    """Whether a number has more digits than a float, so that the reference rounds it."""
    return any(len(re.sub(r"\D", "", number)) > 15 for number in re.findall(r"[\d.]+", text))


names = st.sampled_from(["a", "b", "foo"])
scalars = st.one_of(
    st.sampled_from(
        [True, {}, {"type": "string"}, {"type": "integer"}, {"type": "null"}, {"type": ["integer", "object"]}]
    ),
    st.builds(lambda lo, n: {"minimum": lo, "maximum": lo + n}, st.integers(-3, 5), st.integers(0, 4)),
    st.builds(lambda lo, n: {"minLength": lo, "maxLength": lo + n}, st.integers(0, 2), st.integers(0, 2)),
    st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from([1, 2, "a", "ab", None, True]), min_size=1, max_size=3)),
    st.sampled_from([{"pattern": "^a"}, {"pattern": "b"}, {"const": 1}, {"multipleOf": 2}]),
)
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(lambda p: {"properties": p}, st.dictionaries(names, inner, max_size=2)),
        st.builds(
            lambda p, r, e: {"type": "object", "properties": p, "required": r, "additionalProperties": e},
            st.dictionaries(names, inner, max_size=2), st.lists(names, unique=True, max_size=2), st.one_of(st.booleans(), inner),
        ),
        st.builds(lambda s, lo, n: {"items": s, "minItems": lo, "maxItems": lo + n}, inner, st.integers(0, 1), st.integers(0, 2)),
        st.builds(lambda p, s: {"type": "array", "prefixItems": p, "items": s}, st.lists(inner, min_size=1, max_size=2), inner),
        st.builds(lambda s, lo, n: {"contains": s, "minContains": lo, "maxContains": lo + n}, inner, st.integers(0, 1), st.integers(0, 2)),
        st.builds(lambda s: {"contains": s}, inner),
        st.builds(lambda s, e: {"patternProperties": {"^a": s, "o": e}}, inner, inner),
        st.builds(lambda n, s: {"propertyNames": n, "additionalProperties": s}, inner, inner),
        st.builds(lambda n, r, m, s: {"dependentRequired": {n: r}, "dependentSchemas": {m: s}}, names, st.lists(names, max_size=2), names, inner),
        st.builds(lambda k, v: {k: v}, st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda s: {"not": s}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda p, lo: {"type": "object", "minProperties": lo, "maxProperties": lo + 1, "properties": p}, st.dictionaries(names, inner, max_size=2), st.integers(0, 2)),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(suppress_health_check=list(HealthCheck))
@given(schemas, st.integers(0, 1 << 30))
def test_any_schema_agrees_with_the_reference(vocabulary: Vocabulary, schema: Any, seed: int) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    options = {"format": "annotate", "numbers": "any"}
    try:
        grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any", **options)
        in_order = compile("json_schema", json.dumps(schema), vocabulary, property_order="schema", **options)
    except GrammarError as error:
        assert "no value satisfies" in str(error)
        assert not any(validator.is_valid(value) for value in VALUES)
        return
    rng = random.Random(seed)
    for value in rng.sample(VALUES, 20):
        assert takes(grammar, as_json(value)) == validator.is_valid(value), value
        assert validator.is_valid(value) or not takes(in_order, as_json(value)), value
    for either in (grammar, in_order):
        assert (
            mismatches(
                either,
                lambda text: validator.is_valid(json.loads(text)) or has_twin(text) or is_rounded(text),
                walks=2,
                seed=seed,
            )
            == []
        )


def test_equal_parts_of_two_grammars_share_states(vocabulary: Vocabulary) -> None:
    one = compile(
        "json_schema", '{"type": "object", "properties": {"p": {"type": "string", "maxLength": 77}}}', vocabulary
    )
    assert takes(one, '{"p": "x"}')
    before = one.machine.num_states
    two = compile("json_schema", '{"type": "object", "properties": {"p": {"type": "string", "maxLength": 77}}, "title": "x"}', vocabulary)  # fmt: skip
    assert takes(two, '{"p": "x"}')
    assert two.machine is one.machine and two.machine.num_states - before < 20


def test_a_wide_schema_compiles_and_a_deep_one_is_refused(vocabulary: Vocabulary) -> None:
    wide = {"type": "object", "properties": {f"key{i}": {"type": "integer", "minimum": i} for i in range(5_000)}}
    grammar = compile("json_schema", json.dumps(wide), vocabulary)
    assert takes(grammar, '{"key77": 77}')
    deep: Any = {"type": "integer"}
    for _ in range(400):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="nests deeper than 200"):
        compile("json_schema", json.dumps(deep), vocabulary)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ({"oneOf": [{"type": "string", "pattern": f"x{i}"} for i in range(70)]}, "70 branches that overlap"),
        (
            {
                "oneOf": [
                    {"properties": {f"p{j}": {"minimum": i} for j in range(i, i + 4)}, "required": [f"p{i % 7}"]}
                    for i in range(40)
                ]
            },
            "more than 500,000 steps",
        ),
        ({"allOf": [{"pattern": "^(a|b)*a(a|b){18}$"}, {"pattern": "^(a|b)*b(a|b){18}$"}]}, "more than 10,000 states"),
        ({"patternProperties": {f"^a{i}.*{i}": {"minimum": i} for i in range(41)}}, "41 patterns"),
        (
            {
                "anyOf": [{"properties": {f"a{i}": {"type": "null"}}, "required": [f"a{i}"]} for i in range(12)],
                "unevaluatedProperties": False,
            },
            "more than 256 cases",
        ),
        (
            {
                "allOf": [
                    {"anyOf": [{"properties": {"a": {"minimum": i}}}, {"properties": {"a": {"maxLength": i}}}]}
                    for i in range(14)
                ],
            },
            "more than 512 cases",
        ),
    ],
)
def test_a_schema_that_is_too_complex_is_refused_with_its_place(vocabulary: Vocabulary, inner: dict, says: str) -> None:
    schema = {"properties": {"outer": {"type": "array", "items": inner, "minItems": 1}}, "required": ["outer"]}
    with pytest.raises(GrammarTooComplex, match=says) as caught:
        compile("json_schema", json.dumps({"type": "object", **schema}), vocabulary)
    assert caught.value.where == "#/properties/outer/items"


KINDS = ["string", "integer", "boolean", "null"]
MANY_BRANCHES: list[Any] = [
    # each property has a choice of its own: 1,024 cases together
    {**O, "allOf": [{"anyOf": [{"properties": {f"x{i}": {"type": t}}} for t in KINDS]} for i in range(5)]},
    # one property decides what else is asked
    {**O, "properties": {"t": {"enum": [f"v{i}" for i in range(24)]}}, "required": ["t"],
     "allOf": [{"if": {"properties": {"t": {"const": f"v{i}"}}}, "then": {"required": [f"r{i}"]}} for i in range(24)]},
    {**O, "allOf": [{"anyOf": [{"required": [f"x{i}"]}, {"not": {"required": [f"x{(i + 1) % 12}"]}}]} for i in range(12)]},
    {"allOf": [{"anyOf": [{"required": [f"x{i}"]}, {"required": [f"r{i}"]}]} for i in range(14)],
     "additionalProperties": {"minimum": 2}, "maxProperties": 16},
]  # fmt: skip


@pytest.mark.parametrize("schema", MANY_BRANCHES, ids=["types", "if", "implications", "pairs"])
def test_alternatives_that_multiply_are_followed_without_multiplying_them(vocabulary: Vocabulary, schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    for value in (
        {}, {"x0": "a", "x1": 1, "x2": True, "x3": None, "x4": 2}, {"x0": [], "x1": 1}, {"x4": {}}, {f"x{i}": 1 for i in range(12)},
        {"x1": 1, "x2": 2}, {"t": "v3", "r3": 1}, {"t": "v3", "r4": 1}, {"r23": 1, "t": "v23"}, {"t": "v24"}, {"t": "v0"},
        {"xr"[i % 2] + str(i): 2 for i in range(14)}, {f"x{i}": 2 for i in range(13)}, [], {**{f"x{i}": 2 for i in range(13)}, "r13": 1},
    ):  # fmt: skip
        assert takes(grammar, as_json(value)) == validator.is_valid(value), value


def test_keywords_beside_a_reference_that_stands_alone_may_be_anything(vocabulary: Vocabulary) -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/b", "format": ["email"], "pattern": 3}},
        "definitions": {"b": {"type": "null"}},
    }
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    assert takes(grammar, '{"a": null}') and not takes(grammar, '{"a": "b"}')


def _steps(tags: list[Any], branches: str) -> dict[str, Any]:
    """A list of steps, whose kind is told by a required property."""
    step = [
        {**O, "properties": {"task": tag, f"in{i}": {"type": "integer"}}, "required": ["task", f"in{i}"]}
        for i, tag in enumerate(tags)
    ]
    return {
        **O, "properties": {"steps": {"$ref": "#/definitions/steps"}}, "required": ["steps"],
        "definitions": {
            "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}},
            "step": {branches: [{"$ref": f"#/definitions/s{i}"} for i in range(len(step))]},
            **{f"s{i}": one for i, one in enumerate(step)},
        },
    }  # fmt: skip


TAGS: dict[str, list[Any]] = {
    "lists": [{"enum": [f"t{i}", f"u{i}"]} for i in range(80)],
    "lists of lists": [{"anyOf": [{"enum": [f"t{i}", f"u{i}"]}, {"const": f"v{i}"}]} for i in range(80)],
    "mixed": [{"enum": [i, f"t{i}", *([True] if i == 7 else [None] if i == 8 else [])]} for i in range(2, 82)],
}


@pytest.mark.parametrize("branches", ["oneOf", "anyOf"])
@pytest.mark.parametrize("tags", TAGS)
def test_many_objects_are_told_apart_by_what_one_property_lists(
    vocabulary: Vocabulary, tags: str, branches: str
) -> None:
    schema = _steps(TAGS[tags], branches)
    validator = jsonschema.Draft7Validator(schema)
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    for step in (
        {"task": "t3", "in3": 1}, {"task": "t3", "in1": 1}, {"task": "t3", "in4": 1}, {"in3": 1, "task": "u3"}, {"in79": 1, "task": "t79"}, {"task": "v4", "in4": 1},
        {"task": "t80", "in80": 1}, {"task": 5, "in3": 1}, {"task": True, "in5": 1}, {"task": None, "in5": 1}, {"task": None, "in6": 1}, {"in3": 1}, {"task": "x"},
    ):  # fmt: skip
        text = as_json({"steps": [step, step]})
        assert takes(grammar, text) == validator.is_valid({"steps": [step, step]}), step


def test_what_tells_branches_apart_is_found_while_the_schema_is_compiled(vocabulary: Vocabulary) -> None:
    grammar = compile(
        "json_schema", json.dumps(_steps(TAGS["lists of lists"], "oneOf")), vocabulary, property_order="any"
    )
    fuel, matcher = grammar.machine.fuel, grammar.matcher()
    before = fuel.spent
    for byte in b'{"steps": [{"task": "':
        matcher.mask()
        assert matcher.accept(byte)
    assert fuel.spent - before < 2_000 < before  # a mask may take 100,000


NAME_PATTERNS = ["^x-", "_at$", "^[a-z]+$", "^[A-Z_]{2,5}$", "^[0-9]+$", "Url$", "^is[A-Z]", "o", "^a?b?$", "^foo$"]


@pytest.mark.parametrize("seed", range(24))
def test_names_by_patterns_whose_values_clash_are_those_that_have_a_value(vocabulary: Vocabulary, seed: int) -> None:
    r = random.Random(seed)
    types = ["string", "integer", "boolean", "null"]
    schema: dict[str, Any] = {
        **O, "patternProperties": {p: {"type": r.sample(types, r.choice([1, 1, 2]))} for p in r.sample(NAME_PATTERNS, r.randrange(2, 8))},
        "additionalProperties": r.choice([False, False, {"type": "null"}]),
    }  # fmt: skip
    if r.random() < 0.6:
        schema["properties"] = {n: {"type": r.choice(types)} for n in r.sample(["foo", "x-o", "isA", "b", "zz9"], 2)}
    if r.random() < 0.4:
        schema["propertyNames"] = r.choice([{"maxLength": 3}, {"pattern": "[a-z]"}, {"not": {"pattern": "o"}}])
    if r.random() < 0.3:
        schema["required"] = ["foo"]
    validator = jsonschema.Draft202012Validator(schema)
    if seed in (11, 20):
        with pytest.raises(GrammarError, match="no value satisfies"):
            compile("json_schema", json.dumps(schema), vocabulary)
        return
    grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
    names = [
        "",
        "a",
        "b",
        "ab",
        "foo",
        "food",
        "x-",
        "x-o",
        "x-_at",
        "isA",
        "isUrl",
        "o_at",
        "AB",
        "A_",
        "12",
        "zz9",
        "Url",
        "1o",
        "é",
        "isAUrl",
        "fooUrl",
        "foo_at",
    ]
    for name in names:
        for value in ("s", 1, True, None):
            for whole in ({name: value}, {"foo": "s", name: value}, {name: value, "foo": None}):
                assert takes(grammar, as_json(whole)) == validator.is_valid(whole), whole
