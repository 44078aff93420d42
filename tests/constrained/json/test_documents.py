import json
import re
from decimal import Decimal

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.json.documents import Document, Place, read_json

from ..conftest import takes


def test_an_unknown_dialect_is_refused_by_name(vocabulary: Vocabulary) -> None:
    for known in ("http://json-schema.org/draft-04/schema#", "https://json-schema.org/draft/2020-12/schema"):
        assert compile("json_schema", json.dumps({"$schema": known}), vocabulary).unchecked == ()
    schema = json.dumps({"$schema": "https://example.com/dialect", "minimum": 3})
    with pytest.raises(GrammarError, match=r"unsupported: the dialect \$schema 'https://example.com/dialect'"):
        compile("json_schema", schema, vocabulary)
    lax = compile("json_schema", schema, vocabulary, on_unsupported="check_after")
    assert lax.unchecked and takes(lax, "3") and not takes(lax, "2")


@pytest.mark.parametrize("where", ["http://example.com/schema.json", "other.json#/$defs/a", "#/$defs/none"])
def test_references_that_lead_nowhere_are_refused_by_name(vocabulary: Vocabulary, where: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(where)):
        compile("json_schema", json.dumps({"properties": {"a": {"$ref": where}}}), vocabulary)


def test_numbers_are_read_exactly_and_within_range() -> None:
    assert read_json("[0.10, 1e2, 7]") == [Decimal("0.10"), Decimal("1e2"), 7]
    with pytest.raises(GrammarError, match="the number 1e401 is out of range: numbers go from 1e-400 to 1e400"):
        read_json("1e401")
    with pytest.raises(GrammarError, match="NaN is not JSON"):
        read_json("NaN")


@pytest.mark.parametrize(
    ("reference", "pointer"),
    [
        ("#", "#"),
        ("#/$defs/a~1b", "#/$defs/a~1b"),
        ("#/$defs/list/allOf/1", "#/$defs/list/allOf/1"),
        ("#named", "#/$defs/named"),
        ("other.json", "#/$defs/moved"),
        ("other.json#/items", "#/$defs/moved/items"),
        ("https://example.com/root.json#/$defs/named", "#/$defs/named"),
    ],
)
def test_references_lead_to_their_schemas(reference: str, pointer: str) -> None:
    root = {
        "$id": "https://example.com/root.json",
        "$defs": {
            "a/b": {"type": "null"},
            "list": {"allOf": [True, {"minimum": 1}]},
            "named": {"$anchor": "named"},
            "moved": {"$id": "other.json", "items": {"type": "string"}},
        },
    }
    document = Document(root)
    place = Place({"$ref": reference}, "#/here", document.root_place.base)
    assert document.resolve(place, "$ref").pointer == pointer


def test_a_dynamic_reference_leads_to_the_outermost_anchor() -> None:
    tree = {"$id": "tree", "$dynamicAnchor": "node", "items": {"$dynamicRef": "#node"}}
    strict = {"$id": "https://x/strict", "$dynamicAnchor": "node", "$ref": "tree", "$defs": {"tree": tree}}
    document = Document(strict)
    inner = document.resolve(document.root_place, "$ref")
    items = document.child(tree["items"], "items", inner)
    assert document.resolve(items, "$dynamicRef").pointer == "#"
    plain = document.child({"$ref": "#node"}, "items", inner)
    assert document.resolve(plain, "$ref").pointer == "#/$defs/tree"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": []}, "properties must be an object"),
        ({"allOf": {}}, "allOf must be a list"),
        ({"items": 3}, "a schema must be an object, true or false, not 3 (at #/items)"),
    ],
)
def test_parts_that_are_no_schemas_are_refused(schema: object, says: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(says)):
        Document(schema)


def test_a_named_schema_of_a_document_with_a_urn_is_found() -> None:
    uri = "urn:uuid:deadbeef-1234-ff00-00ff-4321feebdaed"
    dialect = "http://json-schema.org/draft-07/schema#"
    root = {"$schema": dialect, "$id": uri, "definitions": {"a": {"$id": "#something", "type": "string"}}}
    document = Document(root)
    for reference in (f"{uri}#something", "#something"):
        place = Place({"$ref": reference}, "#/here", document.root_place.base)
        assert document.resolve(place, "$ref").pointer == "#/definitions/a"
