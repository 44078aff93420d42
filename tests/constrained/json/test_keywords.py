from decimal import Decimal
from typing import Any

import pytest
from phloem.constrained import GrammarError
from phloem.constrained.json.inner_values import KINDS
from phloem.constrained.json.keywords import check_keyword, kinds_of, number_bounds
from phloem.constrained.json.numbers import Bound


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("type", "strin", 'unknown type "strin"; there are null, boolean'),
        ("type", ["string", 3], "unknown type 3"),
        ("enum", 3, "enum must be a list, not 3"),
        ("required", ["a", 1], "required must be a list of strings"),
        ("pattern", 1, "pattern must be a string, not 1"),
        ("multipleOf", 0, "multipleOf must be a number above 0, not 0"),
        ("uniqueItems", 1, "uniqueItems must be true or false, not 1"),
        ("dependentRequired", {"a": "b"}, "required must be a list of strings"),
        ("minLength", -1, "minLength must be a whole number of at least 0, not -1"),
        ("maxContains", Decimal("1.5"), "maxContains must be a whole number"),
        ("minimum", "3", "minimum must be a number"),
        ("minimum", True, "minimum must be a number"),
    ],
)
def test_a_keyword_of_another_kind_is_refused_at_its_place(key: str, value: Any, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        check_keyword(key, value, "#/here")
    assert says in str(caught.value) and caught.value.where.startswith("#/here")


def test_keywords_as_they_should_be_pass() -> None:
    for key, value in (("minLength", Decimal("2.0")), ("exclusiveMinimum", True), ("type", ["null", "integer"])):
        check_keyword(key, value, "#")


def test_types_and_the_kinds_they_let_pass() -> None:
    assert kinds_of({}) == KINDS and kinds_of({"type": "boolean"}) == ("true", "false")
    assert kinds_of({"type": ["integer", "null"]}) == ("null", "number") and kinds_of({"type": "integer"}) == (
        "number",
    )


def test_bounds_of_both_spellings() -> None:
    tight = number_bounds({"minimum": 3, "exclusiveMinimum": 3, "maximum": 7, "exclusiveMaximum": 8})
    assert tight == (Bound(Decimal(3), False), Bound(Decimal(7), True))
    assert number_bounds({"minimum": 3, "exclusiveMinimum": True}) == (Bound(Decimal(3), False), None)  # draft 4


def test_listed_values_narrow_the_kinds() -> None:
    assert kinds_of({"const": None}) == ("null",)
    assert kinds_of({"enum": [Decimal("1.5"), True, "a"]}) == ("true", "string", "number")
    assert kinds_of({"type": "string", "enum": [1, [], {}]}) == ()
    assert kinds_of({"const": [], "enum": [[]]}) == ("array",)


def test_branches_narrow_the_kinds() -> None:
    texts = {"anyOf": [{"type": "string"}, {"enum": ["a", None]}, False]}
    assert kinds_of(texts) == ("null", "string") and kinds_of({"type": "string", **texts}) == ("string",)
    assert kinds_of({"oneOf": [texts, {"type": "integer"}]}) == ("null", "string", "number")
    assert kinds_of({"oneOf": [{"const": 1}, {}]}) == kinds_of({"anyOf": [True]}) == KINDS
    assert (
        kinds_of({"anyOf": [{"type": "string", "$ref": "#/a"}]}) == KINDS
    )  # in older drafts the reference alone counts
    assert kinds_of({"anyOf": [{"anyOf": [{"anyOf": [{"type": "null"}]}]}]}) == KINDS  # too deep to be looked at
