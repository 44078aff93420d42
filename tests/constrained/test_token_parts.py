"""Short and long tokens are walked apart; the masks are those of every token tried by itself."""

import json
import random

import numpy as np
import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.token_parts import SHORT_TOKEN, TokenParts, parts_of

LONG = [run * n for run in (b"-", b" ", b"a", b"\n") for n in (SHORT_TOKEN, SHORT_TOKEN + 1, 23, 40)]
MIXED = [
    b"abcdefghij klmnopqrs",
    b'-----------------"',
    b'aaaaaaaaaaaaaaaaaa", "',
    b"a a a a a a a a a a a a",
    b"--aaaaaaaaaaaaaaaa--",
]
SHORT = [b"aa", b"--", b"a-", b'a"', b'-"', b"\\n", b"\\u00", b'",', b' "', b"\xc3\xa9", b"\xc3", b"a\xc3\xa9a"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokens = [bytes([b]) for b in range(256)] + LONG + MIXED + SHORT + [b"</s>"]
    return Vocabulary(tokens, {len(tokens) - 1}, len(tokens) - 1)


@pytest.mark.parametrize(
    ("pattern", "bounds"),
    [
        ("^([a-z-]{2,20} ?){1,30}$", {"maxLength": 90}),
        ("^([^\\n]{0,30}\\n){0,20}[^\\n]{0,19}$", {"maxLength": 70}),
        ("^([^\\n]{0,30}\\n){0,20}[^\\n]{0,19}$", {}),
        ("^.{0,25}: .*$", {"minLength": 18, "maxLength": 60}),
        ("^[a-]{18,22}( [a-]{1,21}){0,9}$", {"minLength": 20}),
        ("^([a-z]{1,18}-){19,40}[a-z]+$", {"maxLength": 400}),
        ("^[^ ]{17,}é?$", {"maxLength": 24}),
    ],
)
def test_masks_are_those_of_every_token_tried(vocabulary: Vocabulary, pattern: str, bounds: dict[str, int]) -> None:
    grammar = compile("json_schema", json.dumps({"type": "string", "pattern": pattern, **bounds}), vocabulary)
    rng = random.Random(pattern)
    seen = 0
    for _ in range(4):
        matcher = grammar.matcher()
        for _ in range(14):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: len(vocabulary)]
            for token in range(len(vocabulary)):
                assert matcher.clone().accept(token) == bits[token], (vocabulary.tokens[token], pattern)
            allowed = np.flatnonzero(bits[: vocabulary.eos])
            if not len(allowed):
                break
            seen += 1
            texts = [t for t in allowed.tolist() if b"\\" not in vocabulary.tokens[t]]
            assert matcher.accept(rng.choice(texts or allowed.tolist()))
    assert seen > 20


def test_nodes_of_a_part_are_found_among_all(vocabulary: Vocabulary) -> None:
    def spelled(trie, node: int) -> bytes:
        token = int(trie.token_order[trie.first_token[node]])
        return vocabulary.tokens[token][: int(trie.node_depth[node])]

    parts = TokenParts(vocabulary)
    for trie in (parts.short, parts.long):
        nodes = np.arange(trie.num_nodes)
        found = parts.in_whole(trie, nodes)
        assert [spelled(vocabulary.trie, n) for n in found] == [spelled(trie, n) for n in nodes]
    assert len(parts.short.token_order) + len(parts.long.token_order) == len(vocabulary.trie.token_order)


def test_a_vocabulary_without_long_tokens_has_no_parts() -> None:
    tokens = [bytes([b]) for b in range(256)] + [b"</s>"]
    vocabulary = Vocabulary(tokens, {256}, 256)
    assert parts_of(vocabulary) is None
    grammar = compile("json_schema", json.dumps({"type": "string", "pattern": "^[a-z]{1,40}$"}), vocabulary)
    assert grammar.matcher().accept(ord('"'))
