"""Shared prefixes are found by slots: each token reads each chunk once, and rows read shared chunks together."""

from collections.abc import Sequence

import numpy as np
import pytest
from phloem.kernels import Sharing
from phloem.runtime.executor.prefixes import PIECES_A_ROW, Prefixes, PrefixFinder, shared_size
from phloem.runtime.layers.batch import StepArrays
from phloem.runtime.scheduler.plan import DecodePart, StepPlan

CHUNK = 4


def finder(*, piece_len: int = 3, least_bytes: int = 0) -> PrefixFinder:
    return PrefixFinder(Sharing(CHUNK, piece_len, least_bytes), key_bytes=10, num_rows=40, max_len=120)


def find(look: PrefixFinder, contexts: Sequence[np.ndarray], ends: np.ndarray, counts: np.ndarray) -> Prefixes | None:
    for row, context in enumerate(contexts):
        cut = len(context) // 3  # a prompt in two chunks
        look.note([(row, 0, context[:cut]), (row, cut, context[cut:])])
    return look.of(np.arange(len(contexts)), ends, counts)


def forest(rng: np.random.Generator, num_rows: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Contexts that branch off each other at random places; their lengths and numbers of new tokens."""
    slots = iter(rng.permutation(10_000))
    contexts: list[np.ndarray] = []
    for _ in range(num_rows):
        length = int(rng.integers(1, 40))
        shared = np.zeros(0, np.int64)
        if contexts and rng.random() < 0.8:
            parent = contexts[int(rng.integers(len(contexts)))]
            shared = parent[: min(int(rng.integers(0, len(parent) + 1)), length - 1)]
        contexts.append(np.concatenate((shared, [next(slots) for _ in range(length - len(shared))])).astype(np.int32))
    ends = np.array([len(context) for context in contexts])
    return contexts, ends, np.minimum(rng.integers(1, 4, num_rows), ends)


def in_common(a: np.ndarray, b: np.ndarray) -> int:
    most = min(len(a), len(b))
    return int((a[:most] == b[:most]).cumprod().sum()) // CHUNK


def check(found: Prefixes, contexts: Sequence[np.ndarray], ends: np.ndarray, counts: np.ndarray) -> None:
    owners = np.repeat(np.arange(len(contexts)), counts)
    assert sorted(found.order) == list(range(len(owners)))
    read = [[0] * 20 for _ in owners]
    for begin, end, row, first, last in found.pieces.tolist():
        for token in found.order[begin:end]:
            keys = slice(first * CHUNK, last * CHUNK)
            assert np.array_equal(contexts[owners[token]][keys], contexts[row][keys])
            assert last * CHUNK <= ends[owners[token]] - counts[owners[token]]  # it ends before the new tokens
            for chunk in range(first, last):
                read[token][chunk] += 1
    for chunks, own_from in zip(read, found.own_from, strict=True):
        assert chunks == [1] * own_from + [0] * (20 - own_from)
    for row in range(len(contexts)):  # a kernel's block has several tokens of a row
        assert len(set(found.own_from[owners == row].tolist())) == 1


@pytest.mark.parametrize("seed", range(30))
def test_every_token_reads_each_chunk_once_and_shared_chunks_together(seed: int) -> None:
    contexts, ends, counts = forest(np.random.default_rng(seed), 12)
    found = find(finder(), contexts, ends, counts)
    before = [context[: end - n] for context, end, n in zip(contexts, ends, counts, strict=True)]
    most = [max(in_common(a, b) for j, b in enumerate(before) if j != i) for i, a in enumerate(before)]
    if found is None:
        assert not any(most)
        return
    check(found, contexts, ends, counts)
    if len(found.pieces) + -(-counts.sum() // 3) < PIECES_A_ROW * len(contexts):  # no run was left out
        assert found.own_from.tolist() == np.repeat(most, counts).tolist()


@pytest.mark.parametrize(("drafted", "piece_len"), [(1, 1), (2, 3), (3, 4)])
def test_rows_read_pieces_beyond_the_limit_for_themselves(drafted: int, piece_len: int) -> None:
    rng = np.random.default_rng(1)
    base = rng.permutation(400).astype(np.int32)
    contexts = [np.concatenate((base[: 4 * (i // 2 + 1)], [1000 + i] * drafted)).astype(np.int32) for i in range(30)]
    ends, counts = np.array([len(context) for context in contexts]), np.full(30, drafted)
    found = find(finder(piece_len=piece_len), contexts, ends, counts)
    assert found is not None and 30 <= len(found.pieces) <= PIECES_A_ROW * 30
    assert found.own_from.max() < 14  # the longest runs have 14 chunks
    check(found, contexts, ends, counts)
    assert len(found.padded(32 * drafted)) == shared_size(32 * drafted)


def test_prefixes_that_save_too_little_are_not_shared() -> None:
    contexts = [np.arange(9, dtype=np.int32), np.append(np.arange(8), 20).astype(np.int32)]
    ends, counts = np.array([9, 9]), np.array([1, 1])
    saved = 2 * CHUNK * 10  # one row's two chunks
    assert find(finder(least_bytes=saved), contexts, ends, counts) is not None
    assert find(finder(least_bytes=saved + 1), contexts, ends, counts) is None
    assert find(finder(), contexts, ends, np.array([1, 200])) is None  # a prompt


def decoding(contexts: Sequence[np.ndarray]) -> StepArrays:
    """The step of each context's last token."""
    rows = np.arange(len(contexts))
    starts = np.array([len(context) - 1 for context in contexts])
    slots = np.array([context[-1] for context in contexts], np.int32)
    return StepArrays.of(StepPlan(0, (), DecodePart(rows, rows, starts, np.zeros(len(rows), np.int32), slots)))


def test_an_unchanged_step_returns_the_same_prefixes_object() -> None:
    look = finder()
    contexts = [np.append(np.arange(9), 50 + i).astype(np.int32) for i in range(3)]
    look.note([(row, 0, context[:-1]) for row, context in enumerate(contexts)])
    look.note_step(decoding(contexts))
    first = look.of_decode(decoding(contexts))
    assert first is not None and first.own_from.tolist() == [2, 2, 2]
    longer = [np.append(context, 90 + i).astype(np.int32) for i, context in enumerate(contexts)]
    assert look.of_decode(decoding(longer)) is first
    look.note([(2, 0, np.arange(100, 110, dtype=np.int32))])  # other slots
    changed = look.of_decode(decoding(longer))
    assert changed is not None and changed.own_from.tolist() == [2, 2, 0]
    assert look.of_decode(decoding(longer[:1])) is None


def test_a_chunk_filled_by_decoding_is_shared_from_the_next_step_on() -> None:
    look = finder()
    slots = np.arange(20, dtype=np.int32)
    for length in range(1, 10):  # two rows that write equal slots, which real rows never do
        part = decoding([slots[:length], slots[:length]])
        look.note_step(part)
        found = look.of_decode(part)
        assert (0 if found is None else int(found.own_from[0])) == (length - 1) // CHUNK
