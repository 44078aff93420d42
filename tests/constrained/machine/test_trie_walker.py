import random

import numpy as np
import pytest
from phloem.constrained import Vocabulary
from phloem.constrained.compiler import Compiler
from phloem.constrained.machine import Machine, walk
from phloem.constrained.machine.trie_walker import TrieWalker
from phloem.constrained.regex_syntax import compile_regex
from phloem.constrained.spec import GrammarKind, GrammarSpec

from ..conftest import is_set


def walked(vocabulary: Vocabulary, *, room: int) -> tuple[np.ndarray, list[int]]:
    """The mask of a regex, and the nodes where it may end, with buffers that have ``room`` entries at first."""
    machine = Machine(vocabulary)
    walker = TrieWalker(machine, room=room)
    mask = np.zeros(vocabulary.num_words, np.uint32)
    state = machine.text(compile_regex("[a-z ]+(\\.[a-z]+)*|[0-9-]+", machine.expressions, anchored=True))
    noted = walker.ends_from(mask, state)
    return mask, sorted(set(noted.tolist()))


def test_small_buffers_grow_and_change_nothing(vocabulary: Vocabulary) -> None:
    mask, noted = walked(vocabulary, room=4096)
    small_mask, small_noted = walked(vocabulary, room=1)
    assert (mask == small_mask).all() and noted == small_noted and len(noted) > 1
    assert is_set(mask, vocabulary.tokens.index(b" the")) and not is_set(mask, vocabulary.tokens.index(b".5"))


def test_a_walk_below_nodes_allows_what_the_bytes_to_them_and_the_state_allow(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    walker, trie = TrieWalker(machine), vocabulary.trie
    state = machine.text(machine.expressions.literal(b"e"))
    machine.row(state)
    children = [n for n in range(trie.num_nodes) if trie.node_depth[n] == 3]
    children.sort(key=lambda n: trie.node_byte[n])
    starts = np.searchsorted(trie.node_byte[children], np.arange(257)).astype(np.int32)
    mask = np.zeros(vocabulary.num_words, np.uint32)
    walker.ends_below(mask, state, starts, np.array(children, np.int32))
    allowed = {vocabulary.tokens[t] for t in range(len(vocabulary)) if is_set(mask, t)}
    assert allowed == {t for t in set(vocabulary.tokens) if len(t) == 3 and t[2:] == b"e"} != set()


def test_a_missing_row_is_asked_for_again_after_its_maker_failed(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    walker = TrieWalker(machine)
    attempts = []

    def fill(row: np.ndarray) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise MemoryError
        row[ord("a")] = machine.end_state(0)

    state = machine.add_state(fill)
    mask = np.zeros(vocabulary.num_words, np.uint32)
    for _ in range(2):
        try:
            walker.ends_from(mask, state)
        except MemoryError:
            assert machine.arrays[walk.DELTA][state, 0] == walk.UNKNOWN
    assert len(attempts) == 2


TEXTS: list[tuple[GrammarKind, str]] = [
    ("regex", "([^\\n,]{1,5}(-[^\\n,]{1,9}){0,4}\\.){1,9}[a-z]{2,6}"),
    ("regex", "(a|b)*a(a|b){5}[à-ü]?"),
    ("json_schema", '{"type": "string", "pattern": "^([^\\\\n,]{1,5}(-[^,]{1,9}){0,4}\\\\.){1,9}[a-z]{2,6}$"}'),
    ("json_schema", '{"type": "string", "pattern": "^([^,]{1,5}(-.{1,9}){0,9}[.]){1,9}[a-zé]{2}$", "maxLength": 60}'),
    ("json_schema", '{"type": "string", "pattern": "^([\\\\w.-]{2,30}\\\\s?){1,49}$", "not": {"pattern": "na$"}}'),
    ("json_schema", '{"oneOf": [{"pattern": "^(\\\\S+\\\\s+){0,9}\\\\S+$", "type": "string"}, {"maxLength": 20}]}'),
    (
        "json_schema",
        '{"type": "string", "pattern": "^[^\\"\\\\\\\\]{0,40}(\\"[^\\"]{0,20}\\"){2,9}$", "maxLength": 90}',
    ),
]


@pytest.mark.parametrize(("kind", "text"), TEXTS)
def test_masks_of_rows_made_in_parts_are_those_of_whole_rows(
    vocabulary: Vocabulary, kind: GrammarKind, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, whole = (Compiler(vocabulary).compile(GrammarSpec(kind, text)) for _ in range(2))
    rng = random.Random(text)
    for _ in range(6):
        matcher, twin = parts.matcher(), whole.matcher()
        for _ in range(25):
            row = matcher.mask()
            monkeypatch.setattr("phloem.constrained.machine.machine.MOST_STEPPED", 0)
            assert np.array_equal(row, twin.mask())
            monkeypatch.undo()
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            assert matcher.accept(token) and twin.accept(token)
            if token == vocabulary.eos:
                break
    machine = parts.machine
    some = [s for s in range(machine.num_states) if machine.arrays[walk.DELTA][s, 0] == walk.UNKNOWN]
    some = [s for s in some if machine.arrays[walk.LAZY][s]]
    assert some
    for state in some[:300]:
        for byte in range(1, 256):
            machine.entry(state, byte, is_alone=True)
        made = machine.arrays[walk.DELTA][state].copy()
        assert np.array_equal(made[1:], machine.row(state)[1:]), state
