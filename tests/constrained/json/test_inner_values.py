import json
from typing import get_args

import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.json.inner_values import KINDS, InnerValues, Kind
from phloem.constrained.json.json_schema import Schemas

from ..conftest import takes

SPELLED = {
    "null": "null",
    "true": "true",
    "false": "false",
    "string": '"a"',
    "number": "1",
    "array": "[]",
    "object": "{}",
}


def test_values_have_everything_that_arrays_and_objects_ask_for(schemas: Schemas) -> None:
    asked = [*InnerValues.__annotations__, *(name for name in vars(InnerValues) if not name.startswith("_"))]
    assert len(asked) > 10 and [name for name in asked if not hasattr(schemas.values, name)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_values_that_no_other_has(vocabulary: Vocabulary, kind: Kind) -> None:
    assert get_args(Kind) == KINDS and SPELLED.keys() == set(KINDS)
    grammar = compile("json_schema", json.dumps({"const": json.loads(SPELLED[kind])}), vocabulary)
    assert [other for other in KINDS if takes(grammar, SPELLED[other])] == [kind]
