"""The masks of a machine's configurations, remembered by what they depend on. Never changes what a text may be.

A mask is made by walking the vocabulary's trie. A walk inside a value stops where the frame below it is popped, so it
is the same for every such frame; what follows there is walked for each frame, and remembered with the frames that were
looked at. Tokens of nothing but text, which are most, are allowed all at once where a string goes on.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..recent import Recent
from ..spec import GrammarTooComplex
from ..vocabulary import Trie
from . import walk
from .item_texts import Crossing, crossing_tokens, is_in_string
from .lazy_masks import LazyMasks
from .text_slices import text_slices
from .walk import PUSH

if TYPE_CHECKING:
    from .machine import Machine

MASK_WORK = 100_000  # of fuel: a tenth to a fifth of a second, while all others wait
SHORT_TOKEN = 16  # bytes; longer tokens are few, and walked one by one where a language may have a bound


class _Inner(NamedTuple):
    """A walk from a state that stops where the frame below it is popped: the same for every such frame.

    ``exits`` [n, 3]: node, result, whether the node's byte is taken; ``results`` are the different ones among them.
    """

    mask: np.ndarray
    trie: np.ndarray
    exits: np.ndarray
    results: tuple[int, ...]


_NO_EXITS = np.zeros((0, 3), np.int64)


class Masks:
    """The masks of one machine, made while its lock is held."""

    def __init__(self, machine: "Machine", max_bytes: int) -> None:
        self.machine = machine
        vocabulary = self.vocabulary = machine.vocabulary
        capacity = max(64, max_bytes // (16 * vocabulary.num_words))
        self.known: Recent[int, np.ndarray] = Recent(4 * capacity)  # config -> one of the shared
        self._shared: Recent[tuple[int, int, tuple[int, ...]], np.ndarray] = Recent(capacity)
        self._inner: Recent[tuple[int, int, int], _Inner] = Recent(capacity)
        self._depths: dict[tuple[int, int], tuple[int, ...]] = {}
        self._crossing: Crossing | None = None  # found when first needed
        self._only: dict[int, int] = {}
        self._barriers: dict[int, int] = {}
        self._inside: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._texts: tuple[np.ndarray, np.ndarray] | None = None
        self._pending = [np.zeros((1024, 5), np.int64), np.zeros((1024, 5), np.int64)]  # one is read, one is written
        self._turn = 0
        self._wanted = np.zeros((2048, 3), np.int64)
        machine.set_array(walk.WANTED, self._wanted)
        machine.control[walk.WANTED_SIZE] = len(self._wanted)
        self._exits = np.zeros((0, 3), np.int64)
        self._room_for_exits(256)
        self._noted = np.zeros(0, np.int64)
        self._room_for_notes(vocabulary.trie.num_nodes)  # untouched pages cost nothing
        self._has_slices = bool(vocabulary.has_byte[0x80:0xC0].all())  # else a character begun may have no end
        self._tries: list[tuple[Trie, tuple[np.ndarray, ...]]] = []  # what the addresses point at
        self.whole = self._addresses(vocabulary.trie)
        self._open_barrier = self._barrier_of(0)
        self.lazy = LazyMasks(machine, self, capacity)

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

    def noted(self, count: int) -> np.ndarray:
        """The first so many nodes that the last walk noted."""
        return self._noted[:count]

    # -- one mask -------------------------------------------------------------------------------------------------

    def _find(self, config: int) -> np.ndarray:
        machine = self.machine
        state, aux, stack, _ = machine.configs[config]
        if state in machine.lazy:
            alone = machine.lazy[state].mask(self.lazy)
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
        """The mask without tokens that end an item and go on as if its text did not count."""
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
        """Counts so far from both bounds that no token tells them apart share a mask."""
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
        """The mask without the end token, and how many of the stack's top frames it depends on."""
        machine = self.machine
        barrier = self._barrier_of(machine.stack_frames[stack])
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
        num_exits = len(inner.exits)
        if num_exits > len(self._pending[self._turn]):
            self._pending[self._turn] = np.zeros((2 * num_exits, 5), np.int64)
        num_pending = walk.enter_exits(inner.exits, targets, self._pending[self._turn])
        self._walk(inner.trie, mask, num_pending)
        return mask, machine.stack_depths[stack] - int(control[walk.LOWEST]) + 1

    def _barrier_of(self, frame: int) -> int:
        """The frame that stands for all those with the same filter and bounds, and stops the walk when popped."""
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
        """The state and stack after popping the top frame with a result; state 0 if it goes nowhere."""
        machine, control = self.machine, self.machine.control
        while True:
            control[walk.LOWEST] = min(int(control[walk.LOWEST]), machine.stack_depths[stack])
            state = machine.after(machine.stack_frames[stack], result)
            stack = machine.stack_parents[stack]
            if state >= PUSH:
                action = state - PUSH
                stack = machine.stack(int(machine.arrays[walk.ACT_FRAME][action]), stack)
                state = int(machine.arrays[walk.ACT_STATE][action])
                control[walk.SCRATCH] = max(int(control[walk.SCRATCH]), len(machine.stack_frames))
            if state == 0 or not machine.arrays[walk.FINAL][state]:
                return state, stack
            result = int(machine.arrays[walk.ENDS][state]) - 1

    # -- walks ----------------------------------------------------------------------------------------------------

    def _addresses(self, trie: Trie) -> np.ndarray:
        """The trie as ``walk_trie`` takes it."""
        nodes = (trie.node_byte, trie.node_depth, trie.node_end, trie.first_token, trie.num_tokens, trie.token_order)
        out = np.zeros(walk.TRIE_SIZE, np.int64)
        out[: len(nodes)] = [array.ctypes.data for array in nodes]
        out[walk.T_NODES] = trie.num_nodes
        out[walk.T_TOKENS] = len(trie.token_order)
        kept = nodes
        if self._has_slices:
            slices = text_slices(*nodes, self.vocabulary.has_byte)
            for slot, array in zip(
                (walk.T_INSIDE, walk.T_COVERED, walk.T_COVERED_BEFORE, walk.T_BOUNDARIES, walk.T_BOUNDARIES_BEFORE),
                slices,
                strict=True,
            ):
                out[slot] = array.ctypes.data
            kept += slices
        self._tries.append((trie, kept))
        return out

    def _walk_inside(self, state: int, aux: int, barrier: int) -> _Inner:
        """Walk with the barrier as the only frame: what stays above it, and where it is popped."""
        machine = self.machine
        stack = machine.stack(barrier, 0)
        trie = self.whole
        inside = self._inside_of(state, aux, barrier)
        if inside is None:
            mask = np.zeros(self.vocabulary.num_words, np.uint32)
        else:
            mask, trie = inside[0].copy(), inside[1]
        machine.begin()
        self._walk_from(trie, mask, state, aux, stack)
        mask.flags.writeable = False
        num_exits = int(machine.control[walk.NUM_EXITS])
        if not num_exits:
            return _Inner(mask, trie, _NO_EXITS, ())
        exits = self._exits[:num_exits].copy()
        return _Inner(mask, trie, exits, tuple(dict.fromkeys(exits[:, 1].tolist())))

    def walk_from(self, mask: np.ndarray, state: int) -> int:
        """Set the bits of all tokens that a state allows on the empty stack. Returns how many inner nodes where it
        accepts, some perhaps counted twice, are in ``NOTED`` until the next walk."""
        self.machine.begin()
        self.machine.control[walk.NUM_NOTED] = 0
        self._walk_from(self.whole, mask, state, 0, 0)
        return self._end_notes()

    def walk_below(self, mask: np.ndarray, state: int, starts: np.ndarray, nodes: np.ndarray) -> int:
        """As ``walk_from``, for the tokens below some nodes that a state before these nodes' bytes allows: those in
        ``nodes[starts[b]:starts[b + 1]]`` are of byte b."""
        self.machine.begin()
        self.machine.control[walk.NUM_NOTED] = 0
        if len(nodes) > len(self._pending[self._turn]):
            self._pending[self._turn] = np.zeros((2 * len(nodes), 5), np.int64)
        count = walk.regions_at(self.machine.control, starts, nodes, state, self._pending[self._turn])
        self._walk(self.whole, mask, count)
        return self._end_notes()

    def _end_notes(self) -> int:
        control = self.machine.control
        count = int(control[walk.NUM_NOTED])
        control[walk.NUM_NOTED] = -1
        return count

    def _walk_from(self, trie: np.ndarray, mask: np.ndarray, state: int, aux: int, stack: int) -> None:
        self._pending[self._turn][0] = (-1, state, aux, stack, 0)
        self._walk(trie, mask, 1)

    def _walk(self, trie: np.ndarray, mask: np.ndarray, num_pending: int) -> None:
        """Set the mask's bits from what is pending, making what is missing and resuming there until nothing is."""
        control = self.machine.control
        control[walk.NUM_EXITS] = 0
        while num_pending:
            pending, out = self._pending[self._turn], self._pending[self._turn ^ 1]
            count, num_wanted = walk.walk_trie(control, trie, mask, pending, num_pending, out)
            if not count:
                return
            scratch, lowest = control[walk.SCRATCH], control[walk.LOWEST]
            self._supply(num_wanted)
            control[walk.SCRATCH], control[walk.LOWEST] = scratch, lowest
            if count >= 0:
                self._turn ^= 1
                num_pending = count
            # else once more with more room: setting a bit twice does no harm
            elif count == walk.SHORT_OF_NOTES:
                self._room_for_notes(2 * len(self._noted))
            elif count == walk.SHORT_OF_EXITS:
                self._room_for_exits(4 * len(self._exits))
            else:
                self._pending[self._turn ^ 1] = np.zeros((4 * len(out), 5), np.int64)

    def _supply(self, num_wanted: int) -> None:
        """Make the rows and returns that a walk asked for."""
        machine = self.machine
        wanted = self._wanted[:num_wanted].tolist()
        try:
            for kind, a, b in wanted:
                if kind == walk.MISS_ROW:
                    machine.entry(a, b)
                elif kind == walk.MISS_AFTER:
                    machine.after(a, b)
                else:
                    raise GrammarTooComplex("one token opens too many nested values")
        except BaseException:
            delta = machine.arrays[walk.DELTA]
            for kind, a, b in wanted:
                if kind == walk.MISS_ROW and delta[a, b] == walk.ASKED:
                    delta[a, b] = walk.UNKNOWN
            raise

    def _room_for_exits(self, size: int) -> None:
        exits = np.zeros((size, 3), np.int64)
        exits[: len(self._exits)] = self._exits
        self._exits = exits
        self.machine.set_array(walk.EXITS, exits)
        self.machine.control[walk.EXITS_SIZE] = size

    def _room_for_notes(self, size: int) -> None:
        noted = np.zeros(size, np.int64)
        noted[: len(self._noted)] = self._noted
        self._noted = noted
        self.machine.set_array(walk.NOTED, noted)
        self.machine.control[walk.NOTED_SIZE] = size

    # -- tokens within a string -------------------------------------------------------------------------------------

    def _inside_of(self, state: int, aux: int, frame: int) -> tuple[np.ndarray, np.ndarray] | None:
        """What is known of the tokens within a string that goes on: see ``_inside_tokens``; None outside."""
        machine = self.machine
        base = machine.inside_string.get(state, -1)
        if base < 0:
            return None
        if state in machine.counted_states:
            if not self._has_slices:
                return None
            room = int(machine.arrays[walk.FRAME_HIGH][frame]) - aux
            return self._inside_tokens(base, min(room, self.vocabulary.trie.max_depth))
        filter_at = int(machine.arrays[walk.FRAME_FILTER][frame])
        if filter_at >= 0 and not machine.arrays[walk.FILTERS][filter_at]:
            return None
        return self._inside_tokens(base, -1)

    def _inside_tokens(self, base: int, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that stay within a string, as a mask, and the trie of all others that might be allowed.

        ``room``: so many characters may still come; -1 for a language that short tokens never leave.
        """
        found = self._inside.get((base, room))
        if found is None:
            vocabulary = self.vocabulary
            if room < 0:
                covered = np.zeros(vocabulary.num_words, np.uint32)  # on the empty stack a closing quote is refused
                self.walk_from(covered, base)
                within = np.unpackbits(covered.view(np.uint8), bitorder="little")[: len(vocabulary)].astype(bool)
                kept = within & (np.diff(vocabulary.token_offsets) <= SHORT_TOKEN)
                trie = self._addresses(
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
        """How many characters each token of text without escapes has (no other may come); the others' trie."""
        if self._texts is None:
            vocabulary = self.vocabulary
            _, slices = self._tries[0]
            num_chars = np.full(len(vocabulary), 1 << 30, np.int64)
            is_first = np.concatenate([[0], np.cumsum((vocabulary.token_bytes[:-1] & 0xC0) != 0x80)])
            counts = np.diff(is_first[vocabulary.token_offsets])
            texts = slices[-4]
            num_chars[texts] = counts[texts]
            others = self._having(b'"') | self._having(b"\\")
            self._texts = num_chars, self._addresses(vocabulary.build_trie(np.flatnonzero(others)))
        return self._texts

    def _having(self, mark: bytes) -> np.ndarray:
        vocabulary = self.vocabulary
        before = np.concatenate([[0], np.cumsum(vocabulary.token_bytes[:-1] == mark[0])])
        return (np.diff(before[vocabulary.token_offsets]) > 0) & vocabulary.is_text
