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
