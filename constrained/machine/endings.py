"""Short endings: for each configuration, bytes that complete the text, and the fewest tokens that spell them.

An ending is found by a search over bytes (A*: Hart, Nilsson, Raphael 1968) inside one value at a time. Where a byte
opens a value, the search steps over that value by its own shortest text, found by the same search and kept (as in Knuth
1977); so the work is that of the values met, not of their combinations. Every byte of an ending is a token by itself,
since languages leave out other bytes, so every ending can be spelled; ``spell`` finds the spelling with the fewest
tokens.

Some choices keep a search small. They make some endings longer than the shortest, never wrong:
    the next property of an object is the first required one (``closing`` of ``Machine.add_frame``);
    a string has escapes only where nothing else leads on (``detour`` of ``Machine.add_state``);
    after ``MAX_STEPS_FOR_FEW`` places a string gets a text that its expression tells, if it tells one;
    a value has its shortest text, unless what follows depends on which text it is (``decides``): then the shortest
    text for each of the first ``FEW`` results is tried, and for fewer of them once most steps are used;
    items of arrays with ``uniqueItems`` are chosen one after the other, each as short as the items before it allow, and
    so are names that have to differ, where those of the shortest ending do not; an ending that was found behind other
    items is used again, with others for the items that it repeats;
    where items have to differ, the ending after one token stands for all tokens of a mask that lead to the same place,
    with ``SPARE`` tokens more, because an item of that ending may be the item under way after another token.
"""

import heapq
import re
from collections.abc import Iterator
from json.encoder import encode_basestring
from typing import NamedTuple

import numpy as np

from ..native_code import brief_native
from ..spec import GrammarTooComplex
from ..tables import PART_BITS
from . import walk
from .machine import MASK_WORK
from .masks import Masks
from .recent import Recent
from .repeats import STEP_FUEL
from .walk import PUSH

MAX_BYTES = 1 << 14  # of an ending
MAX_STEPS = 4_000  # places visited for one ending
START_WORK = 4  # times as much for the ending of a whole text, which is looked for while its grammar is compiled
BYTES_A_STEP = 32  # of those that are read to see whether an ending fits
ITEMS_WORK = 2  # times as much again where items have to differ, since those steps are shorter
MAX_MASK_STEPS = 2_000  # and for those after all tokens of a mask: 0.1 s; the others count as not found
MAX_ITEM_MASK_STEPS = 250  # where items have to differ: 20 to 40 ms
FEW = 8
FEW_TOKENS = 64  # of a mask, each followed by itself
MAX_HINTED = 200  # bytes of a text of a language that is told apart
MAX_STEPS_FOR_FEW = 300
SHARE_FOR_FEW = 10  # further results of a value are looked for in at most a tenth as many places as steps are left
FAR = 2_048  # tokens that an ending is taken to need if it was not found
NOT_ALLOWED = 1 << 30
SPARE = 2  # tokens added to the cost of an ending that was found for another item under way
MAX_KEPT = 2  # endings for a place behind different items
COSTS_KEPT = 64  # configurations whose costs are kept for each token

_NAME_END, _ITEM_END = re.compile(rb'"'), re.compile(rb"[,\]}]")
_ITEM_BEGINS = re.compile(rb'[\[,]|(?<![^{,\s])"')
ACCEPTED = -1  # the result where the whole text may end
# A node of a search: bytes, in a string also those to come at least, those so far, negated, the word so far, the kind,
# and by kind
#   _AT: state, aux, the frame of the name under way (0: none)      _ENDED: result, 0, 0
#   _INSIDE: state, frame, the bytes still to come at least; before a value that is stepped over
# Words are kept inverted, so that of equally short ones the one with the higher bytes comes first: "]" before "0".
_AT, _INSIDE, _ENDED = range(3)
_INVERTED = bytes(range(255, -1, -1))
_Node = tuple[int, int, bytes, int, int, int, int]


class ShortEnding(NamedTuple):
    """``word`` completes the text; ``costs[i]`` tokens spell ``word[i:]``, int32 [len(word) + 1]."""

    word: bytes
    costs: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.costs[0])


_NO_BYTES = ShortEnding(b"", np.zeros(1, np.int32))


class Leave(NamedTuple):
    """A way out of a value: its text's length, the result, the text with its bytes inverted."""

    length: int
    result: int
    word: bytes


class _Level(NamedTuple):
    """What a search has found: the ways out of at most ``limit`` bytes."""

    limit: int
    leaves: tuple[Leave, ...]


