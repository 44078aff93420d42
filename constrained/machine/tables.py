"""A machine's tables: its states with their rows, and what its frames return, made when first asked for.

Never follows a text. States are ints. A builder gives a state a ``fill`` that writes its row of 256 codes (0 refuses;
another state; ``push(frame, state)``), what result it ends with, if it may end, and whether white space may stand
before its bytes. A frame is what waits below: ``returns(result)`` names the state to go on in. Everything is keyed by
meaning, so grammars of one vocabulary share states.
"""

import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..expressions import NOTHING, Expressions
from ..fuel import Fuel
from ..prefixes import without_far_bounds
from ..spec import GrammarTooComplex
from ..vocabulary import Vocabulary
from . import walk
from .item_texts import ItemReader
from .walk import PUSH

if TYPE_CHECKING:
    from .lazy_masks import LazyMasks

Fill = Callable[[np.ndarray], None]
Returns = Callable[[int], int]

DEAD_STATE = 0
MAX_INDENT = 40
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


def only(byte: int, state: int, row: np.ndarray) -> None:
    row[byte] = state


def _no_row(row: np.ndarray) -> None:
    raise AssertionError("the row of a lazy state is made byte by byte")


class LazyState(Protocol):
    """What a state of a context-free grammar stands for: parser sets with lexemes under way."""

    def step(self, byte: int) -> tuple[int, int, int]:
        """The range of bytes that act like ``byte``, and the code for them."""
        ...

    def accepts(self) -> bool:
        """Whether the text may end here."""
        ...

    def mask(self, masks: "LazyMasks") -> np.ndarray:
        """The tokens that may follow, the end token left out."""
        ...


def _fill_one(fill: Callable[[np.ndarray, int], None], state: int, row: np.ndarray) -> None:
    fill(row, state)


