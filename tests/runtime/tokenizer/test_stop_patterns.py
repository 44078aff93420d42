"""Patterns that end a text: where they match, how much text they hold back, and which are refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from phloem.constrained.spec import GrammarError
from phloem.runtime.tokenizer.detokenizer import Detokenizer
from phloem.runtime.tokenizer.stop_patterns import StopPattern, StopScan

PIECES = [bytes([byte]) for byte in range(256)]
PATTERNS = ["ab", "a+b", "(ab|ba)a", "[ab]{3}c", "a[^b]*b", "é.", "b|ab", "ca*c", ".a.a"]


def expected(patterns: list[str], text: str) -> tuple[int, int] | None:
    """(start, end) of the match that is complete first, and of those the longest; by trying them all."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if any(re.fullmatch(pattern, text[start:end]) for pattern in patterns):
                return start, end
    return None


@given(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3), st.text("abcé", max_size=24))
def test_the_first_match_to_be_complete_ends_the_text(patterns: list[str], text: str) -> None:
    scan = StopScan(tuple(StopPattern(pattern) for pattern in patterns))
    found = None
    for at, char in enumerate(text, start=1):
        length, pattern = scan.step(char)
        if length:
            assert pattern in patterns
            found = (at - length, at)
            break
    assert found == expected(patterns, text)


@given(st.sampled_from(PATTERNS), st.text("abcé", max_size=24), st.sampled_from(["", "ca", "bc"]))
def test_the_detokenizer_shows_nothing_that_is_taken_back(pattern: str, text: str, stop: str) -> None:
    detokenizer = Detokenizer(PIECES, (stop,) if stop else (), (StopPattern(pattern),))
    shown = ""
    for byte in text.encode():
        shown += detokenizer.push(byte)
        if detokenizer.matched_stop is not None:
            break
    shown += detokenizer.finish()
    both = [pattern, re.escape(stop)] if stop else [pattern]
    match = expected(both, text)
    assert shown == detokenizer.text == (text if match is None else text[: match[0]])
    kept = text.encode()[: detokenizer.num_whole_tokens].decode()
    assert match is None or kept + detokenizer.remainder == shown


def test_text_that_can_be_no_part_of_a_match_is_shown_at_once() -> None:
    detokenizer = Detokenizer(PIECES, (), (StopPattern(r"\n\d+\."),))
    assert "".join(detokenizer.push(byte) for byte in b"one\n1") == "one"
    assert detokenizer.push(ord("2")) == ""
    assert detokenizer.push(ord("x")) == "\n12x"
    assert [detokenizer.push(byte) for byte in b"\n3."] == ["", "", ""]
    assert (detokenizer.matched_stop, detokenizer.text) == (r"\n\d+\.", "one\n12x")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a*", "matches the empty text"),
        ("^a", "holds \\^ or \\$"),
        ("(x|a$)", "holds \\^ or \\$"),
        ("[^\\s\\S]", "matches no text"),
        ("(a", "a\\b|group|\\)"),
    ],
)
def test_a_pattern_that_cannot_end_a_text_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        StopPattern(pattern)


def test_hidden_bytes_are_not_shown_and_stop_nothing() -> None:
    detokenizer = Detokenizer([b"ab", b"cX", b"Xc"], ("X",), num_hidden=3)
    assert detokenizer.push(0) == "" and detokenizer.is_hidden and detokenizer.num_hidden == 1
    assert detokenizer.push(1) == "" and not detokenizer.is_hidden
    assert detokenizer.matched_stop == "X" and detokenizer.text == ""
