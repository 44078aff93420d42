"""Random schemas of all keywords, with references: no value or text is judged other than by the reference validator."""

import json
import random
from typing import Any

import pytest
from phloem.benchmarks.generated_schemas import (
    ALONE,
    KINDS,
    any_keywords,
    random_value,
    schemas,
    walk,
)
from phloem.constrained import GrammarError, Vocabulary, compile

jsonschema = pytest.importorskip("jsonschema")

KNOWN_REFUSALS = (
    "unsupported: uniqueItems",
    "refers to itself without end",
    "uniqueItems with minItems",
    "references nest too deep",
    "uniqueItems where an array has to repeat an item",
)


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
        schema = any_keywords(r)
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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ALONE or kind == "catalogues"])
def test_random_texts_of_random_schemas_are_valid(vocabulary: Vocabulary, kind: str) -> None:
    num_valid = 0
    for number, (name, schema) in enumerate(schemas(4, 2, (kind,))):
        found = walk(vocabulary, name, schema, order="any" if number % 2 else "schema", walks=2)
        assert "no value satisfies" in found.refused or not found.refused, (schema, found.refused)
        assert found.faults == [], schema
        num_valid += found.valid
    assert num_valid >= 4
