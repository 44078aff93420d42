import json

import numpy as np
import pytest
from phloem.constrained import GrammarError, GrammarSpec, GrammarTooComplex, Vocabulary
from phloem.constrained.compiler import Compiler
from phloem.constrained.json import JsonSchemas
from phloem.constrained.json.scalars import Scalars
from phloem.constrained.machine import Machine, Masks
from phloem.constrained.options import option_values

SCHEMA = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}'


def costs_of(word: bytes) -> np.ndarray:
    return np.ones(len(word) + 1, np.int32)


def start(schemas: JsonSchemas, text: str, options: dict[str, str]) -> tuple[int, list[str]]:
    config, unenforced, _ = schemas.start(text, options, costs_of)
    return config, unenforced


def options(**given: str) -> dict[str, str]:
    return option_values(GrammarSpec("json_schema", SCHEMA, given))


def test_schemas_of_equal_options_share_their_states(vocabulary: Vocabulary) -> None:
    schemas = JsonSchemas(Masks(Machine(vocabulary)))
    first, unenforced = start(schemas, SCHEMA, options())
    assert (first, unenforced) == start(schemas, SCHEMA, options()) and unenforced == []
    assert start(schemas, SCHEMA, options(whitespace="compact"))[0] != first
    assert schemas.value(SCHEMA, options(), costs_of)[0] == schemas.value(SCHEMA, options(), costs_of)[0]


def test_keywords_that_are_not_enforced_are_refused_or_listed(vocabulary: Vocabulary) -> None:
    schemas = JsonSchemas(Masks(Machine(vocabulary)))
    text = '{"oneOf": [{"uniqueItems": true}, {"type": "array", "contains": {"const": 1}}]}'
    with pytest.raises(GrammarError, match="unsupported: uniqueItems"):
        start(schemas, text, options())
    _, unenforced = start(schemas, text, options(on_unsupported="check_after"))
    assert len(unenforced) == 1 and unenforced[0].endswith("at #")


def test_a_half_full_store_of_formulas_counts_as_full(vocabulary: Vocabulary) -> None:
    schemas = JsonSchemas(Masks(Machine(vocabulary)))
    start(schemas, SCHEMA, options())
    assert not schemas.is_full
    next(iter(schemas.styles.values())).formulas.max_formulas = 4
    assert schemas.is_full


NAMES = ["^[a-z]+_id$", "^[A-Z_]{2,9}$", "Url$", "^x-", "[0-9]", "^is[A-Z]"]
HARD = {
    "a string": {"type": "string", "pattern": "^([a-z]{1,9}(-[a-z0-9]{1,9}){0,9}[.]){1,9}$", "maxLength": 99},
    "alternatives": {"oneOf": [{"type": "string", "maxLength": 9}, {"pattern": "x[0-9]{2}[a-f]{9}y*$"}]},
    "names": {"type": "object", "patternProperties": {n: {"minimum": len(n)} for n in NAMES}},
}


@pytest.mark.parametrize("name", HARD)
def test_masks_within_hard_strings_and_names_are_made_while_compiling(vocabulary: Vocabulary, name: str) -> None:
    schema = {"type": "object", "properties": {"a": HARD[name]}, "required": ["a"], "additionalProperties": False}
    grammar = Compiler(vocabulary).compile(GrammarSpec("json_schema", json.dumps(schema), {"whitespace": "compact"}))
    machine = grammar.machine
    begun = machine.advance_bytes(grammar.start, b'{"a":{"' if name == "names" else b'{"a":"')
    before = machine.fuel.spent
    assert grammar.masks.of(begun).any()
    assert machine.fuel.spent - before < before / 4


BOUNDS = [{}, {"minimum": 3}, {"maximum": 9}]
NUMBERS = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "number"} | b for i, b in enumerate(BOUNDS)}})


def test_the_first_rows_of_the_first_two_values_are_made_while_compiling(vocabulary: Vocabulary, monkeypatch) -> None:
    made: set[int] = set()
    fill = Scalars.fill_number

    def note(scalars: Scalars, row: np.ndarray, number: int, watched: tuple[int, ...]) -> None:
        made.add(number)
        fill(scalars, row, number, watched)

    monkeypatch.setattr(Scalars, "fill_number", note)
    Compiler(vocabulary).compile(GrammarSpec("json_schema", NUMBERS))
    assert len(made) == 2


def test_a_first_value_that_takes_too_much_work_is_refused_where_a_text_gets_there(
    vocabulary: Vocabulary, monkeypatch
) -> None:
    def give_up(*given) -> None:
        raise GrammarTooComplex("too much")

    monkeypatch.setattr(Scalars, "fill_number", give_up)
    grammar = Compiler(vocabulary).compile(GrammarSpec("json_schema", NUMBERS))
    assert grammar.masks.of(grammar.start).any()
    with pytest.raises(GrammarTooComplex, match="too much"):
        grammar.masks.of(grammar.machine.advance_bytes(grammar.start, b'{"p0":'))


def test_a_string_that_cannot_be_followed_is_refused_with_its_place(vocabulary: Vocabulary) -> None:
    hard = {"type": "string", "pattern": "^(.*[ab].{30}){20}", "not": {"pattern": "^(.*[cd].{31}){20}$"}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": hard}}
    with pytest.raises(GrammarTooComplex, match="at #/properties/b"):
        Compiler(vocabulary).compile(GrammarSpec("json_schema", json.dumps(schema)))