class Tables:
    """The tables of one vocabulary's automaton."""

    def __init__(self, vocabulary: Vocabulary, *, max_states: int) -> None:
        self.vocabulary = vocabulary
        self.lock = threading.RLock()
        self.fuel = Fuel()
        self.expressions = Expressions(vocabulary.has_byte, fuel=self.fuel)
        self.max_states = max_states
        self.hard_limit = 4 * max_states
        self.num_states = 0
        self._fills: list[Fill | None] = []
        self.lazy: dict[int, LazyState] = {}
        self._states: dict[Hashable, int] = {}
        self._frames: dict[Hashable, int] = {}
        self._returns: list[Returns] = []
        self._actions: dict[tuple[int, int], int] = {}
        self._filters: dict[bytes, int] = {}
        self._num_filter_bytes = 0
        self.accepting: set[int] = set()

        self.control = np.zeros(walk.CONTROL_SIZE, dtype=np.int64)
        self.arrays: dict[int, np.ndarray] = {}
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
            (walk.LOOPS, np.uint8),
            (walk.ACCEPTING, np.uint8),
        ):
            self.set_array(slot, np.zeros(self.hard_limit, dtype))
        self.set_array(walk.DELTA, np.zeros((self.hard_limit, 256), np.int32))
        self.set_array(walk.ACT_FRAME, np.zeros(256, np.int32))
        self.set_array(walk.ACT_STATE, np.zeros(256, np.int32))
        self.set_array(walk.FRAME_FILTER, np.full(256, -1, np.int64))
        self.set_array(walk.FRAME_LOW, np.zeros(256, np.int64))
        self.set_array(walk.FRAME_HIGH, np.zeros(256, np.int64))
        self.set_array(walk.FILTERS, np.zeros(4096, np.uint8))
        self._resize_hash(1 << 16)
        self._afters: dict[int, int] = {}  # what the hash table holds, read faster from here
        self.set_array(walk.SPACE_DELTA, _space_automaton())
        classes = np.zeros(256, np.uint8)
        classes[[32, 9, 10, 13]] = (1, 2, 3, 4)
        self.set_array(walk.SPACE_CLASS, classes)
        self.inside_string: dict[int, int] = {}
        self.counted_states: set[int] = set()
        self.twins: dict[int, Callable[[], int]] = {}
        self.item_readers: dict[int, ItemReader] = {}  # by frame
        self.all_sole = True  # all of these
        self.add_state(None)  # DEAD_STATE
        self.add_frame(lambda result: DEAD_STATE)  # frame 0, below every stack

    def set_array(self, slot: int, array: np.ndarray) -> None:
        self.arrays[slot] = array
        self.control[slot] = array.ctypes.data

    def _grow(self, slot: int, needed: int, fill: int = 0) -> None:
        old = self.arrays[slot]
        if needed <= len(old):
            return
        new = np.full((max(needed, 2 * len(old)), *old.shape[1:]), fill, old.dtype)
        new[: len(old)] = old
        self.set_array(slot, new)

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
        loops: bool = False,
    ) -> int:
        """A new state. ``final``: it ends at once, with result ``ends``. Without ``fill`` its row is all refusals.

        ``inside_string``: a state with the same tokens that stay within a string (itself for the first such state).
        ``counted``: 1 at a character boundary of a string whose characters are counted in aux, 2 within a character.
        ``local``: what a frame's filter asks. ``loops``: any text of a string that needs no escape leads back to it.
        """
        state = self.num_states
        if state >= self.hard_limit:
            raise GrammarTooComplex(f"the grammar needs more than {self.hard_limit:,} automaton states")
        self.num_states += 1
        self._fills.append(fill)
        arrays = self.arrays
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
            self.counted_states.add(state)
        if accepting:
            self.accepting.add(state)
            arrays[walk.ACCEPTING][state] = 1
        if loops:
            arrays[walk.LOOPS][state] = 1
        if inside_string >= 0:
            self.inside_string[state] = inside_string
        return state

    def add_states(self, count: int, fill: Callable[[np.ndarray, int], None], *, inside_string: int = -1) -> None:
        """``count`` states in a row, local numbers from 1 on; ``fill`` is told which one's row to write."""
        first = self.num_states
        if first + count > self.hard_limit:
            raise GrammarTooComplex(f"the grammar needs more than {self.hard_limit:,} automaton states")
        self.num_states += count
        self._fills += [partial(_fill_one, fill, state) for state in range(first, first + count)]
        self.arrays[walk.LOCAL][first : first + count] = np.arange(1, count + 1)
        if inside_string >= 0:
            self.inside_string.update(dict.fromkeys(range(first, first + count), inside_string))

    def rows_like(self, row: np.ndarray, first: int, count: int) -> np.ndarray:
        """The rows of states from ``first`` on, made equal to one; to be changed, then ``refuse_missing``."""
        rows = self.arrays[walk.DELTA][first : first + count]
        rows[:] = row
        return rows

    def refuse_missing(self, rows: np.ndarray) -> None:
        """Refuse bytes that no token has."""
        if self._any_missing:
            rows[:, self._missing] = walk.REFUSED

    def set_twin(self, state: int, twin: Callable[[], int]) -> None:
        """Name a state that no token tells from this one: masks are made for the twin."""
        self.twins[state] = twin

    def add_lazy_state(self, lazy: LazyState) -> int:
        """A new state whose row is made byte by byte."""
        state = self.add_state(_no_row)
        self.lazy[state] = lazy
        self.arrays[walk.LAZY][state] = 1
        return state

    def state(self, key: Hashable, make: Callable[[], int]) -> int:
        """The state known by ``key``, made at the first asking."""
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = make()
        return found

    def add_frame(
        self, returns: Returns, *, low: int = 0, high: int = 0, filter_at: int = -1, reader: ItemReader | None = None
    ) -> int:
        """A new frame. Where a ``reader`` waits for the value's text, ``returns`` is good for masks alone."""
        frame = len(self._returns)
        self._returns.append(returns)
        if reader is not None:
            self.item_readers[frame] = reader
            self.all_sole = self.all_sole and reader.is_sole
        if frame >= len(self.arrays[walk.FRAME_FILTER]):
            self._grow(walk.FRAME_FILTER, frame + 1, -1)
            self._grow(walk.FRAME_LOW, frame + 1)
            self._grow(walk.FRAME_HIGH, frame + 1)
        self.arrays[walk.FRAME_FILTER][frame] = filter_at
        self.arrays[walk.FRAME_LOW][frame] = low
        self.arrays[walk.FRAME_HIGH][frame] = high
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
            self.arrays[walk.ACT_FRAME][action] = frame
            self.arrays[walk.ACT_STATE][action] = state
        return PUSH + action

    def add_filter(self, allowed: np.ndarray) -> int:
        """Where a frame's filter starts: byte ``local`` tells whether states of that local number are allowed."""
        data = allowed.tobytes()
        found = self._filters.get(data)
        if found is None:
            found = self._filters[data] = self._num_filter_bytes
            self._num_filter_bytes += len(allowed)
            self._grow(walk.FILTERS, self._num_filter_bytes)
            self.arrays[walk.FILTERS][found : self._num_filter_bytes] = allowed
        return found

    def row(self, state: int) -> np.ndarray:
        """The 256 codes of a state, made if need be."""
        row = self.arrays[walk.DELTA][state]
        if row[0] in (walk.UNKNOWN, walk.ASKED):
            fill = self._fills[state]
            assert fill is not None
            fresh = np.zeros(256, np.int32)
            fill(fresh)
            if self._any_missing:
                fresh[self._missing] = 0
            fresh[fresh == 0] = walk.REFUSED
            row[:] = fresh
        return row

    def entry(self, state: int, byte: int) -> None:
        """Make the entry of a row, or the whole row where it is made at once."""
        lazy = self.lazy.get(state)
        if lazy is None:
            self.row(state)
            return
        row = self.arrays[walk.DELTA][state]
        if row[byte] in (walk.UNKNOWN, walk.ASKED):
            low, high, target = lazy.step(byte)
            row[low:high] = target or walk.REFUSED
            if self._any_missing:
                row[low:high][self._missing[low:high]] = walk.REFUSED

    def after(self, frame: int, result: int) -> int:
        """Where ``frame`` goes on after a value that ended with ``result``: a state, or a push in the frame's stead."""
        key = frame << 32 | result
        found = self._afters.get(key)
        if found is None:
            found = self._afters[key] = self._returns[frame](result)
            if 2 * len(self._afters) > self._hash_size:
                self._resize_hash(4 * self._hash_size)
            walk.set_after(self.control, key, found)
        return found

    def _resize_hash(self, size: int) -> None:
        keys, values = np.full(size, -1, np.int64), np.zeros(size, np.int32)
        if walk.HASH_KEYS in self.arrays:
            walk.hash_copy(self.arrays[walk.HASH_KEYS], self.arrays[walk.HASH_VALUES], keys, values, size - 1)
        self.set_array(walk.HASH_KEYS, keys)
        self.set_array(walk.HASH_VALUES, values)
        self.control[walk.HASH_MASK] = size - 1
        self._hash_size = size

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

    def text(self, expr: int) -> int:
        """The state from which a whole text of a language follows."""
        ex = self.expressions

        def fill(row: np.ndarray) -> None:
            for lo, hi in ex.classes(expr):
                byte = ex._available_in(lo, hi)
                if byte >= 0:
                    to = ex.alive(ex.derive(expr, byte))
                    if to != NOTHING:
                        row[lo:hi] = self.text(to)

        def make() -> int:
            state = self.add_state(fill, accepting=ex.nullable[expr])
            far = without_far_bounds(ex, expr, self.vocabulary.trie.max_depth)
            if far != expr:
                self.set_twin(state, lambda: self.text(far))
            return state

        return self.state(("text", expr), make)

    def end_state(self, result: int) -> int:
        """The state in which a value has just ended."""
        return self.state(("end", result), lambda: self.add_state(None, ends=result, final=True))
