"""The token masks of a machine's configurations.

A mask is made by walking the vocabulary's trie with the machine. States that recur under many stacks, such as those
within strings, are walked once without their stack: such a walk stops where the frame below the value is popped (an
exit), so its result is the same for every such frame. What follows the exits is walked for each stack. States within a
property's name are walked only where they differ from those within any other name. Where a string goes on, all tokens
that are nothing but text, which are most of the vocabulary, are allowed at once.
"""

from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from ..spec import GrammarError, grammar_error
from ..tables import PART_BITS
from ..token_parts import SHORT_TOKEN, parts_of
from ..vocabulary import Trie
from . import walk
from .joint_sets import JointSets
from .kept_masks import only_token
from .lazy_masks import LazyMasks
from .machine import MASK_WORK, Machine
from .part_sets import BACKSLASH, NoParts, PartSets, StringText
from .recent import Recent, RecentByNumber
from .repeats import Repeats
from .string_reader import StringReader
from .trie_walker import TrieWalker
from .walk import DEAD_STATE, MAX_NEED, UNBOUNDED

MAX_LEXEME_BYTES = 128 << 20
PREPARE_WORK = 5 * MASK_WORK  # fuel for a mask that is made while a grammar is compiled


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

    ``max_bytes`` bounds the masks, roughly; masks of lexemes count to ``is_full`` instead.
    """

    def __init__(self, machine: Machine, *, max_bytes: int = 96 << 20) -> None:
        self.machine = machine
        vocabulary = self.vocabulary = machine.vocabulary
        capacity = max(64, max_bytes // (16 * vocabulary.num_words))
        self.known: RecentByNumber[np.ndarray] = RecentByNumber(16 * capacity)  # configuration -> a kept mask
        self.inner: Recent[tuple[int, int, int], _Inner] = Recent(capacity)
        self._counted: Recent[tuple[int, int, int], _Inner] = Recent(max(16, capacity // 16))  # with ``needs``
        self._short: Recent[tuple[int, int, int], _Inner] = Recent(capacity)  # of short tokens alone
        self._parts = parts_of(vocabulary)
        self._part_sets = PartSets(machine.expressions)
        self._joint_sets = JointSets(self._part_sets)
        self._prepares = False
        self._within: Recent[tuple[int, int, int, int], np.ndarray] = Recent(capacity)  # of counted strings
        # Of counted strings: numbers, see ``_behind``.
        self._kept_behind: Recent[tuple[int, int, int, int], int] = Recent(capacity)
        self._failed: dict[int, GrammarError] = {}  # configurations whose mask took too much work
        self._only: dict[int, int] = {}
        self._barriers: dict[int, int] = {}
        self._inside: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._counting_barrier = self._barrier(0, 0, UNBOUNDED - 1)  # under it, every character is counted
        self.walker = TrieWalker(machine, num_kept=capacity)
        self.kept = self.walker.kept
        tries = () if self._parts is None else (self._parts.short, self._parts.long)
        self._part_tries = [self.walker.addresses(trie) for trie in tries]
        self._long = self._part_tries[1] if self._part_tries else None
        self.lazy = LazyMasks(machine, self.walker, capacity)
        self._repeats = Repeats(machine)
        ex, order = machine.expressions, vocabulary.trie.token_order
        few = vocabulary.build_trie(order[:: len(order) // 64 + 1])
        nothing = np.zeros(vocabulary.num_words, np.uint32)
        for sets, expr in ((self._part_sets, ex.any_char), (self._joint_sets, ex.intersect(ex.any_char, ex.text))):
            sets.walk(few, StringText(expr, False, False, lambda expr: DEAD_STATE), nothing)  # loads compiled code
        self._part_sets.read(ex.any_char, b"a", False, 1)
        self._joint_sets.read(ex.any_char, b"a", 1)
        machine.read_text = StringReader(ex, self._part_sets, self._joint_sets).read

    @property
    def is_full(self) -> bool:
        """Whether lexemes hold so much memory that new grammars should use another machine."""
        return self.lazy.num_bytes > MAX_LEXEME_BYTES

    def of(self, config: int) -> np.ndarray:
        """uint32 [ceil(V / 32)], read-only: the tokens that may follow, the end token's bit where the text may end.

        Configurations with equal masks share one array. Raises GrammarError where a mask takes too much work; then it
        does so at once when asked again.
        """
        part = config >> PART_BITS
        found = self.known.young[part].get(config)
        if found is None:
            failed = self._failed.get(config)
            if failed is not None:
                raise failed.twin()
            with self.machine.lock:
                found = self.known.old[part].get(config)
                try:
                    with self.machine.fuel.at_most(MASK_WORK):
                        found = self._make(config) if found is None else self._keep(found)
                except (GrammarError, RecursionError) as error:
                    self._failed[config] = grammar_error(error)
                    raise self._failed[config].twin() from error
                self.known.put(config, found)
        return found

    def prepare(self, code: int) -> None:
        """Walk inside a value ahead of time, from where a row code leads to; the machine's lock is held.

        Raises GrammarTooComplex where it takes ``PREPARE_WORK``. States are made for it, so that a string of several
        languages whose states take too much work to find is refused here, not where a text gets there.
        """
        frame, state = self.machine.action(code) if code >= walk.PUSH else (0, code)
        self._prepares = True
        try:
            with self.machine.fuel.at_most(PREPARE_WORK):
                self._inner_of(state, 0, self.machine.stack(frame, 0))
        finally:
            self._prepares = False

    def prepare_text(self, base: int) -> None:
        """Find the tokens that stay within a string ahead of time; ``base``: what ``inside_string`` says of a state."""
        with self.machine.lock:
            self._inside_tokens(base)

    def prepare_items(self) -> None:
        """Make what the first mask where items may not repeat would make."""
        self._repeats.prepare()

    def way_apart(self, config: int) -> bytes:
        """Bytes after which the items under way differ from those before them; b"" if none are found."""
        return self._repeats.way_apart(config)

    def agreeing(self, config: int) -> np.ndarray:
        """The tokens after which an item or a name under way still agrees with one before it, and maybe some more."""
        return self._repeats.agreeing(config)

    def only_token(self, config: int) -> int:
        """The one token the mask allows; -1 if there are more."""
        found = self._only.get(config)
        if found is None:
            mask = self.of(config)
            self.machine.may_end(config)  # so that it is remembered too
            found = self._only[config] = only_token(mask)
        return found

    def known_only_token(self, config: int) -> int | None:
        """As ``only_token``, where it is remembered; else None. It takes no lock."""
        return self._only.get(config)

    def at_once(self, config: int) -> np.ndarray | None:
        """As ``of``, where compiled code makes the mask of what is there, and what it allows is then remembered as
        well; else None. The machine's lock is held."""
        machine = self.machine
        if machine.reads_items or config in self._failed:
            return None
        state, aux, stack, _ = machine.place(config)
        kept = -1
        if machine.recurring[state]:
            inner = self._known_inner(state, aux, stack)
            if inner is not None:
                kept = self._behind(inner, state, aux, stack, at_once=True)
        elif state not in machine.lazy:
            is_beside = self._is_beside(state, stack)
            kept = self._beside_at_once(state, stack) if is_beside else self.walker.at(state, aux, stack, at_once=True)
        if kept < 0:
            return None
        row, only, may_end = self.kept.told(kept)
        self.known.put(config, row)
        machine.note_end(config, may_end)
        self._only[config] = only
        return row

    def _beside_at_once(self, state: int, stack: int) -> int:
        """The number of the mask of a state within a name; negative where something has to be made first."""
        machine, beside = self.machine, int(self.machine.inside_string[state])
        if not machine.has_row(state):
            return -1
        config = machine.config(beside, 0, stack)
        base = self.known.get(config)
        if base is None:
            base = self.at_once(config)
        return -1 if base is None else self.walker.beside(base, state, beside, stack, at_once=True)

    def _is_beside(self, state: int, stack: int) -> bool:
        """Whether the mask is made from that of the state ``inside_string``."""
        machine = self.machine
        return bool(machine.inside_string[state]) and not machine.frame_filters[machine.stack_frames[stack]]

    # -- one mask -------------------------------------------------------------------------------------------------

    def _make(self, config: int) -> np.ndarray:
        state, aux, stack, _ = self.machine.place(config)
        found = self._plain(state, aux, stack)
        if self.machine.reads_items:
            left = self._repeats.removed(config, found)
            found = found if left is found else self._keep(left)
        return found

    def _plain(self, state: int, aux: int, stack: int) -> np.ndarray:
        """The mask as if items might repeat."""
        machine, walker = self.machine, self.walker
        if machine.recurring[state]:
            kept = self._behind(self._inner_of(state, aux, stack), state, aux, stack)
        elif state in machine.lazy:
            return self._lazy(state, aux, stack)
        else:
            if self._is_beside(state, stack):
                beside = int(machine.inside_string[state])
                if machine.reads_items:
                    base = self._plain(beside, 0, stack)
                else:
                    base = self.of(machine.config(beside, 0, stack))
                machine.row(state)
                kept = walker.beside(base, state, beside, stack)
            else:
                kept = walker.at(state, aux, stack)
        return self.kept.row(kept) if kept >= 0 else self._keep_in_new_memory(walker.under_way())

    def _keep(self, row: np.ndarray) -> np.ndarray:
        kept = self.walker.keep(row)
        return self.kept.row(kept) if kept >= 0 else self._keep_in_new_memory(row)

    def _keep_in_new_memory(self, row: np.ndarray) -> np.ndarray:
        """Forget the masks that were not asked for since this happened last."""
        self.known.age()
        self.kept.clear()
        self._kept_behind.forget()
        return self._keep(row)

    def _lazy(self, state: int, aux: int, stack: int) -> np.ndarray:
        machine, eos = self.machine, self.vocabulary.eos
        row = self.lazy.of(*machine.lazy[state].threads())
        if machine.may_end(machine.config(state, aux, stack)):
            row = row.copy()
            row[eos >> 5] |= np.uint32(1 << (eos & 31))
        return self._keep(row)

    def _behind(self, inner: _Inner, state: int, aux: int, stack: int, *, at_once: bool = False) -> int:
        """The number of the mask of a state that recurs. ``at_once``: negative where something has to be made first."""
        walk_behind = partial(self.walker.behind, at_once=at_once)
        if inner.needs is None:
            return walk_behind(inner.trie, inner.mask, inner.exits, -UNBOUNDED, UNBOUNDED, state, aux, stack)
        low, high = self._bounds_left(inner, aux, stack)
        place = state, stack, low, high
        known = self._kept_behind.get(place)
        kept = -1 if known is None else known
        if kept < 0:
            mask = inner.mask
            if high < inner.most:
                key = (*inner.key, max(high, 0))
                found = self._within.get(key)
                if found is None:
                    found = np.packbits(inner.needs <= max(high, 0), bitorder="little").view(np.uint32)
                    self._within.put(key, found)
                mask = found
            kept = walk_behind(inner.trie, mask, inner.exits, low, high, state, aux, stack)
            if kept >= 0:
                self._kept_behind.put(place, kept)
        return kept

    def _bounds_left(self, inner: _Inner, count: int, stack: int) -> tuple[int, int]:
        """How many characters the string must still have, and may have: as far as its tokens can tell."""
        machine = self.machine
        frame = machine.stack_frames[stack]
        low, high = machine.frame_lows[frame], machine.frame_highs[frame]
        return min(max(low - count, 0), inner.most + 1), max(min(high - count - inner.owed, inner.most), -1)

    def barrier_of(self, frame: int) -> int:
        """The frame that stops walks in place of all frames with the same filter and bounds."""
        found = self._barriers.get(frame)
        if found is None:
            machine = self.machine
            filter_at, low, high = (
                view[frame] for view in (machine.frame_filters, machine.frame_lows, machine.frame_highs)
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
        if self.machine.counted[state]:
            return self._inner_at(state, 0, self._counting_barrier, self._counted)
        return self._inner_at(state, aux, self.barrier_of(self.machine.stack_frames[stack]), self.inner)

    def _known_inner(self, state: int, aux: int, stack: int) -> _Inner | None:
        """``_inner_of``, where it is remembered."""
        if self.machine.counted[state]:
            return self._counted.get((state, 0, self._counting_barrier))
        barrier = self._barriers.get(self.machine.stack_frames[stack])
        return None if barrier is None else self.inner.get((state, aux, barrier))

    def _inner_at(self, state: int, aux: int, barrier: int, known: "Recent[tuple[int, int, int], _Inner]") -> _Inner:
        machine = self.machine
        found = known.get((state, aux, barrier))
        if found is not None:
            return found
        machine.settle(state)
        twin, owed = None, 0
        if state in machine.twins:
            twin, owed = machine.twins[state](), machine.owed.get(state, 0)
        elif known is self._short or (self._part_tries and self._inside_of(state, barrier) is None):
            short_twin = machine.short_twins.get(state)
            shorter, more = (state, 0) if short_twin is None else short_twin()
            if shorter != state and known is self._short:
                twin, owed = shorter, more
            elif shorter != state:
                found = self._in_parts(state, aux, barrier)
        if twin is not None:
            found = _owing(self._inner_at(twin, aux, barrier, known), owed)
        if found is None and state in machine.stand_ins:
            for lower, upper, owed in machine.stand_ins[state]():
                above = self._inner_at(upper, aux, barrier, known)
                if above.allows_the_same(self._inner_at(lower, aux, barrier, known)):
                    found = _owing(above, owed)
                    break
        if found is None:
            found = self._walk_inside(state, aux, barrier, self._part_tries[0] if known is self._short else None)
        known.put((state, aux, barrier), found)
        return found

    def _in_parts(self, state: int, aux: int, barrier: int) -> _Inner:
        """As one walk, where many states allow the same short tokens: those are walked from one of them, and the few
        long tokens, which run into bounds that are far away, from each."""
        parts = self._parts
        assert parts is not None
        short = self._inner_at(state, aux, barrier, self._short)
        long = self._walk_inside(state, aux, barrier, self._part_tries[1])
        mask = _frozen(short.mask | long.mask)
        exits = np.concatenate([short.exits, long.exits])
        nodes = [parts.in_whole(t, i.exits[:, 0]) for t, i in ((parts.short, short), (parts.long, long))]
        exits[:, 0] = np.concatenate(nodes)
        _, firsts = np.unique(exits[:, 0], return_index=True)  # a node of both parts has the same exit in both
        exits = exits[firsts]
        if short.needs is None or long.needs is None:
            return _Inner((state, aux, barrier), mask, self.walker.whole, exits)
        needs = np.minimum(short.needs, MAX_NEED - short.owed) + np.uint16(short.owed)
        needs = np.minimum(np.where(short.needs > MAX_NEED, short.needs, needs), long.needs)
        return _Inner((state, aux, barrier), mask, self.walker.whole, exits, needs, _most(needs, exits))

    def _walk_inside(self, state: int, aux: int, barrier: int, part: np.ndarray | None) -> _Inner:
        """Walk with the barrier as the only frame: the tokens that stay above it, and the exits where it is popped.

        ``part``: the trie of some tokens; None for all.
        """
        key = (state, aux, barrier)
        text = self.machine.string_texts.get(state)
        if text is not None:
            with suppress(NoParts):
                return self._walk_text(key, text, part)
        stack = self.machine.stack(barrier, 0)
        if part is None or part is not self._long:
            self.machine.row(state)  # most bytes begin a token
        trie = self.walker.whole if part is None else part
        if barrier == self._counting_barrier:
            mask = np.zeros(self.vocabulary.num_words, np.uint32)
            needs = np.full(32 * self.vocabulary.num_words, MAX_NEED + 1, np.uint16)
            exits = self.walker.from_state(trie, mask, state, aux, stack, needs)
            return _Inner(key, _frozen(mask), trie, exits, needs, _most(needs, exits))
        inside = self._inside_of(state, barrier) if part is None else None
        if inside is None:
            mask = np.zeros(self.vocabulary.num_words, np.uint32)
        else:
            mask, trie = inside[0].copy(), inside[1]
        exits = self.walker.from_state(trie, mask, state, aux, stack)
        return _Inner(key, _frozen(mask), trie, exits)

    def _walk_text(self, key: tuple[int, int, int], text: StringText, part: np.ndarray | None) -> _Inner:
        """``_walk_inside`` a string of one language, by its parts, or of several. Raises NoParts."""
        machine = self.machine
        state, _, barrier = key
        is_plain = machine.expressions.is_plain[text.expr]
        if machine.frame_filters[barrier] or (
            is_plain and part is None and self._inside_of(state, barrier) is not None
        ):
            raise NoParts
        trie = self.walker.whole if part is None else part
        mask = np.zeros(self.vocabulary.num_words, np.uint32)
        needs = np.full(32 * self.vocabulary.num_words, MAX_NEED + 1, np.uint16) if text.is_counted else None
        if needs is None and not is_plain:
            if self._prepares:
                raise NoParts
            exits, regions = self._joint_sets.walk(self._nodes_of(part), text, mask)
        else:
            exits, regions = self._part_sets.walk(self._nodes_of(part), text, mask, needs)
        if regions:
            stack, pending = machine.stack(barrier, 0), []
            for node, expr, count in regions:
                before = text.state_of(expr)
                machine.entry(before, BACKSLASH, is_alone=True)
                pending.append((node, int(machine.arrays[walk.DELTA][before, BACKSLASH]), count, stack, 0))
            more = self.walker.from_regions(trie, mask, np.array(pending, np.int64), needs)
            exits = np.concatenate([exits, more])
            exits = exits[np.argsort(exits[:, 0])]
        if needs is None:
            return _Inner(key, _frozen(mask), trie, exits)
        return _Inner(key, _frozen(mask), trie, exits, needs, _most(needs, exits))

    def _nodes_of(self, part: np.ndarray | None) -> Trie:
        if part is None or self._parts is None:
            return self.vocabulary.trie
        return self._parts.long if part is self._long else self._parts.short

    # -- tokens within a string -------------------------------------------------------------------------------------

    def _inside_of(self, state: int, frame: int) -> tuple[np.ndarray, np.ndarray] | None:
        """``_inside_tokens`` where the state is inside a string; None elsewhere."""
        machine = self.machine
        base = int(machine.inside_string[state])
        if not base:
            return None
        filter_at = machine.frame_filters[frame]
        if filter_at and not machine.arrays[walk.FILTERS][filter_at]:
            return None
        return self._inside_tokens(base)

    def _inside_tokens(self, base: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of up to ``SHORT_TOKEN`` bytes that stay within a string, as a mask, and the trie of the other
        tokens that may be allowed."""
        found = self._inside.get(base)
        if found is None:
            covered = np.zeros(self.vocabulary.num_words, np.uint32)  # on the empty stack a closing quote is refused
            self.walker.ends_from(covered, base)
            mask, trie = self.vocabulary.split_text(covered, SHORT_TOKEN)
            found = self._inside[base] = mask, self.walker.addresses(trie)
        return found


def _owing(inner: _Inner, owed: int) -> _Inner:
    """The same walk where ``owed`` characters more have to follow. Then no token ends the string."""
    assert not (owed and inner.needs is not None and len(inner.exits))
    return inner._replace(owed=inner.owed + owed) if owed else inner


def _most(needs: np.ndarray, exits: np.ndarray) -> int:
    """The largest number of characters that an allowed token needs."""
    most: int = walk.largest_need(needs)
    return max(most, int((exits[:, 3] + exits[:, 4]).max(initial=0))) if len(exits) else most


def _frozen(row: np.ndarray) -> np.ndarray:
    row.flags.writeable = False
    return row
