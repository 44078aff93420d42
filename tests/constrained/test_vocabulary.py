import numpy as np
import pytest
from phloem.constrained import Vocabulary


def tokens_under(trie) -> list[bytes]:
    found, path = [], []
    for n in range(trie.num_nodes):
        path[trie.node_depth[n] - 1 :] = [trie.node_byte[n]]
        found += [bytes(path)] * int(trie.num_tokens[n])
    return found


def test_trie_spells_every_text_token_once(vocabulary: Vocabulary) -> None:
    expected = [t for i, t in enumerate(vocabulary.tokens) if vocabulary.is_text[i]]
    assert tokens_under(vocabulary.trie) == sorted(expected)
    assert sorted(vocabulary.trie.token_order) == np.flatnonzero(vocabulary.is_text).tolist()


def test_subtree_end_is_the_next_node_that_is_not_deeper(vocabulary: Vocabulary) -> None:
    trie = vocabulary.trie
    for n in range(trie.num_nodes):
        end = next(
            (m for m in range(n + 1, trie.num_nodes) if trie.node_depth[m] <= trie.node_depth[n]), trie.num_nodes
        )
        assert trie.node_end[n] == end


def test_special_and_empty_tokens_are_not_text() -> None:
    vocabulary = Vocabulary([b"a", b"", b"b", b"<s>"], {3}, 3)
    assert vocabulary.is_text.tolist() == [True, False, True, False]
    assert vocabulary.has_byte[ord("a")] and not vocabulary.has_byte[ord("<")]


def test_vocabularies_with_equal_keys_are_equal() -> None:
    one, same, other = (Vocabulary([b"a", b"bc", b"e"], {2}, 2) for _ in range(3))
    assert one.key == same.key == other.key
    assert one.key != Vocabulary([b"ab", b"c", b"e"], {2}, 2).key


def test_an_end_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="eos token 7 is outside the vocabulary of 1 tokens"):
        Vocabulary([b"a"], set(), 7)


def test_empty_vocabulary_of_text_has_an_empty_trie() -> None:
    assert Vocabulary([b"</s>"], {0}, 0).trie.num_nodes == 0


def test_the_order_of_a_trie_is_that_of_the_tokens_bytes() -> None:
    r = np.random.default_rng(5)
    drawn = [bytes(r.choice([0, 0, 32, 97, 255], r.integers(1, 20)).tolist()) for _ in range(3_000)]
    shared = [b"12345678" + t for t in drawn[:500]] + [b"12345678", b"1234567", b"12345678", b"\0", b"\0\0"]
    vocabulary = Vocabulary([*drawn, *shared, b""], {3_505}, 3_505)
    for ids in (np.arange(3_505), np.flatnonzero(r.random(3_505) < 0.3), np.arange(7, 8)):
        expected = sorted(ids.tolist(), key=vocabulary.tokens.__getitem__)
        assert vocabulary.build_trie(ids).token_order.tolist() == expected


def test_tokens_that_hold_a_byte_are_found_among_those_of_text(vocabulary: Vocabulary) -> None:
    for mark in (b'"', b"\xa9", b"a", b"\0"):
        expected = [bool(vocabulary.is_text[i]) and mark in token for i, token in enumerate(vocabulary.tokens)]
        assert vocabulary.having(mark).tolist() == expected


def test_what_machines_share_is_made_once_for_each_key(vocabulary: Vocabulary) -> None:
    made = [vocabulary.shared(("test", key), object) for key in ("one", "two", "one")]
    assert made[0] is made[2] and made[0] is not made[1]
