"""Small automata of strings, made whole in compiled code.

Partial derivatives (Antimirov 1996) give the parts of an expression, the states of an automaton that may be in several
of them at once; compiled code then follows sets of parts (Rabin, Scott 1959). All languages that a string is asked are
followed together: their parts are told apart, so a set says which of the languages the string may still be in.
"""

from typing import NamedTuple

import numpy as np

from ..expressions import NOTHING, Expressions
from ..native_code import native, native_part
from .names import CLASS, PARENT, name_nodes

MAX_PARTS = 1024
MAX_STATES = 2048
MAX_WORK = 1 << 23  # steps of following sets: 6 ms
Condition = int | tuple  # the number of a language, ("not", condition) or ("and", conditions)


class Unsuitable(Exception):
    """The languages have parts of another kind, or too many."""


class Automaton(NamedTuple):
    """A deterministic automaton of S states, the first one at 0.

    ``after`` int32 [S, C]: the state after each class of bytes, -1 for none; ``class_of`` int64 [256]: a byte's class.
    ``sets`` uint64 [S, words]: the parts of each. ``has`` bool [languages, S]: whether a string that ends there is in
    each language. ``tags`` int32 [S]: the tag of the tagged word that ends there, -1 for none.
    """

    after: np.ndarray
    class_of: np.ndarray
    sets: np.ndarray
    has: np.ndarray
    tags: np.ndarray


