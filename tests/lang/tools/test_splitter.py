"""Text and calls told apart, in pieces of any size."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from phloem.lang.tools.calls import read_calls
from phloem.lang.tools.tool import as_tool
from phloem.protocol.tool_format import ToolFormat
from phloem.protocol.tool_splitter import ArgumentsPiece, CallBegun, CallEnded, TextPiece

TEXT = (
    'Let me see <tool_ca <b>.\n\n<tool_call>\n{"name": "add", "arguments": {"x": "}\\"{", "y": [{}]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ask", "arguments": {}}\n</tool_call>\n\nDone.\n'
)
TOOLS = [as_tool({"name": name}) for name in ("add", "ask", "a")]


def events(pieces: list[str]) -> list[tuple]:
    """What comes out, neighbouring pieces of one kind joined."""
    splitter = ToolFormat().splitter([tool.name for tool in TOOLS])
    found: list[tuple] = []
    for event in [event for piece in pieces for event in splitter.push(piece)] + splitter.finish():
        match event:
            case TextPiece(text):
                if found and found[-1][0] == "text":
                    text = found.pop()[1] + text
                found.append(("text", text))
            case ArgumentsPiece(index, text):
                if found[-1][0] == "arguments":
                    text = found.pop()[2] + text
                found.append(("arguments", index, text))
            case CallBegun(index, name):
                found.append(("begun", index, name))
            case CallEnded(index):
                found.append(("ended", index))
    return found


EXPECTED = [
    ("text", "Let me see <tool_ca <b>."),
    ("begun", 0, "add"),
    ("arguments", 0, '{"x": "}\\"{", "y": [{}]}'),
    ("ended", 0),
    ("begun", 1, "ask"),
    ("arguments", 1, "{}"),
    ("ended", 1),
    ("text", "Done.\n"),
]


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_calls_are_found_however_the_text_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TEXT)]
    assert events([TEXT[a:b] for a, b in itertools.pairwise(edges)]) == EXPECTED


def test_text_is_shown_as_soon_as_it_cannot_be_a_call() -> None:
    splitter = ToolFormat().splitter(["add"])
    assert splitter.push("Hello <to") == [TextPiece("Hello")]
    assert splitter.push("day> x ") == [TextPiece(" <today> x")]
    assert splitter.finish() == [TextPiece(" ")]


def test_text_that_only_resembles_a_call_is_text() -> None:
    text = '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'
    assert events([text]) == [("text", text)]


@pytest.mark.parametrize("cut", ['"arguments": {"x": 1', '"arguments": {"x": 1}', '"arguments": {}}\n</tool'])
def test_a_call_cut_short_is_an_error_and_not_a_call(cut: str) -> None:
    with pytest.raises(ValueError, match=r"the call of add\(\) is not complete"):
        read_calls('<tool_call>\n{"name": "add", ' + cut, ToolFormat(), TOOLS)


def test_calls_come_with_the_text_around_them() -> None:
    calls = read_calls(TEXT, ToolFormat(), TOOLS)
    assert [(call.name, call.arguments) for call in calls] == [("add", {"x": '}"{', "y": [{}]}), ("ask", {})]
    assert calls.text == "Let me see <tool_ca <b>.Done.\n" and len(calls) == 2 and calls[-1].name == "ask"
