"""The suffix automaton compared with a plain search."""

import random

import numpy as np
import pytest
from phloem.runtime.speculative.automaton import SuffixAutomaton


def longest_seen_before(text: list[int]) -> int:
    """Length of the longest suffix of ``text`` that also ends earlier in it."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        if any(text[e - length : e] == text[n - length :] for e in range(length, n)):
            return length
    return 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8, 40])
def test_the_match_is_the_longest_earlier_suffix_with_its_end(alphabet):
    rng = random.Random(alphabet)
    for _ in range(20):
        automaton, text = SuffixAutomaton(), []
        while len(text) < 80:
            piece = [rng.randrange(alphabet) for _ in range(rng.choice((1, 1, 1, 5, 17)))]
            if text and rng.random() < 0.3:
                start = rng.randrange(len(text))
                piece = text[start : start + rng.randrange(1, 20)]
            text += piece
            automaton.extend(np.array(piece, np.int32))
            assert automaton.text.tolist() == text
            length, end = automaton.match_len, automaton.match_end
            assert length == longest_seen_before(text)
            if length:
                assert end < len(text) - 1
                assert text[end + 1 - length : end + 1] == text[-length:]
                follows = automaton.continuation(6).tolist()
                assert len(follows) == 6
                assert follows[: len(text) - 1 - end] == text[end + 1 : end + 7]


def test_the_continuation_follows_the_last_occurrence():
    automaton = SuffixAutomaton()
    automaton.extend(np.array([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], np.int32))
    assert automaton.match_len == 3 and automaton.continuation(2).tolist() == [8, 1]


def test_a_repeating_text_is_continued_beyond_its_end():
    automaton = SuffixAutomaton()
    automaton.extend(np.array([5, 6, 7, 5, 6, 7, 5], np.int32))
    assert automaton.continuation(7).tolist() == [6, 7, 5, 6, 7, 5, 6]


def test_memory_is_linear_in_the_text():
    automaton = SuffixAutomaton()
    automaton.extend(np.arange(50_000, dtype=np.int32) * 7919 % 1000)
    assert automaton.num_bytes < 200 * 50_000
