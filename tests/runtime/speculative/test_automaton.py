"""The suffix automaton, and the search before it, compared with a plain search."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from phloem.runtime.speculative import automaton as module
from phloem.runtime.speculative.automaton import SeenText, SuffixAutomaton


def longest_seen_before(text: list[int]) -> int:
    """Length of the longest suffix of ``text`` that also ends earlier in it."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        if any(text[e - length : e] == text[n - length :] for e in range(length, n)):
            return length
    return 0


def pieces(alphabet: int, seed: int) -> Iterator[list[int]]:
    """Parts of a text of 80 tokens or more, in which earlier parts come again."""
    rng, text = random.Random(f"{alphabet} {seed}"), list[int]()
    while len(text) < 80:
        piece = [rng.randrange(alphabet) for _ in range(rng.choice((1, 1, 1, 5, 17)))]
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            piece = text[start : start + rng.randrange(1, 20)]
        text += piece
        yield piece


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("searches", [0, 2, 64])
def test_the_match_is_the_longest_earlier_suffix_with_its_end(alphabet, searches, monkeypatch):
    monkeypatch.setattr(module, "_SEARCHES", searches)
    for seed in range(20):
        automaton, seen, text = SuffixAutomaton(), SeenText(), []
        for piece in pieces(alphabet, seed):
            text += piece
            for one in (automaton, seen):
                one.extend(np.array(piece, np.int32))
                assert len(one) == len(text)
                length, end = one.match_len, one.match_end
                assert length == longest_seen_before(text)
                if length:
                    assert end < len(text) - 1
                    assert text[end + 1 - length : end + 1] == text[-length:]
            assert seen.text.tolist() == text
            if length:
                follows = seen.continuation(6).tolist()
                assert len(follows) == 6
                assert follows[: len(text) - 1 - end] == text[end + 1 : end + 7]
        assert seen.is_indexed == (searches < 64)


def test_the_continuation_follows_the_last_occurrence():
    seen = SeenText()
    seen.extend(np.array([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], np.int32))
    assert seen.match_len == 3 and seen.continuation(2).tolist() == [8, 1]


def test_a_repeating_text_is_continued_beyond_its_end():
    seen = SeenText()
    seen.extend(np.array([5, 6, 7, 5, 6, 7, 5], np.int32))
    assert seen.continuation(7).tolist() == [6, 7, 5, 6, 7, 5, 6]


def test_no_match_in_texts_of_no_token_and_of_one():
    seen = SeenText()
    assert seen.match_len == 0 and not len(seen.continuation(3))
    for tokens in ([], [4]):
        seen.extend(np.array(tokens, np.int32))
        assert seen.match_len == 0 and not len(seen.continuation(3))


def test_a_text_that_is_asked_about_often_is_indexed():
    seen, text = SeenText(), list(range(200))
    seen.extend(np.array(text, np.int32))
    num_asked = 0
    while not seen.is_indexed:
        text.append(num_asked % 7)
        seen.extend(np.array(text[-1:], np.int32))
        assert seen.match_len == longest_seen_before(text)
        num_asked += 1
    assert 50 < num_asked < 80


def test_a_long_search_gives_up_and_the_text_is_indexed():
    seen = SeenText()
    text = [*([1] * 200 + [2]) * 100, 3, *[1] * 199]  # the last 199 tokens occurred before
    seen.extend(np.array(text, np.int32))
    assert seen.match_len == 199 and not seen.is_indexed
    seen.extend(np.array([1, 1], np.int32))  # many ends to try for a longer match
    assert seen.match_len == 200 and seen.is_indexed


def test_memory_is_linear_in_the_text():
    automaton = SuffixAutomaton()
    automaton.extend(np.arange(50_000, dtype=np.int32) * 7919 % 1000)
    assert automaton.num_bytes < 200 * 50_000
