# ruff: noqa: E501
"""References to the standard's own meta-schemas, against the reference validator."""

import json
import tomllib
from pathlib import Path
from typing import Any

import phloem
import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.json.standard import FOLDER, standard_document

from ..conftest import as_json, mismatches, takes

jsonschema = pytest.importorskip("jsonschema")
specifications = pytest.importorskip("jsonschema_specifications")

OLD, NEW = "http://json-schema.org/draft-0{}/schema#", "https://json-schema.org/draft/{}/schema"
VALIDATORS = {
    OLD.format(4): jsonschema.Draft4Validator, OLD.format(6): jsonschema.Draft6Validator, OLD.format(7): jsonschema.Draft7Validator,
    NEW.format("2019-09"): jsonschema.Draft201909Validator, NEW.format("2020-12"): jsonschema.Draft202012Validator,
}  # fmt: skip
TEXTS: list[Any] = [
    {}, True, "x", [], {"type": "object"}, {"type": "nope"}, {"minLength": 1}, {"minLength": -1}, {"minLength": 1.0}, {"properties": {"a": {"type": 3}}},
    {"items": [{"minItems": 2}]}, {"required": ["a", "a"]}, {"required": ["a", "b"]}, {"allOf": []}, {"allOf": [{"not": {"type": "x"}}]},
    {"dependencies": {"a": ["b"], "c": {"minimum": 2}}}, {"exclusiveMinimum": True, "minimum": 3}, {"exclusiveMinimum": 3}, {"$defs": {"a": {"type": 7}}},
    {"definitions": {"a": {"type": 7}}}, {"type": ["string", "string"]}, {"unevaluatedProperties": {"pattern": 5}}, {"if": {"then": {"type": 1}}},
    {"prefixItems": [{"type": "a"}]}, {"$dynamicAnchor": "1x"}, {"$recursiveAnchor": 1},
]  # fmt: skip


@pytest.mark.parametrize("uri", VALIDATORS)
@pytest.mark.parametrize("form", ["itself", "reference", "inside"])
def test_a_meta_schema_takes_the_schemas_of_its_draft(vocabulary: Vocabulary, uri: str, form: str) -> None:
    schema: dict[str, Any] = {
        "itself": VALIDATORS[uri].META_SCHEMA,
        "reference": {"$ref": uri},
        "inside": {
            "$schema": uri,
            "required": ["s"],
            "properties": {"s": {"$ref": uri}},
            "additionalProperties": False,
        },
    }[form]
    grammar = compile(
        "json_schema", json.dumps(schema), vocabulary, property_order="any", numbers="any", format="annotate"
    )
    meta = VALIDATORS[uri](VALIDATORS[uri].META_SCHEMA)
    for text in TEXTS:
        value = {"s": text} if form == "inside" else text
        assert takes(grammar, as_json(value)) == meta.is_valid(text), text
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    assert mismatches(grammar, lambda text: validator.is_valid(json.loads(text)), walks=2) == []


def test_a_meta_schema_extended_by_its_dynamic_anchor_applies_to_every_level(vocabulary: Vocabulary) -> None:
    for schema in (
        {"$id": "https://example.com/strict", "$dynamicAnchor": "meta", "$ref": NEW.format("2020-12"), "propertyNames": {"maxLength": 5}},
        {"$schema": NEW.format("2019-09"), "$id": "https://example.com/strict", "$recursiveAnchor": True, "$ref": NEW.format("2019-09"), "propertyNames": {"maxLength": 5}},
    ):  # fmt: skip
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any", format="annotate")
        for value in (
            {"not": {"const": 1}},
            {"not": {"minLength": 1}},
            {"minLength": 1},
            {"not": {"not": {"type": 3}}},
        ):
            assert takes(grammar, as_json(value)) == validator.is_valid(value), value
        assert not takes(grammar, '{"not": {"minLength": 1}}')


def test_recursive_references_lead_to_the_outermost_anchor(vocabulary: Vocabulary) -> None:
    tree = {
        "$id": "tree",
        "$recursiveAnchor": True,
        "type": ["object", "null"],
        "additionalProperties": {"$recursiveRef": "#"},
    }
    for outer in (True, False):
        schema = {
            "$schema": NEW.format("2019-09"), "$id": "https://example.com/short", "$recursiveAnchor": outer, "maxProperties": 1,
            "$ref": "tree", "$defs": {"tree": tree},
        }  # fmt: skip
        validator = jsonschema.Draft201909Validator(schema)
        grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order="any")
        for value in ({}, {"a": {}}, {"a": {}, "b": {}}, {"a": {"a": {}, "b": None}}):
            assert takes(grammar, as_json(value)) == validator.is_valid(value), value


def test_integers_have_no_point_in_draft_4_alone(vocabulary: Vocabulary) -> None:
    for uri, validator in VALIDATORS.items():
        for asked in ({}, {"minimum": 0}, {"multipleOf": 2}, {"maximum": 5, "multipleOf": 2}):
            schema = {"$schema": uri, "type": ["integer", "null"], **asked}
            grammar = compile("json_schema", json.dumps(schema), vocabulary, numbers="any")
            outside = compile("json_schema", json.dumps({"$schema": uri, "not": schema}), vocabulary, numbers="any")
            for text in ("2", "-0", "2.0", "2.5", "null", "-3"):
                is_valid = validator(schema).is_valid(json.loads(text))
                assert takes(grammar, text) == is_valid and takes(outside, text) != is_valid, (schema, text)


def test_the_shipped_documents_are_those_of_the_standard() -> None:
    found = 0
    for uri in specifications.REGISTRY:
        if "draft-03" not in uri:
            assert standard_document(uri.rstrip("#")) == specifications.REGISTRY.contents(uri), uri
            found += 1
    assert (
        found == len(list(FOLDER.glob("*.json")))
        and standard_document("https://json-schema.org/draft/2020-12/x") is None
    )


def test_every_document_of_the_standard_is_in_the_package() -> None:
    settings = tomllib.loads((Path(phloem.__file__).parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["phloem.constrained.json"]
    names = [f"{FOLDER.name}/{file.name}" for file in FOLDER.iterdir()]
    assert [name for name in names if not any(Path(name).match(pattern) for pattern in patterns)] == []
