"""Text of other sequences is found again, until the ring buffer overwrites it."""

import random

import numpy as np
from phloem.runtime.speculative.shared_text import SharedText


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_a_continuation_is_found_with_the_length_of_its_match():
    shared = SharedText(1 << 10)
    shared.add(ids(*range(100, 140)))
    found, matched = shared.continuation(ids(7, 8, 110, 111, 112, 113), 5)
    assert found.tolist() == [114, 115, 116, 117, 118] and matched == 4


def test_a_continuation_stops_at_the_end_of_its_text():
    shared = SharedText(1 << 10)
    shared.add(ids(1, 2, 3, 4, 5))
    shared.add(ids(6, 7, 8, 9))
    assert shared.continuation(ids(1, 2, 3), 9)[0].tolist() == [4, 5]
    assert not len(shared.continuation(ids(3, 4, 5), 9)[0])
    assert not len(shared.continuation(ids(4, 5, 6), 9)[0])


def test_every_continuation_occurred_however_often_the_ring_wrapped():
    rng = random.Random(1)
    shared, said = SharedText(256), []
    num_found = 0
    for _ in range(400):
        text = [rng.randrange(12) for _ in range(rng.randrange(1, 60))]
        said.append(text)
        shared.add(ids(*text))
        tail = [rng.randrange(12) for _ in range(3)] if rng.random() < 0.5 else rng.choice(said[-4:])[:8]
        found, matched = shared.continuation(ids(*tail), 6)
        if len(found):
            num_found += 1
            piece = tail[len(tail) - matched :] + found.tolist()
            assert any(piece == t[i : i + len(piece)] for t in said for i in range(len(t)))
    assert num_found > 50
