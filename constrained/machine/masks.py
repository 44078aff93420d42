"""The token masks of a machine's configurations, remembered by what they depend on.

A mask is made by walking the vocabulary's trie with the machine. A walk inside a value stops where the frame below the
value is popped (an exit), so its result is the same for every such frame. What follows the exit is walked for each
frame and remembered together with the frames that the walk has read. Where a string goes on, all tokens that are
nothing but text, which are most of the vocabulary, are allowed at once.
"""

from typing import NamedTuple

import numpy as np

from ..spec import GrammarError, grammar_error
from . import walk
from .lazy_masks import LazyMasks
from .machine import MASK_WORK, Machine
from .recent import Recent
from .repeats import Repeats
from .trie_walker import TrieWalker
from .walk import MAX_NEED, UNBOUNDED

MAX_LEXEME_BYTES = 128 << 20
PREPARE_WORK = 5 * MASK_WORK  # fuel for a mask that is made while a grammar is compiled
SHORT_TOKEN = 16  # bytes; longer tokens are few, and are walked where a string has a length bound
_Key = tuple[int, ...]


class _Inner(NamedTuple):
    """A walk that stopped where the frame below the value is popped; it holds for every such frame.

    ``exits`` [n, 5], in the order of the nodes: node, result, whether the node's byte belongs to the value, characters
    before it, their padding. ``needs`` uint16 [32 * words]: of a counted string, the characters that each token brings
    and that have to follow it, but for ``owed`` more; ``most``: the largest of an allowed token.
    """

    key: tuple[int, int, int]
    mask: np.ndarray
    trie: np.ndarray
    exits: np.ndarray
    needs: np.ndarray | None = None
    most: int = 0
    owed: int = 0

    def allows_the_same(self, other: "_Inner") -> bool:
        if not np.array_equal(self.mask, other.mask) or not np.array_equal(self.exits, other.exits):
            return False
        if self.needs is None or other.needs is None:
            return True
        return self.owed == other.owed and np.array_equal(self.needs, other.needs)


