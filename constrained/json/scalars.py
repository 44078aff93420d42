"""The states of JSON strings, numbers and literals.

``must`` is the language that the value has to be in. ``observers`` are further languages: the value's result has a bit
for each of them that the value is in.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..expressions import NOTHING, Expressions
from ..machine import SHORT_TOKEN, UNBOUNDED, Machine
from ..prefixes import contains_all_texts_of, without_far_bounds

QUOTE, BACKSLASH, SLASH = 0x22, 0x5C, 0x2F
SHORT_ESCAPES = {0x22: 0x22, 0x5C: 0x5C, 0x62: 8, 0x66: 12, 0x6E: 10, 0x72: 13, 0x74: 9}
SHORT_CODES = frozenset(SHORT_ESCAPES.values())
HEX = {ord(c): c.lower() for c in "0123456789abcdefABCDEF"}
LOWER_HEX = {ord(c): c for c in "0123456789abcdef"}


class Spelling(NamedTuple):
    """How a string is written and read.

    ``tagged``: the number of names in the first observer, which ``one_of_tagged`` made; -1: it is like the others.
    """

    free: bool  # it may use every escape
    counted: bool = False  # see ``Machine.add_state``
    tagged: int = -1


class Scalars:
    """The states of scalar values on one machine.

    Listed strings and property names are spelled one way only; where any character may follow, a string may use every
    escape of the standard.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.ex = machine.expressions
        self._longest = machine.vocabulary.trie.max_depth
        text = (self.ex.text,)
        self.free_text = self._string(text, Spelling(free=True))
        self.key_text = self._string(text, Spelling(free=False))

    # -- strings --------------------------------------------------------------------------------------------------

    def string(self, must: int, observers: tuple[int, ...] = ()) -> int:
        """The row code of the opening quote of a string value; 0 if no text is in ``must``."""
        ex = self.ex
        if not ex.is_nonempty(must):
            return 0
        node = ex.nodes[must]
        if not observers and node[0] == "rep" and node[1] == ex.any_char and must != ex.text:
            low, high = node[2], UNBOUNDED if node[3] is None else node[3]
            machine = self.machine
            end = machine.end_state(0)
            frame = machine.frame(
                ("length", low, high), lambda: machine.add_frame(lambda result: end, low=low, high=high)
            )
            return machine.push(frame, self._string((ex.text,), Spelling(free=True, counted=True)))
        return self._string((must, *observers), Spelling(free=ex.words_of(must) is None))

    def key(self, must: int, names: int, patterns: tuple[int, ...]) -> int:
        """The state after the opening quote of a property name.

        ``names`` is ``one_of_tagged``. The result is the class of the name: the tag + 1 of a listed name; for another
        one the number of listed names plus the bits of the patterns that it matches, or 0 if it matches none.
        """
        spelling = Spelling(free=False, tagged=len(self.ex.words_of(names) or ()))
        return self._string((must, names, *patterns), spelling)

    def _string(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        """The state inside a string."""
        if exprs[0] == NOTHING:
            return 0
        machine = self.machine

        def make() -> int:
            fits = contains_all_texts_of(self.ex, exprs[0])
            base = -1
            if fits is not None and fits >= SHORT_TOKEN:
                plain = exprs == (self.ex.text,) and not spelling.counted
                base = machine.num_states if plain else (self.free_text if spelling.free else self.key_text)
            boundary = exprs[0] == self.ex.text
            loops = boundary and not spelling.counted and all(e in (NOTHING, self.ex.text) for e in exprs)
            state = machine.add_state(
                lambda row: self._fill_string(row, exprs, spelling),
                counted=(1 if boundary else 2) if spelling.counted else 0,
                inside_string=base,
                loops=loops,
            )
            far = tuple(without_far_bounds(self.ex, e, self._longest) for e in exprs)
            if far != exprs:
                machine.set_twin(state, lambda: self._string(far, spelling))
            return state

        return machine.state(("string", exprs, spelling), make)

    def _derive(self, exprs: tuple[int, ...], data: bytes) -> tuple[int, ...]:
        ex = self.ex
        for byte in data:
            must = ex.alive(ex.derive(exprs[0], byte))
            if must == NOTHING:
                return (NOTHING,)
            exprs = (must, *[ex.derive(e, byte) for e in exprs[1:]])
        return exprs

    def _fill_string(self, row: np.ndarray, exprs: tuple[int, ...], spelling: Spelling) -> None:
        ex, tagged = self.ex, spelling.tagged
        may_escape = False
        for lo, hi in ex.classes(*exprs):
            byte = ex.available_in(lo, hi)
            if byte < 0:
                continue
            to = self._derive(exprs, bytes([byte]))
            if to[0] == NOTHING:
                continue
            if lo < 0x20 or lo <= QUOTE < hi or lo <= BACKSLASH < hi:
                may_escape = True
            if hi > 0x20:
                row[max(lo, 0x20) : hi] = self._string(to, spelling)
        row[QUOTE] = row[BACKSLASH] = 0
        if ex.nullable[exprs[0]]:
            bits = 0
            for i, e in enumerate(exprs[1:] if tagged < 0 else exprs[2:]):
                bits |= ex.nullable[e] << i
            if tagged >= 0:
                tag = _tag_here(ex, exprs[1])
                bits = tag + 1 if tag >= 0 else tagged + bits if bits else 0
            row[QUOTE] = self.machine.end_state(self.machine.result(bits))
        if may_escape:
            row[BACKSLASH] = self._escape(exprs, spelling)

    def _any_next(self, exprs: tuple[int, ...]) -> bool:
        run = contains_all_texts_of(self.ex, exprs[0])
        return run is not None and run >= 1

    def _escape(self, exprs: tuple[int, ...], spelling: Spelling) -> int:
        """The state after a backslash."""
        spelling = spelling._replace(free=spelling.free and self._any_next(exprs))
        machine = self.machine

        def fill(row: np.ndarray) -> None:
            controls = self._controls(exprs)
            for byte, code in SHORT_ESCAPES.items():
                to = controls[code] if code < 0x20 else self._derive(exprs, bytes([code]))
                if to[0] != NOTHING:
                    row[byte] = self._string(to, spelling)
            if spelling.free:
                row[SLASH] = self._string(self._derive(exprs, b"/"), spelling)
            row[ord("u")] = self._code_point(exprs, spelling, "")

        return machine.state(
            ("escape", exprs, spelling),
            lambda: machine.add_state(fill, counted=2 if spelling.counted else 0, detour=True),
        )

    def _controls(self, exprs: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The derivatives by each control character."""
        found: list[tuple[int, ...]] = []
        for lo, hi in self.ex.classes(*exprs):
            if lo >= 0x20:
                break
            byte = self.ex.available_in(lo, hi)
            to = self._derive(exprs, bytes([byte])) if byte >= 0 else (NOTHING,)
            found += [to if self.ex.available >> b & 1 else (NOTHING,) for b in range(lo, min(hi, 0x20))]
        return found

    def _code_point(self, exprs: tuple[int, ...], spelling: Spelling, digits: str) -> int:
        r"""The state after ``\u`` and ``digits``, which for a surrogate pair hold the second ``\u`` too; 0 if none."""
        machine = self.machine
        if not spelling.free:
            controls = self._controls(exprs)
            found = [c for c in range(0x20) if controls[c][0] != NOTHING and c not in SHORT_CODES]
            if not any(f"{c:04x}".startswith(digits) for c in found):
                return 0
        if len(digits) >= 2 and digits[0] == "d" and digits[1] in "cdef" and len(digits) <= 4:
            return 0  # a low surrogate without a high one
        is_high = len(digits) >= 4 and digits[0] == "d" and digits[1] in "89ab"
        if (len(digits) == 4 and not is_high) or len(digits) == 10:
            code = int(digits[:4], 16)
            if is_high:
                code = 0x10000 + ((code - 0xD800) << 10) + (int(digits[6:], 16) - 0xDC00)
            to = self._derive(exprs, chr(code).encode())
            return self._string(to, spelling)

        def fill(row: np.ndarray) -> None:
            if len(digits) in (4, 5):
                byte = b"\\u"[len(digits) - 4]
                row[byte] = self._code_point(exprs, spelling, digits + chr(byte))
                return
            for byte, digit in (HEX if spelling.free else LOWER_HEX).items():
                if (len(digits) == 6 and digit != "d") or (len(digits) == 7 and digit not in "cdef"):
                    continue
                row[byte] = self._code_point(exprs, spelling, digits + digit)

        key = ("code point", exprs, spelling, digits)
        return machine.state(
            key, lambda: machine.add_state(fill, counted=2 if spelling.counted else 0, detour=not digits)
        )

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
            return machine.add_state(lambda row: self.fill_number(row, exprs[0], exprs[1:]), ends=ends)

        return machine.state(("number", exprs), make)


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
