import json

import pytest
from phloem.constrained import Compiler, GrammarSpec, Vocabulary, compile

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