class Masks:
    """The masks of one machine. Each is made while the machine's lock is held.

    ``max_bytes`` bounds the shared masks, roughly; masks of lexemes count to ``is_full`` instead.
    """

    def __init__(self, machine: Machine, *, max_bytes: int = 96 << 20) -> None:
        self.machine = machine
        vocabulary = self.vocabulary = machine.vocabulary
        capacity = max(64, max_bytes // (16 * vocabulary.num_words))
        self.known: Recent[int, np.ndarray] = Recent(4 * capacity)  # configuration -> a shared mask
        self.shared: Recent[tuple[_Key, tuple[int, ...]], np.ndarray] = Recent(capacity)
        self.inner: Recent[tuple[int, int, int], _Inner] = Recent(capacity)
        self._counted: Recent[tuple[int, int, int], _Inner] = Recent(max(16, capacity // 16))  # with ``needs``
        self._depths: dict[_Key, tuple[int, ...]] = {}
        self._failed: dict[int, GrammarError] = {}  # configurations whose mask took too much work
        self._only: dict[int, int] = {}
        self._barriers: dict[int, int] = {}
        self._inside: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._counting_barrier = self._barrier(-1, 0, UNBOUNDED - 1)  # under it, every character is counted
        self.walker = TrieWalker(machine)
        self.lazy = LazyMasks(machine, self.walker, capacity)
        self._repeats = Repeats(machine)

    @property
    def is_full(self) -> bool:
        """Whether lexemes hold so much memory that new grammars should use another machine."""
        return self.lazy.num_bytes > MAX_LEXEME_BYTES

    def of(self, config: int) -> np.ndarray:
        """uint32 [ceil(V / 32)], read-only: the tokens that may follow, the end token's bit where the text may end.

        Raises GrammarError where that takes too much work; then it does so at once when asked again.
        """
        found = self.known.get(config)
        if found is None:
            failed = self._failed.get(config)
            if failed is not None:
                raise failed.twin()
            with self.machine.lock:
                try:
                    with self.machine.fuel.at_most(MASK_WORK):
                        found = self._find(config)
                        if self.machine.item_readers:
                            found = self._repeats.removed(config, found)
                except (GrammarError, RecursionError) as error:
                    self._failed[config] = grammar_error(error)
                    raise self._failed[config].twin() from error
                self.known.put(config, found)
        return found

    def prepare(self, code: int) -> None:
        """Walk inside a value ahead of time, from where a row code leads to; the machine's lock is held.

        Raises GrammarTooComplex where it takes ``PREPARE_WORK``.
        """
        frame, state = self.machine.action(code) if code >= walk.PUSH else (0, code)
        with self.machine.fuel.at_most(PREPARE_WORK):
            self._inner_of(state, 0, self.machine.stack(frame, 0))

    def way_apart(self, config: int) -> bytes:
        """Bytes after which the items under way differ from those before them; b"" if none are found."""
        return self._repeats.way_apart(config)

    def only_token(self, config: int) -> int:
        """The one token the mask allows; -1 if there are more."""
        found = self._only.get(config)
        if found is None:
            mask = self.of(config)
            self.machine.may_end(config)  # so that it is remembered too
            words = np.flatnonzero(mask)
            found = -1
            if len(words) == 1:
                word = int(mask[words[0]])
                if word & (word - 1) == 0:
                    found = int(words[0]) * 32 + word.bit_length() - 1
            self._only[config] = found
        return found

    def known_only_token(self, config: int) -> int | None:
        """As ``only_token``, where it is remembered; else None. It takes no lock."""
        return self._only.get(config)

    # -- one mask -------------------------------------------------------------------------------------------------

    def _find(self, config: int) -> np.ndarray:
        machine = self.machine
        state, aux, stack, _ = machine.configs[config]
        if state in machine.lazy:
            alone = self.lazy.of(*machine.lazy[state].threads())
            return self._with_end(alone) if machine.may_end(config) else alone
        inner = self._inner_of(state, aux, stack)
        key: _Key = inner.key
        if inner.needs is not None:
            key = (*key, *self._bounds_left(inner, aux, stack))
        depths = self._depths.get(key, ())
        for depth in depths:
            row = self.shared.get((key, self._top_frames(stack, depth)))
            if row is not None:
                return row
        row, depth = self._compute(inner, key, stack)
        if machine.may_end(config):
            row = self._with_end(row)
            depth = machine.stack_depths[stack]
        row.flags.writeable = False
        self.shared.put((key, self._top_frames(stack, depth)), row)
        if depth not in depths:
            self._depths[key] = (*depths, depth)
        return row

    def _with_end(self, row: np.ndarray) -> np.ndarray:
        eos = self.vocabulary.eos
        row = row if row.flags.writeable else row.copy()
        row[eos >> 5] |= np.uint32(1 << (eos & 31))
        return row

    def _bounds_left(self, inner: _Inner, count: int, stack: int) -> tuple[int, int]:
        """How many characters the string must still have, and may have: as far as its tokens can tell."""
        arrays = self.machine.arrays
        frame = self.machine.stack_frames[stack]
        low, high = int(arrays[walk.FRAME_LOW][frame]), int(arrays[walk.FRAME_HIGH][frame])
        longest = int(inner.exits[:, 3].max()) if len(inner.exits) else -1
        return min(max(low - count, 0), longest + 1), max(min(high - count - inner.owed, inner.most), -1)

    def _top_frames(self, stack: int, depth: int) -> tuple[int, ...]:
        if depth == 0:
            return ()
        frames, parents = self.machine.stack_frames, self.machine.stack_parents
        if depth == 1:
            return (frames[stack],)
        out = []
        for _ in range(depth):
            out.append(frames[stack])
            stack = parents[stack]
        return tuple(out)

    def _compute(self, inner: _Inner, key: _Key, stack: int) -> tuple[np.ndarray, int]:
        """The mask without the end token, and the number of top frames that it depends on."""
        mask, low, high = inner.mask, -UNBOUNDED, UNBOUNDED
        if inner.needs is not None:
            low, high = key[-2:]
            if high < inner.most:
                mask = np.packbits(inner.needs <= max(high, 0), bitorder="little").view(np.uint32)
        if not len(inner.exits):
            return mask, 0
        mask = mask.copy()
        return mask, self.walker.from_exits(inner.trie, mask, inner.exits, low, high, stack)

    def barrier_of(self, frame: int) -> int:
        """The frame that stops walks in place of all frames with the same filter and bounds."""
        found = self._barriers.get(frame)
        if found is None:
            arrays = self.machine.arrays
            filter_at, low, high = (
                int(arrays[slot][frame]) for slot in (walk.FRAME_FILTER, walk.FRAME_LOW, walk.FRAME_HIGH)
            )
            found = self._barriers[frame] = self._barrier(filter_at, low, high)
        return found

    def _barrier(self, filter_at: int, low: int, high: int) -> int:
        machine = self.machine
        return machine.frame(
            ("barrier", filter_at, low, high),
            lambda: machine.add_frame(lambda result: walk.EXITED, filter_at=filter_at, low=low, high=high),
        )

    def _inner_of(self, state: int, aux: int, stack: int) -> _Inner:
        if state in self.machine.counted_states:
            return self._inner_at(state, 0, self._counting_barrier, self._counted)
        return self._inner_at(state, aux, self.barrier_of(self.machine.stack_frames[stack]), self.inner)

    def _inner_at(self, state: int, aux: int, barrier: int, known: "Recent[tuple[int, int, int], _Inner]") -> _Inner:
        machine = self.machine
        found = known.get((state, aux, barrier))
        if found is not None:
            return found
        twin = machine.twins.get(state)
        if twin is not None:
            found = _owing(self._inner_at(twin(), aux, barrier, known), machine.owed.get(state, 0))
        elif state in machine.stand_ins:
            for lower, upper, owed in machine.stand_ins[state]():
                above = self._inner_at(upper, aux, barrier, known)
                if above.allows_the_same(self._inner_at(lower, aux, barrier, known)):
                    found = _owing(above, owed)
                    break
        if found is None:
            found = self._walk_inside(state, aux, barrier)
        known.put((state, aux, barrier), found)
        return found

    def _walk_inside(self, state: int, aux: int, barrier: int) -> _Inner:
        """Walk with the barrier as the only frame: the tokens that stay above it, and the exits where it is popped."""
        key = (state, aux, barrier)
        stack = self.machine.stack(barrier, 0)
        trie = self.walker.whole
        if barrier == self._counting_barrier:
            mask = np.zeros(self.vocabulary.num_words, np.uint32)
            needs = np.full(32 * self.vocabulary.num_words, MAX_NEED + 1, np.uint16)
            exits = self.walker.from_state(trie, mask, state, aux, stack, needs)
            most = int(needs.max(where=needs <= MAX_NEED, initial=0))
            most = max(most, int((exits[:, 3] + exits[:, 4]).max(initial=0)))
            return _Inner(key, _frozen(mask), trie, exits, needs, most)
        inside = self._inside_of(state, barrier)
        if inside is None:
            mask = np.zeros(self.vocabulary.num_words, np.uint32)
        else:
            mask, trie = inside[0].copy(), inside[1]
        exits = self.walker.from_state(trie, mask, state, aux, stack)
        return _Inner(key, _frozen(mask), trie, exits)

    # -- tokens within a string -------------------------------------------------------------------------------------

    def _inside_of(self, state: int, frame: int) -> tuple[np.ndarray, np.ndarray] | None:
        """``_inside_tokens`` where the state is inside a string; None elsewhere."""
        machine = self.machine
        base = machine.inside_string.get(state, -1)
        if base < 0:
            return None
        filter_at = int(machine.arrays[walk.FRAME_FILTER][frame])
        if filter_at >= 0 and not machine.arrays[walk.FILTERS][filter_at]:
            return None
        return self._inside_tokens(base)

    def _inside_tokens(self, base: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of up to ``SHORT_TOKEN`` bytes that stay within a string, as a mask, and the trie of the other
        tokens that may be allowed."""
        found = self._inside.get(base)
        if found is None:
            vocabulary = self.vocabulary
            covered = np.zeros(vocabulary.num_words, np.uint32)  # on the empty stack a closing quote is refused
            self.walker.ends_from(covered, base)
            within = np.unpackbits(covered.view(np.uint8), bitorder="little")[: len(vocabulary)].astype(bool)
            kept = within & (np.diff(vocabulary.token_offsets) <= SHORT_TOKEN)
            trie = self.walker.addresses(
                vocabulary.build_trie(np.flatnonzero(within & ~kept | vocabulary.having(b'"') & ~kept))
            )
            bits = np.zeros(32 * vocabulary.num_words, bool)
            bits[: len(kept)] = kept
            found = self._inside[base] = np.packbits(bits, bitorder="little").view(np.uint32), trie
        return found


def _owing(inner: _Inner, owed: int) -> _Inner:
    """The same walk where ``owed`` characters more have to follow. Then no token ends the string."""
    assert not (owed and inner.needs is not None and len(inner.exits))
    return inner._replace(owed=inner.owed + owed) if owed else inner


def _frozen(row: np.ndarray) -> np.ndarray:
    row.flags.writeable = False
    return row
