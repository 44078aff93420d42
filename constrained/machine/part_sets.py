"""Walks of a token trie within a string of one language, which need no states of the machine.

The parts of an expression are its partial derivatives (Antimirov 1996): what may follow after a text is one of them, or
several. A part is a *shape* and the bounds of the repeats in it, such as ``a{.}b{.}`` and (0, 3), (1, 9). How a byte
changes the bounds is found once for a shape (a *rule*); compiled code then follows the sets of parts, whatever the
counts are. Of parts that differ in bounds alone, such as ``a{0,3}b`` and ``a{0,2}b``, a set keeps the one that holds
the others' texts too. A step from a set takes some tenths of a microsecond and is noted; an entry of a state's row
takes Python 20 to 200.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..expressions import EMPTY, Expressions
from ..native_code import native, native_part
from ..prefixes import contains_all_texts_of
from ..vocabulary import Trie
from .untouched import untouched
from .walk import MAX_NEED

MAX_PARTS = 4096
MAX_SETS = 12_288
MAX_RULES = 4096
MAX_MOVES = 16_384
MOST_REPEATS = 12  # of a shape
MOST_COMPARED = 256  # parts of a set
MOST_TOLD_APART = 64  # alternatives with a common beginning
MAX_WORK = 1 << 22  # moves that are followed in one round: 40 ms
MOVES_OF_FUEL = 200  # that are followed for one step of fuel, which is 2 microseconds
SHORTEST = 2  # bytes of a text that is read at once: the entry of one byte costs less
QUOTE, BACKSLASH, SLASH, LETTER_U = 0x22, 0x5C, 0x2F, 0x75
SIMPLE_ESCAPES = {0x22: 0x22, 0x2F: 0x2F, 0x5C: 0x5C, 0x62: 8, 0x66: 12, 0x6E: 10, 0x72: 13, 0x74: 9}
ESCAPED = 1 << QUOTE | 1 << BACKSLASH | 0xFFFFFFFF  # the characters that cannot stand for themselves
ASCII = (1 << 128) - 1

NEVER = 1 << 30  # no number of characters
NO_BOUND = 1 << 29  # as the upper bound of a repeat
NOT_MADE, REFUSED, LACKS_RULES, NO_ROOM = 0, -1, -2, -3  # steps; others are the numbers of sets (NO_ROOM: or no work)
NO_RULE, ASKED = -1, -2  # instead of the number of a rule
# Columns of a part: its shape, the characters of its shortest text, its padding where it may end (else NEVER), the
# characters of its longest text (NEVER if there is none), and its gap: of so many numbers of characters in a row, from
# those of the shortest to those of the longest text, one is that of a text (NEVER if that is not known).
SHAPE, LEFT, PADDING, MOST, GAP = range(5)
# Columns of a set: those of its shortest part, the least padding, whether any character may come first, the last
# round in which a rule of its parts was missing, the characters of the longest text, and whether it has every text, or
# every text whose number of characters is in a range.
S_LEFT, S_PADDING, S_WIDE, S_LACKED_IN, S_MOST, S_WHOLE, S_RANGE = range(7)
# Columns of a shape: the number of its repeats, the characters that its other elements have at least, its padding where
# all repeats may be left out (NEVER if it may not end), whether any character may come first, the characters that its
# other elements have at most, their gap; then for each repeat the characters of the shortest text that is repeated,
# behind these for each those of the longest one, and for each the gap.
NUM_REPEATS, OTHERS_LEFT, LAST_PADDING, WIDE, OTHERS_MOST, OTHERS_GAP, INNER_LEFT = range(7)
INNER_MOST = INNER_LEFT + MOST_REPEATS
INNER_GAP = INNER_MOST + MOST_REPEATS
TEXT_SHAPE = 0  # that of any character, repeated
# Columns of a move: its bytes, the shape that it leads to; then for each repeat of that the repeat whose bounds it has
# (-1: those that follow), whether one repeat less is left, a lower and an upper bound.
M_BYTES, M_SHAPE, M_BOUNDS = range(3)
M_FROM, M_LESS, M_LOW, M_HIGH = range(4)
NUM_SETS, NUM_PARTS, NUM_LACKING, WORK, ROUND, MOST_WORK, SETS_ROOM, PARTS_ROOM = range(8)
# Of counts, SETS_ROOM and PARTS_ROOM say for how many sets and parts there is room.
# Compiled code gets the tables as one record. With a tuple of arrays each call would pass every length and stride, and
# the code would take half as long again to compile.
TABLES = np.dtype(
    [
        ("counts", np.int64, 8),
        ("sets", np.uint64, (MAX_SETS, MAX_PARTS // 64)),
        ("steps", np.int32, (MAX_SETS, 256)),
        ("about_sets", np.int32, (MAX_SETS, 7)),
        ("set_table", np.int32, 4 << (MAX_SETS - 1).bit_length()),
        ("parts", np.int32, (MAX_PARTS, 5)),
        ("bounds", np.int32, (MAX_PARTS, 2 * MOST_REPEATS)),
        ("part_table", np.int32, 4 * MAX_PARTS),
        ("shapes", np.int32, (MAX_RULES, INNER_GAP + MOST_REPEATS)),
        ("rule_keys", np.int64, 4 * MAX_RULES),  # -1 where there is none
        ("rule_at", np.int32, 4 * MAX_RULES),
        ("rules", np.int32, (MAX_RULES, 2)),  # the first move, and how many
        ("moves", np.int32, (MAX_MOVES, M_BOUNDS + 4 * MOST_REPEATS)),
        ("has_byte", np.uint8, (MAX_RULES, 256)),  # of each set of bytes
        ("kinds", np.uint8, (MAX_RULES, 2)),  # whether it has a byte of ESCAPED, of ASCII
        ("lacking", np.int64, MAX_RULES),
        ("set", np.uint64, MAX_PARTS // 64),  # the set under way
        ("members", np.int32, MAX_PARTS),
        ("following", np.int32, (MAX_MOVES, 1 + 2 * MOST_REPEATS)),  # shapes and bounds
        ("alike", np.uint8, 256),  # the bytes after which a step leads to the same
    ],
    align=True,
)
# Where a walk is: behind a backslash; between two characters; within one that is counted, of which n - 1 bytes are
# missing. A string that is not counted may begin within a character.
BEHIND_BACKSLASH, BETWEEN, BEFORE_U = 0, 1, 5

Element = tuple[int, bool]  # an expression, and whether it is repeated
Bounds = tuple[int, int]


class NoParts(Exception):
    """The language has an intersection in it, or the walk meets too many parts, or follows too many moves."""


class StringText(NamedTuple):
    """The rest of a string, before a character. ``is_free``: it may use every escape where any character may follow.

    ``is_counted``: its characters are counted. ``state_of(expr)``: the machine's state before the rest ``expr``.
    ``is_escaping``: a backslash was just read.
    """

    expr: int
    is_free: bool
    is_counted: bool
    state_of: Callable[[int], int]
    is_escaping: bool = False


class Found(NamedTuple):
    """``exits`` int64 [n, 5], in the order of the nodes, as ``walk_trie`` writes them.

    ``regions`` (node, expr, characters): nodes of a ``u`` behind a backslash, which were not walked; ``expr`` is what
    may follow before the backslash.
    """

    exits: np.ndarray
    regions: list[tuple[int, int, int]]


class WalkRoom:
    """Where walks of a trie note what they find. ``exits`` int64 [n, 5]; ``out`` int32 [n, 4]: regions of the trie that
    are left (node, number of a set or joint, characters, place). It is used again: fresh memory would take as long as
    the walk.
    """

    def __init__(self) -> None:
        self.exits = np.empty((0, 5), np.int64)
        self.out = self._before = np.empty((0, 4), np.int32)

    def begin(self, num_nodes: int, number: int, place: int) -> np.ndarray:
        """The region of a whole trie, as ``pending`` of the first walk."""
        if len(self.out) < num_nodes:
            self.exits = untouched((num_nodes, 5), np.int64)
            self.out, self._before = (untouched((num_nodes, 4), np.int32) for _ in range(2))
        self._before[0] = -1, number, 0, place
        return self._before[:1]

    def left(self, count: int) -> tuple[np.ndarray, list[list[int]]]:
        """The ``count`` regions in ``out``: those to be walked next, and apart those that are not (``BEFORE_U``)."""
        pending = self.out[:count]
        self.out, self._before = self._before, self.out
        before_u = pending[:, 3] == BEFORE_U
        if not before_u.any():
            return pending, []
        apart, others = pending[before_u].tolist(), pending[~before_u]
        pending[: len(others)] = others
        return pending[: len(others)], apart


class PartSets:
    """The shapes, parts and sets of one store, which are forgotten where there is no more room. Callers hold the
    machine's lock."""

    def __init__(self, ex: Expressions) -> None:
        self.ex = ex
        self.escapes = np.zeros(256, np.uint8)  # the character that a byte behind a backslash stands for
        self.escapes[list(SIMPLE_ESCAPES)] = list(SIMPLE_ESCAPES.values())
        self.is_missing = np.array([not ex.available >> byte & 1 for byte in range(256)], np.uint8)
        tables = self.tables = untouched((1,), TABLES)[0]
        self._counts, self._sets, self._parts, self._bounds = (tables[n] for n in ("counts", "sets", "parts", "bounds"))
        self._table, self._part_table = tables["set_table"], tables["part_table"]
        self._shapes, self._rules, self._moves = tables["shapes"], tables["rules"], tables["moves"]
        self._rule_keys, self._rule_at, self._lacking = tables["rule_keys"], tables["rule_at"], tables["lacking"]
        self._has_byte, self._kinds, self._following = tables["has_byte"], tables["kinds"], tables["following"]
        self._counts[SETS_ROOM], self._counts[PARTS_ROOM] = MAX_SETS, MAX_PARTS
        self._path = np.zeros((0, 3), np.int64)
        self.room = WalkRoom()
        self._no_needs = np.zeros(0, np.uint16)
        self.age = 0  # grows where the numbers of sets mean others
        self.forget()

    def forget(self) -> None:
        """Forget everything, also where rules that were asked for were not made."""
        self._elements: list[tuple[Element, ...]] = []  # of each shape
        self._numbers: dict[tuple[Element, ...], int] = {}
        self._number_of_bytes: dict[int, int] = {}
        self.num_rules = self._num_moves = 0
        self._rule_keys[:] = -1
        self._shape(((self.ex.any_char, True),))  # TEXT_SHAPE
        self._forget_sets()

    def _forget_sets(self) -> None:
        """Forget the sets and the parts, but no shape and no rule."""
        self._table[:] = 0
        self._part_table[:] = 0
        self._set_of: dict[int, int] = {}  # by expression
        self._rests: dict[int, int] = {}  # by set
        self._part_exprs: dict[int, int] = {}  # by part
        self._counts[:ROUND] = 1, 1, 0, 0  # the number 0 is no set and no part
        self.age += 1

    @property
    def num_parts(self) -> int:
        return int(self._counts[NUM_PARTS]) - 1

    def walk(self, trie: Trie, text: StringText, mask: np.ndarray, needs: np.ndarray | None = None) -> Found:
        """Set the bits of the trie's tokens that the string allows. Raises NoParts; then some may be set.

        ``needs`` uint16 [32 * words], of a counted string: the characters that each allowed token brings and that have
        to follow it.
        """
        self.make_room()
        if len(self._path) < trie.max_depth + 2:
            self._path = np.zeros((trie.max_depth + 2, 3), np.int64)
        try:
            return self._walk(trie, text, mask, self._no_needs if needs is None else needs)
        except BaseException:
            self.forget()  # some rules that were asked for were not made
            raise

    def make_room(self) -> None:
        """Forget what was found, if little room is left."""
        counts = self._counts
        most_rules = max(self.num_rules, len(self._elements), len(self._number_of_bytes))
        if 2 * most_rules > MAX_RULES or 2 * self._num_moves > MAX_MOVES:
            self.forget()
        elif 2 * counts[NUM_PARTS] > MAX_PARTS or 2 * counts[NUM_SETS] > MAX_SETS:
            self._forget_sets()

    def begin_round(self) -> None:
        """Have rules that are missing be noted again, and count work from zero."""
        self._counts[MOST_WORK] = MAX_WORK
        self._counts[ROUND] += 1

    def finish_round(self) -> None:
        """Count the work, and make the rules that were missing."""
        counts = self._counts
        self.ex.fuel.spend(int(counts[WORK]) // MOVES_OF_FUEL)
        counts[WORK] %= MOVES_OF_FUEL
        for key in self._lacking[: counts[NUM_LACKING]].tolist():
            self._make_rule(key)
        counts[NUM_LACKING] = 0

    def finish_reading(self, most: int) -> int:
        """As ``finish_round`` if at most ``most`` rules were missing; else these are asked for again where they are met
        next. How many were made."""
        counts = self._counts
        count = int(counts[NUM_LACKING])
        if count > most:
            for key in self._lacking[:count].tolist():
                set_rule(self._rule_keys, self._rule_at, key, NO_RULE)
            counts[NUM_LACKING] = count = 0
        try:
            self.finish_round()
        except BaseException:
            self.forget()  # some rules that were asked for were not made
            raise
        return count

    def _walk(self, trie: Trie, text: StringText, mask: np.ndarray, needs: np.ndarray) -> Found:
        nodes = (trie.node_byte, trie.node_depth, trie.node_end, trie.first_token, trie.num_tokens, trie.token_order)
        room = self.room
        pending = room.begin(trie.num_nodes, self.set_of(text.expr), BETWEEN)
        exits: list[np.ndarray] = []
        regions: list[tuple[int, int, int]] = []
        while len(pending):
            self.begin_round()
            num_exits, num_out = walk_sets(
                *nodes, self.is_missing, self.escapes, self.tables, self._path, pending, text.is_free,
                text.is_counted, mask, needs, room.exits, room.out,
            )  # fmt: skip
            if num_out < 0:
                raise NoParts
            exits.append(room.exits[:num_exits].copy())
            pending, apart = room.left(num_out)
            regions += [(node, self.rest(s), count) for node, s, count, _ in apart]
            self.finish_round()
        if len(exits) == 1:
            return Found(exits[0], regions)
        whole = np.concatenate(exits)
        return Found(whole[np.argsort(whole[:, 0])], regions)

    def read(self, expr: int, data: bytes, is_counted: bool, most_rules: int) -> tuple[int, int, int]:
        """How many bytes of ``data`` may follow, as far as at most ``most_rules`` more rules tell and, where characters
        are counted, up to the end of one; how many characters begin in them; and the expression of what may follow
        then. Without more rules no shape is made either. Raises NoParts."""
        self.make_room()
        number = self.set_of(expr) if most_rules else self.known_set(expr)
        array = np.frombuffer(bytearray(data), np.uint8)
        while True:
            self.begin_round()
            size, count, after = read_sets(self.tables, number, array, is_counted)
            made = self.finish_reading(most_rules)
            if not made:
                return size, count, self.rest(after)
            most_rules -= made

    def known_set(self, expr: int) -> int:
        """As ``set_of``, where all shapes are known. Raises NoParts."""
        found = self._set_of.get(expr)
        if found is not None:
            return found
        if not all(elements in self._numbers for elements, _ in self.chains(expr)):
            raise NoParts
        return self.set_of(expr)

    def set_of(self, expr: int) -> int:
        """The number of the set of an expression's parts."""
        found = self._set_of.get(expr)
        if found is None:
            found = self._set_of[expr] = self._make_set(expr)
        return found

    def _make_set(self, expr: int) -> int:
        options = self.chains(expr)
        if len(options) > len(self._following):
            raise NoParts
        for i, (elements, bounds) in enumerate(options):
            self._following[i, 0] = self._shape(elements)
            self._following[i, 1 : 1 + 2 * len(bounds)] = [bound for pair in bounds for bound in pair]
        found: int = find_set(self.tables, len(options))
        if found == NO_ROOM:
            raise NoParts
        return found

    def rest(self, number: int) -> int:
        """The expression of what may follow in a set."""
        found = self._rests.get(number)
        if found is None:
            found = self._rests[number] = self._make_rest(number)
            self._set_of.setdefault(found, number)
        return found

    def _make_rest(self, number: int) -> int:
        options = []
        bits = int.from_bytes(self._sets[number, : 1 + (self.num_parts >> 6)].tobytes(), "little")
        while bits:
            part = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            found = self._part_exprs.get(part)
            if found is None:
                found = self._part_exprs[part] = self._make_part_expr(part)
            options.append(found)
        return self.ex.union(*options)

    def _make_part_expr(self, part: int) -> int:
        ex = self.ex
        elements = self._elements[self._parts[part, SHAPE]]
        bounds = self._bounds[part].tolist()
        at = 2 * sum(is_repeated for _, is_repeated in elements)
        made = EMPTY
        for expr, is_repeated in reversed(elements):
            if is_repeated:
                at -= 2
                low, high = bounds[at], bounds[at + 1]
                expr = ex.repeat(expr, low, None if high == NO_BOUND else high)
            made = ex.before(expr, made)
        return made

    def chains(self, expr: int) -> list[tuple[tuple[Element, ...], list[Bounds]]]:
        """The alternatives of an expression: elements that follow each other, and the bounds of those that are
        repeated. Alternatives with a common beginning, which ``Expressions.union`` joins, are told apart again."""
        nodes = self.ex.nodes
        if nodes[expr][0] == "or":
            return [chain for part in nodes[expr][1:] for chain in self.chains(part)]
        elements: list[Element] = []
        bounds: list[Bounds] = []
        while expr != EMPTY:
            part, expr = nodes[expr][1:] if nodes[expr][0] == "cat" else (expr, EMPTY)
            node = nodes[part]
            if node[0] == "rep":
                elements.append((node[1], True))
                bounds.append((node[2], NO_BOUND if node[3] is None else node[3]))
            else:
                elements.append((part, False))
            if nodes[expr][0] == "or" and len(rests := self.chains(expr)) <= MOST_TOLD_APART:
                return [((*elements, *rest), [*bounds, *behind]) for rest, behind in rests]
        return [(tuple(elements), bounds)]

    def _shape(self, elements: tuple[Element, ...]) -> int:
        found = self._numbers.get(elements)
        if found is None:
            ex = self.ex
            found = len(self._elements)
            repeated = [expr for expr, is_repeated in elements if is_repeated]
            others = [expr for expr, is_repeated in elements if not is_repeated]
            if found == MAX_RULES or len(repeated) > MOST_REPEATS or not all(ex.is_plain[expr] for expr, _ in elements):
                raise NoParts
            ends_in_repeat = bool(elements) and elements[-1][1]
            last = ex.least_padding(elements[-1][0]) if elements and not ends_in_repeat else 0
            if last is None or not all(ex.nullable[expr] for expr in (others if ends_in_repeat else others[:-1])):
                last = NEVER
            head, repeats_head = elements[0] if elements else (EMPTY, False)
            is_wide = head == ex.any_char if repeats_head else (contains_all_texts_of(ex, head) or 0) >= 1
            row = self._shapes[found]
            most = min(sum(map(ex.longest, others)), NEVER)
            gap = max(map(self._gap, others), default=1)
            row[:INNER_LEFT] = len(repeated), sum(map(self._left, others)), last, is_wide, most, gap
            row[INNER_LEFT : INNER_LEFT + len(repeated)] = [self._left(expr) for expr in repeated]
            row[INNER_MOST : INNER_MOST + len(repeated)] = [min(ex.longest(expr), NEVER) for expr in repeated]
            row[INNER_GAP : INNER_GAP + len(repeated)] = [self._gap(expr) for expr in repeated]
            self._numbers[elements] = found
            self._elements.append(elements)
        return found

    def _left(self, expr: int) -> int:
        found = self.ex.shortest(expr)
        assert found is not None  # it is plain
        return found

    def _gap(self, expr: int) -> int:
        found = self.ex.spread(expr)
        return NEVER if found is None else found.gap

    def _make_rule(self, key: int) -> None:
        """Make the moves of the parts of one shape that agree in which repeats may be left out, and which are the last
        ones; see ``rule_key``."""
        ex = self.ex
        elements = self._elements[key >> 2 * MOST_REPEATS]
        first = at = self._num_moves
        repeat = 0  # the number of the repeat that comes next
        for i, (expr, is_repeated) in enumerate(elements):
            may_skip = bool(key >> 2 * repeat & 1) if is_repeated else ex.nullable[expr]
            is_last = is_repeated and bool(key >> 2 * repeat + 1 & 1)
            form = ex.linear_form(expr)
            if form is None:
                raise NoParts
            after = elements[i + 1 :] if not is_repeated or is_last else elements[i:]
            behind = repeat + (is_repeated and is_last)  # the repeats from this one on are those of ``after``
            for bits, rest in form:
                bits &= ex.available
                for inner, bounds in self.chains(rest) if bits else ():
                    if at == MAX_MOVES:
                        raise NoParts
                    row = self._moves[at]
                    row[M_BYTES], row[M_SHAPE] = self._bytes(bits), self._shape((*inner, *after))
                    sources = [(-1, 0, low, high) for low, high in bounds]
                    count = sum(is_also for _, is_also in after)
                    sources += [(behind + n, is_repeated and not is_last and n == 0, 0, 0) for n in range(count)]
                    row[M_BOUNDS : M_BOUNDS + 4 * len(sources)] = np.array(sources, np.int32).ravel()
                    at += 1
            repeat += is_repeated
            if not may_skip:
                break
        if self.num_rules == MAX_RULES:
            raise NoParts
        self._rules[self.num_rules] = first, at - first
        set_rule(self._rule_keys, self._rule_at, key, self.num_rules)
        self.num_rules += 1
        self._num_moves = at

    def _bytes(self, bits: int) -> int:
        found = self._number_of_bytes.get(bits)
        if found is None:
            found = len(self._number_of_bytes)
            if found == MAX_RULES:
                raise NoParts
            self._number_of_bytes[bits] = found
            has = np.frombuffer(bits.to_bytes(32, "little"), np.uint8)
            self._has_byte[found] = np.unpackbits(has, bitorder="little")
            self._kinds[found] = bits & ESCAPED != 0, bits & ASCII != 0
        return found


@native_part
def rule_slot(keys, key):
    """Where a rule's key is, or is to be."""
    mask = len(keys) - 1
    at = (key * np.int64(0x9E3779B97F4A7C1) >> 20) & mask
    while keys[at] != -1 and keys[at] != key:
        at = (at + 1) & mask
    return at


@native
def set_rule(keys, values, key, value):
    at = rule_slot(keys, key)
    keys[at] = key
    values[at] = value


@native_part
def rule_key(part, parts, bounds, shapes):
    """The shape, and two bits for each repeat: whether it may be left out, and whether one is left at most."""
    shape = np.int64(parts[part, SHAPE])
    key = shape << 2 * MOST_REPEATS
    for k in range(shapes[shape, NUM_REPEATS]):
        key |= np.int64(bounds[part, 2 * k] == 0) << 2 * k | np.int64(bounds[part, 2 * k + 1] == 1) << 2 * k + 1
    return key


@native_part
def find_part(tables, row):
    """The number of the part of a row of ``following``, a new one if there is none; NO_ROOM if there is no room."""
    counts, parts, bounds, table = tables.counts, tables.parts, tables.bounds, tables.part_table
    shapes = tables.shapes
    shape = np.int64(row[0])
    num_bounds = 2 * shapes[shape, NUM_REPEATS]
    key = np.uint64(shape + 1) * np.uint64(0x9E3779B97F4A7C15)
    for k in range(num_bounds):
        key = (key ^ (key >> np.uint64(29)) ^ np.uint64(row[1 + k])) * np.uint64(0x9E3779B97F4A7C15)
    slots = len(table) - 1
    slot = np.int64(key >> np.uint64(33)) & slots
    while table[slot] > 0:
        found = np.int64(table[slot])
        if parts[found, SHAPE] == shape:
            k = 0
            while k < num_bounds and bounds[found, k] == row[1 + k]:
                k += 1
            if k == num_bounds:
                return found
        slot = (slot + 1) & slots
    number = counts[NUM_PARTS]
    if number == counts[PARTS_ROOM]:
        return np.int64(NO_ROOM)
    counts[NUM_PARTS] = number + 1
    table[slot] = number
    left, most = np.int64(shapes[shape, OTHERS_LEFT]), np.int64(shapes[shape, OTHERS_MOST])
    may_be_empty = True  # all repeats
    for k in range(shapes[shape, NUM_REPEATS]):
        left += np.int64(row[1 + 2 * k]) * shapes[shape, INNER_LEFT + k]
        most += np.int64(row[2 + 2 * k]) * shapes[shape, INNER_MOST + k]
        may_be_empty = may_be_empty and row[1 + 2 * k] == 0
    for k in range(bounds.shape[1]):
        bounds[number, k] = row[1 + k] if k < num_bounds else 0
    parts[number, GAP] = gap_of(shapes, shape, row)
    parts[number, SHAPE] = shape
    parts[number, LEFT], parts[number, MOST] = min(left, NEVER), min(most, NEVER)
    parts[number, PADDING] = shapes[shape, LAST_PADDING] if may_be_empty else NEVER
    return number


@native_part
def gap_of(shapes, shape, row):
    """The gap of a part: that of the element whose numbers of characters lie furthest apart, less by how many
    characters those elements differ that have every number in a range."""
    gap, span = np.int64(1), np.int64(0)
    for k in range(-1, shapes[shape, NUM_REPEATS]):
        if k < 0:
            own, least, most = shapes[shape, OTHERS_GAP], shapes[shape, OTHERS_LEFT], shapes[shape, OTHERS_MOST]
            least, most, own = np.int64(least), np.int64(most), np.int64(own)
        else:
            low, high = np.int64(row[1 + 2 * k]), np.int64(row[2 + 2 * k])
            own = np.int64(shapes[shape, INNER_GAP + k])
            if low < high:
                own = max(own, np.int64(shapes[shape, INNER_LEFT + k]))
            least, most = low * shapes[shape, INNER_LEFT + k], high * shapes[shape, INNER_MOST + k]
        if own <= 1:
            span += most - least
        gap = max(gap, own)
    return NEVER if gap == NEVER else max(gap - span, 1)


@native_part
def row_slot(table, rows, wanted):
    """Where ``table`` has the number of the row of ``rows`` that is equal to ``wanted``; 0 is there if it has none."""
    key = np.uint64(0)
    for i in range(len(wanted)):
        if wanted[i] != 0:
            key = (key ^ (np.uint64(wanted[i]) + np.uint64(i))) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
    slots = len(table) - 1
    slot = np.int64(key & np.uint64(slots))
    while table[slot] > 0:
        found = table[slot]
        i = 0
        while i < len(wanted) and rows[found, i] == wanted[i]:
            i += 1
        if i == len(wanted):
            break
        slot = (slot + 1) & slots
    return slot


@native
def find_set(tables, count):
    """The number of the set of the parts in the first rows of ``following``, without those whose texts another one has
    too; a new number if there is none. NO_ROOM if there is no room."""
    counts, sets, steps, about_sets = tables.counts, tables.sets, tables.steps, tables.about_sets
    table, parts, shapes = tables.set_table, tables.parts, tables.shapes
    wanted, following = tables.set, tables.following
    words = sets.shape[1]
    for w in range(words):
        wanted[w] = 0
    left, padding, wide, most = np.int32(NEVER), np.int32(NEVER), np.int32(0), np.int32(0)
    num_parts = 0
    is_whole, is_range = False, False
    counts[WORK] += min(count, MOST_COMPARED) * count
    for i in range(count):
        shape = following[i, 0]
        is_covered = False
        for j in range(count if count <= MOST_COMPARED else 0):
            if i == j or following[j, 0] != shape:
                continue
            is_equal, is_less = True, True
            for k in range(shapes[shape, NUM_REPEATS]):
                low, other_low = following[i, 1 + 2 * k], following[j, 1 + 2 * k]
                high, other_high = following[i, 2 + 2 * k], following[j, 2 + 2 * k]
                is_less = is_less and other_low <= low and high <= other_high
                is_equal = is_equal and other_low == low and high == other_high
            if is_less and (not is_equal or j < i):
                is_covered = True
                break
        if is_covered:
            continue
        num_parts += 1
        is_range = is_range or shape == TEXT_SHAPE
        is_whole = is_whole or (shape == TEXT_SHAPE and following[i, 1] == 0 and following[i, 2] == NO_BOUND)
        part = find_part(tables, following[i])
        if part == NO_ROOM:
            return np.int64(NO_ROOM)
        wanted[part >> 6] |= np.uint64(1) << np.uint64(part & 63)
        left = min(left, parts[part, LEFT])
        padding = min(padding, parts[part, PADDING])
        most = max(most, parts[part, MOST])
        wide |= shapes[shape, WIDE]
    slot = row_slot(table, sets, wanted)
    if table[slot] > 0:
        return np.int64(table[slot])
    number = counts[NUM_SETS]
    if number == counts[SETS_ROOM]:
        return np.int64(NO_ROOM)
    counts[NUM_SETS] = number + 1
    table[slot] = number
    for w in range(words):
        sets[number, w] = wanted[w]
    for b in range(256):
        steps[number, b] = NOT_MADE
    about_sets[number, S_LEFT], about_sets[number, S_PADDING] = left, padding
    about_sets[number, S_WIDE], about_sets[number, S_LACKED_IN] = wide, 0
    about_sets[number, S_MOST], about_sets[number, S_WHOLE] = most, is_whole
    about_sets[number, S_RANGE] = is_range and num_parts == 1
    return number


@native_part
def rule_of(tables, part):
    """The number of the part's rule; NO_RULE if it is missing, which is noted once."""
    counts, parts, bounds, shapes = tables.counts, tables.parts, tables.bounds, tables.shapes
    keys, values = tables.rule_keys, tables.rule_at
    lacking = tables.lacking
    key = rule_key(part, parts, bounds, shapes)
    at = rule_slot(keys, key)
    if keys[at] == -1 or values[at] == NO_RULE:
        if counts[NUM_LACKING] < len(lacking):
            keys[at], values[at] = key, ASKED
            lacking[counts[NUM_LACKING]] = key
            counts[NUM_LACKING] += 1
        return np.int64(NO_RULE)
    return np.int64(values[at]) if values[at] != ASKED else np.int64(NO_RULE)


@native_part
def members_of(tables, number):
    """How many parts a set has, whose numbers are written to ``members``. Negative if rules of some are missing; those
    are noted, each once."""
    counts, sets, about_sets = tables.counts, tables.sets, tables.about_sets
    members = tables.members
    found = 0
    is_whole = True
    for w in range((counts[NUM_PARTS] + 63) >> 6):
        bits = sets[number, w]
        part = w << 6
        while bits != 0:
            if bits & np.uint64(255) == 0:
                bits >>= np.uint64(8)
                part += 8
                continue
            if bits & np.uint64(1):
                members[found] = part
                found += 1
                is_whole = rule_of(tables, part) >= 0 and is_whole
            bits >>= np.uint64(1)
            part += 1
    if not is_whole:
        about_sets[number, S_LACKED_IN] = counts[ROUND]
    return found if is_whole else -1


@native_part
def follow(moves, m, bounds, part, shapes, row):
    """Write what a move leads to from a part to a row of ``following``."""
    shape = moves[m, M_SHAPE]
    row[0] = shape
    for k in range(shapes[shape, NUM_REPEATS]):
        at = M_BOUNDS + 4 * k
        source = moves[m, at + M_FROM]
        if source < 0:
            row[1 + 2 * k], row[2 + 2 * k] = moves[m, at + M_LOW], moves[m, at + M_HIGH]
            continue
        low, high = bounds[part, 2 * source], bounds[part, 2 * source + 1]
        if moves[m, at + M_LESS] != 0:
            low = max(low - 1, 0)
            high = high if high == NO_BOUND else high - 1
        row[1 + 2 * k], row[2 + 2 * k] = low, high


@native_part
def make_step(tables, number, byte):
    """The set after a byte, which is noted for all bytes that are alike; or one of the other steps."""
    counts, steps, parts, bounds = tables.counts, tables.steps, tables.parts, tables.bounds
    shapes, keys, values, rules = tables.shapes, tables.rule_keys, tables.rule_at, tables.rules
    moves, has_byte = tables.moves, tables.has_byte
    members, following, alike = tables.members, tables.following, tables.alike
    if counts[WORK] > counts[MOST_WORK]:
        return np.int64(NO_ROOM)
    num_members = members_of(tables, number)
    if num_members < 0:
        return np.int64(LACKS_RULES)
    count = np.int64(0)
    for b in range(256):
        alike[b] = 1
    for i in range(num_members):
        part = members[i]
        rule = values[rule_slot(keys, rule_key(part, parts, bounds, shapes))]
        first = rules[rule, 0]
        counts[WORK] += 1 + rules[rule, 1]
        for m in range(first, first + rules[rule, 1]):
            has = has_byte[moves[m, M_BYTES]]
            for b in range(256):
                alike[b] &= has[b] == has[byte]
            if has[byte] != 0:
                if count == len(following):
                    return np.int64(NO_ROOM)
                follow(moves, m, bounds, part, shapes, following[count])
                count += 1
    found = find_set(tables, count) if count > 0 else np.int64(REFUSED)
    if found != NO_ROOM:
        for b in range(256):
            if alike[b]:
                steps[number, b] = found
    return found


@native
def read_sets(tables, s, data, is_counted):
    """Follow the bytes ``data`` from a set, up to one that is refused or whose step is not told. Returns how many were
    followed, in whole characters if ``is_counted``, how many characters begin in them, and the set behind them."""
    steps = tables.steps
    size, count, after = np.int64(0), np.int64(0), np.int64(s)
    begun = missing = np.int64(0)
    s = np.int64(s)
    for at in range(len(data)):
        byte = np.int64(data[at])
        step = np.int64(steps[s, byte])
        if step == NOT_MADE:
            step = make_step(tables, s, byte)
        if step < 0:
            break
        s = step
        if byte >= 0xC0:
            missing = np.int64(1 + (byte >= 0xE0) + (byte >= 0xF0))
        elif byte >= 0x80:
            missing -= 1
        begun += byte < 0x80 or byte >= 0xC0
        if missing == 0 or not is_counted:
            size, count, after = np.int64(at + 1), begun, s
    return size, count, after


_NO, _YES = np.bool_(False), np.bool_(True)  # not literals, for which numba would compile a function once more


@native_part
def after_backslash(tables, number, may_be_any):
    """The characters of the shortest text that begins with an escape, of any character if it ``may_be_any``, else of
    one that needs it. NEVER for none; LACKS_RULES, NO_ROOM."""
    parts, bounds, shapes, keys = tables.parts, tables.bounds, tables.shapes, tables.rule_keys
    values, rules, moves = tables.rule_at, tables.rules, tables.moves
    kinds, members, following = tables.kinds, tables.members, tables.following
    num_members = members_of(tables, number)
    if num_members < 0:
        return np.int64(LACKS_RULES)
    found = np.int64(NEVER)
    for i in range(num_members):
        part = members[i]
        rule = values[rule_slot(keys, rule_key(part, parts, bounds, shapes))]
        for m in range(rules[rule, 0], rules[rule, 0] + rules[rule, 1]):
            has_escaped, has_ascii = kinds[moves[m, M_BYTES], 0], kinds[moves[m, M_BYTES], 1]
            if has_escaped == 0 and not may_be_any:
                continue
            follow(moves, m, bounds, part, shapes, following[0])
            to = find_part(tables, following[0])
            if to == NO_ROOM:
                return np.int64(NO_ROOM)
            found = min(found, np.int64(parts[to, LEFT]) + (1 if has_ascii else 0))  # else the rest has the character
    return found


@native
def walk_sets(
    node_byte, depths, ends, first, count, order, is_missing, escapes, tables, path, pending, is_free, is_counted, mask,
    needs, exits, out,
):  # fmt: skip
    """Walk the regions in ``pending`` [n, 4] (node, set, characters, place), node -1 for the whole trie.

    Returns the numbers of exits and of regions that are left, which are in ``out``: those where a rule is missing, and
    those at a ``u`` behind a backslash. The last is negative where there is no room for another set, or too much work.
    """
    counts, steps, about_sets = tables.counts, tables.steps, tables.about_sets
    num_exits = num_out = 0
    for p in range(len(pending)):
        node = np.int64(pending[p, 0])
        at = max(node, np.int64(0))
        end = len(node_byte) if node < 0 else np.int64(ends[at])
        if at >= end:
            continue
        base = np.int64(depths[at]) - 1
        path[base, 0], path[base, 1], path[base, 2] = pending[p, 1], pending[p, 2], pending[p, 3]
        while at < end:
            d = np.int64(depths[at])
            s, chars, place = path[d - 1, 0], path[d - 1, 1], path[d - 1, 2]
            byte = np.int64(node_byte[at])
            step, left = np.int64(REFUSED), np.int64(0)
            char = np.int64(-1)  # whose step is looked for
            if is_missing[byte] != 0 or (place != BEHIND_BACKSLASH and byte < 0x20):
                pass
            elif place == BEHIND_BACKSLASH:
                if byte == LETTER_U:
                    out[num_out, 0], out[num_out, 1], out[num_out, 2], out[num_out, 3] = at, s, chars, BEFORE_U
                    num_out += 1
                elif escapes[byte] != 0 and (byte != SLASH or (is_free and about_sets[s, S_WIDE] != 0)):
                    char = np.int64(escapes[byte])
            elif byte == QUOTE:
                if about_sets[s, S_PADDING] != NEVER:
                    exits[num_exits, 0], exits[num_exits, 1], exits[num_exits, 2] = at, 0, 1
                    exits[num_exits, 3], exits[num_exits, 4] = chars, about_sets[s, S_PADDING]
                    num_exits += 1
            elif byte == BACKSLASH:
                left = after_backslash(tables, s, _NO)
                step = left if left in (LACKS_RULES, NO_ROOM) else s
                if left == NEVER:
                    step = np.int64(REFUSED)
                elif step == s and is_free and about_sets[s, S_WIDE] != 0:
                    left = after_backslash(tables, s, _YES)
                    step = left if left in (LACKS_RULES, NO_ROOM) else s
                if step == s:
                    place = np.int64(BEHIND_BACKSLASH)
            else:
                char = byte
            if char >= 0:
                step = np.int64(steps[s, char])
                if step == NOT_MADE:
                    lacks = about_sets[s, S_LACKED_IN] == counts[ROUND]
                    step = np.int64(LACKS_RULES) if lacks else make_step(tables, s, char)
                if step >= 0:
                    s = step
                    left = np.int64(about_sets[s, S_LEFT])
                    if place == BEHIND_BACKSLASH:
                        place = np.int64(BETWEEN)
                    elif is_counted and byte >= 0xC0:
                        place = np.int64(2 + (byte >= 0xE0) + (byte >= 0xF0))
                    elif is_counted and byte >= 0x80:
                        place -= 1
                    if place == BETWEEN:
                        chars += is_counted
            if step >= 0:
                path[d, 0], path[d, 1], path[d, 2] = s, chars, place
                for i in range(first[at], first[at] + count[at]):
                    token = order[i]
                    mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
                    if is_counted:
                        needs[token] = np.uint16(max(min(chars + left, MAX_NEED), 0))
                at += 1
                continue
            if step == LACKS_RULES:
                out[num_out, 0], out[num_out, 1], out[num_out, 2], out[num_out, 3] = at, s, chars, place
                num_out += 1
            elif step == NO_ROOM:
                return num_exits, -1
            at = np.int64(ends[at])
    return num_exits, num_out
