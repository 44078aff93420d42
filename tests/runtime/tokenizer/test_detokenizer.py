"""Text comes out in whole characters, ends at stops, and has the right number of tokens."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from phloem.runtime.tokenizer import Detokenizer
from phloem.runtime.tokenizer.stop_strings import StopStrings

# Tokens that cut characters apart, empty (special) ones, bytes that are no UTF-8, and letters of the stop strings.
PIECES = ["é".encode()[:1], "é".encode()[1:], "🦜".encode()[:2], "🦜".encode()[2:], "🦜".encode(), "aé".encode(), b""]
PIECES += [b"a", b"b", b"ab", b"ba", b"aab", b"\n", b"\nU", b"\xff", b"\xf0\x9f", b"c\xc3", b"\xa9c", "€".encode()]
STOPS = st.lists(st.text("abcé\nU🦜�", min_size=1, max_size=4), max_size=3)
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=14)


def whole_text(tokens: list[int], *, final: bool) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(b"".join(PIECES[t] for t in tokens), final=final)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the text is cut and by which stop string: the one complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def slow(tokens: list[int], stops: list[str]) -> tuple[int, str, str | None, int, str]:
    """The slow reference, which decodes everything after each token: tokens taken, text, stop, whole tokens, rest."""
    for count in range(len(tokens) + 1):
        final = count == len(tokens)
        cut = first_stop(whole_text(tokens[:count], final=False), stops)
        if cut is None and final:
            cut = first_stop(whole_text(tokens, final=True), stops)
        if cut is not None:
            text = whole_text(tokens[:count], final=True)[: cut[0]]
            for whole in range(count, -1, -1):
                head = whole_text(tokens[:whole], final=False)
                ends_with_character = head == whole_text(tokens[:whole], final=True)
                if ends_with_character and len(head) <= len(text):
                    return count, text, cut[1], whole, text[len(head) :]
    return len(tokens), whole_text(tokens, final=True), None, len(tokens), ""


@given(TOKENS, STOPS)
def test_it_says_what_decoding_everything_each_time_would_say(tokens: list[int], stops: list[str]) -> None:
    detokenizer = Detokenizer(PIECES, stops)
    released = ""
    for token in tokens:
        released += detokenizer.push(token)
        assert detokenizer.text == released
        if detokenizer.matched_stop is not None:
            break
    taken = detokenizer.num_tokens
    released += detokenizer.finish()
    count, text, stop, whole, remainder = slow(tokens, stops)
    assert taken == count
    assert released == detokenizer.text == text
    assert detokenizer.matched_stop == stop
    assert (detokenizer.num_whole_tokens, detokenizer.remainder) == (whole, remainder)


@given(TOKENS, STOPS)
def test_nothing_is_released_that_a_stop_string_takes_back(tokens: list[int], stops: list[str]) -> None:
    detokenizer = Detokenizer(PIECES, stops)
    for count, token in enumerate(tokens, start=1):
        detokenizer.push(token)
        if detokenizer.matched_stop is not None:
            return
        text = whole_text(tokens[:count], final=False)
        held = text[len(detokenizer.text) :]
        assert text.startswith(detokenizer.text)
        # What is held is exactly the longest end of the text that begins a stop string.
        assert held == max(
            (
                text[i:]
                for i in range(len(text) + 1)
                if any(stop.startswith(text[i:]) for stop in stops) or i == len(text)
            ),
            key=len,
        )


@given(st.lists(TOKENS, max_size=4))
def test_many_tokens_at_once_are_those_one_by_one(parts: list[list[int]]) -> None:
    single, many = Detokenizer(PIECES), Detokenizer(PIECES)
    for part in parts:
        assert many.extend(part) == "".join([single.push(token) for token in part])
        assert (many.text, many.num_tokens, many.num_whole_tokens) == (
            single.text,
            single.num_tokens,
            single.num_whole_tokens,
        )
    assert many.finish() == single.finish()


@given(TOKENS, st.integers(0, len(PIECES) + 1))
def test_a_token_between_characters_shows_its_own_text(tokens: list[int], token: int) -> None:
    detokenizer = Detokenizer(PIECES)
    detokenizer.extend(tokens)
    text = detokenizer.text_of(token)
    if text and not detokenizer.is_mid_character:
        assert detokenizer.push(token) == text
        assert not detokenizer.is_mid_character


def test_half_a_character_waits_for_its_other_half() -> None:
    detokenizer = Detokenizer(PIECES)
    assert [detokenizer.push(0), detokenizer.push(1)] == ["", "é"]


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    detokenizer = Detokenizer(PIECES)
    assert [detokenizer.push(0), detokenizer.finish()] == ["", "�"]


def test_a_token_that_reaches_over_the_cut_is_not_whole_and_leaves_a_remainder() -> None:
    detokenizer = Detokenizer([b"Hello", b" wor", b"ld. E", b"ND"], ["END"])
    assert [detokenizer.push(i) for i in range(4)] == ["Hello", " wor", "ld. ", ""]
    assert (detokenizer.matched_stop, detokenizer.num_whole_tokens, detokenizer.remainder) == ("END", 2, "ld. ")


def test_an_id_beyond_the_vocabulary_shows_nothing() -> None:
    assert Detokenizer(PIECES).push(10_000) == ""


def test_pushing_after_a_stop_is_a_bug() -> None:
    detokenizer = Detokenizer([b"a"], ["a"])
    detokenizer.push(0)
    with pytest.raises(AssertionError):
        detokenizer.push(0)


def test_of_stop_strings_complete_at_one_character_the_longest_wins() -> None:
    detokenizer = Detokenizer([b"xab"], ["b", "ab"])
    assert (detokenizer.push(0), detokenizer.matched_stop) == ("x", "ab")


def test_points_that_no_cut_can_reach_are_forgotten() -> None:
    detokenizer = Detokenizer([b"word ", b"S"], ["STOP"])
    for _ in range(1000):
        detokenizer.push(0)
        detokenizer.push(1)
    assert len(detokenizer.boundaries) < 8


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.text("abc", max_size=30))
def test_a_state_is_the_longest_beginning_of_a_stop_string(stops: list[str], text: str) -> None:
    automaton, state = StopStrings(tuple(stops)), 0
    for end, char in enumerate(text, start=1):
        state = automaton.step(state, char)
        tails = [text[i:end] for i in range(end + 1)]
        assert automaton.depth[state] == max(len(t) for t in tails if any(stop.startswith(t) for stop in stops))
        assert automaton.match[state] == max((t for t in tails if t in stops), key=len, default=None)
