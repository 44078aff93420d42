# ruff: noqa: E501
import json

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile

from .conftest import takes

CALLS = {
    "tags": [
        {"begin": "<f=get>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, "end": "</f>"},
        {"begin": "<f=re>", "regex": "[0-9]+", "end": "</f>"},
    ],
    "triggers": ["<f="],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("", True),
        ("free é text < f = <f <", True),
        ('ok <f=get>{"x": 1}</f> and <f=re>12</f> bye', True),
        ('<f=get>{"x":1}</f><f=get>{"x":2}</f>', True),
        ('<f=get>{"x": "1"}</f>', False),
        ('<f=get>{"x": 1}', False),
        ('<f=get>{"x": 1}<', False),
        ("<f=other>", False),
        ("<f=re>1x</f>", False),
        ("<<f=re>1</f>", True),
        ("<f<f=re>a", False),
    ],
)
def test_free_text_between_tags(vocabulary: Vocabulary, text: str, valid: bool) -> None:
    assert takes(compile("structural_tags", json.dumps(CALLS), vocabulary), text) == valid


def test_text_before_start_after_is_free(vocabulary: Vocabulary) -> None:
    grammar = compile("structural_tags", json.dumps({**CALLS, "start_after": "</think>"}), vocabulary)
    assert takes(grammar, "<f=zz> </thin</think><f=re>1</f>")
    assert not takes(grammar, "</think><f=zz>")
    assert not takes(grammar, "still thinking")


def test_at_least_one_and_stop_after_first(vocabulary: Vocabulary) -> None:
    grammar = compile(
        "structural_tags", json.dumps({**CALLS, "at_least_one": True, "stop_after_first": True}), vocabulary
    )
    assert takes(grammar, "x<f=re>1</f>")
    assert not takes(grammar, "x")
    assert not takes(grammar, "x<f=re>1</f>y")


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"tags": []}, "need 1 to 512 tags, not 0"),
        ({"tags": [{"begin": "a"}]}, "holds either a schema or a regex \\(at #/tags/0\\)"),
        ({"tags": [{"begin": "", "regex": "a"}]}, "needs begin"),
        ({"tags": [{"begin": "a", "regex": "b", "stop": "c"}]}, "unknown field 'stop'"),
        ({"tags": [{"begin": "a", "regex": "b"}], "colour": 1}, "unknown field 'colour'"),
        ({"tags": [{"begin": "a", "regex": "b"}], "triggers": ["z"]}, "trigger 'z' begins no tag"),
        ({"tags": [{"begin": "xay", "regex": "b"}, {"begin": "a", "regex": "b"}]}, "it contains the trigger 'a'"),
        ({"tags": [{"begin": "a", "regex": "b"}, {"begin": "ab", "regex": "b"}]}, "also the beginning of another"),
        ({"tags": [{"begin": "a", "schema": {"type": "nope"}}]}, "unknown type"),
    ],
)
def test_bad_tags_are_refused_by_name(vocabulary: Vocabulary, tags: object, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile("structural_tags", json.dumps(tags), vocabulary)


def test_begin_at_once_puts_the_first_tag_at_the_start(vocabulary: Vocabulary) -> None:
    grammar = compile("structural_tags", json.dumps({**CALLS, "begin_at_once": True}), vocabulary)
    assert takes(grammar, "<f=re>1</f> and <f=re>2</f>")
    assert not takes(grammar, "x<f=re>1</f>")
    assert not takes(grammar, "")
    after = compile(
        "structural_tags", json.dumps({**CALLS, "begin_at_once": True, "start_after": "</think>"}), vocabulary
    )
    assert takes(after, "hm</think><f=re>1</f>") and not takes(after, "hm</think> <f=re>1</f>")


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("<a>x</a> and then", True),
        ("<a>x</a>y</a>", True),
        ("<a>x</a> and <a>", False),
        ("<a></a", False),
        ("<b>112 and <b>3", True),
        ("<b>x", False),
    ],
)
def test_a_regex_ends_at_the_first_end_behind_a_match(vocabulary: Vocabulary, text: str, valid: bool) -> None:
    tags = [{"begin": "<a>", "regex": ".*", "end": "</a>"}, {"begin": "<b>", "regex": "[0-9]+"}]
    assert takes(compile("structural_tags", json.dumps(tags), vocabulary), text) == valid
