import numpy as np
from phloem.constrained import Vocabulary
from phloem.constrained.machine import Machine, walk
from phloem.constrained.machine.trie_walker import TrieWalker
from phloem.constrained.regex_syntax import compile_regex

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
