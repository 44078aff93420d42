import random

import numpy as np
from phloem.constrained import Vocabulary
from phloem.constrained.machine import Machine, Masks


def test_equal_masks_are_one_array_and_different_ones_differ(vocabulary: Vocabulary) -> None:
    masks = Masks(Machine(vocabulary))
    rng = random.Random(0)
    rows = [np.zeros(vocabulary.num_words, np.uint32) for _ in range(60)]
    for row in rows:
        for _ in range(rng.randrange(3)):
            row[rng.randrange(len(row))] |= np.uint32(1 << rng.randrange(32))
    found = {row.tobytes(): masks.walker.keep(row) for row in rows}
    for row in rows:
        number = masks.walker.keep(row.copy())
        assert number == found[row.tobytes()] and (masks.kept.row(number) == row).all()
    assert len(set(found.values())) == len(found) > 20


def test_a_full_room_is_said_and_begun_again(vocabulary: Vocabulary) -> None:
    masks = Masks(Machine(vocabulary))
    masks.kept.capacity = 4
    masks.kept.clear()
    rows = [np.full(vocabulary.num_words, i, np.uint32) for i in range(5)]
    assert [masks.walker.keep(row) for row in rows] == [0, 1, 2, 3, -1]
    assert masks.walker.keep(rows[2]) == 2
    held = masks.kept.row(2)
    masks.kept.clear()
    assert masks.walker.keep(rows[4]) == 0
    assert (masks.kept.row(0) == rows[4]).all() and (held == rows[2]).all()
