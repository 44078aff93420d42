"""An answer's events do not depend on how its text is cut into pieces."""

import pytest
from phloem.protocol.answer_splitter import AnswerSplitter, ReasoningPiece
from phloem.protocol.messages import ThinkingStyle
from phloem.protocol.thinking_splitter import ThinkingSplitter
from phloem.protocol.tool_format import ToolFormat
from phloem.protocol.tool_splitter import ArgumentsPiece, CallBegun, CallEnded, TextPiece

CALL = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'


def events_of(text: str, size: int, *, is_forced: bool = False) -> tuple[list, AnswerSplitter]:
    """The events of ``text`` in pieces of ``size``; neighbouring pieces of one kind joined."""
    splitter = AnswerSplitter(ThinkingSplitter(ThinkingStyle(is_forced=is_forced)), ToolFormat().splitter(["clock"]))
    found: list = []
    pushed = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
    for event in [e for events in [*pushed, splitter.finish()] for e in events]:
        if found and type(found[-1]) is type(event) and isinstance(event, ReasoningPiece | TextPiece):
            found[-1] = type(event)(found[-1].text + event.text)
        elif found and isinstance(found[-1], ArgumentsPiece) and isinstance(event, ArgumentsPiece):
            found[-1] = ArgumentsPiece(event.index, found[-1].text + event.text)
        else:
            found.append(event)
    return found, splitter


@pytest.mark.parametrize(
    ("text", "is_forced", "wanted"),
    [
        (f"<think>\nhm\n</think>\n\nWell.\n{CALL}", False, [ReasoningPiece("hm"), TextPiece("Well."), CALL]),
        (f"hm {CALL} hm\n</think>\n{CALL}", True, [ReasoningPiece(f"hm {CALL} hm"), CALL]),
        (CALL, False, [CALL]),
        ("<think>\nnever done", False, [ReasoningPiece("never done")]),
        ("Well.", False, [TextPiece("Well.")]),
        ("", True, []),
    ],
)
def test_reasoning_text_and_calls_come_apart(text, is_forced, wanted):
    expanded = []
    for event in wanted:
        called = [CallBegun(0, "clock"), ArgumentsPiece(0, '{"a": 1}'), CallEnded(0)]
        expanded += called if event == CALL else [event]
    for size in (1, 2, 7, 1000):
        events, splitter = events_of(text, size, is_forced=is_forced)
        assert events == expanded, size
        assert splitter.num_calls == wanted.count(CALL)
        assert splitter.has_reasoning == any(isinstance(event, ReasoningPiece) for event in wanted)
