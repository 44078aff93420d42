"""The automaton: its tables of states and frames, and the configurations that texts lead to.

States are ints. A builder gives a state a ``fill``, which writes its row of 256 codes when the row is first needed:

    0 (REFUSED once stored)   the byte is refused
    1 .. PUSH - 1             the next state
    push(frame, state)        push ``frame`` on the stack and go to ``state``

A state that ends a value has a result: an int that tells the frame on top of the stack what the value was. The machine
then pops the frame, and ``returns(result)`` names the state where the text goes on. States and frames are found by
keys that say what they mean, so all grammars of one vocabulary share them.

A configuration (state, aux, stack, reading) is an int as well. ``aux`` is the state of the white space automaton, or
the number of characters in a string whose length is bounded. ``reading`` is the number of the items read so far by the
``ItemReader`` of each array around the place, 0 where there is none.
"""

import struct
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..expressions import NOTHING, Expressions
from ..fuel import Fuel
from ..prefixes import TokenReach
from ..spec import GrammarError, GrammarTooComplex, grammar_error
from ..tables import NUM_PARTS, PART_BITS, Parts, in_parts
from ..vocabulary import Vocabulary
from . import walk
from .item_texts import BETWEEN, ItemReader, ItemTexts, Level, Levels
from .parser_sets import LazyState
from .part_sets import SHORTEST, StringText
from .recent import Leaving
from .untouched import touch, untouched
from .walk import DEAD_STATE, PUSH
from .white_space import COMPACT, needed_spaces, space_automaton, space_classes

Fill = Callable[[np.ndarray], None]
Returns = Callable[[int], int]
Step = Callable[[int], tuple[int, int, int]]
StandIns = Callable[[], Iterator[tuple[int, int, int]]]

MASK_WORK = 100_000  # fuel for one mask: 0.1 to 0.2 s, during which other texts wait
MOST_STEPPED = 6  # entries of a row that are made one by one before the whole row is
MOST_STEPPED_APART = 32  # the same, of a row that takes long; see ``add_state``
MAX_CONFIGS = 1 << 20
STACK_ROOM = 1 << 16  # for stacks that a compiled walk pushes
MAX_EDGES = 16_384  # that are remembered of each ``1 << SHARD_BITS`` configurations
SHARD_BITS = 12
ROWS_TOUCHED = 64  # whose pages are made at once where a mask needs one
PLACE = struct.Struct("4q")
_ITEM_BYTES = frozenset(b",[]{}")  # where items of arrays begin and end, and objects


def _fill_one_byte(byte: int, state: int, row: np.ndarray) -> None:
    row[byte] = state


class _NumberedFill(NamedTuple):
    """The fill of many states, which is told whose row it writes."""

    write: Callable[[np.ndarray, int], None]


def _no_row(row: np.ndarray) -> None:
    raise AssertionError("the row of a lazy state is made byte by byte")