class _Paused(NamedTuple):
    """A search that found no way out within its limit, to go on from with a higher one."""

    queue: list[_Node]
    seen: dict[tuple[int, int, int], bytes]  # the way to each place


class Endings:
    """The endings of one machine's configurations. Thread-safe: the machine's lock is held."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self._machine = masks.machine
        vocabulary = masks.vocabulary
        trie = vocabulary.trie
        self._trie = trie.node_byte, trie.node_end, trie.num_tokens
        self._roots = np.full(256, -1, np.int32)
        at = 0
        while at < trie.num_nodes:
            self._roots[trie.node_byte[at]] = at
            at = int(trie.node_end[at])
        self._ids: dict[bytes, int] = {}
        self._known: dict[int, ShortEnding | None] = {}
        self._levels: dict[tuple[int, int, int, int, bool], _Level] = {}
        self._chosen: dict[int, tuple[bytes, int, int]] = {}  # by the frame of a property name
        self._by_place: dict[tuple[int, int, int], list[ShortEnding]] = {}  # where items were chosen anew
        self._alike: dict[tuple[object, ...], int] = {}  # the first configuration of each likeness
        self._having: dict[bytes, np.ndarray] = {}  # bool [V]: the tokens with any of the bytes
        self._most: dict[int, int] = {}
        self._costs: Recent[int, np.ndarray] = Recent(COSTS_KEPT)
        self._steps = np.zeros((256, 4), np.int64)
        self._path = np.zeros((trie.max_depth + 2, 3), np.int64)
        self._places = np.zeros((1024, 3), np.int64)
        self.num_steps = self._last_step = 0
        self._active: set[tuple[int, int, int, int, bool]] = set()
        self._paused: dict[tuple[int, int, int, int, bool], _Paused] = {}
        self._finding: set[int] = set()  # configurations whose ending is being looked for
        self._num_cut = 0  # how often that was so

    # -- questions ----------------------------------------------------------------------------------------------------

    def of(self, config: int) -> ShortEnding | None:
        """A short ending of the text; None if none was found within the limits."""
        found = self._known.get(config)
        if found is None and config not in self._known:
            found = self._of(config, 1)
        return found

    def of_start(self, config: int) -> ShortEnding | None:
        """As ``of``, before a text, for which more work is spent: what it finds inside values is kept."""
        times = START_WORK * ITEMS_WORK if self._machine.reads_items else START_WORK
        return self._known[config] if config in self._known else self._of(config, times)

    def _of(self, config: int, times: int) -> ShortEnding | None:
        machine = self._machine
        with machine.lock, machine.fuel.at_most(times * MASK_WORK):
            return self._try(config, times * MAX_STEPS)

    def known(self, config: int) -> ShortEnding | None:
        """The ending that ``of`` remembers; None also where it has not looked for it."""
        return self._known.get(config)

    def knows_at_once(self, config: int) -> bool:
        """Whether ``of`` is remembered, or follows from what is. The machine's lock is held."""
        if config in self._known:
            return True
        ending = self._known.get(self._with_fewest_characters(config))
        if ending is None or not ending.word.startswith(b'"'):
            return False
        self._known[config] = ending
        return True

    def _with_fewest_characters(self, config: int) -> int:
        """Of a string whose characters are counted, where it may end: the configuration with as few of them as it may
        have. An ending of that one that begins with the quote is the shortest of both."""
        machine = self._machine
        state, aux, stack, reading = machine.place(config)
        if not machine.counted[state] or reading or machine.arrays[walk.CHARS_LEFT][state]:
            return config
        low = max(machine.frame_lows[machine.stack_frames[stack]], 0)
        return config if aux <= low else machine.config(state, low, stack)

    def _try(self, config: int, most_steps: int = MAX_STEPS) -> ShortEnding | None:
        self._last_step = self.num_steps + most_steps
        try:
            return self._find(config)
        except (GrammarTooComplex, RecursionError):
            self._known[config] = None
            return None

    def costs_of(self, word: bytes) -> np.ndarray:
        """int32 [len(word) + 1]: the fewest tokens that spell each ``word[i:]``."""
        return self._joined(word, _NO_BYTES).costs

    def tokens_of(self, ending: ShortEnding) -> tuple[int, ...]:
        """The tokens that spell an ending, as few as there can be."""
        if not self._ids:
            vocabulary = self._masks.vocabulary
            for token in range(len(vocabulary) - 1, -1, -1):
                if vocabulary.is_text[token]:
                    self._ids[vocabulary.tokens[token]] = token
        word, costs = ending
        out: list[int] = []
        at = 0
        while at < len(word):
            end = min(len(word), at + self._masks.vocabulary.trie.max_depth)
            while costs[end] != costs[at] - 1 or word[at:end] not in self._ids:
                end -= 1
            out.append(self._ids[word[at:end]])
            at = end
        return tuple(out)

    def most_after(self, config: int) -> int:
        """How many tokens a text may still need after any one token that the mask allows, by ``costs_after``."""
        found = self._most.get(config)
        if found is None:
            with self._machine.lock:
                costs, found = self._after(config)
            self._most[config] = found
            self._costs.put(config, costs)
        return found

    def costs_after(self, config: int) -> np.ndarray:
        """int32 [V]: how many tokens end the text after each token; NOT_ALLOWED for those the mask does not allow."""
        found = self._costs.get(config)
        if found is None:
            with self._machine.lock:
                found, _ = self._after(config)
            self._costs.put(config, found)
        return found

    def knows_no_limit(self, config: int, left: int, margin: int) -> bool:
        """Whether it is remembered that ``left`` tokens to come take no token out of the mask: all endings fit, the
        text's own with more than ``margin`` tokens to spare, or that one does not, so that the text is not closed."""
        if config not in self._known:
            return False
        ending = self._known[config]
        if ending is None or not left - margin <= ending.num_tokens <= left:
            return True
        return self._most.get(config, NOT_ALLOWED) < left

    # -- after each token -----------------------------------------------------------------------------------------

    def _after(self, config: int) -> tuple[np.ndarray, int]:
        """``costs_after`` and ``most_after``."""
        mask = self._masks.of(config)
        vocabulary = self._masks.vocabulary
        groups, configs = self._configs_after(config, mask)
        costs = np.full(len(configs) + 1, NOT_ALLOWED, np.int32)  # the last one is that of the tokens without a group
        num_tokens = np.bincount(groups + 1, minlength=len(configs) + 1)[1:]
        work = MAX_ITEM_MASK_STEPS if self._machine.place(config)[3] else MAX_MASK_STEPS
        most_steps = self.num_steps + work
        with self._machine.fuel.at_most(MASK_WORK):
            for i in np.argsort(-num_tokens, kind="stable").tolist():  # where most tokens lead first
                following = like = configs[i]
                if self._machine.place(following)[3] and following not in self._known:
                    like = self._alike.setdefault(self._likeness(following), following)
                    if self.num_steps < most_steps - work // 2:
                        like = following
                ending = self._known.get(like)
                if ending is None and like not in self._known and self.num_steps < most_steps:
                    ending = self._try(like)
                is_exact = like == following and (num_tokens[i] == 1 or not self._machine.place(following)[3])
                costs[i] = FAR if ending is None else ending.num_tokens + (0 if is_exact else SPARE)
        out = costs[groups]
        if mask[vocabulary.eos >> 5] >> np.uint32(vocabulary.eos & 31) & 1:
            out[vocabulary.eos] = 0
        return out, int(costs[:-1].max(initial=0))

    def _likeness(self, config: int) -> tuple[object, ...]:
        """Equal for configurations that the same texts may follow, except texts with a later item that repeats the item
        under way."""
        machine = self._machine
        state, aux, stack, reading = machine.place(config)
        levels = machine.items.levels(reading)
        if levels:
            is_inside = machine.is_in_item(levels, stack)
            levels = tuple(
                level._replace(text=0)
                if level.text > 0 and (is_inside or level is not levels[-1]) and machine.items.agreement(level) is None
                else level
                for level in levels
            )
        return state, aux, stack, levels

    def _configs_after(self, config: int, mask: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Which of some configurations each token of the mask leads to, int32 [V], -1 for others; and these."""
        machine = self._machine
        groups, places = self._places_after(config, mask)
        if not machine.reads_items:
            stacks = machine.keep_stacks([stack for _, _, stack in places])
            return groups, [
                machine.config(state, aux, stack) for (state, aux, _), stack in zip(places, stacks, strict=True)
            ]
        # What follows an item depends on its text: tokens that may end one are followed one by one, of the others one
        # of each group.
        tokens = np.flatnonzero(groups >= 0)
        alone = tokens
        if len(tokens) > FEW_TOKENS:
            is_alone = self._may_end_item(config)[tokens]
            is_alone |= np.isin(tokens, self._masks.agreeing(config))
            alone = tokens[is_alone]
        groups[alone] = -1
        _, firsts = np.unique(groups[groups >= 0], return_index=True)
        configs: list[int] = []
        renumbered = np.full(len(places), -1, np.int32)
        rest = np.flatnonzero(groups >= 0)
        for token in rest[firsts].tolist():
            renumbered[groups[token]] = len(configs)
            configs.append(machine.advance(config, token))
        groups[rest] = renumbered[groups[rest]]
        numbers: dict[int, int] = {}
        for token in alone.tolist():
            following = machine.advance(config, token)
            if following not in numbers:
                numbers[following] = len(configs)
                configs.append(following)
            groups[token] = numbers[following]
        return groups, configs

    def _may_end_item(self, config: int) -> np.ndarray:
        """bool [V]: the tokens with a byte where an item, or a name of an object that counts them, may end."""
        machine = self._machine
        state, _, _, reading = machine.place(config)
        levels = machine.items.levels(reading)
        ends = b'"'
        if not (machine.inside_string[state] or machine.counted[state]):
            ends = b',]"' if levels and levels[-1].is_object else b",]"
        found = self._having.get(ends)
        if found is None:
            having = self._masks.vocabulary.having
            found = self._having[ends] = np.logical_or.reduce([having(bytes([byte])) for byte in ends])
        return found

    def _places_after(self, config: int, mask: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """As ``_configs_after``, with places (state, aux, stack) whose stacks are valid until the next walk."""
        machine = self._machine
        trie = self._masks.walker.whole
        groups = np.full(len(self._masks.vocabulary), -1, np.int32)
        machine.begin()
        self._path[0] = machine.place(config)[:3]
        at = num_places = 0
        table = np.full(8 * len(self._places), -1, np.int32)
        while True:
            at, num_places, status = walk.token_places(
                machine.control, trie, mask, at, self._path, groups, self._places, num_places, table
            )
            if status == walk.OK:
                return groups, self._places[:num_places].tolist()
            if status == walk.SHORT_OF_REGIONS:
                self._places = np.concatenate([self._places, np.zeros_like(self._places)])
                table = np.full(8 * len(self._places), -1, np.int32)
                groups[:] = -1
                at = num_places = 0
                machine.begin()
                continue
            scratch = int(machine.control[walk.SCRATCH])
            with machine.fuel.at_most(MASK_WORK):
                machine.supply(status)
            machine.control[walk.SCRATCH] = scratch

    # -- one ending ---------------------------------------------------------------------------------------------------

    def _find(self, config: int) -> ShortEnding | None:
        """The ending of a configuration: out of its value, then out of the values around it, one after the other.

        None where it is being looked for: a short ending does not come to the same place twice. What is found
        meanwhile is not kept.
        """
        if config in self._finding:
            self._num_cut += 1
            return None
        machine, num_cut = self._machine, self._num_cut
        self._finding.add(config)
        try:
            path, ending = self._outward(config)
            for at, word in reversed(path):
                if ending is not None:
                    ending = self._joined(word, ending)
                    if machine.reads_items:
                        ending = self._with_items(at, ending)
                if num_cut == self._num_cut or len(self._finding) == 1:
                    self._known[at] = ending
        finally:
            self._finding.discard(config)
        return ending

    def _outward(self, config: int) -> tuple[list[tuple[int, bytes]], ShortEnding | None]:
        """The configurations on a way out of the values, each with the text to the next one, and the ending behind the
        last text; items may repeat others there."""
        path: list[tuple[int, bytes]] = []
        while config not in self._known:
            fewest = self._with_fewest_characters(config)
            if fewest != config:
                self._find(fewest)
                if self.knows_at_once(config):
                    continue
            ways = self._ways_out(config)
            if len(ways) == 1 and ways[0][1] >= 0:
                path.append((config, ways[0][0]))
                config = ways[0][1]
                continue
            best: ShortEnding | None = None
            for word, following in ways:
                rest = _NO_BYTES if following < 0 else self._find(following)
                if rest is not None and (best is None or len(word) + len(rest.word) < len(best.word)):
                    best = self._joined(word, rest)
            path.append((config, b""))
            return path, best
        return path, self._known[config]

    def _joined(self, word: bytes, rest: ShortEnding) -> ShortEnding:
        if not word:
            return rest
        whole = word + rest.word
        costs = np.concatenate([np.zeros(len(word), np.int32), rest.costs])
        spell(*self._trie, self._roots, np.frombuffer(whole, np.uint8), len(word), costs)
        return ShortEnding(whole, costs)

    def _with_items(self, config: int, ending: ShortEnding) -> ShortEnding | None:
        """The ending, with another item for each one that repeats an earlier item. Where one does, the search first
        tries the endings that it found for the same place behind other items, and replaces as few of their items."""
        machine = self._machine
        parts: list[tuple[int, bytes]] = []  # what leads to ``ending``
        at = config
        while not self._ends(at, ending.word):
            begin, place = self._repeating(at, ending.word)
            parts.append((at, ending.word[:begin]))
            kept = self._by_place.get(machine.place(place)[:3], ())
            valid = next((e for e in kept if self._ends(place, e.word)), None)
            if valid is not None:
                ending = valid
                break
            way = self._way_apart(place)
            if not way and begin:
                parts.pop()
                place, begin = at, 0
                way = self._way_apart(at)
            if not way:
                return None
            parts.append((place, way))
            at = machine.advance_bytes(place, way)
            path, rest = self._outward(at)
            if rest is None:
                return None
            anew = self._joined(b"".join(word for _, word in path), rest)
            old = kept[0] if kept else ShortEnding(ending.word[begin:], ending.costs[begin:])
            ending = self._spliced(at, anew, place, old)
        for at, word in reversed(parts):
            ending = self._joined(word, ending)
            self._keep(at, ending)
        return ending

    def _spliced(self, at: int, anew: ShortEnding, place: int, old: ShortEnding) -> ShortEnding:
        """``anew``, an ending of ``at``, up to the end of its first item or name, then ``old``, an ending of ``place``,
        behind its own first one. Where these two lead to different places: ``anew``."""
        machine = self._machine
        levels = machine.items.levels(machine.place(place)[3])
        ends = _NAME_END if levels and levels[-1].is_object else _ITEM_END
        first, other = ends.search(anew.word), ends.search(old.word)
        if not first or not other:
            return anew
        head, size = anew.word[: first.end()], other.end()
        to = machine.place_after(at, head)
        if to is None or to != machine.place_after(place, old.word[:size]):
            return anew
        return self._joined(head, ShortEnding(old.word[size:], old.costs[size:]))

    def _ends(self, config: int, word: bytes) -> bool:
        """Whether the text may end with ``word``: what is read before and in it are items that repeat none."""
        end = self._read_on(config, word)
        return end >= 0 and self._machine.may_end(end)

    def _repeating(self, config: int, word: bytes) -> tuple[int, int]:
        """Where in ``word``, which the text may not end with, an item begins that repeats one, 0 for the one under way;
        and the configuration there."""
        machine = self._machine
        at, begin, last, place = config, 0, 0, config
        for found in _ITEM_BEGINS.finditer(word):
            at = self._read_on(self._read_on(at, word[begin : found.start()]), found.group())
            if at < 0:
                break
            begin = found.end()
            _, _, stack, reading = machine.place(at)
            if machine.items.begins_item(reading, stack, machine.stack_depths):
                last, place = begin, at
        return last, place

    def _keep(self, config: int, ending: ShortEnding) -> None:
        """Remember an ending for its place, whatever the items before it: the shortest ones found there."""
        kept = self._by_place.setdefault(self._machine.place(config)[:3], [])
        kept.append(ending)
        kept.sort(key=lambda e: e.num_tokens)
        del kept[MAX_KEPT:]

    def _read_on(self, config: int, data: bytes) -> int:
        """The configuration after ``data``; -1 where it is refused, or the one before it was."""
        if config < 0 or not data:
            return config
        self._count_steps(1 + len(data) // BYTES_A_STEP)
        return self._machine.read_on(config, data)

    def _count_steps(self, count: int) -> None:
        self.num_steps += count
        if self.num_steps > self._last_step:
            raise GrammarTooComplex("no ending of the text was found within the limit of steps")

    def _way_apart(self, config: int) -> bytes:
        """Bytes after which the items under way differ from those before them; b"" if there are none."""
        spent = self._machine.fuel.spent
        way = self._masks.way_apart(config)
        self._count_steps((self._machine.fuel.spent - spent) // STEP_FUEL)
        return way

    def _ways_out(self, config: int) -> list[tuple[bytes, int]]:
        """Texts that lead out of the value under way, each with the configuration behind it; -1 where the whole text
        may end."""
        machine = self._machine
        state, aux, stack, _ = machine.place(config)
        lazy = machine.lazy.get(state)
        if lazy is not None:
            return [(lazy.ending(self._word_of), -1)]
        within = machine.stack_frames[stack] if machine.stack_frames[stack] in machine.closings else 0
        if within:
            stack = machine.stack_parents[stack]
        frame = machine.stack_frames[stack]
        found: list[tuple[bytes, int]] = []
        for leave in self._leaves(state, aux, within, frame, MAX_BYTES).leaves:
            word = leave.word.translate(_INVERTED)
            if leave.result == ACCEPTED:
                found.append((word, -1))
                continue
            following = self._behind(stack, leave.result)
            if following >= 0:
                found.append((word, following))
        return found

    def _behind(self, stack: int, result: int) -> int:
        """The configuration after the top frame is popped with a result; -1 if nothing may follow."""
        machine = self._machine
        while stack:
            to = machine.after(machine.stack_frames[stack], result)
            stack = machine.stack_parents[stack]
            if to >= PUSH:
                frame, to = machine.action(to)
                return machine.config(to, 0, machine.stack(frame, stack))
            if to == 0:
                return -1
            if not machine.arrays[walk.FINAL][to]:
                return machine.config(to, 0, stack)
            result = machine.result_of(to)
        return -1

    def _word_of(self, expr: int) -> bytes:
        """A shortest text of a language."""
        leaves = self._leaves(self._machine.text(expr), 0, 0, 0, MAX_BYTES).leaves
        if not leaves:
            raise GrammarTooComplex(f"every text of a lexeme has more than {MAX_BYTES:,} bytes")
        return leaves[0].word.translate(_INVERTED)

    # -- the search inside one value ----------------------------------------------------------------------------------

    def _leaves(self, state: int, aux: int, within: int, frame: int, limit: int) -> _Level:
        """The ways out of a value of at most ``limit`` bytes, shortest first: one, or ``FEW`` where the frame decides.

        ``within``: the frame of the property name under way in the object that is the value; 0 for none.
        """
        machine = self._machine
        decides = frame in machine.deciding
        barrier = self._masks.barrier_of(frame)
        key = (state, aux, within, barrier, decides)
        known = self._levels.get(key)
        if known is None or (not known.leaves and known.limit < limit):
            if key in self._active:
                return _Level(limit, ())  # a shortest text has no value like itself inside
            self._active.add(key)
            try:
                told = self._told(state, limit)
                leaves = self._search(key, limit) if told is None else (told,)
                known = self._levels[key] = _Level(limit, leaves)
            finally:
                self._active.discard(key)
        return known

    def _told(self, state: int, limit: int) -> Leave | None:
        """The way out of a regex, where the expression tells it: as short as the one that the search finds."""
        expr = self._machine.texts.get(state)
        word = None if expr is None else self._machine.expressions.shortest_bytes(expr, limit)
        return None if word is None else Leave(len(word), ACCEPTED, word.translate(_INVERTED))

    def _search(self, key: tuple[int, int, int, int, bool], limit: int) -> tuple[Leave, ...]:
        """The ways out from ``key``: a state, aux, the frame of a name under way, the barrier, whether it decides."""
        machine, levels = self._machine, self._levels
        state, aux, within, barrier, decides = key
        base = machine.stack(barrier, 0)
        leaves: dict[int, Leave] = {}
        low = machine.frame_lows[barrier]
        told_apart = machine.told_apart
        is_inside = state in told_apart  # a string: then there are no other results
        most = min(FEW, 1 << len(told_apart[state])) if is_inside else FEW
        hinted: dict[int, Leave] | None = None  # one text for each language that a string tells apart, easily found
        begun: tuple[bytes, int, int, int] | None = (
            None  # of a string: the word so far, state, aux, language of the rest
        )
        was_told = False  # whether the string's expression was asked
        queue: list[_Node] = [(0, 0, b"", _AT, state, aux, within)]
        seen: dict[tuple[int, int, int], bytes] = {}
        if key in self._paused:
            queue, seen = self._paused.pop(key)
        while queue and queue[0][0] <= limit:
            length, _, word, kind, a, b, c = heapq.heappop(queue)
            if kind == _ENDED:
                if a not in leaves:
                    leaves[a] = Leave(length, a, word)
                    told = hinted.keys() if hinted and is_inside else ()
                    if not decides or len(leaves.keys() | told) >= most:
                        break
                    limit = 2 * length + 64
                continue
            if kind == _INSIDE:
                self._step_over(queue, length - c, word, a, b, c, limit)
                continue
            length, place = len(word), (a, b, c)
            if place in seen:
                continue
            seen[place] = word
            known = levels.get((a, b, c, barrier, False)) if not decides else None
            if known is not None and known.leaves:
                leave = known.leaves[0]
                heapq.heappush(queue, _node(length + leave.length, word + leave.word, _ENDED, leave.result, 0, 0))
                continue
            if leaves and len(seen) > min(MAX_STEPS_FOR_FEW, (self._last_step - self.num_steps) // SHARE_FOR_FEW):
                break
            if begun is None and not (c or decides) and (language := self._language_of(a)) is not None:
                begun = word, a, b, language
            elif begun is not None and not was_told and len(seen) >= MAX_STEPS_FOR_FEW:
                was_told = True
                before, inside, count, language = begun
                for ending, result in self._told_by_hints((language,), inside, count, base, MAX_BYTES):
                    leaves[result] = Leave(len(before) + len(ending), result, before + ending)
                if leaves:
                    break
            self._count_steps(1)
            if a in machine.accepting:
                heapq.heappush(queue, _node(length, word, _ENDED, ACCEPTED, 0, 0))
            if not c and machine.result_of(a) >= 0:
                heapq.heappush(queue, _node(length, word, _ENDED, machine.result_of(a), 0, 0))
            steps = self._steps_from(a, b, machine.stack(c, base) if c else base)
            plain = [step for step in steps if step[1] != walk.NEXT_STATE or step[2] not in machine.detours]
            if plain and len(plain) < len(steps):
                here = self._at_least(a, b, low)
                nearer = [  # a byte from 0xC0 on begins a character of several; of 0 nothing is known
                    kind != walk.NEXT_STATE or self._at_least(to, n, low) - (here > 0 and byte >= 0xC0) < here
                    for byte, kind, to, n in plain
                ]
                if not any(nearer):
                    plain = []  # an escape has to lead on
            if decides and not c and hinted is None and a in told_apart and a not in machine.escape_left:
                hints = self._told_by_hints(told_apart[a], a, b, base)
                hinted = {result: Leave(length + len(told), result, word + told) for told, result in hints}
                if not is_inside:
                    for leave in hinted.values():
                        heapq.heappush(queue, _node(leave.length, leave.word, _ENDED, leave.result, 0, 0))
            for byte, step, to, more in plain or steps:
                further = word + _INVERTED[byte : byte + 1]
                if step == walk.NEXT_STATE:
                    heapq.heappush(queue, _node(length + 1 + self._at_least(to, more, low), further, _AT, to, more, c))
                elif step == walk.LEFT:
                    heapq.heappush(queue, _node(length + 1, further, _ENDED, to, 0, 0))
                elif step == walk.PUSHED and more in machine.closings:
                    self._begin_name(queue, further, to, more, base)
                else:
                    heapq.heappush(queue, _node(length + 2, further, _INSIDE, to, more, 1))
        if leaves and not decides:  # what ends the text from the beginning ends it from each place on its way
            (leave,) = leaves.values()
            for place, before in seen.items():
                if leave.word.startswith(before):
                    rest = Leave(leave.length - len(before), leave.result, leave.word[len(before) :])
                    levels.setdefault((*place, barrier, False), _Level(limit, (rest,)))
        if not leaves:
            self._paused[key] = _Paused(queue, seen)
            return ()
        if hinted and is_inside:
            leaves = hinted | leaves
        return tuple(sorted(leaves.values(), key=lambda leave: leave.length))

    def _told_by_hints(
        self, hints: tuple[int, ...], state: int, aux: int, base: int, most: int = MAX_HINTED
    ) -> Iterator[tuple[bytes, int]]:
        """Words, inverted, that lead out of a string, with their results: texts of ``hints``, languages, of at most
        ``most`` bytes. They may not be the shortest."""
        machine = self._machine
        for expr in hints:
            text = machine.expressions.some_bytes(expr, most)
            if text is None:
                continue
            word = encode_basestring(text.decode(errors="ignore"))[1:].encode()
            last = self._last_step_of(word, state, aux, base)
            if last is not None and last[1] == walk.LEFT:
                yield word.translate(_INVERTED), last[2]

    def _language_of(self, state: int) -> int | None:
        """The language of the rest of a string, where that is known."""
        machine = self._machine
        language = machine.strings[state >> PART_BITS].get(state)
        if language is None and machine.counted[state]:
            machine.settle(state)
            text = machine.string_texts.get(state)
            language = None if text is None else text.expr
        return language

    def _last_step_of(self, word: bytes, state: int, aux: int, stack: int) -> list[int] | None:
        """The step by the word's last byte, as ``walk.steps_from`` gives it; None where the grammar refuses a byte, or
        where one before the last leaves the value."""
        step: list[int] | None = None
        for byte in word:
            if step is not None:
                _, kind, state, aux = step
                if kind != walk.NEXT_STATE:
                    return None
            step = next(iter(self._steps_from(state, aux, stack, byte)), None)
            if step is None:
                return None
        return step

    def _at_least(self, state: int, count: int, low: int) -> int:
        """Of a string, the fewest bytes that may be missing: the characters, of one byte at least, and the quote; 0 for
        other states. ``count`` and ``low``: of one whose characters are counted."""
        machine = self._machine
        left = machine.escape_left.get(state, 0)  # of one character
        if machine.counted[state]:
            chars = max(low - count, int(machine.arrays[walk.CHARS_LEFT][state]), 0)
            return chars + max(left - 1, 0) + 1 if chars else left + 1
        language = machine.strings[state >> PART_BITS].get(state)
        if language is None:
            return left + 1 if left else 0
        return machine.expressions.at_least(language) + 1

    def _begin_name(self, queue: list[_Node], word: bytes, state: int, frame: int, base: int) -> None:
        """Go on from the beginning of a property's name: to the end of the name that the frame has chosen."""
        chosen = self._chosen.get(frame)
        if chosen is None:
            chosen = self._chosen[frame] = self._choose_name(state, frame, base)
        name, to, above = chosen
        word += name
        if name:
            heapq.heappush(queue, _node(len(word) + 1, word, _INSIDE, to, above, 1))
        else:
            heapq.heappush(queue, _node(len(word), word, _AT, state, 0, frame))

    def _choose_name(self, state: int, frame: int, base: int) -> tuple[bytes, int, int]:
        """The chosen name, inverted, and the state and the frame behind it; b"" if none is chosen."""
        name = self._machine.closings[frame]()
        last = self._last_step_of(name, state, 0, self._machine.stack(frame, base))
        if last is None or last[1] != walk.REPLACED:
            return b"", 0, 0
        return name.translate(_INVERTED), last[2], last[3]

    def _step_over(
        self, queue: list[_Node], length: int, word: bytes, state: int, frame: int, bound: int, limit: int
    ) -> None:
        """Go on behind a value that has at least ``bound`` bytes, or put it back with a higher bound."""
        machine = self._machine
        room = min(limit - length, max(FEW, 2 * bound))
        leaves = self._leaves(state, 0, 0, frame, room).leaves
        if not leaves:
            heapq.heappush(queue, _node(length + room + 1, word, _INSIDE, state, frame, room + 1))
        for leave in leaves:
            total, whole = length + leave.length, word + leave.word
            if leave.result == ACCEPTED:
                heapq.heappush(queue, _node(total, whole, _ENDED, ACCEPTED, 0, 0))
                continue
            to = machine.after(frame, leave.result)
            if to >= PUSH:
                above, to = machine.action(to)
                heapq.heappush(queue, _node(total + 1, whole, _INSIDE, to, above, 1))
            elif to and machine.arrays[walk.FINAL][to]:
                heapq.heappush(queue, _node(total, whole, _ENDED, machine.result_of(to), 0, 0))
            elif to:
                heapq.heappush(queue, _node(total, whole, _AT, to, 0, 0))

    def _steps_from(self, state: int, aux: int, stack: int, byte: int = -1) -> list[list[int]]:
        """The steps by any byte, or by one; see ``walk.steps_from``."""
        machine = self._machine
        low, high = (0, 256) if byte < 0 else (byte, byte + 1)
        while True:
            machine.begin()
            count = walk.steps_from(machine.control, state, aux, stack, low, high, self._steps)
            if count >= 0:
                return self._steps[:count].tolist()
            machine.supply(-1 - count)


def _node(length: int, word: bytes, kind: int, a: int, b: int, c: int) -> _Node:
    """Of nodes of equal length the one with more bytes so far comes first: it is nearer to its end."""
    return length, -len(word), word, kind, a, b, c


def pack(allowed: np.ndarray) -> np.ndarray:
    """A mask, uint32 [ceil(V / 32)], read-only, of the tokens that are allowed, bool [V]."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    row = np.packbits(padded, bitorder="little").view(np.uint32)
    row.flags.writeable = False
    return row


@brief_native
def spell(node_byte, ends, num_tokens, roots, word, first, costs):
    """Set ``costs[i]`` for i < ``first`` to the number of tokens that spell ``word[i:]``, given the others."""
    size = len(word)
    for i in range(first - 1, -1, -1):
        best = NOT_ALLOWED
        node = np.int64(roots[word[i]])
        at = i
        while node >= 0:
            at += 1
            if num_tokens[node] > 0 and costs[at] + 1 < best:
                best = costs[at] + 1
            if at == size:
                break
            child, end = node + 1, ends[node]
            node = np.int64(-1)
            while child < end:
                if node_byte[child] == word[at]:
                    node = np.int64(child)
                    break
                child = np.int64(ends[child])
        costs[i] = best
