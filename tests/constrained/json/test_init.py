import pytest
from phloem.constrained import GrammarError, GrammarSpec, Vocabulary
from phloem.constrained.json import JsonSchemas
from phloem.constrained.machine import Machine
from phloem.constrained.options import option_values

SCHEMA = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}'


def options(**given: str) -> dict[str, str]:
    return option_values(GrammarSpec("json_schema", SCHEMA, given))


def test_schemas_of_equal_options_share_their_states(vocabulary: Vocabulary) -> None:
    schemas = JsonSchemas(Machine(vocabulary))
    first, unenforced = schemas.start(SCHEMA, options())
    assert (first, unenforced) == schemas.start(SCHEMA, options()) and unenforced == []
    assert schemas.start(SCHEMA, options(whitespace="compact"))[0] != first
    assert schemas.value(SCHEMA, options()) == schemas.value(SCHEMA, options())


def test_keywords_that_are_not_enforced_are_refused_or_listed(vocabulary: Vocabulary) -> None:
    schemas = JsonSchemas(Machine(vocabulary))
    text = '{"oneOf": [{"uniqueItems": true}, {"type": "array", "contains": {"const": 1}}]}'
    with pytest.raises(GrammarError, match="unsupported: uniqueItems"):
        schemas.start(text, options())
    _, unenforced = schemas.start(text, options(on_unsupported="check_after"))
    assert len(unenforced) == 1 and unenforced[0].endswith("at #")


def test_a_half_full_store_of_formulas_counts_as_full(vocabulary: Vocabulary) -> None:
    schemas = JsonSchemas(Machine(vocabulary))
    schemas.start(SCHEMA, options())
    assert not schemas.is_full
    next(iter(schemas.styles.values())).formulas.max_formulas = 4
    assert schemas.is_full
