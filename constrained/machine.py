"""A pushdown automaton over bytes whose states, rows and returns are made when first met. Never knows a grammar.

States are ints. A builder gives a state a ``fill`` that writes its row of 256 codes (0 refuses; another state;
``push(frame, state)``), what result it ends with, if it may end, and whether white space may stand before its bytes.
A frame is what waits below: ``returns(result)`` names the state to go on in. Everything is keyed by meaning, so
grammars of one vocabulary share states, masks and string walks.

A configuration (state, aux, stack) is an int too; ``mask`` and ``advance`` remember what they found for it.
"""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from . import walk
from .expressions import Expressions
from .spec import GrammarTooComplex
from .vocabulary import Trie, Vocabulary
from .walk import PUSH

Fill = Callable[[np.ndarray], None]
Returns = Callable[[int], int]
Step = Callable[[int], tuple[int, int, int]]  # byte -> the range of bytes that act like it, and the code for them

DEAD_STATE = 0
MAX_INDENT = 40
SHORT_TOKEN = 16  # bytes; longer tokens are few, and walked one by one where a bound is near
# White space automata (0: none): what may stand at one place. FLEXIBLE: one space, or a line end and its indent.
COMPACT, FLEXIBLE = 0, 1
_SPACE_STATES = 5 + MAX_INDENT


def _space_automaton() -> np.ndarray:
    delta = np.zeros((_SPACE_STATES, 8), dtype=np.uint8)  # classes: 1 space, 2 tab, 3 line feed, 4 carriage return
    delta[FLEXIBLE, 1], delta[FLEXIBLE, 3], delta[FLEXIBLE, 4] = 2, 4, 3
    delta[3, 3] = 4
    for i in range(4, _SPACE_STATES - 1):
        delta[i, 1] = delta[i, 2] = i + 1
    return delta


def _forget_oldest(cache: dict, capacity: int) -> None:
    if len(cache) >= capacity:
        del cache[next(iter(cache))]


def _no_row(row: np.ndarray) -> None:
    raise AssertionError("the row of a lazy state is made byte by byte")


@dataclass(frozen=True, slots=True)
class _Inner:
    """A walk from a state that stops where the frame below it is popped: the same for every such frame.

    ``exits`` [n, 3]: node, result, whether the node's byte is taken; ``results`` are the different ones among them.
    """

    mask: np.ndarray
    trie: np.ndarray
    exits: np.ndarray
    results: np.ndarray