class TextParts:
    """The parts of several languages, numbered."""

    def __init__(self, ex: Expressions) -> None:
        self.ex = ex
        self.exprs: list[int] = []  # of each part; -1: a node of the tagged words
        self.spans: list[tuple[int, int]] = []  # of the parts of each language
        self.whole: list[int] = []  # of each language the part that is every text; -1 if there is none
        self._languages: dict[int, int] = {}  # by expression
        self._moves: list[list[tuple[int, int]]] = []  # (bytes, part)
        self._tag_of: list[int] = []

    def add(self, expr: int) -> Condition:
        """The condition that a string is in the language. Raises Unsuitable."""
        node = self.ex.nodes[expr]
        if node[0] == "and":
            return ("and", tuple(self.add(part) for part in node[1:]))
        if node[0] == "not":
            return ("not", self.add(node[1]))
        known = self._languages.get(expr)
        if known is not None:
            return known
        first = len(self.exprs)
        numbers = {expr: first}
        self.exprs.append(expr)
        self._moves.append([])
        for at in range(first, MAX_PARTS + 1):
            if at == len(self.exprs):
                break
            moves = []
            form = self.ex.linear_form(self.exprs[at])
            if form is None:
                raise Unsuitable
            for bits, to in form:
                number = numbers.get(to)
                if number is None:
                    number = numbers[to] = len(self.exprs)
                    self.exprs.append(to)
                    self._moves.append([])
                moves.append((bits, number))
            self._moves[at] = moves
        else:
            raise Unsuitable
        self._tag_of += [-1] * (len(self.exprs) - first)
        self.spans.append((first, len(self.exprs)))
        self.whole.append(numbers.get(self.ex.text, -1))
        found = self._languages[expr] = len(self.spans) - 1
        return found

    def add_tagged(self, tags: dict[bytes, int]) -> int:
        """The number of the language of some words, each with a tag."""
        words = sorted(tags)
        lengths = np.array([len(word) for word in words], np.int64)
        nodes = name_nodes(b"".join(words), lengths, np.arange(len(words), dtype=np.int32))
        first = len(self.exprs)
        if first + len(nodes) > MAX_PARTS:
            raise Unsuitable
        self._moves += [[] for _ in range(len(nodes))]
        for n, (byte, parent) in enumerate(nodes[1:, : PARENT + 1].tolist(), 1):
            self._moves[first + parent].append((1 << byte, first + n))
        self._tag_of += [tags[words[cls - 1]] if cls else -1 for cls in nodes[:, CLASS].tolist()]
        self.exprs += [-1] * len(nodes)
        self.spans.append((first, len(self.exprs)))
        self.whole.append(-1)
        return len(self.spans) - 1

    def automaton(self, required: list[int]) -> Automaton:
        """Follow all languages together, as long as the string may still be in all that are ``required``.

        Raises Unsuitable.
        """
        num_parts = len(self.exprs)
        available = self.ex.available
        sets: dict[int, int] = {}
        begins, move_sets, move_to = [0], [], []
        for moves in self._moves:
            for bits, to in moves:
                move_sets.append(sets.setdefault(bits & available, len(sets)))
                move_to.append(to)
            begins.append(len(move_to))
        members = np.frombuffer(b"".join(bits.to_bytes(32, "little") for bits in sets), np.uint8).reshape(-1, 32)
        class_of, classes = byte_classes(np.unpackbits(members, axis=1, bitorder="little"))
        ends = np.zeros(num_parts, np.uint8)
        ends[[i for i, expr in enumerate(self.exprs) if (expr >= 0 and self.ex.nullable[expr])]] = 1
        tag_of = np.array(self._tag_of, np.int32)
        ends[tag_of >= 0] = 1
        masks = np.zeros((len(self.spans), (num_parts + 63) // 64), np.uint64)
        for mask, (first, last) in zip(masks, self.spans, strict=True):
            data = ((1 << last) - (1 << first)).to_bytes(8 * len(mask), "little")
            mask[:] = np.frombuffer(data, np.uint64)
        found, after = follow_sets(
            np.array(begins, np.int32),
            np.array(move_sets, np.int32),
            np.array(move_to, np.int32),
            *members_of_rows(classes),
            classes.shape[1],
            masks,
            np.array(self.whole, np.int32),
            np.array(required, np.int32),
            MAX_STATES,
            MAX_WORK,
        )
        if len(found) == 0:
            raise Unsuitable
        has, tags = endings(found, np.array(self.spans, np.int32), ends, tag_of)
        return Automaton(after, class_of, found, has, tags)

    def rest(self, language: int, parts: np.ndarray) -> int:
        """The expression of what may follow in one language, in a state with these parts."""
        first, last = self.spans[language]
        here = [self.exprs[i] for i in range(first, last) if int(parts[i >> 6]) >> (i & 63) & 1]
        return self.ex.union(*here) if here else NOTHING


def byte_classes(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each byte [256], such that sets hold all bytes of a class or none; which classes each set holds,
    uint8 [sets, classes]. ``members`` uint8 [sets, 256]."""
    columns = np.ascontiguousarray(np.packbits(members, axis=0).T)
    _, firsts, class_of = np.unique(
        columns.view(f"V{columns.shape[1]}").ravel(), return_index=True, return_inverse=True
    )
    return class_of.ravel(), np.ascontiguousarray(members[:, firsts])


def members_of_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the list of each row begins (int32 [rows + 1]) and the lists, one after the other, of the columns in which
    the row is not zero (int32)."""
    rows, columns = np.nonzero(table)
    return np.searchsorted(rows, np.arange(len(table) + 1)).astype(np.int32), columns.astype(np.int32)


@native_part
def _grown(rows):
    """The rows of a table, and room for three times as many more, which are zero.

    Element by element: numba takes long to compile an assignment to a slice.
    """
    more = np.zeros((4 * len(rows), rows.shape[1]), rows.dtype)
    for i in range(len(rows)):
        for j in range(rows.shape[1]):
            more[i, j] = rows[i, j]
    return more


@native
def follow_sets(
    begins, move_sets, move_to, class_begins, classes, num_classes, masks, wholes, required, most, work
):  # fmt: skip
    """The sets of parts that bytes lead to, uint64 [S, words], the first ones of all languages at 0, and the set after
    each class of bytes, int32 [S, classes]; -1 for none. Empty arrays for more than ``most`` sets or ``work`` steps.

    ``class_begins`` and ``classes``: the classes of each set of bytes, by ``members_of_rows``. ``masks`` uint64
    [languages, words]: the parts of each; ``wholes`` int32 [languages]: ``TextParts.whole``.
    """
    words = masks.shape[1]
    sets = np.zeros((256, words), np.uint64)
    after = np.zeros((256, num_classes), np.int32)
    slots = 4 * most - 1
    table = np.full(slots + 1, -1, np.int32)
    one = np.uint64(1)
    part = 0
    for i in range(len(masks)):
        while not masks[i, part >> 6] >> np.uint64(part & 63) & one:
            part += 1
        sets[0, part >> 6] |= one << np.uint64(part & 63)
    count = 1
    following = np.zeros((num_classes, words), np.uint64)
    followed = np.full(num_classes, -1, np.int32)  # the last set after which a part follows the class
    before = np.zeros(words, np.uint64)  # the parts of the class that was looked at before
    at = 0
    while at < count:
        work -= num_classes * words * (len(wholes) + len(required) + 2)
        for w in range(words):
            left = sets[at, w]
            part = w << 6
            while left:
                if left & one:
                    work -= num_classes * (begins[part + 1] - begins[part])
                    for i in range(begins[part], begins[part + 1]):
                        word, bit = move_to[i] >> 6, one << np.uint64(move_to[i] & 63)
                        for n in range(class_begins[move_sets[i]], class_begins[move_sets[i] + 1]):
                            c = classes[n]
                            if followed[c] != at:
                                followed[c] = at
                                for w in range(words):
                                    following[c, w] = 0
                            following[c, word] |= bit
                left >>= one
                part += 1
        if work < 0:
            return sets[:0].copy(), after[:0].copy()
        last = -1
        for c in range(num_classes):
            if followed[c] != at:
                if len(required):
                    after[at, c] = -1
                    continue
                for w in range(words):
                    following[c, w] = 0
            is_same = last >= 0  # mostly: few sets hold some classes and not others
            for w in range(words):
                is_same = is_same and following[c, w] == before[w]
            if is_same:
                after[at, c] = after[at, last]
                continue
            last = c
            for w in range(words):
                before[w] = following[c, w]
            key = np.uint64(0)
            for i in range(len(wholes)):
                whole = wholes[i]
                if whole >= 0 and following[c, whole >> 6] >> np.uint64(whole & 63) & one:
                    for w in range(words):
                        following[c, w] &= ~masks[i, w]
                    following[c, whole >> 6] |= one << np.uint64(whole & 63)
            is_dead = False
            for i in required:
                is_empty = True
                for w in range(words):
                    is_empty = is_empty and following[c, w] & masks[i, w] == 0
                is_dead = is_dead or is_empty
            if is_dead:
                after[at, c] = -1
                continue
            for w in range(words):
                key = (key ^ following[c, w]) * np.uint64(0x9E3779B97F4A7C15)
                key ^= key >> np.uint64(29)
            slot = np.int64(key & np.uint64(slots))
            while table[slot] >= 0:
                differs = np.uint64(0)
                for w in range(words):
                    differs |= sets[table[slot], w] ^ following[c, w]
                if differs == 0:
                    break
                slot = (slot + 1) & slots
            if table[slot] < 0:
                if count == most:
                    return sets[:0].copy(), after[:0].copy()
                if count == len(sets):
                    sets, after = _grown(sets), _grown(after)
                table[slot] = count
                for w in range(words):
                    sets[count, w] = following[c, w]
                count += 1
            after[at, c] = table[slot]
        at += 1
    return sets[:count].copy(), after[:count].copy()


@native
def endings(sets, spans, ends, tag_of):
    """``Automaton.has`` and ``Automaton.tags``; ``ends`` uint8 and ``tag_of`` int32 [parts]."""
    has = np.zeros((len(spans), len(sets)), np.uint8)
    tags = np.full(len(sets), -1, np.int32)
    for s in range(len(sets)):
        for i in range(len(spans)):
            for p in range(spans[i, 0], spans[i, 1]):
                if ends[p] and sets[s, p >> 6] >> np.uint64(p & 63) & np.uint64(1):
                    has[i, s] = 1
                    tags[s] = max(tags[s], tag_of[p])
    return has, tags


@native
def leading_on(after, is_end):
    """Whether a string can end after each state: ``is_end`` uint8 [S], of the states that it may end in, is written."""
    changes = True
    while changes:
        changes = False
        for s in range(len(after) - 1, -1, -1):
            if is_end[s] == 0:
                for to in after[s]:
                    if to >= 0 and is_end[to]:
                        is_end[s] = 1
                        changes = True
                        break
    return is_end


@native
def reached(after, is_alive, is_exit):
    """Which states are reached from the first one over states that are alive and no exits, uint8 [S]."""
    found = np.zeros(len(after), np.uint8)
    todo = np.zeros(len(after), np.int32)
    found[0] = 1
    count = 1
    at = 0
    while at < count:
        s = todo[at]
        at += 1
        if is_exit[s]:
            continue
        for to in after[s]:
            if to >= 0 and is_alive[to] and not found[to]:
                found[to] = 1
                todo[count] = to
                count += 1
    return found


@native
def moves_between(after, numbers, codes, quotes, backslashes):
    """``begins`` and ``moves`` of ``Machine.add_sparse_states`` for the states whose ``numbers`` are given.

    ``codes`` int32 [S]: the row code of each state, 0 for none; ``quotes`` and ``backslashes``: those of a quote and of
    a backslash after each.
    """
    begins = np.zeros(len(numbers) + 1, np.int32)
    moves = np.zeros((1024, 3), np.int32)
    count = 0
    for n in range(len(numbers)):
        s = numbers[n]
        low = 0x20
        while low < 256:
            high = low + 1
            if low == 0x22:
                code = quotes[s]
            elif low == 0x5C:
                code = backslashes[s]
            else:
                to = after[s, low]
                code = codes[to] if to >= 0 else np.int32(0)
                while high < 256 and high != 0x22 and high != 0x5C and after[s, high] == to:
                    high += 1
            if code > 0:
                if count == len(moves):
                    moves = _grown(moves)
                moves[count, 0], moves[count, 1], moves[count, 2] = low, high, code
                count += 1
            low = high
        begins[n + 1] = count
    return begins, moves[:count].copy()
