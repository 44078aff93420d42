import random

import numpy as np
import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.machine import walk

from ..conftest import encode


def test_the_hash_table_finds_what_was_put_in_also_after_it_was_copied() -> None:
    rng = random.Random(0)
    entries = {rng.randrange(1 << 60): i for i in range(500)}
    keys, values = np.full(1024, -1, np.int64), np.zeros(1024, np.int32)
    for key, value in (*entries.items(), (next(iter(entries)), 7)):
        walk.hash_copy(np.array([key]), np.array([value], np.int32), keys, values, 1023)
    more_keys, more_values = np.full(4096, -1, np.int64), np.zeros(4096, np.int32)
    walk.hash_copy(keys, values, more_keys, more_values, 4095)
    entries[next(iter(entries))] = 7
    for found_keys, found_values in ((keys, values), (more_keys, more_values)):
        at = np.flatnonzero(found_keys != -1)
        assert dict(zip(found_keys[at].tolist(), found_values[at].tolist(), strict=True)) == entries


def test_tokens_are_set_bit_by_bit() -> None:
    mask = np.zeros(3, np.uint32)
    walk.allow_tokens(mask, np.array([0, 31, 32, 95, 31], np.int32))
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [0, 31, 32, 95]


@pytest.mark.parametrize("text", ['{"name": "é\\u00e9", "a": [1.5e3, {}]}', "[[], [[true]]]", '"the"'])
def test_a_trie_walk_allows_what_stepping_through_each_token_allows(vocabulary: Vocabulary, text: str) -> None:
    grammar = compile("json", "", vocabulary)
    config = grammar.start
    for token in encode(vocabulary, text):
        bits = np.unpackbits(grammar.masks.of(config).view(np.uint8), bitorder="little")
        for each in np.flatnonzero(vocabulary.is_text).tolist():
            stepped = grammar.machine.advance_bytes(config, vocabulary.tokens[each])
            assert bool(bits[each]) == (stepped >= 0), vocabulary.tokens[each]
        config = grammar.machine.advance(config, token)


@pytest.mark.parametrize("highest", [1, 40, walk.MAX_NEED, walk.MAX_NEED + 1])
def test_the_largest_need_is_that_of_the_tokens_that_have_one(highest: int) -> None:
    needs = np.random.default_rng(highest).integers(0, highest + 1, 1000).astype(np.uint16)
    needs[::7] = walk.MAX_NEED + 1  # refused
    needs[3] = highest
    assert walk.largest_need(needs) == needs.max(where=needs <= walk.MAX_NEED, initial=0)
    assert walk.largest_need(np.full(20, walk.MAX_NEED + 1, np.uint16)) == 0