class Machine:
    """The automaton of one vocabulary. Public methods that follow texts hold its lock; builders hold it themselves."""

    def __init__(self, vocabulary: Vocabulary, *, max_states: int = 60_000, compares_names: bool = False) -> None:
        """With ``compares_names`` the names of objects that count their properties have to differ."""
        self.vocabulary = vocabulary
        self.compares_names = self.reads_items = compares_names  # with readers it reads items too
        self.lock = threading.RLock()
        self.fuel = Fuel()
        self.expressions = Expressions(vocabulary.has_byte, fuel=self.fuel)
        self.reach = TokenReach(self.expressions, vocabulary)
        self.max_states = max_states
        self.hard_limit = 4 * max_states
        self.num_sparse_states = 0
        self._end = 0  # the numbers below it are those of states, or ready
        self._ready: list[int] = []  # the numbers of the next states, last one first; their rows have pages
        self._fills: Parts[int, Fill | _NumberedFill] = in_parts()
        self.lazy: dict[int, LazyState] = {}
        self._states: Parts[Hashable, int] = in_parts()
        self._frames: dict[Hashable, int] = {}
        self._returns: list[Returns] = []
        self._actions: Parts[int, int] = in_parts()
        self._num_actions = 0
        self._filters: dict[bytes, int] = {}
        self._num_filter_bytes = 1  # 0 stands for no filter
        self.accepting: set[int] = set()
        self._end_states = np.zeros(0, np.int32)
        self.texts: dict[int, int] = {}  # by state; see ``text``
        self.strings: Parts[int, int] = in_parts()  # by state inside a string: the language of the rest

        self.control = np.zeros(walk.CONTROL_SIZE, dtype=np.int64)
        self.control[walk.READS_ITEMS] = compares_names
        self._control = self.control.data
        self.arrays: dict[int, np.ndarray] = {}
        self._results: dict[int, int] = {}
        self._result_bits: list[int] = []
        self.missing = np.array([not b for b in vocabulary.has_byte])  # bytes that are no token by themselves
        self._any_missing = bool(self.missing.any())
        self.set_array(walk.MISSING, self.missing.view(np.uint8))
        # These have room for the hard limit from the start: pages that are never touched cost no memory.
        for slot, dtype in (
            (walk.ENDS, np.int32),  # result + 1, 0 for none
            (walk.FINAL, np.uint8),
            (walk.SPACE, np.uint16),
            (walk.LOCAL, np.int32),
            (walk.COUNTED, np.uint8),
            (walk.CHARS_LEFT, np.int32),
            (walk.PADDING, np.int32),
            (walk.LAZY, np.uint8),
            (walk.LOOPS, np.uint8),
            (walk.ACCEPTING, np.uint8),
            (walk.SPARSE_OF, np.int32),
        ):
            self.set_array(slot, np.zeros(self.hard_limit, dtype))
        self._rows = untouched((self.hard_limit, 256), np.int32)
        self._codes = self._rows.data  # Python reads single entries faster from it
        self._fresh: list[np.ndarray] = []  # rows of zeros, for fills to write to
        self.set_array(walk.DELTA, self._rows)
        for slot in (walk.ACT_FRAME, walk.ACT_STATE):
            self.set_array(slot, untouched((max_states,), np.int32))
        for slot in (walk.FRAME_FILTER, walk.FRAME_LOW, walk.FRAME_HIGH):  # filter 0 stands for none
            self.set_array(slot, untouched((max_states,), np.int64))
        self._view_frames()
        self.set_array(walk.FILTERS, np.zeros(4096, np.uint8))
        self.set_array(walk.SPARSE, np.zeros((64, 4), np.int64))
        self._sparse: list[tuple[np.ndarray, np.ndarray]] = []  # whose addresses are in SPARSE
        for size in (2, 1 << 16):  # grown once here, so that its compiled function is loaded, which takes milliseconds
            self._resize_hash(size)
        self._afters: Parts[int, int] = in_parts()  # the same entries as the hash table, for Python
        self._num_afters = 0
        self.set_array(walk.SPACE_DELTA, space_automaton())
        self.set_array(walk.SPACE_CLASS, space_classes())
        self.inside_string = np.zeros(self.hard_limit, np.int32)  # by state; see ``add_state``
        self.recurring = bytearray(self.hard_limit)  # 1 for states that recur
        self.counted = self.arrays[walk.COUNTED].data
        self.twins: dict[int, Callable[[], int]] = {}
        self.owed: dict[int, int] = {}  # of states with a twin; see ``set_twin``
        self.stand_ins: dict[int, StandIns] = {}
        self.short_twins: dict[int, Callable[[], tuple[int, int]]] = {}  # see ``set_short_twin``
        self.string_texts: dict[int, StringText] = {}  # by state
        self.read_text: Callable[[int, StringText, bytes], tuple[int, int, int]] | None = None  # see ``StringReader``
        self._steps: dict[int, Step] = {}  # by state; see ``add_state``
        self.apart: set[int] = set()  # states; see ``add_state``
        self._num_stepped: dict[int, int] = {}  # entries made of the rows of these states, one by one
        self._unsettled: dict[int, Callable[[], None]] = {}
        self.item_readers: dict[int, ItemReader] = {}  # by frame
        self.counted_objects: set[int] = set()  # states behind the brace of an object several of whose names differ
        self.distinct_names: dict[int, int] = {}  # by the frame of a name; see ``add_frame``
        self.items = ItemTexts()
        self.only_repeats: Callable[[int], bool] | None = None  # whether a configuration leads to nothing else
        self.closings: dict[int, Callable[[], bytes]] = {}  # by frame; see ``add_frame``
        self.deciding: set[int] = set()  # frames; see ``add_frame``
        self.detours: set[int] = set()  # states; see ``add_state``
        self.escape_left: dict[int, int] = {}  # by state within an escape: how many bytes of it are missing at least
        # By state of a string whose result tells languages apart: those that the rest of the string decides.
        self.told_apart: dict[int, tuple[int, ...]] = {}

        self.set_array(walk.TOKEN_BYTES, vocabulary.token_bytes)
        self.set_array(walk.TOKEN_OFFSETS, vocabulary.token_offsets)
        opening = vocabulary.having(b"[") | vocabulary.having(b"{")
        self.set_array(walk.TOKEN_KIND, vocabulary.is_text + opening.astype(np.uint8))
        depth = vocabulary.trie.max_depth + 2
        for slot in (walk.STATE_AT, walk.AUX_AT, walk.STACK_AT):
            self.set_array(slot, np.zeros(depth, np.int64))

        # A stack is a (frame, parent stack) pair; 0 is the empty one.
        for slot in (walk.STACK_FRAME, walk.STACK_PARENT, walk.STACK_DEPTH):
            self.set_array(slot, untouched((2 * STACK_ROOM,), np.int32))
        self.set_array(walk.CONFIGS, untouched((MAX_CONFIGS, 4), np.int64))
        self.control[walk.NUM_STACKS] = 1
        # A dictionary for each 4,096 configurations: one for all would stop everybody when it grows, which copies it.
        # A token's key is ``config * _stride + token``: the garbage collector does not look at ints. The stride is odd,
        # so that the keys of one token do not meet in a dictionary.
        self._edges: list[dict[int, int]] = []
        self._leaving = Leaving()  # edges
        self._stride = len(vocabulary) | 1
        self._make_tables(1 << 18, 1 << 21)
        self._failed_edges: dict[tuple[int, int], GrammarError] = {}  # that took too much work
        self._may_end: dict[int, bool] = {}
        self.control[walk.NUM_NOTED] = -1

        self.add_state(None)  # DEAD_STATE
        self.add_frame(lambda result: DEAD_STATE)  # frame 0, the bottom of every stack
        # Compiled functions are loaded here, so that no mask and no token waits for them.
        self.after(0, 0)
        self._follow(DEAD_STATE, 0, 0, -1, b"")
        self.row(
            self.add_sparse_states(1, lambda first: (np.zeros(2, np.int32), np.zeros((0, 3), np.int32)), DEAD_STATE)
        )
        walk.step_token(self.control, 0, 0, DEAD_STATE, 0, 0)
        walk.advance(self.control, self.config(DEAD_STATE, 0, 0), 0)
        walk.set_row(self.control, DEAD_STATE, np.zeros(256, np.int32))

    def set_array(self, slot: int, array: np.ndarray) -> None:
        self.arrays[slot] = array
        self.control[slot] = array.ctypes.data

    def _grow(self, slot: int, needed: int) -> None:
        old = self.arrays[slot]
        if needed <= len(old):
            return
        new = np.zeros((max(needed, 2 * len(old)), *old.shape[1:]), old.dtype)
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
        left: int = 0,
        padding: int = 0,
        accepting: bool = False,
        inside_string: int = 0,
        loops: bool = False,
        recurs: bool = False,
        detour: bool = False,
        step: Step | None = None,
        apart: bool = False,
    ) -> int:
        """A new state. Without ``fill`` every byte is refused.

        ``ends``: the value may end here with this result. ``final``: it ends here at once.
        ``space``: the white space before the state's bytes, a code of ``white_space``.
        ``local``: the index that a frame's filter looks up.
        ``counted``: 1 between two characters of a string whose characters are counted in aux, 2 within a character.
        ``left``: how many characters of a counted string have to follow, one that has begun included.
        ``padding``: by how many characters the bound is smaller for a counted string that ends here.
        ``accepting``: the text may end here.
        ``inside_string``: a state that allows the same tokens within a string; the state itself if it is the first;
        0 for none.
        ``loops``: every character of a string that needs no escape leads back to this state.
        ``recurs``: it is met above many stacks, or allows many tokens: what it allows by itself is walked once.
        ``detour``: ``Endings`` tries it only where no other state is left.
        ``step(byte)``, for bytes from 1 on: (low, high, code), the entries of the row for bytes in [low, high), which
        ``byte`` is one of. Where a walk passes the state with few bytes, only these entries are made; ``apart``: also
        with many, because the whole row takes long.
        """
        if not self._ready:
            self.make_ready(ROWS_TOUCHED)
            if not self._ready:
                raise GrammarTooComplex(f"the grammar needs more than {self.hard_limit:,} automaton states")
        state = self._ready.pop()
        arrays = self.arrays
        if fill is None:
            arrays[walk.DELTA][state] = walk.REFUSED
        else:
            self._fills[state >> PART_BITS][state] = fill
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
            arrays[walk.CHARS_LEFT][state] = left
            arrays[walk.PADDING][state] = padding
            self.recurring[state] = 1
        if accepting:
            self.accepting.add(state)
            arrays[walk.ACCEPTING][state] = 1
        if detour:
            self.detours.add(state)
        if loops:
            arrays[walk.LOOPS][state] = 1
        if inside_string:
            self.inside_string[state] = inside_string
        if recurs:
            self.recurring[state] = 1
        if step is not None:
            self._steps[state] = step
            arrays[walk.LAZY][state] = 1
            if apart:
                self.apart.add(state)
        return state

    def make_ready(self, count: int) -> None:
        """Have ``count`` states to come find the pages of their rows made, so that no mask waits for these. Pages that
        are made together cost half as much."""
        first, more = self._end, min(count - len(self._ready), self.hard_limit - self._end)
        if more > 0:
            self._end += more
            self._ready = [*range(self._end - 1, first - 1, -1), *self._ready]
            touch(self._rows, first, self._end)

    @property
    def num_states(self) -> int:
        return self._end - len(self._ready)

    def add_states(self, count: int, fill: Callable[[np.ndarray, int], None] | None, *, inside_string: int = 0) -> int:
        """``count`` new states with local numbers from 1 on; ``fill(row, state)`` writes the row of each. The first of
        them."""
        first = self._end
        if first + count > self.hard_limit:
            raise GrammarTooComplex(f"the grammar needs more than {self.hard_limit:,} automaton states")
        self._end += count
        if fill is not None:
            numbered = _NumberedFill(fill)
            for state in range(first, first + count):
                self._fills[state >> PART_BITS][state] = numbered
        self.arrays[walk.LOCAL][first : first + count] = np.arange(1, count + 1)
        if inside_string:
            self.inside_string[first : first + count] = inside_string
        return first

    def add_sparse_states(
        self,
        count: int,
        moves_of: Callable[[int], tuple[np.ndarray, np.ndarray]],
        base: int,
        *,
        inside_string: int = 0,
    ) -> int:
        """``count`` new states with local numbers from 1 on, whose rows compiled code makes when a text gets there. The
        first of them.

        The row of state n is that of the state ``base``, but for ``moves[begins[n]:begins[n + 1]]``: (low, high, code)
        of bytes in [low, high). ``moves_of(first)`` gives ``begins`` (int32 [count + 1]) and ``moves`` (int32 [m, 3]).
        The states cost little memory until then, and do not count towards ``max_states``.
        """
        self.row(base)
        begins, moves = moves_of(self._end)
        first = self.add_states(count, None, inside_string=inside_string)
        self.num_sparse_states += count
        number = len(self._sparse) + 1
        self._sparse.append((begins, moves))
        self._grow(walk.SPARSE, number)
        self.arrays[walk.SPARSE][number - 1] = first, base, begins.ctypes.data, moves.ctypes.data
        self.arrays[walk.SPARSE_OF][first : first + count] = number
        return first

    def settle_later(self, state: int, settle: Callable[[], None]) -> None:
        """Have ``settle`` call the three setters below, once ``state`` is looked at by itself."""
        self._unsettled[state] = settle

    def settle(self, state: int) -> None:
        """Do what ``settle_later`` left."""
        settle = self._unsettled.pop(state, None)
        if settle is not None:
            settle()

    def set_twin(self, state: int, twin: Callable[[], int], *, owed: int = 0) -> None:
        """Make masks of ``state`` from ``twin()``, a state that allows the same tokens and whose masks are shared.

        Within a counted string, ``owed`` characters more than for the twin have to follow each token.
        """
        self.twins[state] = twin
        self.recurring[state] = 1
        if owed:
            self.owed[state] = owed

    def set_short_twin(self, state: int, twin: Callable[[], tuple[int, int]]) -> None:
        """As ``set_twin``, for tokens of at most ``SHORT_TOKEN`` bytes alone; ``twin()`` is the state, which may be
        ``state`` itself, and what is owed."""
        self.short_twins[state] = twin

    def set_stand_ins(self, state: int, stand_ins: StandIns) -> None:
        """(lower, upper, owed): the lower state allows no token that ``state`` does not allow, the upper one every
        token that it does, and so do the states after each byte; ``owed`` is that of ``set_twin`` for both. Masks are
        made from the first pair that agrees.
        """
        self.stand_ins[state] = stand_ins
        self.recurring[state] = 1

    def add_lazy_state(self, lazy: LazyState) -> int:
        state = self.add_state(_no_row)
        self.lazy[state] = lazy
        self.arrays[walk.LAZY][state] = 1
        return state

    def state(self, key: Hashable, make: Callable[[], int]) -> int:
        """The state of ``key``; ``make`` makes it the first time."""
        states = self._states[hash(key) % NUM_PARTS]
        found = states.get(key)
        if found is None:
            found = states[key] = make()
        return found

    def add_frame(
        self,
        returns: Returns,
        *,
        low: int = 0,
        high: int = 0,
        filter_at: int = 0,
        reader: ItemReader | None = None,
        closing: Callable[[], bytes] | None = None,
        decides: bool = False,
        distinct: int = 0,
    ) -> int:
        """A new frame; ``returns(result)`` is the state, or the push, after a value that ended with ``result``.

        ``low`` and ``high`` bound the characters of a counted string. ``filter_at``: see ``add_filter``. A
        ``reader`` sees the value's text too, and replaces the state that ``returns`` names. ``distinct``: so many names
        of the object, from that of this frame on, have to differ from those before them. For ``Endings``:
        ``decides`` says that what has to follow may depend on the result; ``closing`` marks the frame of a property
        name; it gives the name, with its quote, to write where the text is to end soon (b"": the shortest one).
        """
        frame = len(self._returns)
        self._returns.append(returns)
        if reader is not None:
            self.item_readers[frame] = reader
            self.reads_items = True
            self.control[walk.READS_ITEMS] = 1
        if distinct:
            self.distinct_names[frame] = distinct
        if closing is not None:
            self.closings[frame] = closing
        if decides:
            self.deciding.add(frame)
        arrays = self.arrays
        if frame >= len(arrays[walk.FRAME_FILTER]):
            self._grow(walk.FRAME_FILTER, frame + 1)
            self._grow(walk.FRAME_LOW, frame + 1)
            self._grow(walk.FRAME_HIGH, frame + 1)
            self._view_frames()
        if filter_at:
            arrays[walk.FRAME_FILTER][frame] = filter_at
        if low or high:
            arrays[walk.FRAME_LOW][frame] = low
            arrays[walk.FRAME_HIGH][frame] = high
        return frame

    def _view_frames(self) -> None:
        """Python reads single entries of frames faster from these."""
        slots = walk.FRAME_FILTER, walk.FRAME_LOW, walk.FRAME_HIGH
        self.frame_filters, self.frame_lows, self.frame_highs = (self.arrays[slot].data for slot in slots)

    def frame(self, key: Hashable, make: Callable[[], int]) -> int:
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = make()
        return found

    def push(self, frame: int, state: int) -> int:
        """The row code that pushes ``frame`` and goes to ``state``."""
        if state == DEAD_STATE:
            return 0
        actions, key = self._actions[frame >> PART_BITS], frame << 32 | state
        action = actions.get(key)
        if action is None:
            action = actions[key] = self._num_actions
            self._num_actions += 1
            arrays = self.arrays
            if action >= len(arrays[walk.ACT_FRAME]):
                self._grow(walk.ACT_FRAME, action + 1)
                self._grow(walk.ACT_STATE, action + 1)
            arrays[walk.ACT_FRAME][action] = frame
            arrays[walk.ACT_STATE][action] = state
        return PUSH + action

    def action(self, code: int) -> tuple[int, int]:
        """The frame and the state of a row code that ``push`` made."""
        return int(self.arrays[walk.ACT_FRAME][code - PUSH]), int(self.arrays[walk.ACT_STATE][code - PUSH])

    def add_filter(self, allowed: np.ndarray) -> int:
        """The offset of a frame's filter: ``allowed[local]`` says whether states of that local number are allowed."""
        data = allowed.tobytes()
        found = self._filters.get(data)
        if found is None:
            found = self._filters[data] = self._num_filter_bytes
            self._num_filter_bytes += len(allowed)
            self._grow(walk.FILTERS, self._num_filter_bytes)
            self.arrays[walk.FILTERS][found : self._num_filter_bytes] = allowed
        return found

    def row(self, state: int) -> np.ndarray:
        """The 256 codes of a state; made the first time."""
        row: np.ndarray = self._rows[state]
        fill = self._fills[state >> PART_BITS].get(state)
        if fill is None:
            if self.arrays[walk.SPARSE_OF][state] > 0:
                walk.fill_sparse(self.control, state)
            return row
        code = self._codes[state, 0]
        if code == walk.UNKNOWN or code == walk.ASKED:
            fresh = self._fresh.pop() if self._fresh else np.zeros(256, np.int32)
            if isinstance(fill, _NumberedFill):
                fill.write(fresh, state)
            else:
                fill(fresh)
            walk.set_row(self.control, state, fresh)
            self._fresh.append(fresh)
        return row

    def has_row(self, state: int) -> bool:
        """Whether ``row`` makes nothing that takes long."""
        made = self._codes[state, 0] not in (walk.UNKNOWN, walk.ASKED)
        return made or self._fills[state >> PART_BITS].get(state) is None

    def entry(self, state: int, byte: int, *, is_one_of_many: bool = False, is_alone: bool = False) -> None:
        """Make the entries of a state's row for a byte and those beside it that are alike, where they can be made by
        themselves; else the whole row, as where it is ``is_one_of_many``. What ``is_alone`` is not counted."""
        row = self.arrays[walk.DELTA][state]
        if row[byte] not in (walk.UNKNOWN, walk.ASKED):
            return
        lazy = self.lazy.get(state)
        if lazy is not None:
            low, high, target = lazy.step(byte)
        else:
            step, made = self._steps.get(state), self._num_stepped.get(state, 0)
            most = MOST_STEPPED_APART if state in self.apart else MOST_STEPPED
            is_one_of_many = is_one_of_many and most == MOST_STEPPED
            if step is None or not byte or is_one_of_many or (made >= most and not is_alone):
                self.row(state)
                return
            if self.missing[byte]:
                row[byte] = walk.REFUSED
                return
            if not is_alone:
                self._num_stepped[state] = made + 1
            low, high, target = step(byte)
            low = max(low, 1)  # the entry of byte 0 says that the row is whole
        row[low:high] = target or walk.REFUSED
        if self._any_missing:
            row[low:high][self.missing[low:high]] = walk.REFUSED

    def supply(self, status: int, *, is_alone: bool = False) -> None:
        """Make the entry that a compiled walk lacked; of a row the whole row, unless ``is_alone``."""
        control = self.control
        if status == walk.MISS_ROW:
            state, byte = int(control[walk.MISS_A]), int(control[walk.MISS_B])
            self.entry(state, byte if is_alone or state in self.lazy else 0, is_alone=is_alone)
        elif status == walk.MISS_AFTER:
            self.after(int(control[walk.MISS_A]), int(control[walk.MISS_B]))
        else:
            raise GrammarTooComplex("one token opens too many nested values")

    def after(self, frame: int, result: int) -> int:
        """``returns(result)`` of ``frame``, remembered: a state, or a push that replaces the frame."""
        afters, key = self._afters[frame >> PART_BITS], frame << 32 | result
        found = afters.get(key)
        if found is None:
            found = afters[key] = self._returns[frame](result)
            self._num_afters += 1
            if 2 * self._num_afters > self._hash_size:
                self._resize_hash(2 * self._hash_size)
            walk.set_after(self.control, key, found)
        return found

    def make_row_after(self, frame: int, result: int) -> None:
        """Make ``after(frame, result)`` and the row of the state that it leads to, at which a walk looks next."""
        code = self.after(frame, result)
        if 0 < code < walk.EXITED:
            state = code if code < PUSH else self.action(code)[1]
            if state not in self.lazy and state not in self._steps:
                self.row(state)

    def _resize_hash(self, size: int) -> None:
        keys, values = np.full(size, -1, np.int64), np.zeros(size, np.int32)
        if walk.HASH_KEYS in self.arrays:
            walk.hash_copy(self.arrays[walk.HASH_KEYS], self.arrays[walk.HASH_VALUES], keys, values, size - 1)
        self.set_array(walk.HASH_KEYS, keys)
        self.set_array(walk.HASH_VALUES, values)
        self.control[walk.HASH_MASK] = size - 1
        self._hash_size = size

    def result(self, bits: int) -> int:
        """The result that stands for ``bits``, an integer of any size."""
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
        """The state before a text of the language ``expr``, with which the whole text ends; ``texts[state]`` is it."""
        ex = self.expressions

        def fill(row: np.ndarray) -> None:
            for lo, hi, to in ex.steps(expr):
                row[lo:hi] = self.text(to)

        def step(byte: int) -> tuple[int, int, int]:
            return *ex.class_of(byte, expr), self.text(ex.alive(ex.derive(expr, byte)))

        def make() -> int:
            state = self.add_state(fill, accepting=ex.nullable[expr], recurs=True, step=step)
            self.texts[state] = expr
            near = self.reach.without_far_bounds(expr)
            if near != expr:
                self.set_twin(state, lambda: self.text(near))
            elif self.reach.has_large_counts((expr,)):
                self.set_stand_ins(state, stand_ins)
            return state

        def stand_ins() -> Iterator[tuple[int, int, int]]:
            for (lower,), (upper,), owed in self.reach.stand_ins((expr,)):
                yield self.text(lower), self.text(upper), owed

        if expr == NOTHING:
            return DEAD_STATE
        return self.state(("text", expr), make)

    def literal(self, text: bytes, state: int) -> int:
        """The state from which ``text`` leads to ``state``."""
        for byte in reversed(text):
            fill = partial(_fill_one_byte, byte, state)
            state = self.state(("literal", byte, state), partial(self.add_state, fill))
        return state

    def end_state(self, result: int) -> int:
        """The state in which a value has just ended."""
        if 1 <= result <= len(self._end_states):
            return int(self._end_states[result - 1])
        return self.state(("end", result), lambda: self.add_state(None, ends=result, final=True))

    def end_states(self, count: int) -> np.ndarray:
        """int32 [count]: the states in which a value has just ended with the results 1, 2, ... They are made together,
        which is faster."""
        known = len(self._end_states)
        if count > known:
            more = 2 * count - known
            first = self.add_states(more, None)
            arrays = self.arrays
            arrays[walk.DELTA][first : first + more] = walk.REFUSED
            arrays[walk.LOCAL][first : first + more] = 0
            arrays[walk.ENDS][first : first + more] = np.arange(known + 2, known + 2 + more)
            arrays[walk.FINAL][first : first + more] = 1
            self._end_states = np.append(self._end_states, np.arange(first, first + more, dtype=np.int32))
        return self._end_states[:count]

    def result_of(self, state: int) -> int:
        """The result with which a value may end in the state; -1 if none may."""
        return int(self.arrays[walk.ENDS][state]) - 1

    # -- configurations -------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether it has grown so large that new grammars should use another machine."""
        return (
            self.num_states - self.num_sparse_states > self.max_states
            or self.num_states > self.hard_limit // 2
            or len(self.expressions.nodes) > self.expressions.max_expressions // 2
            or self.num_configs > MAX_CONFIGS
        )

    def stack(self, frame: int, parent: int) -> int:
        found: int = walk.stack_of(self.control, frame, parent)
        if found < 0:
            self._make_room()
            return self.stack(frame, parent)
        return found

    def config(self, state: int, aux: int, stack: int, reading: int = 0) -> int:
        found: int = walk.config_of(self.control, state, aux, stack, reading)
        if found < 0:
            self._make_room()
            return self.config(state, aux, stack, reading)
        return found

    def place(self, config: int) -> tuple[int, int, int, int]:
        """The state, aux, stack and reading of a configuration."""
        found: tuple[int, int, int, int] = PLACE.unpack_from(self._places, PLACE.size * config)
        return found

    @property
    def num_configs(self) -> int:
        return self._control[walk.NUM_CONFIGS]

    @property
    def num_stacks(self) -> int:
        """The lasting ones; those that compiled walks push come behind them."""
        return self._control[walk.NUM_STACKS]

    def _make_room(self) -> None:
        """Make room for more stacks and configurations."""
        for slot in (walk.STACK_FRAME, walk.STACK_PARENT, walk.STACK_DEPTH):
            self._grow(slot, 2 * (self.num_stacks + STACK_ROOM))
        self._grow(walk.CONFIGS, 2 * self.num_configs)
        self._make_tables(4 * self.num_stacks, 4 * self.num_configs)

    def _make_tables(self, num_stacks: int, num_configs: int) -> None:
        """Make the tables in which stacks and configurations are found, of at least so many slots."""
        control = self.control
        sizes = [1 << (count - 1).bit_length() for count in (num_stacks, num_configs)]
        for table, slots, size in zip(
            (walk.STACK_TABLE, walk.CONFIG_TABLE), (walk.STACK_SLOTS, walk.CONFIG_SLOTS), sizes, strict=True
        ):
            self.set_array(table, untouched((size,), np.int32))
            touch(self.arrays[table], 0, size)
            control[slots] = size - 1
        control[walk.STACK_LIMIT] = len(self.arrays[walk.STACK_FRAME]) - 1
        control[walk.MAX_STACKS] = min(len(self.arrays[walk.STACK_FRAME]) - STACK_ROOM, sizes[0] // 2)
        control[walk.MAX_CONFIGS] = min(len(self.arrays[walk.CONFIGS]), sizes[1] // 2)
        walk.enter_all(control)
        self._edges += [{} for _ in range(len(self._edges), (int(control[walk.MAX_CONFIGS]) >> SHARD_BITS) + 1)]
        # Python reads single entries faster from these. They are others once there is more room.
        self._places = self.arrays[walk.CONFIGS].data
        self.stack_frames = self.arrays[walk.STACK_FRAME].data
        self.stack_parents = self.arrays[walk.STACK_PARENT].data
        self.stack_depths = self.arrays[walk.STACK_DEPTH].data

    def start(self, state: int, root_frame: int) -> int:
        """The configuration before a text."""
        with self.lock:
            return self.config(state, 0, self.stack(root_frame, 0))

    def start_after(self, text: bytes, config: int) -> int:
        """The configuration from which ``text`` leads to ``config``."""
        with self.lock:
            state, aux, stack, _ = self.place(config)
            return self.config(self.literal(text, state), aux, stack)

    def begin(self) -> None:
        """Prepare the compiled walk: stacks it pushes are kept behind the lasting ones until the next ``begin``."""
        self.control[walk.SCRATCH] = self.num_stacks

    def keep_stack(self, stack: int) -> int:
        """The lasting stack equal to a stack that a compiled walk has pushed."""
        return stack if stack < self.num_stacks else self.keep_stacks([stack])[0]

    def keep_stacks(self, stacks: Sequence[int]) -> list[int]:
        """``keep_stack`` of each. A lasting stack takes the place of a pushed one, so all of these are read first."""
        kept = self.num_stacks
        pushed: dict[int, tuple[int, list[int]]] = {}  # the lasting stack below each, and the frames on it from the top
        for stack in stacks:
            if stack not in pushed:
                frames, at = [], stack
                while at >= kept:
                    frames.append(self.stack_frames[at])
                    at = self.stack_parents[at]
                pushed[stack] = at, frames
        lasting: dict[int, int] = {}
        for stack, (below, frames) in pushed.items():
            for frame in reversed(frames):
                below = self.stack(frame, below)
            lasting[stack] = below
        return [lasting[stack] for stack in stacks]

    def advance(self, config: int, token: int) -> int:
        """The configuration after a token; -1 if the grammar refuses it.

        Raises GrammarError where that takes too much work; then it does so at once when asked again.
        """
        found = self.edge(config, token)
        return self.derive(config, token) if found is None else found

    def derive(self, config: int, token: int) -> int:
        """As ``advance``, also where the answer is remembered."""
        after = self.derive_quickly(config, token)
        if after == walk.NOT_KNOWN:
            with self.lock:
                after = self._derive_slowly(config, token)
                if after >= 0:
                    self._remember(config, token, after)
        return after

    def derive_quickly(self, config: int, token: int) -> int:
        """As ``derive``, by compiled code alone; ``NOT_KNOWN``, which is negative too, where that does not tell."""
        with self.lock:
            after: int = walk.advance(self.control, config, token)
            if after >= 0:
                self._remember(config, token, after)
            return after

    def _remember(self, config: int, token: int, after: int) -> None:
        shard = config >> SHARD_BITS
        if len(self._edges[shard]) > MAX_EDGES:
            self._leaving.add([self._edges[shard]])
            self._edges[shard] = {}
        self._edges[shard][config * self._stride + token] = after
        if self._leaving.tables:
            self._leaving.drop_some()

    def _derive_slowly(self, config: int, token: int) -> int:
        """As ``derive``, where compiled code alone does not know."""
        failed = self._failed_edges.get((config, token))
        if failed is not None:
            raise failed.twin()
        state, aux, stack, reading = self.place(config)
        data = self.vocabulary.tokens[token]
        try:
            if self.reads_items and (reading or b"[" in data or b"{" in data):
                return self._unless_stuck(self.read_on(config, data, token))
            place = self._follow(state, aux, stack, token, None)
            return -1 if place is None else self.config(*place)
        except (GrammarError, RecursionError) as error:
            self._failed_edges[(config, token)] = grammar_error(error)
            raise self._failed_edges[(config, token)].twin() from error

    def forget_edges(self) -> None:
        """Make ``advance`` derive again what it has derived."""
        for edges in self._edges:
            edges.clear()

    def edge(self, config: int, token: int) -> int | None:
        """As ``advance``, where it is remembered; else None. It takes no lock."""
        return self._edges[config >> SHARD_BITS].get(config * self._stride + token)

    def _follow(self, state: int, aux: int, stack: int, token: int, data: bytes | None) -> tuple[int, int, int] | None:
        """The state, aux and stack after a token, or after the bytes ``data``; None if they are refused."""
        control = self.control
        # Writable, as everywhere: read-only arrays are another type, for which numba compiles and loads it again.
        array = None if data is None else np.frombuffer(bytearray(data), np.uint8)
        at = 0
        reads = self.read_text is not None
        while True:
            if array is None:
                status, at, state, aux, stack = walk.step_token(control, token, at, state, aux, stack)
            else:
                status, at, state, aux, stack = walk.step_bytes(control, array, at, state, aux, stack)
            if status == walk.DEAD:
                return None
            stack = self.keep_stack(stack)
            if status == walk.OK:
                return state, aux, stack
            size = 0
            if reads and status == walk.MISS_ROW:
                whole = self.vocabulary.tokens[token] if data is None else data
                size, state, aux = self._read_text(state, aux, stack, whole[at:])
                at += size
            if not size:
                reads = False
                self.supply(status, is_alone=True)

    def _read_text(self, state: int, aux: int, stack: int, data: bytes) -> tuple[int, int, int]:
        """How many bytes of ``data`` were read within a string at once, and the state and the aux behind them."""
        if self.read_text is None or len(data) < SHORTEST:
            return 0, state, aux
        self.settle(state)
        text = self.string_texts.get(state)
        if text is None or text.is_escaping:
            return 0, state, aux
        arrays, frame = self.arrays, self.stack_frames[stack]
        if self.frame_filters[frame]:
            return 0, state, aux
        size, count, after = self.read_text(state, text, data)
        if not size or not text.is_counted:
            return size, after, aux
        low, high = self.frame_lows[frame], self.frame_highs[frame]
        total = aux + count if high < walk.UNBOUNDED else min(aux + count, max(aux, low))
        return (size, after, total) if arrays[walk.CHARS_LEFT][after] <= high - total else (0, state, aux)

    def _unless_stuck(self, config: int) -> int:
        """-1 where the items under way can only repeat others."""
        return -1 if config >= 0 and self.is_stuck(config) else config

    def is_stuck(self, config: int) -> bool:
        """Whether the items under way can only repeat others."""
        if self.only_repeats is None or not self.place(config)[3]:
            return False
        with self.fuel.at_most(MASK_WORK):
            return self.only_repeats(config)

    def read_on(self, config: int, data: bytes, token: int = -1) -> int:
        """As ``advance_bytes``, where readers wait: they choose the states after items. It may lead to a dead end."""
        state, aux, stack, reading = self.place(config)
        levels = self.items.levels(reading)
        is_inside = self.is_in_item(levels, stack)
        if _ITEM_BYTES.isdisjoint(data) and not (levels and levels[-1].is_object and b'"' in data):
            stepped = self._follow(state, aux, stack, token, None if token >= 0 else data)
            if stepped is None:
                return -1
            if self.is_in_item(levels, stepped[2]) == is_inside:
                return self.config(*stepped, self.items.reading(self._extended(levels, data, is_inside)))
        begin = 0  # the levels' texts hold ``data[:begin]``
        for at, byte in enumerate(data):
            if is_inside and self.stack_parents[stack] == levels[-1].base and self._ends_before(state, byte):
                after, aux = self.after(self.stack_frames[stack], self.result_of(state)), 0
                if after >= PUSH:  # the white space before the first item has chosen another frame
                    stack = self.stack(int(self.arrays[walk.ACT_FRAME][after - PUSH]), self.stack_parents[stack])
                    state = int(self.arrays[walk.ACT_STATE][after - PUSH])
                else:  # such as a number
                    levels, begin = self._extended(levels, data[begin:at], True), at
                    state, levels = self._after_item(levels, after)
                    stack = self.stack_parents[stack]
                    is_inside = self.is_in_item(levels, stack)
            before = stack
            stepped = self._follow(state, aux, stack, -1, bytes([byte])) if state != DEAD_STATE else None
            if stepped is None:
                return -1
            state, aux, stack = stepped
            depth = self.stack_depths[stack]
            is_of_names = byte == ord('"') and bool(levels) and levels[-1].is_object
            if is_of_names and (before == levels[-1].base or (is_inside and stack != before)):  # one begins or ends
                end = at if is_inside else at + 1  # a name's text has no quotes
                levels, begin = self._extended(levels, data[begin:end], is_inside), end
                found = self._after_name(levels, before) if is_inside else self._before_name(levels, stack)
                if found is None:
                    return -1
                levels, is_inside = found, self.is_in_item(found, stack)
                continue
            opened = self._opened(levels, byte, state, stack) if byte in b"[{" else None
            base_depth = self.stack_depths[levels[-1].base] if levels else 0
            if opened is None and depth >= base_depth and self.is_in_item(levels, stack) == is_inside:
                continue
            levels, begin = self._extended(levels, data[begin : at + 1], is_inside), at + 1
            if opened is not None:
                levels = (*levels, opened)
            elif depth < base_depth:
                levels = levels[:-1]
                is_inside = bool(levels) and levels[-1].text != BETWEEN
            if is_inside and levels and opened is None and depth == self.stack_depths[levels[-1].base]:
                state, levels = self._after_item(levels, state)
                aux = 0
                if state == DEAD_STATE:
                    return -1
            is_inside = self.is_in_item(levels, stack)
        return self.config(state, aux, stack, self.items.reading(self._extended(levels, data[begin:], is_inside)))

    def is_in_item(self, levels: Levels, stack: int) -> bool:
        """Whether an item of the innermost array, or a name of the innermost object, is under way."""
        if not levels or levels[-1].text == BETWEEN:
            return False
        return self.stack_depths[stack] > self.stack_depths[levels[-1].base]

    def _opened(self, levels: Levels, byte: int, state: int, stack: int) -> Level | None:
        """The level that begins behind a byte."""
        if byte == ord("{") and state in self.counted_objects:
            return Level(stack, 0, self.items.no_names, BETWEEN)
        frame, base = self.stack_frames[stack], self.stack_parents[stack]
        if byte == ord("[") and frame in self.item_readers and (not levels or levels[-1].base != base):
            return Level(base, frame, self.items.empty)
        return None

    def _before_name(self, levels: Levels, stack: int) -> Levels:
        """The levels behind the opening quote of a name."""
        is_distinct = self.stack_frames[stack] in self.distinct_names
        return (*levels[:-1], levels[-1]._replace(text=0)) if is_distinct else levels[:-1]

    def _after_name(self, levels: Levels, stack: int) -> Levels | None:
        """The levels behind a name, which had the stack; None if the name was written before."""
        level = self.items.with_name(levels[-1])
        if level is None:
            return None
        return (*levels[:-1], level) if self.distinct_names[self.stack_frames[stack]] > 1 else levels[:-1]

    def _extended(self, levels: Levels, part: bytes, is_inside: bool) -> Levels:
        """The levels after more text, which the innermost level's item has part in if it is under way."""
        if not levels or not part:
            return levels
        grows = [*levels[:-1], levels[-1]] if is_inside else levels[:-1]
        extended = self.items.extended
        grown = [Level(b, frame, seen, t if t == BETWEEN else extended(t, part)) for b, frame, seen, t in grows]
        return (*grown, *levels[len(grown) :])

    def _ends_before(self, state: int, byte: int) -> bool:
        return self.arrays[walk.ENDS][state] > 0 and int(self.row(state)[byte]) < 0

    def _after_item(self, levels: Levels, state: int) -> tuple[int, Levels]:
        """The state and the levels after an item of the innermost array, whose text the level has."""
        level = levels[-1]
        with self.fuel.at_most(MASK_WORK):
            after, seen = self.item_readers[level.frame].after(state, self.items.text(level.text), level.seen)
        return after, (*levels[:-1], level._replace(seen=seen, text=0)) if seen is not None else levels[:-1]

    def advance_bytes(self, config: int, data: bytes) -> int:
        """As ``advance``, for bytes."""
        with self.lock:
            if self.reads_items:
                return self._unless_stuck(self.read_on(config, data))
            state, aux, stack, _ = self.place(config)
            after = self._follow(state, aux, stack, -1, data)
            return -1 if after is None else self.config(*after)

    def place_after(self, config: int, data: bytes) -> tuple[int, int, int] | None:
        """The state, aux and stack after bytes, where items may repeat others; None if the grammar refuses them."""
        with self.lock:
            return self._follow(*self.place(config)[:3], -1, data)

    def spaces_before(self, config: int) -> bytes:
        """The bytes of white space of which one has to come before the state's own bytes; none where none has to."""
        state, aux, _, _ = self.place(config)
        space = int(self.arrays[walk.SPACE][state])
        return needed_spaces(aux or space) if space else b""

    def note_end(self, config: int, may_end: bool) -> None:
        """Have ``may_end`` remember what the configuration's mask says."""
        self._may_end[config] = may_end

    def may_end(self, config: int) -> bool:
        """Whether the text may end here."""
        found = self._may_end.get(config)
        if found is None:
            with self.lock:
                state, aux, stack, _ = self.place(config)
                found = False
                while True:
                    lazy = self.lazy.get(state)
                    if state in self.accepting or (lazy is not None and lazy.accepts()):
                        found = True
                        break
                    result = self.result_of(state)
                    if result < 0 or stack == 0 or (aux and self.arrays[walk.SPACE][state]):
                        break
                    state = self.after(self.stack_frames[stack], result)
                    stack = self.stack_parents[stack]
                    if state >= PUSH:
                        break  # another frame takes this one's place: the text goes on
                self._may_end[config] = found
        return found
