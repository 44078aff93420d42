import json
import random

import pytest
from phloem.constrained import Vocabulary, compile

from ..conftest import takes


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('"\\u00e9"', True),
        ('"\\u00E9\\n\\/"', True),
        ('"\\ud83d\\ude00"', True),
        ('"\\ud83d"', False),
        ('"\\ude00"', False),
        ('"\\x41"', False),
        ('"\t"', False),
        ('"\x7f"', True),
    ],
)
def test_free_text_takes_the_escapes_of_the_standard(vocabulary: Vocabulary, text: str, valid: bool) -> None:
    grammar = compile("json_schema", '{"type": "string"}', vocabulary)
    assert takes(grammar, text, random.Random(2)) == valid


def test_a_listed_text_is_spelled_one_way(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", json.dumps({"enum": ['é"\n', "\u0001"]}), vocabulary)
    assert takes(grammar, '"é\\"\\n"') and takes(grammar, '"\\u0001"')
    assert not takes(grammar, '"\\u00e9\\"\\n"') and not takes(grammar, '"é\\"\\u000a"')


@pytest.mark.parametrize(("low", "high"), [(0, 2), (2, 3), (1, None)])
def test_lengths_count_characters_not_bytes_and_an_escape_as_one(
    vocabulary: Vocabulary, low: int, high: int | None
) -> None:
    schema = {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    for length in range(5):
        valid = low <= length and (high is None or length <= high)
        for character in ("a", "é", "\U0001f600", "\\n", "\\u00e9", "\\ud83d\\ude00"):
            assert takes(grammar, f'"{character * length}"') == valid, (character, length)


def test_a_pattern_and_lengths_hold_together(vocabulary: Vocabulary) -> None:
    grammar = compile(
        "json_schema", '{"type": "string", "pattern": "^a+b*$", "minLength": 2, "maxLength": 3}', vocabulary
    )
    texts = ["", "a", "aa", "ab", "aab", "abb", "aabb", "ba"]
    assert [text for text in texts if takes(grammar, f'"{text}"')] == ["aa", "ab", "aab", "abb"]


def test_literals_are_whole(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", '{"type": ["null", "boolean"]}', vocabulary)
    assert all(takes(grammar, text) for text in ("null", "true", "false"))
    assert not any(takes(grammar, text) for text in ("nul", "nulll", "True", "1", ""))
