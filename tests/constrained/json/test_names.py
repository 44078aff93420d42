import json
import random

import pytest
from phloem.constrained import Compiler, GrammarSpec, Vocabulary

from ..conftest import takes

NAMES = ["", "a", "ab", "abc", "b", 'quote"d', "back\\slash", "é", "漢字", "line\nend", "the name", "na", "name"]


@pytest.mark.parametrize("order", ["any", "schema"])
def test_each_name_is_taken_and_no_other(vocabulary: Vocabulary, order: str) -> None:
    """Also where some names need escapes, so that the rows of the trie are made in Python."""
    rng = random.Random(0)
    plain = [name for name in NAMES if name.isalnum() and name.isascii()]
    for listed in (NAMES, plain):
        schema = {
            "type": "object",
            "properties": {name: {"type": "null"} for name in listed},
            "additionalProperties": False,
        }
        compiler = Compiler(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos))
        grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema), {"property_order": order}))
        for name in [*NAMES, "abcd", "c", "an", "nam"]:
            assert takes(grammar, json.dumps({name: None}, ensure_ascii=False), rng) == (name in listed), name
        whole = json.dumps(dict.fromkeys(listed), ensure_ascii=False)
        assert takes(grammar, whole, rng)
        assert not takes(grammar, whole.replace("{", '{"a": null, ', 1), rng)  # the second a


def test_other_names_pass_beside_those_of_the_schema(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in NAMES}, "required": ["ab"]}
    compiler = Compiler(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos))
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema), {"property_order": "any"}))
    assert takes(grammar, '{"abcd": 1, "ab": null, "c": 2}') and not takes(grammar, '{"abcd": 1, "ab": 2}')
    assert not takes(grammar, '{"abcd": 1}')
