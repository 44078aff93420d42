"""The token masks of a machine's configurations, remembered by what they depend on.

A mask is made by walking the vocabulary's trie with the machine. A walk inside a value stops where the frame below the
value is popped (an exit), so its result is the same for every such frame. What follows the exit is walked for each
frame and remembered together with the frames that the walk has read. Where a string goes on, all tokens that are
nothing but text, which are most of the vocabulary, are allowed at once.
"""

from typing import NamedTuple

import numpy as np

from . import walk
from .item_texts import Crossing, crossing_tokens, is_in_string
from .lazy_masks import LazyMasks
from .machine import MASK_WORK, Machine
from .recent import Recent
from .trie_walker import TrieWalker
from .walk import PUSH

MAX_LEXEME_BYTES = 128 << 20
SHORT_TOKEN = 16  # bytes; longer tokens are few, and are walked where a string has a length bound


class _Inner(NamedTuple):
    """A walk that stopped where the frame below the value is popped; it holds for every such frame.

    ``exits`` [n, 3]: node, result, whether the node's byte belongs to the value; ``results``: each result once.
    """

    mask: np.ndarray
    trie: np.ndarray
    exits: np.ndarray
    results: tuple[int, ...]


_NO_EXITS = np.zeros((0, 3), np.int64)


class Masks:
    """The masks of one machine. Each is made while the machine's lock is held.

    ``max_bytes`` bounds the shared masks, roughly; masks of lexemes count to ``is_full`` instead.
    """

    def __init__(self, machine: Machine, *, max_bytes: int = 96 << 20) -> None:
        self.machine = machine
        vocabulary = self.vocabulary = machine.vocabulary
        capacity = max(64, max_bytes // (16 * vocabulary.num_words))
        self.known: Recent[int, np.ndarray] = Recent(4 * capacity)  # configuration -> a shared mask
        self._shared: Recent[tuple[int, int, tuple[int, ...]], np.ndarray] = Recent(capacity)
        self._inner: Recent[tuple[int, int, int], _Inner] = Recent(capacity)
        self._depths: dict[tuple[int, int], tuple[int, ...]] = {}
        self._crossing: Crossing | None = None  # made when first needed
        self._only: dict[int, int] = {}
        self._barriers: dict[int, int] = {}
        self._inside: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._texts: tuple[np.ndarray, np.ndarray] | None = None
        self._open_barrier = self.barrier_of(0)
        self.walker = TrieWalker(machine)
        self.lazy = LazyMasks(machine, self.walker, capacity)

    @property
    def is_full(self) -> bool:
        """Whether lexemes hold so much memory that new grammars should use another machine."""
        return self.lazy.num_bytes > MAX_LEXEME_BYTES

    def of(self, config: int) -> np.ndarray:
        """uint32 [ceil(V / 32)], read-only: the tokens that may follow, the end token's bit where the text may end."""
        found = self.known.get(config)
        if found is None:
            with self.machine.lock:
                with self.machine.fuel.at_most(MASK_WORK):
                    found = self._find(config)
                    if self.machine.item_readers:
                        found = self._without_repeats(config, found)
                self.known.put(config, found)
        return found

    def only_token(self, config: int) -> int:
        """The one token the mask allows; -1 if there are more."""
        found = self._only.get(config)
        if found is None:
            mask = self.of(config)
            words = np.flatnonzero(mask)
            found = -1
            if len(words) == 1:
                word = int(mask[words[0]])
                if word & (word - 1) == 0:
                    found = int(words[0]) * 32 + word.bit_length() - 1
            self._only[config] = found
        return found

    # -- one mask -------------------------------------------------------------------------------------------------

    def _find(self, config: int) -> np.ndarray:
        machine = self.machine
        state, aux, stack, _ = machine.configs[config]
        if state in machine.lazy:
            alone = self.lazy.of(*machine.lazy[state].threads())
            return self._with_end(alone) if machine.may_end(config) else alone
        shared_aux = self._blur_count(aux, stack) if state in machine.counted_states else aux
        depths = self._depths.get((state, shared_aux), ())
        for depth in depths:
            row = self._shared.get((state, shared_aux, self._top_frames(stack, depth)))
            if row is not None:
                return row
        row, depth = self._compute(state, aux, stack)
        if machine.may_end(config):
            row = self._with_end(row)
            depth = machine.stack_depths[stack]
        row.flags.writeable = False
        self._shared.put((state, shared_aux, self._top_frames(stack, depth)), row)
        if depth not in depths:
            self._depths[(state, shared_aux)] = (*depths, depth)
        return row

    def _without_repeats(self, config: int, row: np.ndarray) -> np.ndarray:
        """The mask without the tokens that end an item which ``uniqueItems`` forbids."""
        machine = self.machine
        _, _, stack, item = machine.configs[config]
        if self._crossing is None:
            self._crossing = crossing_tokens(self.vocabulary)
        crossing = self._crossing
        waiting = machine.item_stacks[stack]
        if waiting:
            reader = machine.item_readers[machine.stack_frames[waiting]]
            tokens = crossing.of(reader, in_string=is_in_string(machine.item_text(item)))
        else:
            tokens = crossing.whole_commas if machine.all_sole else crossing.whole
        wrong = [t for t in tokens if int(row[t >> 5]) >> (t & 31) & 1 and machine.advance(config, t) < 0]
        if not wrong:
            return row
        row = row.copy()
        for token in wrong:
            row[token >> 5] &= ~np.uint32(1 << (token & 31))
        row.flags.writeable = False
        return row

    def _with_end(self, row: np.ndarray) -> np.ndarray:
        eos = self.vocabulary.eos
        row = row if row.flags.writeable else row.copy()
        row[eos >> 5] |= np.uint32(1 << (eos & 31))
        return row

    def _blur_count(self, count: int, stack: int) -> int:
        """One number for all character counts that no token brings to a bound, so that they share a mask."""
        arrays = self.machine.arrays
        frame = self.machine.stack_frames[stack]
        low, high = int(arrays[walk.FRAME_LOW][frame]), int(arrays[walk.FRAME_HIGH][frame])
        longest = self.vocabulary.trie.max_depth
        if high - count >= longest:
            if count >= low:
                return -1
            if low - count >= longest:
                return -2
        return count

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

    def _compute(self, state: int, aux: int, stack: int) -> tuple[np.ndarray, int]:
        """The mask without the end token, and the number of top frames that it depends on."""
        machine = self.machine
        barrier = self.barrier_of(machine.stack_frames[stack])
        twin = machine.twins.get(state)
        if twin is not None:
            state = twin()
        key = (state, self._blur_count(aux, stack) if state in machine.counted_states else aux, barrier)
        inner = self._inner.get(key)
        if inner is None:
            inner = self._walk_inside(state, aux, barrier)
            self._inner.put(key, inner)
        if not len(inner.exits):
            return inner.mask, 1 if barrier != self._open_barrier else 0
        mask = inner.mask.copy()
        control = machine.control
        machine.begin()
        control[walk.LOWEST] = machine.stack_depths[stack]
        targets = np.array([(result, *self._leave(stack, result)) for result in inner.results], np.int64)
        self.walker.from_exits(inner.trie, mask, inner.exits, targets)
        return mask, machine.stack_depths[stack] - int(control[walk.LOWEST]) + 1

    def barrier_of(self, frame: int) -> int:
        """The frame that stops walks in place of all frames with the same filter and bounds."""
        found = self._barriers.get(frame)
        if found is None:
            machine = self.machine
            filter_at, low, high = (
                int(machine.arrays[slot][frame]) for slot in (walk.FRAME_FILTER, walk.FRAME_LOW, walk.FRAME_HIGH)
            )
            found = self._barriers[frame] = machine.frame(
                ("barrier", filter_at, low, high),
                lambda: machine.add_frame(lambda result: walk.EXITED, filter_at=filter_at, low=low, high=high),
            )
        return found

    def _leave(self, stack: int, result: int) -> tuple[int, int]:
        """The state and the stack after the top frame is popped with a result; state 0 if nothing may follow."""
        machine, control = self.machine, self.machine.control
        while True:
            control[walk.LOWEST] = min(int(control[walk.LOWEST]), machine.stack_depths[stack])
            state = machine.after(machine.stack_frames[stack], result)
            stack = machine.stack_parents[stack]
            if state >= PUSH:
                frame, state = machine.action(state)
                stack = machine.stack(frame, stack)
                control[walk.SCRATCH] = max(int(control[walk.SCRATCH]), len(machine.stack_frames))
            if state == 0 or not machine.arrays[walk.FINAL][state]:
                return state, stack
            result = int(machine.arrays[walk.ENDS][state]) - 1

    def _walk_inside(self, state: int, aux: int, barrier: int) -> _Inner:
        """Walk with the barrier as the only frame: the tokens that stay above it, and the exits where it is popped."""
        stack = self.machine.stack(barrier, 0)
        trie = self.walker.whole
        inside = self._inside_of(state, aux, barrier)
        if inside is None:
            mask = np.zeros(self.vocabulary.num_words, np.uint32)
        else:
            mask, trie = inside[0].copy(), inside[1]
        exits = self.walker.from_state(trie, mask, state, aux, stack)
        mask.flags.writeable = False
        if not len(exits):
            return _Inner(mask, trie, _NO_EXITS, ())
        exits = exits.copy()
        return _Inner(mask, trie, exits, tuple(dict.fromkeys(exits[:, 1].tolist())))

    # -- tokens within a string -------------------------------------------------------------------------------------

    def _inside_of(self, state: int, aux: int, frame: int) -> tuple[np.ndarray, np.ndarray] | None:
        """``_inside_tokens`` where the state is inside a string; None elsewhere."""
        machine = self.machine
        base = machine.inside_string.get(state, -1)
        if base < 0:
            return None
        if state in machine.counted_states:
            if not self.walker.has_slices:
                return None
            room = int(machine.arrays[walk.FRAME_HIGH][frame]) - aux
            return self._inside_tokens(base, min(room, self.vocabulary.trie.max_depth))
        filter_at = int(machine.arrays[walk.FRAME_FILTER][frame])
        if filter_at >= 0 and not machine.arrays[walk.FILTERS][filter_at]:
            return None
        return self._inside_tokens(base, -1)

    def _inside_tokens(self, base: int, room: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that stay within a string, as a mask, and the trie of the other tokens that may be allowed.

        ``room``: how many characters may still come; -1 for a string that no token of up to ``SHORT_TOKEN`` bytes ends.
        """
        found = self._inside.get((base, room))
        if found is None:
            vocabulary = self.vocabulary
            if room < 0:
                covered = np.zeros(vocabulary.num_words, np.uint32)  # on the empty stack a closing quote is refused
                self.walker.ends_from(covered, base)
                within = np.unpackbits(covered.view(np.uint8), bitorder="little")[: len(vocabulary)].astype(bool)
                kept = within & (np.diff(vocabulary.token_offsets) <= SHORT_TOKEN)
                trie = self.walker.addresses(
                    vocabulary.build_trie(np.flatnonzero(within & ~kept | self._having(b'"') & ~kept))
                )
            else:
                num_chars, trie = self._text_tokens()
                kept = num_chars <= room
            bits = np.zeros(32 * vocabulary.num_words, bool)
            bits[: len(kept)] = kept
            found = self._inside[base, room] = np.packbits(bits, bitorder="little").view(np.uint32), trie
        return found

    def _text_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of characters of each token without escapes (2**30 for others), and the trie of the others."""
        if self._texts is None:
            vocabulary = self.vocabulary
            num_chars = np.full(len(vocabulary), 1 << 30, np.int64)
            is_first = np.concatenate([[0], np.cumsum((vocabulary.token_bytes[:-1] & 0xC0) != 0x80)])
            counts = np.diff(is_first[vocabulary.token_offsets])
            texts = self.walker.text_tokens
            num_chars[texts] = counts[texts]
            others = self._having(b'"') | self._having(b"\\")
            self._texts = num_chars, self.walker.addresses(vocabulary.build_trie(np.flatnonzero(others)))
        return self._texts

    def _having(self, mark: bytes) -> np.ndarray:
        vocabulary = self.vocabulary
        before = np.concatenate([[0], np.cumsum(vocabulary.token_bytes[:-1] == mark[0])])
        return (np.diff(before[vocabulary.token_offsets]) > 0) & vocabulary.is_text
