"""The adapter's calls to a peer, and its use of the answers. The peer is a small engine whose grammars are words."""

import json
from typing import Any

import numpy as np
import pytest
from phloem.constrained import GrammarError, GrammarSpec, Vocabulary
from phloem.constrained.peers import Peer, PeerMatcher, compile_with, load_peer

from .conftest import encode, is_set


class Words:
    """A peer whose grammars are sets of words, given as a regex with ``|`` only."""

    name = "words"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.spelling: dict[bytes, list[int]] = {}
        for token in np.flatnonzero(vocabulary.is_text).tolist():
            self.spelling.setdefault(vocabulary.tokens[token], []).append(token)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []

    def compile(self, kind: str, text: str, options: dict[str, Any]) -> list[bytes]:
        self.asked.append((kind, text, options))
        return [word.encode() for word in text.split("|")]

    def walk(self, compiled: list[bytes]) -> "WordsWalk":
        return WordsWalk(compiled, self.vocabulary)


class WordsWalk:
    def __init__(self, words: list[bytes], vocabulary: Vocabulary) -> None:
        self.words, self.vocabulary, self.taken = words, vocabulary, [b""]

    def fill(self, row: np.ndarray) -> None:
        for token in np.flatnonzero(self.vocabulary.is_text).tolist():
            if any(word.startswith(self.taken[-1] + self.vocabulary.tokens[token]) for word in self.words):
                row[token >> 5] |= np.uint32(1 << (token & 31))

    def accept(self, token_id: int) -> bool:
        text = self.taken[-1] + self.vocabulary.tokens[token_id]
        if not any(word.startswith(text) for word in self.words):
            return False
        self.taken.append(text)
        return True

    def rollback(self, n: int) -> None:
        del self.taken[-n:]

    def may_end(self) -> bool:
        return self.taken[-1] in self.words


@pytest.fixture
def peer(vocabulary: Vocabulary) -> Words:
    return Words(vocabulary)


def _matcher(peer: Peer, vocabulary: Vocabulary, prefix: bytes = b"") -> PeerMatcher:
    return compile_with(peer, GrammarSpec("choices", '["name", "names"]'), vocabulary).after(prefix).matcher()


def test_choices_are_compiled_as_a_regex(peer: Words, vocabulary: Vocabulary) -> None:
    compile_with(peer, GrammarSpec("choices", json.dumps(["a.b", "c"])), vocabulary)
    compile_with(peer, GrammarSpec("json_schema", "{}", {"whitespace": "compact"}), vocabulary)
    assert peer.asked == [("regex", r"a\.b|c", {}), ("json_schema", "{}", {"whitespace": "compact"})]


def test_an_option_that_the_peer_does_not_know_is_refused_by_name(peer: Words, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match="option 'property_order' is not known to grammar engine 'words'"):
        compile_with(peer, GrammarSpec("json_schema", "{}", {"property_order": "any"}), vocabulary)
    with pytest.raises(GrammarError, match="whitespace is 'neat'; grammar engine 'words' knows 'flexible' and 'comp"):
        compile_with(peer, GrammarSpec("json_schema", "{}", {"whitespace": "neat"}), vocabulary)


def test_the_end_is_allowed_exactly_where_the_peer_may_end(peer: Words, vocabulary: Vocabulary) -> None:
    matcher = _matcher(peer, vocabulary)
    assert not is_set(matcher.mask(), vocabulary.eos) and not matcher.is_accepting()
    for token in encode(vocabulary, "name"):
        assert is_set(matcher.mask(), token) and matcher.accept(token)
    row = matcher.mask()
    assert is_set(row, vocabulary.eos) and is_set(row, ord("s")) and not is_set(row, ord("x"))
    twin = matcher.clone()
    assert matcher.accept(vocabulary.eos) and matcher.is_finished() and not twin.is_finished()
    assert matcher.state == -1
    matcher.rollback(1)
    assert (matcher.mask() == row).all() and (twin.mask() == row).all() and matcher.state == twin.state


def test_a_refused_token_is_an_error_until_a_rollback(peer: Words, vocabulary: Vocabulary) -> None:
    matcher = _matcher(peer, vocabulary)
    tokens = [ord(c) for c in "na"]
    assert all(map(matcher.accept, tokens)) and not matcher.accept(ord("x"))
    assert matcher.error == f"token {ord('x')} refused at position 2 by words"
    assert not matcher.accept(ord("m"))
    matcher.rollback(1)
    assert matcher.error is None and matcher.accept(ord("a")) and matcher.accept(ord("m"))
    with pytest.raises(ValueError, match="cannot roll back 9 tokens: 3 were accepted"):
        matcher.rollback(9)


def test_the_prefix_is_written_before_the_grammar_begins(peer: Words, vocabulary: Vocabulary) -> None:
    matcher = _matcher(peer, vocabulary, prefix=b": ")
    allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
    assert {vocabulary.tokens[t] for t in allowed} == {b":"}
    for token in encode(vocabulary, ": name"):
        if vocabulary.tokens[token] != b" name":
            assert is_set(matcher.mask(), token) and matcher.accept(token), vocabulary.tokens[token]
    assert matcher.is_accepting()
    matcher.rollback(matcher.num_tokens)
    assert matcher.accept(ord(":")) and matcher.accept(ord(" ")) and matcher.accept(ord("n"))


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_a_missing_peer_is_an_error_that_says_how_to_install_it(
    vocabulary: Vocabulary, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)  # as if it were not installed
    with pytest.raises(
        GrammarError, match=rf"grammar engine '{name}' is not installed .*pip install 'phloem\[{name}\]'"
    ):
        load_peer(name, vocabulary)
    with pytest.raises(GrammarError, match="grammar engine 'other' is not one of: phloem, llguidance, xgrammar"):
        load_peer("other", vocabulary)
