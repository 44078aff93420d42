"""The states of JSON strings, numbers and literals.

``must`` is the language that the value has to be in. ``observers`` are further languages: the value's result has a bit
for each of them that the value is in.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from ..code_points import ANY, Ranges, intersection
from ..expressions import NO_TEXT, NOTHING, Expressions
from ..machine import DEAD_STATE, MAX_NEED, UNBOUNDED, Fill, Machine, Recent, StringText
from ..prefixes import TokenReach, contains_all_texts_of
from ..tables import PART_BITS
from ..token_parts import SHORT_TOKEN
from .names import name_nodes, trie_moves
from .text_automaton import Condition, TextParts, Unsuitable, leading_on, moves_between, reached

QUOTE, BACKSLASH, SLASH = 0x22, 0x5C, 0x2F
SHORT_ESCAPES = {0x22: 0x22, 0x5C: 0x5C, 0x62: 8, 0x66: 12, 0x6E: 10, 0x72: 13, 0x74: 9}
SHORT_CODES = frozenset(SHORT_ESCAPES.values())
ESCAPED: Ranges = ((0, 0x1F), (QUOTE, QUOTE), (BACKSLASH, BACKSLASH))  # characters that cannot stand for themselves
HEX = {ord(c): c.lower() for c in "0123456789abcdefABCDEF"}
MAX_LISTED_BYTES = 1 << 16  # of words whose states are made together
PLAIN_BYTES = bytes(b for b in range(0x20, 0x100) if b not in b'"\\')  # of characters that need no escape
MOST_COUNTED_WHOLE = 8  # with larger counts, masks are made from those of smaller ones
LOWER_HEX = {ord(c): c for c in "0123456789abcdef"}
NUM_CHARS = sum(last - first + 1 for first, last in ANY)
_CharMoves = Iterator[tuple[int, int, int]]  # (first, last, to): characters lead to an expression


class Spelling(NamedTuple):
    """How a string is written and read.

    ``tagged``: the number of names in the first observer, which ``one_of_tagged`` made; -1: it is like the others.
    """

    free: bool  # it may use every escape
    counted: int = 0  # 1: its characters are counted; n > 1: n - 1 bytes of a character are missing
    tagged: int = -1


class Scalars:
    """The states of scalar values on one machine.

    Listed strings and property names are spelled one way only; where any character may follow, a string may use every
    escape of the standard.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.ex = machine.expressions
        self._reach = machine.reach
        self._short_reach = TokenReach(self.ex, machine.vocabulary, most_bytes=SHORT_TOKEN)
        self._by_rest: dict[tuple[int, int], int] = {}  # see ``_after_any``
        self._by_control: Recent[tuple[int, ...], list[tuple[int, ...]]] = Recent(64)
        self._counted: dict[int, tuple[int, int, int | None] | None] = {}  # ``Expressions.counted``
        self._wholes: dict[tuple[tuple[int, ...], Spelling], int] = {}
        text = (self.ex.text,)
        self.free_text = self._string(text, Spelling(free=True))
        self.key_text = self._string(text, Spelling(free=False))
        self._whole((self.ex.bytes_in(1 << ord("a")),), Spelling(free=False))  # loads compiled functions

    # -- strings --------------------------------------------------------------------------------------------------

    def string(self, must: int, observers: tuple[int, ...] = ()) -> int:
        """The row code of the opening quote of a string value; 0 if no text is in ``must``."""
        if not self.ex.is_nonempty(must):
            return 0
        answers = tuple([self._answer(must, observer) for observer in observers])
        asked = tuple(dict.fromkeys([o for o, answer in zip(observers, answers, strict=True) if answer is None]))
        places = tuple([asked.index(o) if a is None else a for o, a in zip(observers, answers, strict=True)])
        free = self.ex.words_of(must) is None
        if not asked:
            counted = self._counted[must] if must in self._counted else self.ex.counted(must)
            self._counted[must] = counted
            if counted is not None and (counted[2] is None or counted[2] <= MAX_NEED):
                must, low, high = counted
                if low or high is not None:
                    return self._counted_string(must, low, UNBOUNDED if high is None else high, places)
        inside = self._begin((must, *asked), Spelling(free))
        if asked:
            self.machine.told_apart[inside] = asked
        return inside if asked == observers or (True not in places and not asked) else self._answered(inside, places)

    def _answer(self, must: int, observer: int) -> bool | None:
        """Whether all strings in ``must`` are in the observer, or none is; None where that depends on the string, or is
        not known."""
        if observer == NOTHING:
            return False
        node = self.ex.nodes[must]
        return True if observer in (must, self.ex.text) or (node[0] == "and" and observer in node[1:]) else None

    def _answered(self, inside: int, places: tuple[int, ...]) -> int:
        """The row code that goes inside a string whose result has a bit for each of ``places``: the bit of that number
        in the result within, or True or False."""
        machine = self.machine

        def returns(result: int) -> int:
            within = machine.bits(result)
            bits = sum(1 << i for i, at in enumerate(places) if (at if isinstance(at, bool) else within >> at & 1))
            return machine.end_state(machine.result(bits))

        decides = not all(isinstance(at, bool) for at in places)
        frame = machine.frame(("answered", *map(str, places)), lambda: machine.add_frame(returns, decides=decides))
        return machine.push(frame, inside)

    def _counted_string(self, must: int, low: int, high: int, places: tuple[int, ...]) -> int:
        machine = self.machine
        bits = sum(1 << i for i, at in enumerate(places) if at)
        end = machine.end_state(machine.result(bits))
        frame = machine.frame(
            ("length", low, high, bits), lambda: machine.add_frame(lambda result: end, low=low, high=high)
        )
        return machine.push(frame, self._string((must,), Spelling(free=True, counted=1)))

    def key(self, must: int, names: int, patterns: tuple[int, ...]) -> int:
        """The state after the opening quote of a property name.

        ``names`` is ``one_of_tagged``. The result is the class of the name: the tag + 1 of a listed name; for another
        one the number of listed names plus the bits of the patterns that it matches, or 0 if it matches none.
        """
        spelling = Spelling(free=False, tagged=len(self.ex.words_of(names) or ()))
        return self._begin((must, names, *patterns), spelling)

    def _begin(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        """The state after the opening quote. The states of a list of words that are spelled as they are are a trie."""
        words = self.ex.words_of(exprs[0]) or ()
        whole = b"".join(words)
        if not 0 < len(whole) <= MAX_LISTED_BYTES or whole.translate(None, PLAIN_BYTES):
            return self._whole(exprs, spelling) or self._string(exprs, spelling)
        machine = self.machine

        def fill(row: np.ndarray) -> None:
            if machine.num_states + len(whole) > machine.hard_limit * 3 // 4:
                self._fill_string(exprs, spelling, row)
                return
            if len(exprs) == 1:
                ends = np.full(len(words), machine.end_state(0), np.int32)
            else:
                ends = np.array(
                    [machine.end_state(result) for result in self._results_of(words, exprs, spelling)], np.int32
                )
            lengths = np.array([len(word) for word in words], np.int64)
            nodes = name_nodes(whole, lengths, np.arange(len(words), dtype=np.int32))
            start = machine.add_sparse_states(len(nodes), lambda first: trie_moves(nodes, first, ends), DEAD_STATE)
            row[:] = machine.row(start)

        return machine.state(("words", exprs, spelling), lambda: machine.add_state(fill))

    def _whole(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        """The state after the opening quote, whose states are an automaton that compiled code makes as a whole; 0 where
        ``_string`` makes them one by one, because there are too many or they share masks."""
        found = self._wholes.get((exprs, spelling))
        if found is None:
            found = 0
            node = self.ex.nodes[exprs[0]]
            joined = node[1:] if spelling.free and node[0] == "and" else ()
            if (
                all(map(self._is_small, (*exprs, *joined)))
                and self.ex.words_of(exprs[0]) is None
                and not (spelling.free and self._any_next(exprs))
            ):
                with suppress(Unsuitable):
                    found = self._make_whole(exprs, spelling)
            self._wholes[exprs, spelling] = found
        return found

    def _is_small(self, expr: int) -> bool:
        return self._reach.largest_count(expr) <= MOST_COUNTED_WHOLE and self._reach.without_far_bounds(expr) == expr

    def _make_whole(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        ex, machine, tagged = self.ex, self.machine, spelling.tagged
        parts = TextParts(ex)
        must = parts.add(exprs[0])
        names = parts.add_tagged(self._tags(exprs[1])) if tagged >= 0 else -1
        watched = [parts.add(e) for e in exprs[1 if tagged < 0 else 2 :]]
        after, class_of, sets, has, tags = parts.automaton(_positive(must))
        is_end = evaluated(must, has)
        is_alive = leading_on(after, is_end.astype(np.uint8))
        if not is_alive[0] or machine.num_states + len(after) > machine.hard_limit * 3 // 4:
            raise Unsuitable

        is_text = np.array([_has_any(sets, [whole] if whole >= 0 else []) for whole in parts.whole])
        is_exit = np.zeros(len(sets), bool)  # where every text may follow: these states are those of other strings too
        if spelling.free:
            is_exit = np.ones(len(sets), bool)
            for language in _positive(must):
                wide = [
                    i for i in range(*parts.spans[language]) if (contains_all_texts_of(ex, parts.exprs[i]) or 0) >= 1
                ]
                is_exit &= _has_any(sets, wide)
        elif tagged >= 0 and all(isinstance(w, int) for w in watched):
            is_empty = np.array([~_has_any(sets, list(range(*span))) for span in parts.spans])
            is_exit = evaluated(must, is_text, is_empty) & is_empty[names]
            for observer in watched:
                is_exit &= is_text[observer] | is_empty[observer]
        if is_exit[0]:
            raise Unsuitable
        is_met = reached(after, is_alive, is_exit).astype(bool)
        codes = np.zeros(len(sets), np.int32)
        for s in np.flatnonzero(is_met & is_exit).tolist():
            rests = [_rest(ex, parts, condition, sets[s]) for condition in (must, *watched)]
            codes[s] = self._string((rests[0], *([NOTHING] if tagged >= 0 else []), *rests[1:]), spelling)

        bits = np.zeros(len(sets), np.int64)
        for i, observer in enumerate(watched):
            bits |= evaluated(observer, has).astype(np.int64) << i
        if tagged >= 0:
            bits = np.where(tags >= 0, tags + 1, np.where(bits > 0, bits + tagged, 0))
        quotes = np.zeros(len(sets), np.int32)
        for result in np.unique(bits[is_end]).tolist():
            quotes[is_end & (bits == result)] = machine.end_state(machine.result(result))
        numbers = np.flatnonzero(is_met & ~is_exit).astype(np.int32)
        is_all = np.zeros(len(numbers), bool)
        if (contains_all_texts_of(ex, exprs[0]) or 0) >= SHORT_TOKEN and not spelling.free:
            is_all = np.any([is_text[language][numbers] for language in _positive(must)], axis=0)
        after[~is_met[after]] = -1
        return self._add_whole(after[:, class_of], numbers, codes, quotes, is_all)

    def _add_whole(
        self, after: np.ndarray, numbers: np.ndarray, codes: np.ndarray, quotes: np.ndarray, is_all: np.ndarray
    ) -> int:
        """The first of the new states that stand for ``numbers`` of an automaton's states.

        ``after``: see ``Automaton``; -1 where nothing may follow. ``codes``: the row codes of its other states.
        ``quotes``: those after a quote. ``is_all``: whether any text may follow.
        """
        machine = self.machine
        backslashes = np.zeros(len(after), np.int32)
        after_escapes = np.ascontiguousarray(after[:, [*range(0x20), QUOTE, BACKSLASH]])
        made: dict[bytes, int] = {}
        for s in numbers[(after_escapes[numbers] >= 0).any(axis=1)].tolist():
            key = after_escapes[s].tobytes()
            code = made.get(key)
            if code is None:
                code = made[key] = self._escaped_in(after_escapes[s], codes)
            backslashes[s] = code

        def moves_of(first: int) -> tuple[np.ndarray, np.ndarray]:
            codes[numbers] = np.arange(first, first + len(numbers))
            return moves_between(after, numbers, codes, quotes, backslashes)

        first = machine.add_sparse_states(len(numbers), moves_of, DEAD_STATE)
        machine.recurring[first : first + len(numbers)] = bytes([1]) * len(numbers)
        machine.inside_string[first : first + len(numbers)] = np.where(is_all, self.key_text, 0)
        return first

    def _escaped_in(self, after: np.ndarray, codes: np.ndarray) -> int:
        """The state after a backslash. ``codes[after[i]]`` is that after character i: the 32 control characters, the
        quote and the backslash."""

        def to(at: int) -> int:
            return int(codes[after[at]]) if after[at] >= 0 else 0

        def fill(row: np.ndarray) -> None:
            for byte, char in SHORT_ESCAPES.items():
                row[byte] = to(char if char < 0x20 else 0x20 if char == QUOTE else 0x21)
            longer = {b"%04x" % c: to(c) for c in range(0x20) if c not in SHORT_CODES and to(c)}
            row[ord("u")] = self._one_of_digits(longer, detour=True) if longer else 0

        return self.machine.add_state(fill, detour=True)

    def _one_of_digits(self, words: dict[bytes, int], *, detour: bool = False) -> int:
        """The state before one of some words of equal length, each with the state after it."""
        if b"" in words:
            return words[b""]

        def fill(row: np.ndarray) -> None:
            for byte in {word[0] for word in words}:
                row[byte] = self._one_of_digits({word[1:]: to for word, to in words.items() if word[0] == byte})

        return self.machine.add_state(fill, detour=detour)

    def _tags(self, names: int) -> dict[bytes, int]:
        """The tags of the words that ``one_of_tagged`` was given."""
        found = {}
        for tagged in self.ex.words_of(names) or ():
            cut = tagged.rindex(b'"', 0, -1)
            found[tagged[:cut]] = int(tagged[cut + 1 : -1])
        return found

    def _results_of(self, words: tuple[bytes, ...], exprs: tuple[int, ...], spelling: Spelling) -> list[int]:
        """The result of a string for each of the words that it may be. It takes as long as the observers that are lists
        of words are together, and a question of each word for each other observer."""
        ex, tagged = self.ex, spelling.tagged
        bits = dict.fromkeys(words, 0)
        for i, observer in enumerate(exprs[1:] if tagged < 0 else exprs[2:]):
            listed = ex.words_of(observer)
            met = bits.keys() & listed if listed is not None else [w for w in words if ex.matches(observer, w)]
            for word in met:
                bits[word] |= 1 << i
        if tagged < 0:
            return [self.machine.result(found) for found in bits.values()]
        tags = self._tags(exprs[1])
        return [
            self.machine.result(tags[word] + 1 if word in tags else found and tagged + found)
            for word, found in bits.items()
        ]

    def _string(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        """The state inside a string."""
        if exprs[0] == NOTHING:
            return 0
        machine = self.machine

        def make() -> int:
            if not spelling.counted and self.ex.words_of(exprs[0]) is not None:
                return machine.add_state(partial(self._fill_string, exprs, spelling))
            is_base = False
            fits = None if spelling.counted else contains_all_texts_of(self.ex, exprs[0])
            base = 0
            if fits is not None and fits >= SHORT_TOKEN:
                is_base = exprs == (self.ex.text,)
                base = 0 if is_base else (self.free_text if spelling.free else self.key_text)
            loops = not spelling.counted and all(e in (NOTHING, self.ex.text) for e in exprs)
            state = machine.add_state(
                partial(self._fill_string, exprs, spelling),
                counted=min(spelling.counted, 2),
                left=(self.ex.shortest(exprs[0]) or 0) if spelling.counted else 0,
                padding=(self.ex.least_padding(exprs[0]) or 0) if spelling.counted else 0,
                inside_string=base,
                loops=loops and exprs[0] == self.ex.text,
                recurs=True,
                step=partial(self._step, exprs, spelling),
                apart=any(not self.ex.is_plain[e] and not self.ex.has_moves(e) for e in exprs),
            )
            if is_base:
                machine.inside_string[state] = state
            if not spelling.counted:
                machine.strings[state >> PART_BITS][state] = exprs[0]
            self._tell_apart(state, exprs, spelling)
            machine.settle_later(state, partial(self._settle, exprs, spelling, state))
            return state

        return machine.state(("string", exprs, spelling), make)

    def _settle(self, exprs: tuple[int, ...], spelling: Spelling, state: int) -> None:
        """Name the states that allow the same tokens as the state of a string. Most states are passed within a token
        and need none."""
        machine = self.machine
        machine.set_short_twin(state, lambda: self._short_twin(exprs, spelling))
        if len(exprs) == 1 and spelling.counted <= (1 if self.ex.is_plain[exprs[0]] else 0):
            machine.string_texts[state] = self._text(exprs[0], spelling)
        near, owed = _near(self._reach, exprs, spelling)
        if near != exprs:
            machine.set_twin(state, lambda: self._string(near, spelling), owed=owed)
        elif self._reach.has_large_counts(exprs):
            machine.set_stand_ins(state, lambda: self._stand_ins(exprs, spelling))

    def _text(self, expr: int, spelling: Spelling, *, is_escaping: bool = False) -> StringText:
        return StringText(
            expr, spelling.free, spelling.counted == 1, lambda expr: self._string((expr,), spelling), is_escaping
        )

    def _short_twin(self, exprs: tuple[int, ...], spelling: Spelling) -> tuple[int, int]:
        near, owed = _near(self._short_reach, exprs, spelling)
        return self._string(near, spelling), owed

    def _stand_ins(self, exprs: tuple[int, ...], spelling: Spelling) -> Iterator[tuple[int, int, int]]:
        for lower, upper, owed in self._reach.stand_ins(exprs):
            yield self._string(lower, spelling), self._string(upper, spelling), owed

    def _step(self, exprs: tuple[int, ...], spelling: Spelling, byte: int) -> tuple[int, int, int]:
        """Entries of the row of a string's state; see ``Machine.add_state``."""
        if byte < 0x20:
            return 1, 0x20, 0
        if byte == QUOTE:
            return QUOTE, QUOTE + 1, self._quote(exprs, spelling)
        if byte == BACKSLASH:
            return BACKSLASH, BACKSLASH + 1, self._escape(exprs, spelling) if self._may_escape(exprs[0]) else 0
        low, high = self.ex.class_of(byte, *exprs)
        low = max(low, 0x20, *(special + 1 for special in (QUOTE, BACKSLASH) if special < byte))
        high = min(high, *(special for special in (QUOTE, BACKSLASH) if special > byte), 256)
        return low, high, self._string(self._derive(exprs, bytes([byte])), _after(spelling, byte))

    def _may_escape(self, must: int) -> bool:
        """Whether a character may come first that cannot stand for itself."""
        ex = self.ex
        ranges = [(QUOTE, QUOTE + 1), (BACKSLASH, BACKSLASH + 1), *ex.classes(must)]
        firsts = (ex.available_in(lo, min(hi, 0x20) if lo < 0x20 else hi) for lo, hi in ranges)
        return any(ex.is_nonempty(ex.derive(must, b)) for b in firsts if 0 <= b < 0x20 or b in (QUOTE, BACKSLASH))

    def _quote(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        """The state after a quote; 0 where the string may not end."""
        ex, tagged = self.ex, spelling.tagged
        if not (ex.least_padding(exprs[0]) is not None if spelling.counted else ex.nullable[exprs[0]]):
            return 0
        bits = 0
        for i, e in enumerate(exprs[1:] if tagged < 0 else exprs[2:]):
            bits |= ex.nullable[e] << i
        if tagged >= 0:
            tag = _tag_here(ex, exprs[1])
            bits = tag + 1 if tag >= 0 else tagged + bits if bits else 0
        return self.machine.end_state(self.machine.result(bits))

    def _moves(self, exprs: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """The ranges [lo, hi) of bytes that may follow, with the derivatives by each of them."""
        ex = self.ex
        others = exprs[1:]
        classes = ex.classes(*others) if others else []
        at = 0
        for lo, hi, must in ex.moves(exprs[0]):
            if not ex.is_nonempty(must):
                continue
            if not others:
                yield lo, hi, (must,)
                continue
            while classes[at][1] <= lo:
                at += 1
            for i in range(at, len(classes)):
                a, b = classes[i]
                if a >= hi:
                    break
                a, b = max(a, lo), min(b, hi)
                byte = ex.available_in(a, b)
                if byte >= 0:
                    yield a, b, (must, *[ex.derive(e, byte) for e in others])

    def _derive(self, exprs: tuple[int, ...], data: bytes) -> tuple[int, ...]:
        ex = self.ex
        for byte in data:
            must = ex.alive(ex.derive(exprs[0], byte))
            if must == NOTHING:
                return (NOTHING,)
            exprs = (must, *[ex.derive(e, byte) for e in exprs[1:]])
        return exprs

    def _fill_string(self, exprs: tuple[int, ...], spelling: Spelling, row: np.ndarray) -> None:
        may_escape = False
        made: dict[tuple[tuple[int, ...], Spelling], int] = {}
        for lo, hi, to in self._moves(exprs):
            if lo < 0x20 or lo <= QUOTE < hi or lo <= BACKSLASH < hi:
                may_escape = True
            if hi > 0x20:
                key = to, _after(spelling, lo)
                state = made.get(key)
                if state is None:
                    state = made[key] = self._string(*key)
                row[max(lo, 0x20) : hi] = state
        row[BACKSLASH] = 0
        row[QUOTE] = self._quote(exprs, spelling)
        if may_escape:
            row[BACKSLASH] = self._escape(exprs, spelling)

    def _any_next(self, exprs: tuple[int, ...]) -> bool:
        run = contains_all_texts_of(self.ex, exprs[0])
        return run is not None and run >= 1

    def _escape(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        """The state after a backslash."""
        free = spelling.free and self._any_next(exprs)
        machine = self.machine

        def fill(row: np.ndarray) -> None:
            controls = self._controls(exprs)
            for byte, code in SHORT_ESCAPES.items():
                to = controls[code] if code < 0x20 else self._derive(exprs, bytes([code]))
                if to[0] != NOTHING:
                    row[byte] = self._string(to, spelling)
            if free:
                row[SLASH] = self._string(self._derive(exprs, b"/"), spelling)
            row[ord("u")] = self._code_point(exprs, spelling, free, "")

        def make() -> int:
            is_joint = len(exprs) == 1 and not spelling.counted and not self.ex.is_plain[exprs[0]]
            codes = ANY if free else ESCAPED
            state = self._within_escape(fill, exprs, spelling, codes, detour=True, recurs=is_joint)
            machine.escape_left[state] = 1
            if is_joint:
                machine.string_texts[state] = self._text(exprs[0], spelling, is_escaping=True)
            return state

        return machine.state(("escape", exprs, spelling), make)

    def _within_escape(
        self,
        fill: Fill,
        exprs: tuple[int, ...],
        spelling: Spelling,
        codes: Ranges,
        *,
        detour: bool,
        recurs: bool = False,
    ) -> int:
        """A new state in the escape of one of the characters ``codes``."""
        left = self.left_after(exprs[0], codes) if spelling.counted else 0
        counted = 2 if spelling.counted else 0
        state = self.machine.add_state(fill, counted=counted, left=left, detour=detour, recurs=recurs)
        self._tell_apart(state, exprs, spelling)
        return state

    def _tell_apart(self, state: int, exprs: tuple[int, ...], spelling: Spelling) -> None:
        """Note which observers the rest of the string still decides."""
        if len(exprs) > 1 and spelling.tagged < 0:
            self.machine.told_apart[state] = tuple([e for e in exprs[1:] if e not in (NOTHING, self.ex.text)])

    def left_after(self, must: int, codes: Ranges) -> int:
        """The number of characters of the shortest text that begins with one of ``codes``."""
        ex = self.ex
        if must == ex.text:
            return 1
        if sum([last - first + 1 for first, last in codes]) == NUM_CHARS:
            # behind the first byte of several, the rest has the character
            return min(((ex.shortest(to) or 0) + (lo < 0x80) for lo, _, to in ex.moves(must)), default=NO_TEXT)
        found, least = NO_TEXT, max(ex.shortest(must) or 0, 1)
        for first, last in codes:
            for _, _, to in self.after_chars(must, first, last):
                found = min(found, (ex.shortest(to) or 0) + 1)
                if found == least:
                    return found
        return found

    def same_after(self, expr: int, first: int, last: int) -> int:
        """The expression after each of the characters from ``first`` to ``last``; -1 if they differ."""
        found, at = -1, first
        for begin, end, to in self.after_chars(expr, first, last):
            if begin > at or found not in (-1, to):
                return -1
            found, at = to, end + 1
        return NOTHING if found == -1 else found if at > last else -1

    def after_chars(self, expr: int, first: int, last: int) -> _CharMoves:
        """The characters from ``first`` to ``last`` that may come first, in order, with the expression after each."""
        for lo, hi, to in self.ex.moves(expr):
            missing = 0 if lo < 0x80 else 1 if lo < 0xE0 else 2 if lo < 0xF0 else 3
            base = lo if missing == 0 else (lo & (0x3F >> missing)) << 6 * missing
            yield from self._after_rest(to, missing, base, hi - lo, first, last)

    def _after_rest(self, expr: int, missing: int, base: int, count: int, first: int, last: int) -> _CharMoves:
        """As ``after_chars``, behind each of ``count`` bytes in a row, where ``missing`` bytes of a character follow;
        ``base`` is the first character behind the first one."""
        width = 1 << 6 * missing
        end = base + count * width - 1
        if base > last or end < first:
            return
        to = self._after_any(expr, missing)
        if to != -1:
            yield max(base, first), min(end, last), to
            return
        unit = width >> 6
        for at in range(base + max(first - base, 0) // width * width, min(end, last) + 1, width):
            for lo, hi, rest in self.ex.moves(expr):
                yield from self._after_rest(rest, missing - 1, at + (lo & 0x3F) * unit, hi - lo, first, last)

    def _after_any(self, expr: int, missing: int) -> int:
        """The expression after any ``missing`` bytes of a character; -1 if that depends on them."""
        if not missing:
            return expr
        found = self._by_rest.get((expr, missing))
        if found is None:
            moves = self.ex.moves(expr)
            is_any = len(moves) == 1 and moves[0][:2] == (0x80, 0xC0)
            found = self._by_rest[expr, missing] = self._after_any(moves[0][2], missing - 1) if is_any else -1
        return found

    def _controls(self, exprs: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The derivatives by each control character."""
        found = self._by_control.get(exprs)
        if found is None:
            found = [(NOTHING,)] * 0x20
            for lo, hi, to in self._moves(exprs):
                if lo >= 0x20:
                    break
                for byte in range(lo, min(hi, 0x20)):
                    if self.ex.available >> byte & 1:
                        found[byte] = to
            self._by_control.put(exprs, found)
        return found

    def _code_point(self, exprs: tuple[int, ...], spelling: Spelling, free: bool, digits: str) -> int:
        r"""The state after ``\u`` and ``digits``, which for a surrogate pair hold the second ``\u`` too; 0 if none."""
        machine = self.machine
        codes = _codes(digits)
        if not free:
            controls = self._controls(exprs)
            found = [c for c in range(0x20) if controls[c][0] != NOTHING and c not in SHORT_CODES]
            codes = intersection(codes, tuple((c, c) for c in found))
        if not codes:
            return 0
        is_high = digits[:2] in ("d8", "d9", "da", "db")
        if (len(digits) == 4 and not is_high) or len(digits) == 10:
            to = self._derive(exprs, chr(codes[0][0]).encode())
            return self._string(to, spelling)

        if free and len(codes) == 1 and digits[:1] != "d":
            after = tuple([self.same_after(e, *codes[0]) for e in exprs])
            if -1 not in after:
                return self._any_code_point((self.ex.alive(after[0]), *after[1:]), spelling, 4 - len(digits))

        def fill(row: np.ndarray) -> None:
            if len(digits) in (4, 5):
                byte = b"\\u"[len(digits) - 4]
                row[byte] = self._code_point(exprs, spelling, free, digits + chr(byte))
                return
            for byte, digit in (HEX if free else LOWER_HEX).items():
                row[byte] = self._code_point(exprs, spelling, free, digits + digit)

        def make() -> int:
            state = self._within_escape(fill, exprs, spelling, codes, detour=not digits)
            machine.escape_left[state] = (10 if is_high else 4) - len(digits)
            return state

        return machine.state(("code point", exprs, spelling, free, digits), make)

    def _any_code_point(self, to: tuple[int, ...], spelling: Spelling, missing: int) -> int:
        """The state before the last ``missing`` hexadecimal digits of a character, each of which leads to ``to``."""
        if to[0] == NOTHING or not missing:
            return self._string(to, spelling)
        machine = self.machine

        def make() -> int:
            left = (self.ex.shortest(to[0]) or 0) + 1 if spelling.counted else 0
            state = machine.add_state(fill, counted=2 if spelling.counted else 0, left=left)
            machine.escape_left[state] = missing
            return state

        def fill(row: np.ndarray) -> None:
            row[list(HEX)] = self._any_code_point(to, spelling, missing - 1)

        return machine.state(("any code point", to, spelling, missing), make)

    # -- numbers --------------------------------------------------------------------------------------------------

    def fill_number(self, row: np.ndarray, must: int, observers: tuple[int, ...]) -> None:
        """Write the codes of a number's next byte into the row of a state."""
        ex = self.ex
        exprs = (must, *observers)
        for lo, hi in ex.classes(*exprs):
            byte = ex.available_in(lo, hi)
            if byte >= 0:
                to = self._derive(exprs, bytes([byte]))
                if to[0] != NOTHING:
                    row[lo:hi] = self._number(to)

    def _number(self, exprs: tuple[int, ...]) -> int:
        ex, machine = self.ex, self.machine

        def make() -> int:
            ends = -1
            if ex.nullable[exprs[0]]:
                ends = machine.result(sum(1 << i for i, e in enumerate(exprs[1:]) if ex.nullable[e]))
            state = machine.add_state(lambda row: self.fill_number(row, exprs[0], exprs[1:]), ends=ends, recurs=True)
            near = tuple([self._reach.without_far_bounds(e) for e in exprs])
            if near != exprs:
                machine.set_twin(state, lambda: self._number(near))
            return state

        return machine.state(("number", exprs), make)


def _near(reach: TokenReach, exprs: tuple[int, ...], spelling: Spelling) -> tuple[tuple[int, ...], int]:
    """Expressions that allow the same tokens, and what they owe (``TokenReach``)."""
    if spelling.counted:
        first, owed = reach.near_and_owed(exprs[0])
        return (first,), owed
    return (reach.without_far_bounds(exprs[0]), *map(reach.observed, exprs[1:])), 0


def _after(spelling: Spelling, byte: int) -> Spelling:
    """How a string goes on after a byte of itself."""
    if not spelling.counted or (byte < 0x80 and spelling.counted == 1):
        return spelling
    counted = spelling.counted - 1 if byte < 0xC0 else 2 + (byte >= 0xE0) + (byte >= 0xF0)
    return Spelling(spelling.free, counted, spelling.tagged)


def _codes(digits: str) -> Ranges:
    r"""The characters whose ``\u`` escape begins with ``digits``, in lower case."""
    first, last = (int(digits[:4].ljust(4, digit), 16) for digit in "0f")
    plain = intersection(((first, last),), ((0, 0xD7FF), (0xE000, 0xFFFF)))
    first, last = max(first, 0xD800), min(last, 0xDBFF)
    if first > last:
        return plain
    low = [int(digits[6:].ljust(4, digit), 16) for digit in "0f"]
    low = [max(low[0], 0xDC00), min(low[1], 0xDFFF)]
    if low[0] > low[1]:
        return plain
    return (
        *plain,
        (0x10000 + (first - 0xD800 << 10) + low[0] - 0xDC00, 0x10000 + (last - 0xD800 << 10) + low[1] - 0xDC00),
    )


def one_of_tagged(ex: Expressions, literals: Iterable[bytes]) -> int:
    """The literals, each followed by its number in quotes: the tag by which ``Scalars.key`` tells which one has ended.

    A literal's own quotes come before the tag's: ``_tag_here`` looks for a tail that is a number and a quote.
    """
    return ex.one_of([word + b'"%d"' % i for i, word in enumerate(literals)])


def _tag_here(ex: Expressions, tagged: int) -> int:
    """The number of the literal that ends here; -1 if none does."""
    for tail in ex.words_of(ex.derive(tagged, 0x22)) or ():
        if tail[-1:] == b'"' and tail[:-1].isdigit():
            return int(tail[:-1])
    return -1


def _positive(condition: Condition) -> list[int]:
    """The languages that a string is in if it meets the condition."""
    if isinstance(condition, int):
        return [condition]
    return [language for part in condition[1] for language in _positive(part)] if condition[0] == "and" else []


def evaluated(condition: Condition, has: np.ndarray, negated: np.ndarray | None = None) -> np.ndarray:
    """bool [S]: where the condition is met, given for each language whether a string is in it, [languages, S]; or, with
    ``negated``, what makes a negated one true."""
    if isinstance(condition, int):
        return has[condition].astype(bool)
    if condition[0] == "and":
        return np.bitwise_and.reduce([evaluated(part, has, negated) for part in condition[1]])
    return ~evaluated(condition[1], has) if negated is None else evaluated(condition[1], negated)


def _rest(ex: Expressions, parts: TextParts, condition: Condition, here: np.ndarray) -> int:
    """The expression of what may follow, where the parts ``here`` may go on."""
    if isinstance(condition, int):
        return parts.rest(condition, here)
    if condition[0] == "and":
        return ex.intersect(*[_rest(ex, parts, part, here) for part in condition[1]])
    return ex.complement(_rest(ex, parts, condition[1], here))


def _has_any(sets: np.ndarray, numbers: list[int]) -> np.ndarray:
    """bool [S]: whether each set has one of the parts."""
    mask = np.zeros(sets.shape[1] * 64, np.uint8)
    mask[numbers] = 1
    return np.bitwise_or.reduce(sets & np.packbits(mask, bitorder="little").view(np.uint64), axis=1) > 0
