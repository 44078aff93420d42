import random

import numpy as np
import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.machine.lazy_masks import MANY_NOTED, reached

from ..conftest import encode


@pytest.mark.parametrize("num_noted", [0, 1, 5, MANY_NOTED + 6])
@pytest.mark.parametrize("limit", [4, 10_000])
def test_what_a_walk_reached_is_found_as_by_looking_at_every_token(
    vocabulary: Vocabulary, num_noted: int, limit: int
) -> None:
    rng = random.Random(num_noted)
    trie = vocabulary.trie
    row, before = (np.array([rng.getrandbits(32) for _ in range(vocabulary.num_words)], np.uint32) for _ in range(2))
    noted = np.array([rng.randrange(trie.num_nodes) for _ in range(num_noted)], np.int64)
    marks = np.zeros(trie.num_nodes, np.int32)
    tokens, covered, starts, children, firsts = reached(
        trie.node_byte, trie.node_end, trie.first_token, trie.token_order, noted, row, before, marks, 1, limit
    )
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    assert tokens.tolist() == (allowed if len(allowed) <= limit else [-1])
    assert (covered == row | before).all()
    bits = np.unpackbits(covered.view(np.uint8), bitorder="little")

    def lacks(node: int) -> bool:
        end = trie.node_end[node]
        last = trie.first_token[end] if end < trie.num_nodes else len(trie.token_order)
        return any(not bits[t] for t in trie.token_order[trie.first_token[node] : last])

    expected = {
        child
        for node in set(noted.tolist())
        for child in range(node + 1, trie.node_end[node])
        if trie.node_depth[child] == trie.node_depth[node] + 1 and lacks(child)
    }
    assert sorted(children.tolist()) == sorted(expected)
    for byte in range(256):
        of_byte = children[starts[byte] : starts[byte + 1]]
        assert all(trie.node_byte[child] == byte for child in of_byte)
        assert bool(firsts[byte >> 3] >> (byte & 7) & 1) == bool(len(of_byte))


def test_states_that_agree_as_deep_as_was_looked_share_a_mask(vocabulary: Vocabulary) -> None:
    grammar = compile("ebnf", 'root ::= "(" root ")" | "x"', vocabulary)
    masks = []
    for depth in (5, 6, 40):
        matcher = grammar.matcher()
        for token in encode(vocabulary, "(" * depth):
            assert matcher.accept(token)
        masks.append(matcher.mask())
    assert masks[0] is masks[1] is masks[2]


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (r"LINE: /([a-z]+[ ,]){0,60}[a-z]+\./", ["the", *[",name"] * 14, "."]),
        (r"LINE: /([a-z]{1,9} ){6,40}[a-z]+\./", ["the", *[" an"] * 14, "."]),
        (r"LINE: /(([0-9]{2}-){2,12}[0-9]{2}a){1,40}/", ["10-12-00a"] * 14),
    ],
)
def test_counts_in_a_lexeme_make_no_walks_of_their_own(vocabulary: Vocabulary, grammar: str, texts: list[str]) -> None:
    fresh = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    matcher = compile("lark", f'start: LINE ("\\n" LINE)*\n{grammar}', fresh).matcher()
    machine = matcher.grammar.machine
    held = []
    for text in texts:
        for token in encode(vocabulary, text):
            row = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: len(vocabulary)].astype(bool)
            for other in np.flatnonzero(vocabulary.is_text).tolist():
                assert row[other] == (machine.advance(matcher.state, other) >= 0), vocabulary.tokens[other]
            assert matcher.accept(token), matcher.error
        held.append(matcher.grammar.masks.lazy.num_bytes)
    assert matcher.is_accepting()
    assert held[11] == held[12], held
