"""Regular languages over bytes as hash-consed expressions with derivatives.

An expression is an int; equal ints are equal expressions. The derivative of a language by a byte is the language of
what may follow that byte (Brzozowski 1964; Owens, Reppy, Turon 2009). An automaton's states are expressions, each made
when a text first reaches it: ``.{0,500}`` costs no more than the texts that are walked through it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from .code_points import ANY, Ranges, clip, intersection, union
from .fuel import Fuel
from .spec import GrammarTooComplex
from .tables import NUM_PARTS, PART_BITS, Parts, in_parts

Moves = tuple[tuple[int, int, int], ...]  # (lo, hi, to): bytes [lo, hi) lead to an expression

NOTHING = 0  # the language without texts
EMPTY = 1  # the language of the empty text alone

FULL = (1 << 256) - 1
NO_TEXT = 1 << 30  # as a number of characters
ANY_LENGTH = -(1 << 29)  # the padding of texts that no bound is meant for
MAX_COUNTED_BY_STATES = 16  # of one character: a larger bound is one on the length
MANY_STATES = 64  # of an intersection or complement: with more, a state seldom comes again, and nothing is counted
MAX_SEARCHED = 2_000  # derivatives of an intersection whose shortest text is looked for
MANY_PARTS = 1 << 30
MOST_BEGINNINGS = 6  # parts of a language that are looked at for its texts that begin with some characters
LIKELY_TEXTS = (b" ", b"a", b"0", b"-", b"aa", b"\x80", b"\x80\x80")  # some end a character
MAX_LIKELY_BYTES = 32
MAX_FREE_DIGITS = 400  # digits that ``_can_reach_multiple`` looks ahead
UTF8_LEADS = ((0x80, 0x7FF, 0xC0, 6), (0x800, 0xFFFF, 0xE0, 12), (0x10000, 0x10FFFF, 0xF0, 18))


# Bytes in the order in which a short text should have them: small letters, then other visible ones, then the rest.
LIKED = bytes(
    [*range(0x61, 0x7B), *range(0x30, 0x61), *range(0x7B, 0x7F), *range(0x20, 0x30), *range(0x20), *range(0x7F, 0x100)]
)
_RANKS = bytes(map(LIKED.index, range(256)))


class LengthSpread(NamedTuple):
    """Bounds on the lengths of the texts of a language and of all that may follow their beginnings.

    ``least_longest``: each text that has begun can become at least so long. ``gap``: of so many lengths in a row,
    between those of the shortest and the longest completion, one occurs. ``most_shortest``: the shortest completion is
    no longer.
    """

    least_longest: int
    gap: int
    most_shortest: int


class Expressions:
    """The expressions over one alphabet, the bytes that have a token. Every expression is kept as long as the store.

    ``fuel`` counts the work of deriving and joining; ``max_expressions`` bounds the store.
    """

    def __init__(
        self, has_byte: np.ndarray | None = None, *, fuel: Fuel | None = None, max_expressions: int = 400_000
    ) -> None:
        available = np.ones(256, dtype=bool) if has_byte is None else has_byte
        self._available_bytes = bytes(np.flatnonzero(available).tolist())
        self.available = sum(1 << b for b in self._available_bytes)
        self._continuations = all(available[0x80:0xC0])
        self.max_expressions = max_expressions
        self.fuel = Fuel() if fuel is None else fuel
        self.nodes: list[tuple] = []
        self.nullable: list[bool] = []
        self.is_text: list[bool] = []  # known to hold texts of whole UTF-8 characters only
        self.is_plain: list[bool] = []  # made without intersection and complement, so it has a text
        self._edges: list[int] = []  # bit b: the derivatives by bytes b and b - 1 may differ
        self._ids: Parts[tuple, int] = in_parts()
        self._by_ranges: dict[Ranges, int] = {}
        self._derived: Parts[int, int] = in_parts()
        self._moves: dict[int, Moves] = {}
        self._linear: dict[int, tuple[tuple[int, int], ...] | None] = {}
        self._unions: dict[tuple[int, ...], int] = {}
        self._intersections: dict[tuple[int, ...], int] = {}
        self._alive: dict[int, bool] = {}
        self._shortest: dict[int, int] = {NOTHING: NO_TEXT, EMPTY: 0}
        self._longest: dict[int, int] = {}
        self._at_least: dict[int, int] = {}
        self._spreads: dict[int, LengthSpread | None] = {}
        self._length_bounds: dict[int, tuple[int, int, int | None] | None] = {}
        self._num_parts: dict[int, int] = {}
        self._not_searched: set[int] = set()  # whose shortest text was not found
        self._make(("or",), False, True, True, 1)
        self._make(("empty",), True, True, True, 1)
        self.text = self.all_bytes = -1  # none yet
        self.any_char = self.chars(ANY)
        self.text = self.repeat(self.any_char, 0, None)  # every UTF-8 text
        self.all_bytes = self._make(("not", NOTHING), True, False, False, 1)
        self.endless = self._make(("endless",), False, True, True, 1)  # stands for texts that no token reaches into

    def _make(self, node: tuple, nullable: bool, is_text: bool, is_plain: bool, edges: int) -> int:
        ids = self._ids[hash(node) % NUM_PARTS]
        found = ids.get(node)
        if found is not None:
            return found
        if len(self.nodes) >= self.max_expressions:
            raise GrammarTooComplex(f"the grammar's regular expressions need more than {self.max_expressions:,} states")
        self.nodes.append(node)
        self.nullable.append(nullable)
        self.is_text.append(is_text)
        self.is_plain.append(is_plain)
        self._edges.append(edges | 1)
        ids[node] = len(self.nodes) - 1
        return len(self.nodes) - 1

    # -- constructors -------------------------------------------------------------------------------------------------

    def bytes_in(self, bits: int) -> int:
        """One byte out of a set; bit b of ``bits`` stands for byte b."""
        bits &= self.available
        if not bits:
            return NOTHING
        return self._make(("set", bits), False, bits < 1 << 128, True, (bits ^ (bits << 1)) & FULL)

    def literal(self, data: bytes) -> int:
        return self.one_of([data])

    def one_of(self, literals: Iterable[bytes]) -> int:
        """Any of the byte strings. Costs a sort; a derivative costs a bisection."""
        words = tuple(sorted({w for w in literals if not w.translate(None, self._available_bytes)}))
        return self._words(words, 0, len(words), 0)

    def _words(self, words: tuple[bytes, ...], lo: int, hi: int, depth: int) -> int:
        if lo >= hi:
            return NOTHING
        if hi - lo == 1:
            tail = words[lo][depth:]
            if not tail:
                return EMPTY
            first = tail[0]
            return self._make(("word", tail), False, first < 0x80 or first >= 0xC0, True, 3 << first & FULL)
        if lo or hi != len(words) or depth:
            words, lo, hi, depth = tuple(w[depth:] for w in words[lo:hi]), 0, hi - lo, 0
        node = ("words", words)
        found = self._ids[hash(node) % NUM_PARTS].get(node)
        if found is not None:
            return found
        edges = 0
        is_text = True
        at = 1 if not words[0] else 0
        nullable = at == 1
        while at < len(words):
            first = words[at][0]
            edges |= 3 << first
            is_text = is_text and (first < 0x80 or first >= 0xC0)
            at = bisect_left(words, bytes([first + 1]), at) if first < 255 else len(words)
        return self._make(node, nullable, is_text, True, edges & FULL)

    def words_of(self, expr: int) -> tuple[bytes, ...] | None:
        """The language's words, sorted, if it is stored as a list of words; None otherwise, even if it is finite."""
        if expr == NOTHING:
            return ()
        if expr == EMPTY:
            return (b"",)
        node = self.nodes[expr]
        if node[0] == "word":
            return (node[1],)
        if node[0] == "words":
            return node[1]
        return None

    def chars(self, ranges: Ranges) -> int:
        """One character out of a set of code points, as UTF-8."""
        found = self._by_ranges.get(ranges)
        if found is None:
            found = self._by_ranges[ranges] = self._chars(ranges)
        return found

    def _chars(self, ranges: Ranges) -> int:
        low = 0
        for a, b in ranges:
            if a < 0x80:
                low |= (1 << (min(b, 0x7F) + 1)) - (1 << a)
        if not ranges or ranges[-1][1] < 0x80:
            return self.bytes_in(low)
        high = clip(ranges, 0x80, 0x10FFFF) if self._continuations else ()
        for lo, hi, base, shift in UTF8_LEADS:
            for lead in range(base | lo >> shift, (base | hi >> shift) + 1):
                if not self.available >> lead & 1:
                    first = (lead - base) << shift
                    high = clip(high, 0, max(first, lo) - 1) + clip(high, first + (1 << shift), 0x10FFFF)
        if not high:
            return self.bytes_in(low)
        low &= self.available
        node = ("chars", low, high)
        found = self._ids[hash(node) % NUM_PARTS].get(node)
        if found is not None:
            return found
        edges = (low ^ (low << 1)) & FULL
        for lo, hi, base, shift in UTF8_LEADS:
            for a, b in clip(high, lo, hi):
                first, last = base | a >> shift, base | b >> shift
                edges |= 3 << first | 3 << last
        return self._make(node, False, True, True, edges & FULL)

    def _tail(self, ranges: Ranges, remaining: int) -> int:
        """``remaining`` continuation bytes of UTF-8 that spell an offset in ``ranges``, each in [0, 64**remaining)."""
        if not ranges:
            return NOTHING
        if remaining == 0:
            return EMPTY
        shift = 6 * (remaining - 1)
        edges = 0
        for a, b in ranges:
            edges |= 3 << (0x80 | a >> shift) | 3 << (0x80 | b >> shift)
        return self._make(("tail", ranges, remaining), False, False, True, edges & FULL)

    def concat(self, *parts: int) -> int:
        """The parts one after another."""
        result = EMPTY
        run: list[int] = []  # neighbouring single words, last first: joined to one, so a union of such makes a list
        for part in reversed(parts):
            if self._word_of(part):
                run.append(part)
                continue
            result = self._concat(part, self._concat(self._joined(run), result))
            run = []
        return self._concat(self._joined(run), result)

    def _joined(self, run: list[int]) -> int:
        if len(run) < 2:
            return run[0] if run else EMPTY
        return self.literal(b"".join([self._word_of(part) for part in reversed(run)]))

    def _word_of(self, expr: int) -> bytes:
        """The only text of a language that is stored as one word or one byte; b"" for any other."""
        node = self.nodes[expr]
        if node[0] == "word":
            return node[1]
        return bytes([node[1].bit_length() - 1]) if node[0] == "set" and node[1] & (node[1] - 1) == 0 else b""

    def before(self, left: int, right: int) -> int:
        """As ``concat``, in the form that derivatives have: single bytes are not joined to words."""
        return self._concat(left, right)

    def _concat(self, left: int, right: int) -> int:
        if left == NOTHING or right == NOTHING:
            return NOTHING
        if left == EMPTY:
            return right
        if right == EMPTY:
            return left
        node = self.nodes[left]
        if node[0] == "cat":
            return self._concat(node[1], self._concat(node[2], right))
        if node[0] == "word" and self.nodes[right][0] == "word":
            return self._words((node[1] + self.nodes[right][1],), 0, 1, 0)
        edges = self._edges[left] | (self._edges[right] if self.nullable[left] else 0)
        return self._make(
            ("cat", left, right),
            self.nullable[left] and self.nullable[right],
            self.is_text[left] and self.is_text[right],
            self.is_plain[left] and self.is_plain[right],
            edges,
        )

    def repeat(self, inner: int, low: int, high: int | None) -> int:
        """``inner`` from ``low`` to ``high`` times (None: any number)."""
        if high == 0 or inner == EMPTY:
            return EMPTY
        if inner == NOTHING:
            return EMPTY if low == 0 else NOTHING
        if self.nullable[inner]:
            low = 0
        if low == 1 and high == 1:
            return inner
        node = self.nodes[inner]
        if node[0] == "rep" and low <= 1 and high is None and node[2] <= 1 and node[3] is None:
            return self.repeat(node[1], min(low, node[2]), None)
        return self._make(
            ("rep", inner, low, high), low == 0, self.is_text[inner], self.is_plain[inner], self._edges[inner]
        )

    def union(self, *parts: int) -> int:
        nodes = self.nodes
        flat: set[int] = set()
        for part in parts:
            node = nodes[part]
            if node[0] == "or":
                flat.update(node[1:])
            else:
                flat.add(part)
        flat.discard(NOTHING)
        if len(flat) == 1:
            return flat.pop()
        if not flat:
            return NOTHING
        heads = {nodes[p][1] if nodes[p][0] == "cat" else NOTHING for p in flat}
        if len(heads) == 1 and NOTHING not in heads:  # the bytes of a character that all begin with, mostly
            return self._concat(heads.pop(), self._union_of([nodes[p][2] for p in flat]))
        if self.text in flat and all(self.is_text[p] for p in flat):
            return self.text
        if self.all_bytes in flat:
            return self.all_bytes
        kinds = [nodes[p][0] for p in flat]
        if kinds.count("set") > 1:
            sets = [p for p in flat if nodes[p][0] == "set"]
            flat.difference_update(sets)
            bits = 0
            for p in sets:
                bits |= nodes[p][1]
            flat.add(self.bytes_in(bits))
        if kinds.count("word") + kinds.count("words") > 1:
            listed = [p for p in flat if nodes[p][0] in ("word", "words")]
            flat.difference_update(listed)
            flat.add(self.one_of(word for p in listed for word in self.words_of(p) or ()))
        if "cat" in kinds or "rep" in kinds:
            self._factor(flat)
        if EMPTY in flat and any(self.nullable[p] for p in flat if p != EMPTY):
            flat.discard(EMPTY)
        if "not" in kinds:
            for p in flat:
                node = nodes[p]
                if node[0] == "not" and node[1] in flat:
                    return self.all_bytes
        if len(flat) == 1:
            return flat.pop()
        ordered = sorted(flat)
        edges = 0
        for p in ordered:
            edges |= self._edges[p]
        return self._make(
            ("or", *ordered),
            any(self.nullable[p] for p in ordered),
            all(self.is_text[p] for p in ordered),
            all(self.is_plain[p] for p in ordered),
            edges,
        )

    def _union_of(self, parts: list[int]) -> int:
        """``union``, remembered."""
        key = tuple(sorted(parts))
        found = self._unions.get(key)
        if found is None:
            found = self._unions[key] = self.union(*key)
        return found

    def _factor(self, flat: set[int]) -> None:
        """``xy | xz`` becomes ``x(y|z)``, and ``x{0,3}y | x{1,5}y`` becomes ``x{0,5}y``.

        So the counts that a text may have reached in a bounded repeat are one repeat, as in a counting set (Turonova et
        al. 2020): the derivatives of ``(a|ab){0,50}`` are a few for each count, not a subset of counts each.
        """
        nodes = self.nodes
        while True:
            by_head: dict[int, list[int]] = {}
            spans: dict[tuple[int, int], list[tuple[int, int | None, int]]] = {}
            is_joined = False
            for p in flat:
                node = nodes[p]
                rest = EMPTY
                if node[0] == "cat":
                    _, head, rest = node
                    if head in by_head:
                        by_head[head].append(p)
                        is_joined = True
                    else:
                        by_head[head] = [p]
                    node = nodes[head]
                if node[0] == "rep":
                    spans.setdefault((node[1], rest), []).append((node[2], node[3], p))
            if is_joined or not flat.isdisjoint(by_head):
                for head, members in by_head.items():
                    if head in flat:
                        members.append(head)
                    if len(members) > 1:
                        flat.difference_update(members)
                        tails = [EMPTY if p == head else nodes[p][2] for p in members]
                        flat.update(self._parts(self._concat(head, self._union_of(tails))))
                continue
            for (inner, rest), found in spans.items():
                if len(found) < 2:
                    continue
                found.sort(key=lambda s: s[0])
                low, high, merged = found[0][0], found[0][1], [found[0][2]]
                for lo, hi, p in found[1:]:
                    if high is None or lo <= high + 1:
                        high = None if high is None or hi is None else max(high, hi)
                        merged.append(p)
                if len(merged) > 1:
                    flat.difference_update(merged)
                    flat.update(self._parts(self._concat(self.repeat(inner, low, high), rest)))
                    is_joined = True
            if not is_joined:
                return

    def _parts(self, expr: int) -> tuple[int, ...]:
        """The alternatives of an expression."""
        node = self.nodes[expr]
        return node[1:] if node[0] == "or" else (expr,)

    def intersect(self, *parts: int) -> int:
        flat: set[int] = set()
        for part in parts:
            node = self.nodes[part]
            if node[0] == "and":
                flat.update(node[1:])
            else:
                flat.add(part)
        if NOTHING in flat:
            return NOTHING
        flat.discard(self.all_bytes)
        if self.text in flat and len(flat) > 1 and any(self.is_text[p] for p in flat if p != self.text):
            flat.discard(self.text)
        if not flat:
            return self.all_bytes
        refused = [p for p in flat if self.nodes[p][0] == "not" and self.words_of(self.nodes[p][1])]
        if len(refused) > 1:  # not a and not b: not (a or b)
            flat.difference_update(refused)
            flat.add(self.complement(self.union(*[self.nodes[p][1] for p in refused])))
        for p in flat:
            if self.nodes[p][0] == "not" and (narrowed := self._narrowed(p, flat)) is not None:
                flat.discard(p)
                return self.intersect(narrowed, *flat)
        self._join_lengths(flat)
        self._join_beginnings(flat)
        if NOTHING in flat:
            return NOTHING
        if len(flat) == 1:
            return flat.pop()
        finite = [p for p in flat if self.words_of(p) is not None]
        if finite:
            first = min(finite, key=lambda p: len(self.words_of(p) or ()))
            words = self.words_of(first) or ()
            if len(words) <= 256:
                rest = [p for p in flat if p != first]
                kept = [w for w in words if all(self.matches(p, w) for p in rest)]
                return self._words(tuple(kept), 0, len(kept), 0)
        for p in flat:
            node = self.nodes[p]
            if node[0] == "not" and node[1] in flat:
                return NOTHING
        if EMPTY in flat:
            return EMPTY if all(self.nullable[p] for p in flat) else NOTHING
        ordered = sorted(flat)
        edges = 0
        for p in ordered:
            edges |= self._edges[p]
        return self._make(
            ("and", *ordered),
            all(self.nullable[p] for p in ordered),
            any(self.is_text[p] for p in ordered),
            False,
            edges,
        )

    def _narrowed(self, refused: int, flat: set[int]) -> int | None:
        """``not (x and y)`` beside ``x`` is ``not y``, ``not .{0,5}`` beside texts is ``.{6,}``; None for others."""
        nodes = self.nodes
        inner = nodes[nodes[refused][1]]
        if inner[0] == "and":
            left = [p for p in inner[1:] if p not in flat]
            if len(left) == len(inner) - 1:
                return None
            return self.complement(self.intersect(*left)) if left else NOTHING
        if inner[0] == "rep" and inner[1] == self.any_char and any(self.is_text[p] for p in flat):
            _, char, low, high = inner
            if low == 0:
                return NOTHING if high is None else self.repeat(char, high + 1, None)
            if high is None:
                return self.repeat(char, 0, low - 1)
        return None

    def _join_lengths(self, flat: set[int]) -> None:
        """``.{2,5}`` and ``[ab]{0,3}`` becomes ``[ab]{2,3}``."""
        nodes = self.nodes
        lengths = [p for p in flat if nodes[p][0] == "rep" and nodes[p][1] == self.any_char and p != self.text]
        if not lengths:
            return
        runs = [
            p for p in flat if nodes[p][0] == "rep" and nodes[nodes[p][1]][0] in ("set", "chars") and self.is_text[p]
        ]
        others = [p for p in runs if nodes[p][1] != self.any_char]
        if len(lengths) + bool(others) < 2:
            return
        joined = [*lengths, *others[:1]]
        flat.difference_update(joined)
        low = max(nodes[p][2] for p in joined)
        highs = [nodes[p][3] for p in joined if nodes[p][3] is not None]
        high = min(highs, default=None)
        flat.add(NOTHING if high is not None and low > high else self.repeat(nodes[joined[-1]][1], low, high))

    def _join_beginnings(self, flat: set[int]) -> None:
        """``[^0].*`` and ``([0-9]b){1,9}`` becomes ``[1-9]b([0-9]b){0,8}``, so a text has one condition and not two."""
        nodes = self.nodes
        if len(flat) < 2:
            return
        for part in flat:
            if nodes[part][0] != "cat" or nodes[part][2] != self.text or not self._is_char(nodes[part][1]):
                continue
            for other in flat - {part}:
                if self.is_plain[other] and self.is_text[other] and self.words_of(other) is None:
                    joined = self._beginning(other, self._char_ranges(nodes[part][1]), MOST_BEGINNINGS)
                    if joined is not None:
                        flat.difference_update((part, other))
                        flat.add(joined)
                        self._join_beginnings(flat)
                        return

    def _beginning(self, expr: int, chars: Ranges, most: int) -> int | None:
        """The texts of a language that begin with one of ``chars``. None where they are not looked for: beyond ``most``
        alternatives, and in intersections and complements. The language has texts of whole characters only.
        """
        node = self.nodes[expr]
        match node[0]:
            case "set" | "chars":
                return self.chars(intersection(self._char_ranges(expr), chars))
            case "word":
                return expr if self._is_in(node[1], chars) else NOTHING
            case "words":
                return self.one_of([word for word in node[1] if word and self._is_in(word, chars)])
            case "empty":
                return NOTHING
            case "cat":
                left = self._beginning(node[1], chars, most)
                found = None if left is None else self._concat(left, node[2])
                if found is None or not self.nullable[node[1]]:
                    return found
                right = self._beginning(node[2], chars, most - 1) if most else None
                return None if right is None else self.union(found, right)
            case "rep":
                inner, low, high = node[1:]
                first = None if self.nullable[inner] else self._beginning(inner, chars, most)
                if first is None:
                    return None
                left = self.repeat(inner, max(low - 1, 0), None if high is None else high - 1)
                return self._concat(first, left)
            case "or" if len(node) <= most:
                parts = [self._beginning(part, chars, most - 1) for part in node[1:]]
                return None if None in parts else self.union(*[part for part in parts if part is not None])
        return None

    def _char_ranges(self, expr: int) -> Ranges:
        """The characters of a language of single ones."""
        node = self.nodes[expr]
        low = tuple((byte, byte) for byte in range(0x80) if node[1] >> byte & 1)
        return union(low, node[2] if node[0] == "chars" else ())

    @staticmethod
    def _is_in(word: bytes, chars: Ranges) -> bool:
        """Whether a word of whole characters begins with one of them."""
        return bool(clip(chars, first := ord(word.decode()[0]), first))

    def complement(self, inner: int) -> int:
        """Every byte string outside the language; ``text_without`` gives those of whole characters."""
        node = self.nodes[inner]
        if node[0] == "not":
            return node[1]
        return self._make(("not", inner), not self.nullable[inner], False, False, self._edges[inner])

    def text_without(self, inner: int) -> int:
        return self.intersect(self.text, self.complement(inner))

    def multiple_of(self, modulus: int, scale: int) -> int:
        """Multiples of ``modulus / 10**scale``, spelled with ``-``, digits and ``.`` in any order.

        Intersect it with a language of well-formed numbers.
        """
        return self._multiple(modulus, scale, 0, -1)

    def _multiple(self, modulus: int, scale: int, remainder: int, fraction: int) -> int:
        # fraction: -1 before the point, else the digits after it so far (at most ``scale`` of them count)
        accepts = remainder * 10 ** (scale - max(fraction, 0)) % modulus == 0
        if fraction == scale and not accepts:
            return NOTHING
        digits = ((1 << 10) - 1) << 0x30
        edges = digits | digits << 1 | 0b111 << 0x2D
        return self._make(("multiple", modulus, scale, remainder, fraction), accepts, False, True, edges)

    # -- questions ----------------------------------------------------------------------------------------------------

    def classes(self, *exprs: int) -> list[tuple[int, int]]:
        """Byte ranges [lo, hi) that cover all bytes; each expression has one derivative by the bytes of a range."""
        edges = 1
        for e in exprs:
            edges |= self._edges[e]
        starts = []
        while edges:
            low = edges & -edges
            starts.append(low.bit_length() - 1)
            edges ^= low
        return list(zip(starts, [*starts[1:], 256], strict=True))

    def class_of(self, byte: int, *exprs: int) -> tuple[int, int]:
        """The range [lo, hi) of ``classes`` that holds the byte."""
        edges = 1
        for e in exprs:
            edges |= self._edges[e]
        above = edges >> byte + 1
        return (edges & (2 << byte) - 1).bit_length() - 1, byte + (above & -above).bit_length() if above else 256

    def derive(self, expr: int, byte: int) -> int:
        """The language of what follows ``byte`` in the expression's texts."""
        if expr <= EMPTY:
            return NOTHING
        key = expr << 8 | byte
        derived = self._derived[expr >> PART_BITS]
        found = derived.get(key)
        if found is None:
            found = self._derive(expr, byte) if self.available >> byte & 1 else NOTHING
            derived[key] = found
        return found

    def _derive(self, expr: int, byte: int) -> int:
        node = self.nodes[expr]
        fuel = self.fuel
        fuel.spent += len(node)
        if fuel.spent > fuel.most:
            raise fuel.empty()
        match node[0]:
            case "set":
                return EMPTY if node[1] >> byte & 1 else NOTHING
            case "endless" | "padding":
                return NOTHING
            case "owing":
                return self.derive(node[2], byte)
            case "word":
                return self._words((node[1][1:],), 0, 1, 0) if node[1][0] == byte else NOTHING
            case "words":
                words = node[1]
                lo = bisect_left(words, bytes([byte]))
                hi = bisect_left(words, bytes([byte + 1]), lo) if byte < 255 else len(words)
                return self._words(words, lo, hi, 1)
            case "chars":
                if byte < 0x80:
                    return EMPTY if node[1] >> byte & 1 else NOTHING
                return self._derive_lead(node[2], byte)
            case "tail":
                if not 0x80 <= byte < 0xC0:
                    return NOTHING
                width = 1 << 6 * (node[2] - 1)
                base = (byte & 0x3F) * width
                part = clip(node[1], base, base + width - 1)
                return self._tail(tuple((a - base, b - base) for a, b in part), node[2] - 1)
            case "cat":
                first = self._concat(self.derive(node[1], byte), node[2])
                if self.nullable[node[1]]:
                    return self.union(first, self.derive(node[2], byte))
                return first
            case "or":
                return self.union(*[self.derive(p, byte) for p in node[1:]])
            case "and":
                return self.intersect(*[self.derive(p, byte) for p in node[1:]])
            case "not":
                return self.complement(self.derive(node[1], byte))
            case "rep":
                _, inner, low, high = node
                after = self.repeat(inner, max(low - 1, 0), None if high is None else high - 1)
                return self._concat(self.derive(inner, byte), after)
            case "multiple":
                _, modulus, scale, remainder, fraction = node
                if byte == 0x2D:
                    return expr
                if byte == 0x2E:
                    return self._multiple(modulus, scale, remainder, 0) if fraction < 0 else NOTHING
                if not 0x30 <= byte <= 0x39:
                    return NOTHING
                if fraction == scale:
                    return expr if byte == 0x30 else NOTHING
                remainder = (remainder * 10 + byte - 0x30) % modulus
                return self._multiple(modulus, scale, remainder, fraction + 1 if fraction >= 0 else -1)
        raise AssertionError(node)

    def _derive_lead(self, ranges: Ranges, byte: int) -> int:
        for lo, hi, base, shift in UTF8_LEADS:
            width = 1 << shift
            if base <= byte < base + (hi >> shift) + 1 and byte >= base:
                at = (byte - base) * width
                if at > hi:
                    continue
                if at + width - 1 < lo:
                    continue
                part = clip(ranges, max(at, lo), min(at + width - 1, hi))
                return self._tail(tuple((a - at, b - at) for a, b in part), shift // 6)
        return NOTHING

    def moves(self, expr: int) -> Moves:
        """The bytes that texts begin with, as ranges (lo, hi, derivative) in order. Costs less than single bytes do."""
        found = self._moves.get(expr)
        if found is None:
            found = self._moves[expr] = self._make_moves(expr)
        return found

    def linear_form(self, expr: int) -> tuple[tuple[int, int], ...] | None:
        """The partial derivatives (Antimirov 1996), as (bytes, rest): a text begins with one of the bytes, which are
        bits, and goes on with a text of the rest. None for intersections, complements and multiples."""
        found = self._linear.get(expr)
        if found is None and expr not in self._linear:
            made = self._make_linear(expr)
            if made is not None:
                found = tuple(made)
                if len(found) > 1:
                    merged: dict[int, int] = {}
                    for bits, to in found:
                        merged[to] = merged.get(to, 0) | bits
                    if len(merged) < len(found):
                        found = tuple([(bits, to) for to, bits in merged.items()])
            self._linear[expr] = found
        return found

    def _make_linear(self, expr: int) -> Iterable[tuple[int, int]] | None:
        node = self.nodes[expr]
        self.fuel.spend(len(node))
        match node[0]:
            case "and" | "not" | "multiple":
                return None
            case "empty" | "endless" | "padding":
                return ()
            case "set":
                return ((node[1], EMPTY),)
            case "word":
                return ((1 << node[1][0], self._words((node[1][1:],), 0, 1, 0)),)
            case "owing":
                return self.linear_form(node[2])
            case "cat":
                first = self.linear_form(node[1])
                rest = self.linear_form(node[2]) if self.nullable[node[1]] else ()
                if first is None or rest is None:
                    return None
                return (*[(bits, self._concat(to, node[2])) for bits, to in first], *rest)
            case "or":
                parts = [self.linear_form(part) for part in node[1:]]
                known = [part for part in parts if part is not None]
                return [move for part in known for move in part] if len(known) == len(parts) else None
            case "rep":
                _, inner, low, high = node
                first = self.linear_form(inner)
                after = self.repeat(inner, max(low - 1, 0), None if high is None else high - 1)
                return None if first is None else [(bits, self._concat(to, after)) for bits, to in first]
        return [((1 << hi) - (1 << lo), to) for lo, hi, to in self.moves(expr)]

    def has_moves(self, expr: int) -> bool:
        """Whether ``moves`` were made."""
        return expr in self._moves

    def _make_moves(self, expr: int) -> Moves:
        node = self.nodes[expr]
        kind = node[0]
        if kind == "word":
            self.fuel.spend(2)
            return ((node[1][0], node[1][0] + 1, self._words((node[1][1:],), 0, 1, 0)),)
        if kind == "cat":
            rest = node[2]
            firsts = tuple([(lo, hi, self._concat(to, rest)) for lo, hi, to in self.moves(node[1])])
            self.fuel.spend(len(firsts))
            if not self.nullable[node[1]]:
                return firsts
            return self._merged([firsts, self.moves(rest)], self.union)
        if kind == "rep":
            _, inner, low, high = node
            after = self.repeat(inner, max(low - 1, 0), None if high is None else high - 1)
            firsts = tuple([(lo, hi, self._concat(to, after)) for lo, hi, to in self.moves(inner)])
            self.fuel.spend(len(firsts))
            return firsts
        if kind == "or" and len(node) > 1:
            return self._merged([self.moves(part) for part in node[1:]], self.union)
        if kind == "and":
            return self._merged([self.moves(part) for part in node[1:]], self.intersect)
        found: list[tuple[int, int, int]] = []
        match kind:
            case "words":
                moves = self._moves_of_words(node[1])
            case "not":
                moves = self._moves_of_complement(node[1])
            case "chars":
                moves = self._moves_of_chars(node[1], node[2])
            case "tail":
                moves = self._moves_of_blocks(node[1], 0x80, node[2] - 1)
            case _:
                moves = self._moves_by_class(expr)
        for lo, hi, to in moves:
            if found and found[-1][1] == lo and found[-1][2] == to:
                found[-1] = (found[-1][0], hi, to)
            else:
                found.append((lo, hi, to))
        return tuple(found)

    def _moves_by_class(self, expr: int) -> Iterator[tuple[int, int, int]]:
        for lo, hi in self.classes(expr):
            byte = self.available_in(lo, hi)
            to = self.derive(expr, byte) if byte >= 0 else NOTHING
            if to != NOTHING:
                yield lo, hi, to

    def _moves_of_chars(self, low: int, high: Ranges) -> Iterator[tuple[int, int, int]]:
        while low:
            first = (low & -low).bit_length() - 1
            after = low + (1 << first)  # carries over the run of bits
            end = (after & -after).bit_length() - 1
            yield first, end, EMPTY
            low &= after
        for lo, hi, base, shift in UTF8_LEADS:
            yield from self._moves_of_blocks(clip(high, lo, hi), base, shift // 6)

    def _moves_of_blocks(self, ranges: Ranges, base: int, remaining: int) -> Iterator[tuple[int, int, int]]:
        """The moves by bytes that each stand for a block of ``64**remaining`` code points or offsets; that of the first
        block is ``base``."""
        self.fuel.spend(len(ranges))
        shift = 6 * remaining
        width = 1 << shift
        part: list[tuple[int, int]] = []  # within the block under way
        block = -1
        for at, last in ranges:
            while at <= last:
                if part and at >> shift != block:
                    yield base + block, base + block + 1, self._tail(tuple(part), remaining)
                    part = []
                block = at >> shift
                first = block << shift
                if at == first and last >= first + width - 1:
                    end = last + 1 >> shift
                    yield base + block, base + end, self._tail(((0, width - 1),), remaining)
                    at = end << shift
                else:
                    stop = min(last, first + width - 1)
                    part.append((at - first, stop - first))
                    at = stop + 1
        if part:
            yield base + block, base + block + 1, self._tail(tuple(part), remaining)

    def _moves_of_complement(self, inner: int) -> Iterator[tuple[int, int, int]]:
        at = 0
        for lo, hi, to in (*self.moves(inner), (256, 256, NOTHING)):
            self.fuel.spend(1)
            if self.available_in(at, lo) >= 0:
                yield at, lo, self.all_bytes
            if to not in (NOTHING, self.all_bytes) and self.available_in(lo, hi) >= 0:
                yield lo, hi, self.complement(to)
            at = hi

    def _moves_of_words(self, words: tuple[bytes, ...]) -> Iterator[tuple[int, int, int]]:
        at = 0 if words[0] else 1
        while at < len(words):
            first = words[at][0]
            end = bisect_left(words, bytes([first + 1]), at) if first < 255 else len(words)
            self.fuel.spend(2)
            yield first, first + 1, self._words(words, at, end, 1)
            at = end

    def _merged(self, each: list[Moves], join: Callable[..., int]) -> Moves:
        """The moves of a union or an intersection; ``join`` joins the derivatives of one range."""
        is_union = join == self.union
        needed = 1 if is_union else len(each)
        joined = self._unions if is_union else self._intersections
        starts = sorted({at for moves in each for lo, hi, _ in moves for at in (lo, hi)})
        cursors = [0] * len(each)
        found: list[tuple[int, int, int]] = []
        for lo, hi in pairwise(starts):
            here = []
            for i, moves in enumerate(each):
                at = cursors[i]
                while at < len(moves) and moves[at][1] <= lo:
                    at += 1
                cursors[i] = at
                if at < len(moves) and moves[at][0] <= lo:
                    here.append(moves[at][2])
            if len(here) < needed or not here:
                continue
            key = tuple(here)
            to = joined.get(key, -1)
            if to < 0:
                self.fuel.spend(len(key))
                to = joined[key] = here[0] if len(here) == 1 else join(*here)
            if to == NOTHING:
                continue
            if found and found[-1][1] == lo and found[-1][2] == to:
                found[-1] = (found[-1][0], hi, to)
            else:
                found.append((lo, hi, to))
        return tuple(found)

    def matches(self, expr: int, data: bytes) -> bool:
        return not data.translate(None, self._available_bytes) and self._matches(expr, data)

    def _matches(self, expr: int, data: bytes) -> bool:
        """``matches``, of data whose bytes are all available. Where the parts tell, nothing is derived."""
        node = self.nodes[expr]
        match node[0]:
            case "not":
                return not self._matches(node[1], data)
            case "and":
                return all(self._matches(part, data) for part in node[1:])
            case "or":
                return any(self._matches(part, data) for part in node[1:])
            case "words":
                at = bisect_left(node[1], data)
                return at < len(node[1]) and node[1][at] == data
        for byte in data:
            expr = self.derive(expr, byte)
            if expr == NOTHING:
                return False
        return self.nullable[expr]

    def is_nonempty(self, expr: int, *, fuel: int = 10_000) -> bool:
        """Whether the language has a text. Free for plain expressions; a search of derivatives for ``and`` and ``not``.

        Raises GrammarTooComplex where the search would visit more than ``fuel`` derivatives.
        """
        if expr == NOTHING:
            return False
        if self.is_plain[expr] or self.nullable[expr]:
            return True
        known = self._alive.get(expr)
        if known is None:
            shortest = self._shortest.get(expr)
            known = self._has_clear_text(expr) if shortest is None else shortest != NO_TEXT
            self._alive[expr] = known = self._has_text(expr, fuel) if known is None else known
        return known

    def note_nonempty(self, expr: int) -> None:
        """Take it from the caller that the language has a text."""
        self._alive[expr] = True

    def _has_clear_text(self, expr: int) -> bool | None:
        """Whether the language has a text; None where only a search tells."""
        if self._can_reach_multiple(expr):
            return True
        bounded = self.length_bound(expr)
        if bounded is not None:
            inner, low, high = bounded
            if self.is_plain[inner]:
                shortest, spread = self.shortest(inner), self.spread(inner)
                assert shortest is not None  # it is plain
                if shortest > (NO_TEXT - 1 if high is None else high) or self.longest(inner) < low:
                    return False
                if shortest >= low or (spread is not None and (high is None or spread.gap <= high - low + 1)):
                    return True
        return True if self._has_likely_text(expr) else None

    def _has_likely_text(self, expr: int) -> bool:
        """Whether one of a few texts is in the language; no derivative of the whole is made for that."""
        node = self.nodes[expr]
        if node[0] == "or":
            return any(self.is_plain[part] or self._has_likely_text(part) for part in node[1:])
        if node[0] == "cat":
            return self.is_plain[node[2]] and self._has_likely_text(node[1])
        if node[0] != "and" or any(self.nodes[part][0] == "multiple" for part in node[1:]):
            return False
        words = list(LIKELY_TEXTS)
        least = 0
        for part in node[1:]:
            if self.nodes[part][0] == "rep":
                least = max(least, self.nodes[part][2])
            elif self.is_plain[part]:
                word = self.shortest_bytes(part, MAX_LIKELY_BYTES)
                if word is not None:
                    words.insert(0, word)
        words = [word for word in words if len(word) >= least]
        return any(all(self._matches(part, word) for part in node[1:]) for word in words)

    def _has_text(self, expr: int, fuel: int) -> bool:
        """Search at most ``fuel`` derivatives for one that accepts; ``_alive`` keeps what the search finds of each."""
        known = self._alive
        found = known.get(expr)
        if found is not None:
            return found
        parents: dict[int, int] = {expr: expr}
        # Both hold what has not been looked at: a short text is near, a long one is found without all shorter ones.
        nearest, latest = deque[int](), deque[int]()
        done: set[int] = set()
        is_turn_of_nearest = False
        while len(done) < len(parents):
            is_turn_of_nearest = not is_turn_of_nearest
            at = expr
            while at in done:
                at = nearest.popleft() if is_turn_of_nearest else latest.pop()
            done.add(at)
            reachable = self._can_reach_multiple(at)
            if known.get(at) or self.least_padding(at) is not None or self.is_plain[at] or reachable:
                while True:  # every expression on the path to this one has a text
                    known[at] = True
                    if parents[at] == at:
                        return True
                    at = parents[at]
            if len(parents) > fuel:
                raise GrammarTooComplex(
                    f"an intersection of regular expressions has more than {fuel:,} states; in a pattern like "
                    "(a|b)*a(a|b){18} each further character doubles them"
                )
            if reachable is False:
                continue
            for _, _, to in self.moves(at):
                if to not in parents and known.get(to) is not False:
                    parents[to] = at
                    nearest.append(to)
                    (latest.appendleft if is_turn_of_nearest else latest.append)(to)
        for at in parents:
            known[at] = False
        return False

    def _can_reach_multiple(self, expr: int) -> bool | None:
        """Whether some digits complete a multiple, computed where a search would try every remainder.

        None where the other parts of the intersection do not treat all digits alike, so that a search has to tell.
        """
        node = self.nodes[expr]
        multiples = [part for part in node[1:] if self.nodes[part][0] == "multiple"] if node[0] == "and" else []
        if len(multiples) != 1:
            return None
        _, modulus, scale, remainder, fraction = self.nodes[multiples[0]]
        others = [part for part in node[1:] if part != multiples[0]]
        has_fraction = False  # the arithmetic below does not follow digits behind a point
        for count in range(MAX_FREE_DIGITS):
            behind_point = [self.derive(part, 0x2E) for part in others]
            has_fraction = has_fraction or self._share_a_digit(behind_point, 1)
            if all(self.nullable[part] for part in others):  # the number may end after any ``count`` digits
                places = scale - max(fraction, 0) - (count if fraction >= 0 else 0)
                if places < 0:
                    return None
                step = modulus // gcd(modulus, 10**places)
                if -remainder * 10**count % step < 10**count:
                    return True
                if not has_fraction and not self._share_a_digit(others, 0):
                    return False
            elif NOTHING not in behind_point:
                return None
            after = [self._after_any_digit(part) for part in others]
            if NOTHING in after or (after == others and not all(self.nullable[part] for part in others)):
                return None
            others = after
        return None

    def _after_any_digit(self, expr: int) -> int:
        """The derivative by a digit if all ten digits have the same one; else NOTHING."""
        after = {self.derive(expr, digit) for digit in range(0x30, 0x3A)}
        return after.pop() if len(after) == 1 else NOTHING

    def _share_a_digit(self, exprs: list[int], least: int) -> bool:
        """Whether one digit of at least ``least`` can follow in all the expressions."""
        return any(NOTHING not in [self.derive(expr, 0x30 + digit) for expr in exprs] for digit in range(least, 10))

    def shortest(self, expr: int) -> int | None:
        """The number of characters of the shortest text; None where finding it would take too long.

        A character that has begun before the expression counts as one. The language is one of whole characters.
        """
        found = self._shortest.get(expr)
        if found is None:
            if not self.is_plain[expr]:
                if expr not in self._not_searched:
                    self._search_shortest(expr)
                return self._shortest.get(expr)
            found = self._shortest[expr] = self._shortest_of_plain(expr)
        return found

    def at_least(self, expr: int) -> int:
        """As ``shortest``, or a lower bound where that would need a search."""
        if self.is_plain[expr] or expr in self._shortest:
            return self.shortest(expr) or 0
        found = self._at_least.get(expr)
        if found is None:
            node = self.nodes[expr]
            match node[0]:
                case "and":
                    found = max(map(self.at_least, node[1:]))
                case "or":
                    found = min(map(self.at_least, node[1:]))
                case "cat":
                    found = self.at_least(node[1]) + self.at_least(node[2])
                case "rep":
                    found = node[2] * self.at_least(node[1])
                case _:
                    found = int(not self.nullable[expr])
            self._at_least[expr] = found
        return found

    def shortest_bytes(self, expr: int, most: int) -> bytes | None:
        """The text of the fewest bytes, of several the first one in the order of ``LIKED``; None where it has more than
        ``most`` bytes, or where only a search of derivatives tells."""
        known: dict[int, bytes | None] = {}

        def of(expr: int) -> bytes | None:
            if expr not in known:
                self.fuel.spend(1)
                found = make(expr)
                known[expr] = None if found is None or len(found) > most else found
            return known[expr]

        def make(expr: int) -> bytes | None:
            node = self.nodes[expr]
            if self.nullable[expr]:
                return b""
            match node[0]:
                case "set" | "chars" if node[1]:
                    return next(LIKED[i : i + 1] for i in range(256) if node[1] >> LIKED[i] & 1)
                case "chars":
                    return chr(node[2][0][0]).encode("utf-8", "surrogatepass")
                case "tail":
                    offset = node[1][0][0]
                    return bytes([0x80 | offset >> 6 * i & 0x3F for i in reversed(range(node[2]))])
                case "word":
                    return bytes(node[1])
                case "words":
                    return min(node[1], key=_by_liking)
                case "rep":
                    inner = of(node[1])
                    return None if inner is None or node[2] * len(inner) > most else inner * node[2]
                case "cat":
                    parts, length = [], 0
                    while node[0] == "cat":
                        parts.append(of(node[1]))
                        expr = node[2]
                        node = self.nodes[expr]
                        length += len(parts[-1] or b"")
                        if parts[-1] is None or length > most:
                            return None
                    parts.append(of(expr))
                    return None if parts[-1] is None else b"".join([part or b"" for part in parts])
                case "or":
                    found = [of(part) for part in node[1:]]
                    told = [part for part in found if part is not None]
                    return min(told, key=_by_liking) if len(told) == len(found) > 0 else None
            return None

        return of(expr)

    def some_bytes(self, expr: int, most: int) -> bytes | None:
        """A text of at most ``most`` bytes that is easily found; of an intersection, the shortest one of a part, with
        more at its end or its beginning where it is too short, that is in all. None where there is none."""
        node = self.nodes[expr]
        parts = node[1:] if node[0] == "and" else (expr,)
        least = self.at_least(expr)
        for part in parts:
            found = self.shortest_bytes(part, most)
            if found is None:
                continue
            more = LIKED[:1] * (least - _num_chars(found))
            for text in dict.fromkeys((found, found + more, more + found)):
                if len(text) <= most and self.matches(expr, text):
                    return text
        return None

    def _shortest_of_plain(self, expr: int) -> int:
        def least(part: int) -> int:
            found = self.shortest(part)
            assert found is not None  # the parts of a plain expression are plain
            return found

        node = self.nodes[expr]
        match node[0]:
            case "word":
                return _num_chars(node[1])
            case "words":
                return min(map(_num_chars, node[1]))
            case "cat":
                return least(node[1]) + least(node[2])
            case "or":
                return min(map(least, node[1:]))
            case "rep":
                return node[2] * least(node[1])
            case "endless":
                return 0
            case "padding":
                return node[1]
            case "owing":
                return node[1] + least(node[2])
        return 1  # set, chars, tail

    def _search_shortest(self, expr: int) -> None:
        """Find the shortest texts of an expression that is not plain and of all its derivatives: a 0-1 search backwards
        from those whose shortest text is known."""
        queue, seen = [expr], {expr}
        ways: dict[int, list[tuple[int, int]]] = {}  # to -> (characters that the step begins, from)
        left: dict[int, int] = {}  # characters that begin on the shortest way to the end
        for at in queue:
            if self.is_plain[at] or at in self._shortest:
                left[at] = (self.shortest(at) or 0) - self._is_within_char(at)
                continue
            if (padding := self.least_padding(at)) is not None:  # it may end here
                left[at] = padding
            if len(queue) > MAX_SEARCHED:
                self._not_searched.add(expr)
                return
            for lo, _, to in self.moves(at):
                ways.setdefault(to, []).append((0 if 0x80 <= lo < 0xC0 else 1, at))
                if to not in seen:
                    seen.add(to)
                    queue.append(to)
        levels: dict[int, list[int]] = {}
        for at, count in left.items():
            levels.setdefault(count, []).append(at)
        count = min(levels, default=0)
        while levels:
            for at in (level := levels.pop(count, [])):
                if left[at] < count:
                    continue
                for step, before in ways.get(at, ()):
                    if count + step < left.get(before, NO_TEXT):
                        left[before] = count + step
                        (level if step == 0 else levels.setdefault(count + 1, [])).append(before)
            count += 1
            if levels and count not in levels:
                count = min(levels)
        for at in queue:
            self._shortest[at] = left[at] + self._is_within_char(at) if at in left else NO_TEXT

    def _is_within_char(self, expr: int) -> bool:
        moves = self.moves(expr)
        return bool(moves) and 0x80 <= moves[0][0] < 0xC0

    def longest(self, expr: int) -> int:
        """The number of characters of the longest text of a plain expression, as ``shortest`` counts; NO_TEXT if there
        is none that is the longest."""
        found = self._longest.get(expr)
        if found is None:
            found = self._longest[expr] = self._make_longest(expr)
        return found

    def _make_longest(self, expr: int) -> int:
        node = self.nodes[expr]
        match node[0]:
            case "empty":
                return 0
            case "word":
                return _num_chars(node[1])
            case "words":
                return max(map(_num_chars, node[1]))
            case "cat":
                return min(self.longest(node[1]) + self.longest(node[2]), NO_TEXT)
            case "or":
                return max(map(self.longest, node[1:]), default=0)
            case "rep":
                return NO_TEXT if node[3] is None else min(node[3] * self.longest(node[1]), NO_TEXT)
        return 1

    def widest_gap(self, expr: int) -> int | None:
        """A bound on the gaps between the lengths of a plain expression's texts and of those of all its derivatives.

        None if one of them has a longest text.
        """
        node = self.nodes[expr]
        match node[0]:
            case "cat" if node[1] == self.text:  # it is an alternative of every derivative, so all great lengths occur
                return max(1, self.shortest(expr) or 0)
            case "cat":
                return self.widest_gap(node[2])
            case "or":
                gaps = [self.widest_gap(p) for p in node[1:]]
                return None if None in gaps else max((g for g in gaps if g is not None), default=None)
            case "rep" if node[3] is None:
                return self.shortest(node[1])
        return None

    def padding(self, count: int) -> int:
        """``count`` characters that are counted and that no text has: what stands before has a smaller bound, or a
        larger one if ``count`` is negative."""
        is_text = count > 0  # then every text has room for it
        return self._make(("padding", count), False, is_text, True, 1) if count else EMPTY

    def owing(self, count: int, inner: int) -> int:
        """The texts of ``inner`` but the empty one; its shortest text is taken to have ``count`` characters more."""
        return self._make(("owing", count, inner), False, self.is_text[inner], self.is_plain[inner], self._edges[inner])

    def least_padding(self, expr: int) -> int | None:
        """How many characters of padding a text that ends here lacks at least; None if none may end here. Without
        padding that is 0 where the language has the empty text."""
        node = self.nodes[expr]
        match node[0]:
            case "padding":
                return node[1]
            case "cat" if self.nullable[node[1]]:
                return self.least_padding(node[2])
            case "or":
                return min((n for n in map(self.least_padding, node[1:]) if n is not None), default=None)
        return 0 if self.nullable[expr] else None

    def length_bound(self, expr: int) -> tuple[int, int, int | None] | None:
        """A language of texts, and how many characters they have at least and at most, if the expression is that."""
        if expr not in self._length_bounds:
            self._length_bounds[expr] = self._length_bound(expr)
        return self._length_bounds[expr]

    def _length_bound(self, expr: int) -> tuple[int, int, int | None] | None:
        node = self.nodes[expr]
        match node[0]:
            case "rep" if node[1] == self.any_char:
                return self.text, node[2], node[3]
            case "and":
                found = ((p, bound) for p in node[1:] if p != self.text and (bound := self.length_bound(p)) is not None)
                part, bound = next(found, (0, None))
                if bound is None:
                    return None
                unbounded, low, high = bound
                inner = self.intersect(self.text, unbounded, *[p for p in node[1:] if p != part])
                nested = self.length_bound(inner)
                if nested is None:
                    return inner, low, high
                highs = [bound for bound in (high, nested[2]) if bound is not None]
                return nested[0], max(low, nested[1]), min(highs, default=None)
            case "rep" if self._is_char(node[1]) and node[3] is not None and node[3] > MAX_COUNTED_BY_STATES:
                low = node[2] if node[2] <= MAX_COUNTED_BY_STATES else 0
                return self.repeat(node[1], low, None), node[2], node[3]
            case "cat" if self.is_plain[expr] and self.longest(node[1]) == self.shortest(node[1]):
                nested = self.length_bound(node[2])
                if nested is None or nested[2] is None:
                    return None
                inner, low, high = nested
                before = self.longest(node[1])
                return self.concat(node[1], inner), low + before if low else 0, None if high is None else high + before
            case "or":
                options = [self.length_bound(p) for p in node[1:]]
                bounds = {option[1:] for option in options if option is not None}
                if None in options or len(bounds) != 1:
                    return None
                return self.union(*[option[0] for option in options if option is not None]), *bounds.pop()
        return None

    def _is_char(self, expr: int) -> bool:
        return self.nodes[expr][0] in ("set", "chars") and self.is_text[expr]

    def counted(self, expr: int) -> tuple[int, int, int | None] | None:
        """As ``length_bound``, where counting decides: a text that has begun can be completed exactly if the
        ``shortest`` text of what may follow fits. None where that is not known, and for a language with many states,
        which seldom recur."""
        found = self.length_bound(expr)
        if found is None:
            return self._padded(expr)
        inner, low, high = found
        if self._has_many_states(inner):
            return None
        shortest = self.shortest(inner)
        if shortest is None:
            return None
        if high is not None and self.is_plain[inner] and self.longest(inner) <= high:
            high = None
        if shortest >= low:
            low = 0
        if low and not self._has_all_lengths(inner, low, high):
            inner = self.intersect(inner, self.repeat(self.any_char, low, None))
            return None if self.shortest(inner) is None else (inner, 0, high)
        return inner, low, high

    def _has_many_states(self, expr: int) -> bool:
        """Whether the derivatives of an expression that is not plain are many."""
        if self.is_plain[expr]:
            return False
        found = [expr]
        for at in found:
            for _, _, to in self.moves(at):
                if to not in found:
                    if len(found) == MANY_STATES:
                        return True
                    found.append(to)
        return False

    def _padded(self, expr: int) -> tuple[int, int, int | None] | None:
        """``counted`` for alternatives with different upper bounds, of which counting decides at least one."""
        if self.nodes[expr][0] != "or":
            return None
        options = [(part, self.counted(part)) for part in self._parts(expr)]
        if not any(found is not None and found[1:] != (0, None) for _, found in options):
            return None  # finite by themselves, such as an address
        parts: list[tuple[int, int]] = []  # with their bounds
        for part, found in options:
            inner, low, high = found or (part, 0, None)
            if low:
                inner = self.intersect(inner, self.repeat(self.any_char, low, None))
            if high is None:
                high = self.longest(inner) if self.is_plain[inner] else NO_TEXT
            if self.shortest(inner) is None or self._has_many_states(inner):
                return None
            parts.append((inner, high))
        most = max((bound for _, bound in parts if bound < NO_TEXT), default=NO_TEXT)
        if most == NO_TEXT:
            return None
        padded = [self.concat(i, self.padding(most - bound if bound < NO_TEXT else ANY_LENGTH)) for i, bound in parts]
        return self.union(*padded), 0, most

    def _has_all_lengths(self, expr: int, low: int, high: int | None) -> bool:
        """Whether a text that has begun can surely be completed with a length in the range, if it is not too long."""
        if not self.is_plain[expr]:
            return False
        gap = self.widest_gap(expr)
        if gap is None:
            spread = self.spread(expr)
            if spread is None or spread.least_longest < low:
                return False
            gap = spread.gap
        return high is None or gap <= high - low + 1

    def spread(self, expr: int) -> LengthSpread | None:
        """The bounds on the lengths of a plain expression; None where they are not known."""
        if expr not in self._spreads:
            self._spreads[expr] = self._spread(expr)
        return self._spreads[expr]

    def _spread(self, expr: int) -> LengthSpread | None:
        node = self.nodes[expr]
        match node[0]:
            case "empty":
                return LengthSpread(0, 1, 0)
            case "set" | "chars" | "tail":
                return LengthSpread(1, 1, 1)
            case "word":
                return LengthSpread(_num_chars(node[1]), 1, _num_chars(node[1]))
            case "words":
                lengths = [*map(_num_chars, node[1])]
                return LengthSpread(min(lengths), max(1, *lengths), max(lengths))
            case "cat":
                first, rest = self.spread(node[1]), self.spread(node[2])
                shortest, after = self.shortest(node[1]), self.shortest(node[2])
                if first is None or rest is None or shortest is None or after is None:
                    return None
                least = min(first.least_longest + self.longest(node[2]), shortest + rest.least_longest, NO_TEXT)
                most = max(first.most_shortest + after, rest.most_shortest)
                return LengthSpread(least, max(first.gap, rest.gap, most), most)
            case "or":
                parts = [self.spread(part) for part in node[1:]]
                known = [part for part in parts if part is not None]
                if len(known) < len(parts) or not known:
                    return None
                most = max(part.most_shortest for part in known)
                gap = max(*(part.gap for part in known), most)
                return LengthSpread(min(part.least_longest for part in known), gap, most)
            case "rep":
                return self._spread_of_repeat(*node[1:])
        return None

    def _spread_of_repeat(self, inner: int, low: int, high: int | None) -> LengthSpread | None:
        each, shortest, longest = self.spread(inner), self.shortest(inner), self.longest(inner)
        if each is None or shortest is None:
            return None
        least = NO_TEXT
        if high is not None:  # within the first repeat, or within the last one after the shortest ones
            least = min(each.least_longest + (high - 1) * longest, (high - 1) * shortest + each.least_longest, NO_TEXT)
        most = each.most_shortest + max(low - 1, 0) * shortest
        return LengthSpread(least, max(each.gap, shortest, most, 1), most)

    def num_parts(self, expr: int) -> int:
        """A rough measure of how many derivatives the texts of a few tokens lead to, at most ``MANY_PARTS``."""
        found = self._num_parts.get(expr)
        if found is None:
            found = self._num_parts[expr] = min(self._count_parts(expr), MANY_PARTS)
        return found

    def _count_parts(self, expr: int) -> int:
        node = self.nodes[expr]
        match node[0]:
            case "chars":
                return 1 + len(node[2]) // 2
            case "word":
                return len(node[1])
            case "cat" | "or":
                return sum(map(self.num_parts, node[1:]))
            case "rep" if self.nodes[node[1]][0] not in ("set", "chars"):
                return self.num_parts(node[1]) * min(max(node[2], node[3] or 1), 8)
            case "rep" | "not":
                return self.num_parts(node[1])
            case "and":
                return prod(self.num_parts(part) for part in node[1:] if part != self.text)
        return 1

    def num_bytes_in(self, lo: int, hi: int) -> int:
        return (self.available >> lo & ((1 << hi - lo) - 1)).bit_count()

    def available_in(self, lo: int, hi: int) -> int:
        bits = self.available >> lo & ((1 << hi - lo) - 1)
        return lo + (bits & -bits).bit_length() - 1 if bits else -1

    def steps(self, expr: int) -> Iterator[tuple[int, int, int]]:
        """The byte ranges [lo, hi) that texts may go on with, each with the derivative by its bytes."""
        for lo, hi, to in self.moves(expr):
            if self.is_nonempty(to):
                yield lo, hi, to

    def alive(self, expr: int) -> int:
        """The expression itself, or NOTHING if its language has no text."""
        return expr if self.is_nonempty(expr) else NOTHING

    def is_subset(self, left: int, right: int) -> bool:
        return not self.is_nonempty(self.intersect(left, self.complement(right)))

    def num_texts(self, expr: int, most: int) -> int:
        """How many texts are in the language, counted up to ``most``."""
        total = 0
        level = {expr: 1} if self.is_nonempty(expr) else {}  # derivatives, and how many prefixes lead to each
        while level:
            total += sum(count for rest, count in level.items() if self.nullable[rest])
            following: dict[int, int] = {}
            for rest, count in level.items():
                for lo, hi, to in self.steps(rest):
                    following[to] = min(most, following.get(to, 0) + count * self.num_bytes_in(lo, hi))
            if total + sum(following.values()) >= most:
                return most  # each prefix has a text of its own
            level = following
        return min(total, most)

    def texts(self, expr: int) -> list[bytes]:
        """The texts of a finite language, shortest first."""
        found: list[bytes] = []
        todo = [(b"", expr)] if self.is_nonempty(expr) else []
        for text, rest in todo:
            if self.nullable[rest]:
                found.append(text)
            steps = ((byte, to) for lo, hi, to in self.steps(rest) for byte in range(lo, hi))
            todo += [(text + bytes([byte]), to) for byte, to in steps if self.available >> byte & 1]
        return found


def _by_liking(word: bytes) -> tuple[int, bytes]:
    """The shortest word first, and of equally long ones that of letters."""
    return len(word), word.translate(_RANKS)


def _num_chars(word: bytes) -> int:
    """Characters of UTF-8; the rest of one that has begun counts too."""
    return sum(b & 0xC0 != 0x80 for b in word) + (bool(word) and 0x80 <= word[0] < 0xC0)
