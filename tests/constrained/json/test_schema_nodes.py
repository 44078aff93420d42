import random

from phloem.constrained.json.documents import Document, Json, Place
from phloem.constrained.json.formulas import FALSE, TRUE
from phloem.constrained.json.inner_values import KINDS
from phloem.constrained.json.json_schema import Schemas
from phloem.constrained.json.keywords import is_surely_satisfiable

RARE = ("maxProperties", "propertyNames")


def test_equal_schemas_of_scalars_have_one_number_in_all_documents(schemas: Schemas) -> None:
    nodes = schemas.values.schemas
    one = Document({"properties": {"a": {"type": "integer", "title": "x"}, "b": {"items": {}}}})
    two = Document({"items": {"type": "integer"}, "contains": {"items": {}}})
    ids = {
        (d, p.pointer): nodes.node(document, d, p) for d, document in (("1", one), ("2", two)) for p in document.places
    }
    assert ids["1", "#/properties/a"] == ids["2", "#/items"]
    assert ids["1", "#/properties/b"] != ids["2", "#/contains"]
    assert nodes.node(one, "1", Place({}, "#", "")) == TRUE and nodes.node(one, "1", Place(False, "#", "")) == FALSE


def test_constants_are_told_apart_by_value_and_type(schemas: Schemas) -> None:
    constant = schemas.values.constant
    assert constant({"a": 1, "b": 2}) == constant({"b": 2, "a": 1})
    assert len({constant(1), constant(True), constant("1"), constant([1]), constant(None)}) == 5


def test_keywords_show_which_schemas_surely_have_a_value(schemas: Schemas) -> None:
    nodes = schemas.values.schemas

    def number(schema: dict) -> int:
        document = Document(schema)
        return schemas.formulas.nodes[nodes.node(document, repr(schema), document.root_place)][1][1]

    assert nodes.is_surely_satisfiable(number({"type": "object", "properties": {"a": {"not": {}}}}))
    assert nodes.is_surely_satisfiable(number({"type": ["string", "null"], "pattern": "a"}))
    assert not nodes.is_surely_satisfiable(number({"type": "string", "pattern": "a"}))
    assert not nodes.is_surely_satisfiable(number({"enum": [1]}))
    assert nodes.kinds[number({"type": "array"})] == ("array",) and len(nodes.kinds[number({"minimum": 3})]) == 7
    assert nodes.pointer(number({"type": "integer", "minimum": 2})) == "#"


def test_a_schema_that_surely_has_a_value_is_proved_to_have_one(schemas: Schemas) -> None:
    rng = random.Random(5)
    leaves: list[Json] = [
        True,
        False,
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"enum": []},
        {"items": False},
    ]

    def draw(depth: int) -> Json:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(leaves)
        schema = {
            "type": rng.choice(["object", ["object", "null"], "array"]),
            "properties": {name: draw(depth - 1) for name in rng.sample("abc", rng.randrange(4))},
            "required": rng.sample("abc", rng.randrange(3)),
            "additionalProperties": draw(depth - 1),
            "maxProperties": rng.randrange(3),
            "propertyNames": {"enum": ["a"]},
        }
        return {key: value for key, value in schema.items() if rng.random() < (0.2 if key in RARE else 0.8)}

    values, sure = schemas.values, 0
    for _ in range(400):
        document = Document(draw(3))
        formula = values.schemas.node(document, repr(document.root), document.root_place)
        if formula > TRUE and is_surely_satisfiable(document.root):
            sure += 1
            assert any(values.satisfiable_kind(formula, kind) for kind in KINDS), document.root
    assert sure > 50