class Machine:
    """The automaton of one vocabulary. All public methods hold its lock."""

    def __init__(self, vocabulary: Vocabulary, *, max_states: int = 60_000, max_mask_bytes: int = 96 << 20) -> None:
        self.vocabulary = vocabulary
        self.lock = threading.RLock()
        self.expressions = Expressions(vocabulary.has_byte)
        self.max_states = max_states
        self.hard_limit = 4 * max_states
        self.num_states = 0
        self._fills: list[Fill | None] = []
        self._twins: dict[int, Callable[[], int]] = {}
        self._steps: dict[int, Step] = {}
        self._accepts: dict[int, Callable[[], bool]] = {}
        self._states: dict[Hashable, int] = {}
        self._frames: dict[Hashable, int] = {}
        self._returns: list[Returns] = []
        self._actions: dict[tuple[int, int], int] = {}
        self._filters: dict[bytes, int] = {}
        self._num_filter_bytes = 0
        self.accepting: set[int] = set()

        self._control = np.zeros(walk.CONTROL_SIZE, dtype=np.int64)
        self._arrays: dict[int, np.ndarray] = {}
        self._results: dict[int, int] = {}
        self._result_bits: list[int] = []
        self._missing = np.array([not b for b in vocabulary.has_byte])
        self._any_missing = bool(self._missing.any())
        # Sized for the hard limit at once: untouched pages cost nothing, and growing would copy.
        for slot, dtype in (
            (walk.ENDS, np.int32),  # result + 1, 0 for none
            (walk.FINAL, np.uint8),
            (walk.SPACE, np.uint8),
            (walk.LOCAL, np.int32),
            (walk.COUNTED, np.uint8),
            (walk.LAZY, np.uint8),
        ):
            self._set(slot, np.zeros(self.hard_limit, dtype))
        self._set(walk.DELTA, np.zeros((self.hard_limit, 256), np.int32))
        self._set(walk.ACT_FRAME, np.zeros(256, np.int32))
        self._set(walk.ACT_STATE, np.zeros(256, np.int32))
        self._set(walk.FRAME_FILTER, np.full(256, -1, np.int64))
        self._set(walk.FRAME_LOW, np.zeros(256, np.int64))
        self._set(walk.FRAME_HIGH, np.zeros(256, np.int64))
        self._set(walk.FILTERS, np.zeros(4096, np.uint8))
        self._resize_hash(1 << 16)
        self._num_returns = 0
        self._stack_room = 1 << 16
        self._set(walk.STACK_FRAME, np.zeros(2 * self._stack_room, np.int32))
        self._set(walk.STACK_PARENT, np.zeros(2 * self._stack_room, np.int32))
        self._set(walk.STACK_DEPTH, np.zeros(2 * self._stack_room, np.int32))
        self._set(walk.SPACE_DELTA, _space_automaton())
        classes = np.zeros(256, np.uint8)
        classes[[32, 9, 10, 13]] = (1, 2, 3, 4)
        self._set(walk.SPACE_CLASS, classes)
        self._set(walk.TOKEN_BYTES, vocabulary.token_bytes)
        self._set(walk.TOKEN_OFFSETS, vocabulary.token_offsets)
        depth = vocabulary.trie.max_depth + 2
        self._walk_stacks = tuple(np.zeros(depth, np.int64) for _ in range(3))
        self._misses = [np.zeros((256, 5), np.int64), np.zeros((256, 5), np.int64)]  # one is read, one is written
        self._exits = np.zeros((256, 3), np.int64)
        self._num_exits = 0
        self._first = np.array([[-1, 0, 0, 0, 0]], np.int64)
        self._barriers: dict[int, int] = {}
        self._inner: dict[tuple[int, int, int], _Inner] = {}
        self._turn = 0
        self._wanted = np.zeros((256, 3), np.int64)
        self._tries: dict[int, tuple[Trie, np.ndarray]] = {}
        self._whole = self._trie_addresses(vocabulary.trie)

        # Stacks as (frame, parent) pairs, id 0 the empty one; the mirror lists are for reading single entries fast.
        self.stack_frames = [0]
        self.stack_parents = [0]
        self.stack_depths = [0]
        self._stacks: dict[tuple[int, int], int] = {}
        self._configs: dict[tuple[int, int, int], int] = {}
        self.configs: list[tuple[int, int, int]] = []
        self._masks: dict[int, np.ndarray] = {}
        self._shared_masks: dict[tuple[int, int, tuple[int, ...]], np.ndarray] = {}
        self._mask_depths: dict[tuple[int, int], tuple[int, ...]] = {}
        self._max_masks = max(64, max_mask_bytes // (8 * vocabulary.num_words))
        self._edges: dict[tuple[int, int], int] = {}
        self._may_end: dict[int, bool] = {}
        self._only: dict[int, int] = {}
        self._inside_string: dict[int, int] = {}
        self._inside: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._counted_states: set[int] = set()
        self.add_state(None)  # DEAD_STATE
        self.add_frame(lambda result: DEAD_STATE)  # frame 0, below every stack
        self._open_barrier = self._barrier_of(0)

    @property
    def is_full(self) -> bool:
        """Whether it has grown so far that new grammars should begin on another."""
        return (
            self.num_states > self.max_states
            or len(self.expressions.nodes) > self.expressions.max_expressions // 2
            or len(self.configs) > 1_000_000
        )

    # -- building -------------------------------------------------------------------------------------------------

    def _set(self, slot: int, array: np.ndarray) -> None:
        self._arrays[slot] = array
        self._control[slot] = array.ctypes.data

    def _grow(self, slot: int, needed: int, fill: int = 0) -> None:
        old = self._arrays[slot]
        if needed <= len(old):
            return
        new = np.full((max(needed, 2 * len(old)), *old.shape[1:]), fill, old.dtype)
        new[: len(old)] = old
        self._set(slot, new)

    def add_state(
        self,
        fill: Fill | None,
        *,
        ends: int = -1,
        final: bool = False,
        space: int = COMPACT,
        local: int = 0,
        counted: int = 0,
        accepting: bool = False,
        inside_string: int = -1,
    ) -> int:
        """A new state. ``final``: it ends at once, with result ``ends``. Without ``fill`` its row is all refusals.

        ``inside_string``: a state with the same tokens that stay within a string (itself for the first such state).
        ``counted``: 1 at a character boundary of a string whose characters are counted in aux, 2 within a character.
        ``local``: what a frame's filter asks.
        """
        state = self.num_states
        if state >= self.hard_limit:
            raise GrammarTooComplex(f"the grammar needs more than {self.hard_limit:,} automaton states")
        self.num_states += 1
        self._fills.append(fill)
        arrays = self._arrays
        if fill is None:
            arrays[walk.DELTA][state] = walk.REFUSED
        if ends >= 0:
            arrays[walk.ENDS][state] = ends + 1
        if final:
            arrays[walk.FINAL][state] = 1
        if space:
            arrays[walk.SPACE][state] = space
        if local:
            arrays[walk.LOCAL][state] = local
        if counted:
            arrays[walk.COUNTED][state] = counted
            self._counted_states.add(state)
        if accepting:
            self.accepting.add(state)
        if inside_string >= 0:
            self._inside_string[state] = inside_string
        return state

    def set_twin(self, state: int, twin: Callable[[], int]) -> None:
        """Name a state that no token tells from this one: masks are made for the twin."""
        self._twins[state] = twin

    def add_lazy_state(self, step: Step, accepts: Callable[[], bool]) -> int:
        """A new state whose row is made byte by byte, and of which is asked later whether the text may end in it."""
        state = self.add_state(_no_row)
        self._steps[state] = step
        self._arrays[walk.LAZY][state] = 1
        self._accepts[state] = accepts
        return state

    def state(self, key: Hashable, make: Callable[[], int]) -> int:
        """The state known by ``key``, made at the first asking."""
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = make()
        return found

    def add_frame(self, returns: Returns, *, low: int = 0, high: int = 0, filter_at: int = -1) -> int:
        frame = len(self._returns)
        self._returns.append(returns)
        if frame >= len(self._arrays[walk.FRAME_FILTER]):
            self._grow(walk.FRAME_FILTER, frame + 1, -1)
            self._grow(walk.FRAME_LOW, frame + 1)
            self._grow(walk.FRAME_HIGH, frame + 1)
        self._arrays[walk.FRAME_FILTER][frame] = filter_at
        self._arrays[walk.FRAME_LOW][frame] = low
        self._arrays[walk.FRAME_HIGH][frame] = high
        return frame

    def frame(self, key: Hashable, make: Callable[[], int]) -> int:
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = make()
        return found

    def push(self, frame: int, state: int) -> int:
        """The code of a row that pushes ``frame`` and goes to ``state``."""
        if state == DEAD_STATE:
            return 0
        action = self._actions.get((frame, state))
        if action is None:
            action = self._actions[(frame, state)] = len(self._actions)
            self._grow(walk.ACT_FRAME, action + 1)
            self._grow(walk.ACT_STATE, action + 1)
            self._arrays[walk.ACT_FRAME][action] = frame
            self._arrays[walk.ACT_STATE][action] = state
        return PUSH + action

    def add_filter(self, allowed: np.ndarray) -> int:
        """Where a frame's filter starts: byte ``local`` tells whether states of that local number are allowed."""
        data = allowed.tobytes()
        found = self._filters.get(data)
        if found is None:
            found = self._filters[data] = self._num_filter_bytes
            self._num_filter_bytes += len(allowed)
            self._grow(walk.FILTERS, self._num_filter_bytes)
            self._arrays[walk.FILTERS][found : self._num_filter_bytes] = allowed
        return found

    def row(self, state: int) -> np.ndarray:
        """The 256 codes of a state, made if need be."""
        row = self._arrays[walk.DELTA][state]
        if row[0] == walk.UNKNOWN:
            fill = self._fills[state]
            assert fill is not None
            fresh = np.zeros(256, np.int32)
            fill(fresh)
            if self._any_missing:
                fresh[self._missing] = 0
            fresh[fresh == 0] = walk.REFUSED
            row[:] = fresh
        return row

    def _entry(self, state: int, byte: int) -> None:
        """Make the entry of a row, or the whole row where it is made at once."""
        step = self._steps.get(state)
        if step is None:
            self.row(state)
            return
        row = self._arrays[walk.DELTA][state]
        if row[byte] == walk.UNKNOWN:
            low, high, target = step(byte)
            row[low:high] = target or walk.REFUSED
            if self._any_missing:
                row[low:high][self._missing[low:high]] = walk.REFUSED

    def after(self, frame: int, result: int) -> int:
        """Where ``frame`` goes on after a value that ended with ``result``: a state, or a push in the frame's stead."""
        key = frame << 32 | result
        keys, values = self._arrays[walk.HASH_KEYS], self._arrays[walk.HASH_VALUES]
        mask = int(self._control[walk.HASH_MASK])
        found = int(walk.hash_find(keys, values, mask, key))
        if found < 0:
            found = self._returns[frame](result)
            self._num_returns += 1
            if 2 * self._num_returns > mask:
                self._resize_hash(4 * (mask + 1))
            walk.hash_insert(
                self._arrays[walk.HASH_KEYS],
                self._arrays[walk.HASH_VALUES],
                int(self._control[walk.HASH_MASK]),
                key,
                found,
            )
        return found

    def _resize_hash(self, size: int) -> None:
        keys, values = np.full(size, -1, np.int64), np.zeros(size, np.int32)
        if walk.HASH_KEYS in self._arrays:
            walk.hash_copy(self._arrays[walk.HASH_KEYS], self._arrays[walk.HASH_VALUES], keys, values, size - 1)
        self._set(walk.HASH_KEYS, keys)
        self._set(walk.HASH_VALUES, values)
        self._control[walk.HASH_MASK] = size - 1

    # -- stacks and configurations -----------------------------------------------------------------------------------

    def stack(self, frame: int, parent: int) -> int:
        key = (frame, parent)
        found = self._stacks.get(key)
        if found is None:
            found = self._stacks[key] = len(self.stack_frames)
            self.stack_frames.append(frame)
            self.stack_parents.append(parent)
            self.stack_depths.append(self.stack_depths[parent] + 1)
            if found + self._stack_room >= len(self._arrays[walk.STACK_FRAME]):
                for slot in (walk.STACK_FRAME, walk.STACK_PARENT, walk.STACK_DEPTH):
                    self._grow(slot, 2 * (found + self._stack_room))
            self._arrays[walk.STACK_FRAME][found] = frame
            self._arrays[walk.STACK_PARENT][found] = parent
            self._arrays[walk.STACK_DEPTH][found] = self.stack_depths[found]
        return found

    def config(self, state: int, aux: int, stack: int) -> int:
        key = (state, aux, stack)
        found = self._configs.get(key)
        if found is None:
            found = self._configs[key] = len(self.configs)
            self.configs.append(key)
        return found

    def start(self, state: int, root_frame: int) -> int:
        """The configuration a text begins in."""
        with self.lock:
            return self.config(state, 0, self.stack(root_frame, 0))

    def _begin(self) -> None:
        control = self._control
        room = len(self.stack_frames)
        control[walk.SCRATCH] = room
        control[walk.STACK_LIMIT] = len(self._arrays[walk.STACK_FRAME]) - 1
        control[walk.LOWEST] = 1 << 40

    def _keep_stack(self, stack: int) -> int:
        """A scratch stack as a lasting one."""
        kept = len(self.stack_frames)
        if stack < kept:
            return stack
        frames = []
        at = stack
        stack_frame, stack_parent = self._arrays[walk.STACK_FRAME], self._arrays[walk.STACK_PARENT]
        while at >= kept:
            frames.append(int(stack_frame[at]))
            at = int(stack_parent[at])
        for frame in reversed(frames):
            at = self.stack(frame, at)
        return at

    def _supply(self, status: int) -> None:
        control = self._control
        if status == walk.MISS_ROW:
            self._entry(int(control[walk.MISS_A]), int(control[walk.MISS_B]))
        elif status == walk.MISS_AFTER:
            self.after(int(control[walk.MISS_A]), int(control[walk.MISS_B]))
        else:
            raise GrammarTooComplex("one token opens too many nested values")

    def advance(self, config: int, token: int) -> int:
        """The configuration after a token; -1 if the grammar refuses it."""
        found = self._edges.get((config, token))
        if found is not None:
            return found
        with self.lock:
            if not self.vocabulary.is_text[token]:
                return -1
            state, aux, stack = self.configs[config]
            self._begin()
            at = 0
            control = self._control
            while True:
                status, at = walk.step_token(control, token, at, state, aux, stack)
                if status == walk.OK:
                    break
                if status == walk.DEAD:
                    return -1
                state, aux, stack = (int(control[i]) for i in (walk.OUT_STATE, walk.OUT_AUX, walk.OUT_STACK))
                stack = self._keep_stack(stack)
                self._supply(status)
                self._begin()
            out = self.config(
                int(control[walk.OUT_STATE]),
                int(control[walk.OUT_AUX]),
                self._keep_stack(int(control[walk.OUT_STACK])),
            )
            if len(self._edges) > 1_000_000:
                self._edges.clear()
            self._edges[(config, token)] = out
            return out

    def advance_bytes(self, config: int, data: bytes) -> int:
        """As ``advance``, for bytes."""
        with self.lock:
            state, aux, stack = self.configs[config]
            array = np.frombuffer(data, np.uint8)
            at = 0
            control = self._control
            while True:
                self._begin()
                status, at = walk.step_bytes(control, array, at, state, aux, stack)
                state, aux, stack = (int(control[i]) for i in (walk.OUT_STATE, walk.OUT_AUX, walk.OUT_STACK))
                stack = self._keep_stack(stack)
                if status == walk.OK:
                    return self.config(state, aux, stack)
                if status == walk.DEAD:
                    return -1
                self._supply(status)

    def forced_bytes(self, config: int, limit: int = 4096) -> bytes:
        """The bytes that must follow: as long as there is one way only, and the text may not end."""
        with self.lock:
            out = bytearray()
            control = self._control
            while len(out) < limit and not self.may_end(config):
                state, aux, stack = self.configs[config]
                self._begin()
                byte, status = walk.only_byte(control, state, aux, stack)
                if byte == -2:
                    self._supply(status)
                    continue
                if byte < 0:
                    break
                config = self.advance_bytes(config, bytes([byte]))
                out.append(byte)
            return bytes(out)

    def may_end(self, config: int) -> bool:
        """Whether the text may end here."""
        found = self._may_end.get(config)
        if found is None:
            with self.lock:
                state, aux, stack = self.configs[config]
                found = False
                while True:
                    asked = self._accepts.get(state)
                    if state in self.accepting or (asked is not None and asked()):
                        found = True
                        break
                    result = int(self._arrays[walk.ENDS][state]) - 1
                    if result < 0 or stack == 0 or (aux and self._arrays[walk.SPACE][state]):
                        break
                    state = self.after(self.stack_frames[stack], result)
                    stack = self.stack_parents[stack]
                    if state >= PUSH:
                        break  # the frame goes on
                self._may_end[config] = found
        return found

    def only_token(self, config: int) -> int:
        """The one token the mask allows; -1 if there are more."""
        found = self._only.get(config)
        if found is None:
            mask = self.mask(config)
            words = np.flatnonzero(mask)
            found = -1
            if len(words) == 1:
                word = int(mask[words[0]])
                if word & (word - 1) == 0:
                    found = int(words[0]) * 32 + word.bit_length() - 1
            self._only[config] = found
        return found

    # -- masks ----------------------------------------------------------------------------------------------------

    def mask(self, config: int) -> np.ndarray:
        """uint32 [ceil(V / 32)], read-only: the tokens that may follow, the end token's bit where the text may end."""
        found = self._masks.get(config)
        if found is not None:
            return found
        with self.lock:
            state, aux, stack = self.configs[config]
            if state in self._counted_states:
                aux = self._blur_count(aux, stack)
            for depth in self._mask_depths.get((state, aux), ()):
                row = self._shared_masks.get((state, aux, self._top_frames(stack, depth)))
                if row is not None:
                    break
            else:
                row, depth = self._compute_mask(*self.configs[config])
                if self.may_end(config):
                    eos = self.vocabulary.eos
                    row[eos >> 5] |= np.uint32(1 << (eos & 31))
                    depth = self.stack_depths[stack]
                row.flags.writeable = False
                _forget_oldest(self._shared_masks, self._max_masks)
                self._shared_masks[(state, aux, self._top_frames(stack, depth))] = row
                known = self._mask_depths.get((state, aux), ())
                if depth not in known:
                    self._mask_depths[(state, aux)] = (*known, depth)
            _forget_oldest(self._masks, self._max_masks)
            self._masks[config] = row
            return row

    def _blur_count(self, count: int, stack: int) -> int:
        """Counts so far from both bounds that no token tells them apart share a mask."""
        frame = self.stack_frames[stack]
        low, high = int(self._arrays[walk.FRAME_LOW][frame]), int(self._arrays[walk.FRAME_HIGH][frame])
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
        frames, parents = self.stack_frames, self.stack_parents
        if depth == 1:
            return (frames[stack],)
        out = []
        for _ in range(depth):
            out.append(frames[stack])
            stack = parents[stack]
        return tuple(out)

    def _trie_addresses(self, trie: Trie) -> np.ndarray:
        addresses = np.array(
            [
                trie.node_byte.ctypes.data,
                trie.node_depth.ctypes.data,
                trie.node_end.ctypes.data,
                trie.first_token.ctypes.data,
                trie.num_tokens.ctypes.data,
                trie.token_order.ctypes.data,
                trie.num_nodes,
            ],
            dtype=np.int64,
        )
        self._tries[id(trie)] = (trie, addresses)
        return addresses

    def _compute_mask(self, state: int, aux: int, stack: int) -> tuple[np.ndarray, int]:
        """The mask without the end token, and how many of the stack's top frames it depends on."""
        frame = self.stack_frames[stack]
        barrier = self._barrier_of(frame)
        twin = self._twins.get(state)
        if twin is not None:
            state = twin()
        key = (state, self._blur_count(aux, stack) if state in self._counted_states else aux, barrier)
        inner = self._inner.get(key)
        if inner is None:
            inner = self._walk_inside(state, aux, barrier)
            _forget_oldest(self._inner, self._max_masks)
            self._inner[key] = inner
        mask = inner.mask.copy()
        if not len(inner.exits):
            return mask, 1 if barrier != self._open_barrier else 0
        control = self._control
        self._begin()
        control[walk.LOWEST] = self.stack_depths[stack]
        results = inner.results
        states, stacks = np.empty(len(results), np.int64), np.empty(len(results), np.int64)
        for i, result in enumerate(results.tolist()):
            states[i], stacks[i] = self._leave(stack, result)
        pending = np.empty((len(inner.exits), 5), np.int64)
        num_pending = walk.enter_exits(inner.exits, results, states, stacks, pending)
        self._walk(inner.trie, mask, pending, num_pending)
        lowest = int(control[walk.LOWEST])
        return mask, self.stack_depths[stack] - lowest + 1

    def _barrier_of(self, frame: int) -> int:
        """The frame that stands for all those with the same filter and bounds, and stops the walk when popped."""
        found = self._barriers.get(frame)
        if found is None:
            arrays = self._arrays
            key = (
                "barrier",
                int(arrays[walk.FRAME_FILTER][frame]),
                int(arrays[walk.FRAME_LOW][frame]),
                int(arrays[walk.FRAME_HIGH][frame]),
            )
            found = self._barriers[frame] = self.frame(
                key,
                lambda: self.add_frame(lambda result: walk.EXITED, filter_at=key[1], low=key[2], high=key[3]),
            )
        return found

    def _leave(self, stack: int, result: int) -> tuple[int, int]:
        """The state and stack after popping the top frame with a result; ``DEAD_STATE`` if it goes nowhere."""
        control = self._control
        while True:
            control[walk.LOWEST] = min(int(control[walk.LOWEST]), self.stack_depths[stack])
            state = self.after(self.stack_frames[stack], result)
            stack = self.stack_parents[stack]
            if state >= PUSH:
                action = state - PUSH
                stack = self.stack(int(self._arrays[walk.ACT_FRAME][action]), stack)
                state = int(self._arrays[walk.ACT_STATE][action])
                self._begin_above()
            if state == DEAD_STATE or not self._arrays[walk.FINAL][state]:
                return state, stack
            result = int(self._arrays[walk.ENDS][state]) - 1

    def _begin_above(self) -> None:
        self._control[walk.SCRATCH] = max(int(self._control[walk.SCRATCH]), len(self.stack_frames))

    def _walk_inside(self, state: int, aux: int, barrier: int) -> "_Inner":
        """Walk with the barrier as the only frame: what stays above it, and where it is popped."""
        mask = np.zeros(self.vocabulary.num_words, np.uint32)
        trie = self._whole
        stack = self.stack(barrier, 0)
        self._begin()
        if state in self._inside_string and self._is_free(state, aux, stack):
            mask[:], trie = self._inside_tokens(self._inside_string[state])
            self._begin()
        first = self._first
        first[0, 1], first[0, 2], first[0, 3] = state, aux, stack
        self._num_exits = 0
        self._walk(trie, mask, first, 1)
        exits = self._exits[: self._num_exits].copy()
        self._num_exits = 0
        results = np.empty(len(exits), np.int64)
        num_results = walk.distinct_results(exits, len(exits), results)
        return _Inner(mask, trie, exits, results[:num_results].copy())

    def _walk(self, trie: np.ndarray, mask: np.ndarray, pending: np.ndarray, num_pending: int) -> None:
        """Set the mask's bits, making what is missing and resuming there until nothing is."""
        control = self._control
        control[walk.MASK] = mask.ctypes.data
        while num_pending:
            out = self._misses[self._turn]
            count, num_wanted, num_exits = walk.walk_trie(
                control, trie, pending, num_pending, out, self._wanted, self._exits, self._num_exits, *self._walk_stacks
            )
            if count < 0:  # once more with more room: setting a bit twice does no harm
                self._misses[self._turn] = np.zeros((4 * len(out), 5), np.int64)
                kept = self._exits[: self._num_exits]
                self._exits = np.zeros((4 * len(self._exits), 3), np.int64)
                self._exits[: self._num_exits] = kept
                continue
            self._num_exits = num_exits
            scratch, lowest = control[walk.SCRATCH], control[walk.LOWEST]
            for kind, a, b in self._wanted[:num_wanted].tolist():
                if kind == walk.MISS_ROW:
                    self._entry(a, b)
                elif kind == walk.MISS_AFTER:
                    self.after(a, b)
                else:
                    raise GrammarTooComplex("one token opens too many nested values")
            control[walk.SCRATCH], control[walk.LOWEST], control[walk.MASK] = scratch, lowest, mask.ctypes.data
            pending, num_pending = out, count
            self._turn ^= 1

    def _is_free(self, state: int, aux: int, stack: int) -> bool:
        frame = self.stack_frames[stack]
        if state in self._counted_states:
            return int(self._arrays[walk.FRAME_HIGH][frame]) - aux >= SHORT_TOKEN
        filter_at = int(self._arrays[walk.FRAME_FILTER][frame])
        return filter_at < 0 or bool(self._arrays[walk.FILTERS][filter_at])

    def _inside_tokens(self, base: int) -> tuple[np.ndarray, np.ndarray]:
        """The short tokens that stay within a string, as a mask, and the trie of all others that might be allowed."""
        found = self._inside.get(base)
        if found is None:
            vocabulary = self.vocabulary
            self._begin()
            covered = np.zeros(vocabulary.num_words, np.uint32)  # on the empty stack a closing quote is refused
            self._walk(self._whole, covered, np.array([[-1, base, 0, 0, 0]], np.int64), 1)
            bits = np.unpackbits(covered.view(np.uint8), bitorder="little")[: len(vocabulary)].astype(bool)
            lengths = np.diff(vocabulary.token_offsets)
            is_long = bits & (lengths > SHORT_TOKEN)
            others = [t for t in np.flatnonzero(vocabulary.is_text & ~bits).tolist() if b'"' in vocabulary.tokens[t]]
            for token in np.flatnonzero(is_long).tolist():
                covered[token >> 5] &= ~np.uint32(1 << (token & 31))
                others.append(token)
            trie = self._trie_addresses(vocabulary.build_trie(np.array(others, np.int64)))
            found = self._inside[base] = covered, trie
        return found

    def result(self, bits: int) -> int:
        """The result that stands for a set of answers, one a bit."""
        if bits < 1 << 24:
            return bits
        found = self._results.get(bits)
        if found is None:
            found = self._results[bits] = (1 << 24) + len(self._result_bits)
            self._result_bits.append(bits)
        return found

    def bits(self, result: int) -> int:
        return result if result < 1 << 24 else self._result_bits[result - (1 << 24)]

    def end_state(self, result: int) -> int:
        """The state in which a value has just ended."""
        return self.state(("end", result), lambda: self.add_state(None, ends=result, final=True))
