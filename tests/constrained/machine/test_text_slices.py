import itertools

import numpy as np
from phloem.constrained import Vocabulary
from phloem.constrained.machine.text_slices import text_slices


def is_text(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return all(c >= " " and c not in '"\\' for c in text)


def may_become_text(data: bytes) -> bool:
    """Whether ``data`` is text, or text and the beginning of a character."""
    tails = [b"", *(bytes(t) for n in (1, 2, 3) for t in itertools.product(b"\x80\x90\xa0\xbf", repeat=n))]
    return any(is_text(data + tail) for tail in tails)


def test_text_and_its_ends_are_found_as_by_decoding() -> None:
    pieces = [bytes([b]) for b in b'a"\\\n\xc3\xa9\xe0\xa0\x9f\xed\xf0\x90\xf4\xc0']
    words = sorted({b"".join(p) for n in (1, 2, 3) for p in itertools.product(pieces, repeat=n)})
    words += [b"\xf0\x90\x90\x90", b"\xf4\x90\x90\x90", b"\xf4\x8f\xbf\xbf", b'\xf0\x90\x90\x90"']
    vocabulary = Vocabulary([*(bytes([b]) for b in range(256)), *words, b""], {256 + len(words)}, 256 + len(words))
    trie = vocabulary.trie
    inside, covered, covered_before, boundaries, boundaries_before = text_slices(
        trie.node_byte, trie.node_depth, trie.node_end, trie.first_token, trie.num_tokens, trie.token_order,
        vocabulary.has_byte,
    )  # fmt: skip
    path = b""
    for n in range(trie.num_nodes):
        path = path[: trie.node_depth[n] - 1] + bytes([trie.node_byte[n]])
        assert bool(inside[n]) == is_text(path), path
        at_boundary = n in boundaries[boundaries_before[n] : boundaries_before[n + 1]]
        assert at_boundary == (is_text(path[:-1]) and path[-1] < 0x80 and not is_text(path)), path
    expected = [int(t) for t in trie.token_order if may_become_text(vocabulary.tokens[t])]
    assert covered.tolist() == expected
    assert covered_before[trie.num_nodes] == len(covered) and np.all(np.diff(covered_before) >= 0)
