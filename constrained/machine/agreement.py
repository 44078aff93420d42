"""How a JSON value under way may still become equal to one of a few known values.

An ``Agreement`` reads the value's text byte by byte, however it is spelled, and keeps the known values that the text
may still spell. Most texts soon agree with none.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

Known = Any  # a JSON value whose strings and names are bytes, whose numbers are ``Number`` and whose arrays are tuples
Live = tuple[tuple[int, Known], ...]  # (which known value, its part that stands here)

VALUE, FIRST_VALUE, STRING, NUMBER, LITERAL, AFTER, NAME, FIRST_NAME, IN_NAME, COLON, DONE = range(11)
QUOTE, BACKSLASH = 0x22, 0x5C
SPACES = frozenset(b" \t\n\r")
PRINTABLE = frozenset(range(0x20, 0x7F))
MINUS = 0x2D
_NUMBER_BYTES = b"0123456789+-.eE"
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_AFTER_NUMBER = frozenset(b",]}") | SPACES
_LITERALS: dict[int, tuple[bytes, bool | None]] = {
    ord("t"): (b"rue", True),
    ord("f"): (b"alse", False),
    ord("n"): (b"ull", None),
}
_ESCAPE = re.compile(rb"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\(.)", re.S)
_UNFINISHED = re.compile(
    rb"(?<!\\)(?:\\\\)*((?:\\u[dD][89abAB][0-9a-fA-F]{2})?\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2})\Z"
)
_CODES = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


@dataclass(frozen=True, slots=True)
class Number:
    """A number by its shortest spelling without an exponent and without the sign."""

    digits: bytes
    is_negative: bool

    @classmethod
    def of(cls, value: Decimal) -> "Number":
        digits = format(abs(value), "f").encode()
        return cls(digits.rstrip(b"0").rstrip(b".") if b"." in digits else digits, value < 0)

    def may_begin(self, text: bytes) -> bool:
        """Whether a spelling of the number may begin with ``text``; with an exponent in it, always."""
        if text[0] == MINUS:
            text = text[1:]
            if not self.is_negative and self.digits != b"0":
                return False
        elif self.is_negative:
            return False
        if self.digits.startswith(text) or b"e" in text or b"E" in text:
            return True
        return b"." in text and text.rstrip(b"0").rstrip(b".") == self.digits

    def bytes_after(self, text: bytes) -> bytes:
        """The bytes that ``may_begin`` allows after a ``text`` that it allows, and maybe some more."""
        text = text[1:] if text[0] == MINUS else text
        if len(text) < len(self.digits) and b"e" not in text and b"E" not in text:
            return self.digits[len(text) : len(text) + 1] + b"eE"
        return _NUMBER_BYTES


class Open(NamedTuple):
    """An array or object under way: the known ones that agree, the item's number, the name under way and those done."""

    known: Live
    at: int = 0
    name: bytes = b""
    done: frozenset[bytes] = frozenset()


class Agreement(NamedTuple):
    """The known values with which the text so far agrees. In ``DONE`` the text spells the one that is ``live``."""

    mode: int
    live: Live
    text: bytes = b""  # of the scalar or name under way, without its first quote; of a literal: the rest
    stack: tuple[Open, ...] = ()

    @property
    def is_in_string(self) -> bool:
        return self.mode in (STRING, IN_NAME)

    @property
    def is_in_number(self) -> bool:
        return self.mode == NUMBER

    @property
    def is_in_scalar(self) -> bool:
        return self.mode in (STRING, IN_NAME, NUMBER, LITERAL)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for agreements of texts that may be completed to the same known values, spelling aside."""
        levels = tuple((tuple(i for i, _ in top.known), top.at, top.name, top.done) for top in self.stack)
        return self.mode, tuple(i for i, _ in self.live), levels

    def step(self, byte: int) -> "Agreement | None":
        """After one more byte; None if no known value agrees any more."""
        mode = self.mode
        if mode in (STRING, IN_NAME):
            return self._in_string(byte)
        if mode == NUMBER:
            if byte in _NUMBER_BYTES:
                return self._number(self.text + bytes([byte]))
            if not _NUMBER.fullmatch(self.text):
                return None
            found = Number.of(Decimal(self.text.decode()))
            after = self._complete(tuple(pair for pair in self.live if pair[1] == found))
            return after.step(byte) if after is not None and after.mode != DONE else after
        if mode == LITERAL:
            rest = self.text[1:]
            return self._replace(text=rest) if rest else self._complete(self.live)
        if byte in SPACES:
            return self
        if mode in (VALUE, FIRST_VALUE):
            return self._begin(byte)
        if mode == AFTER:
            return self._after_value(byte)
        if mode in (NAME, FIRST_NAME):
            if byte == QUOTE:
                return Agreement(IN_NAME, self.live, b"", self.stack)
            return self._close(0) if byte == ord("}") and mode == FIRST_NAME else None
        if mode == COLON:
            return self._replace(mode=VALUE)
        raise AssertionError(self)

    def _begin(self, byte: int) -> "Agreement | None":
        live, stack = self.live, self.stack
        if byte == QUOTE:
            return _unless_empty(STRING, tuple(p for p in live if isinstance(p[1], bytes)), b"", stack)
        if byte == ord("["):
            inner = tuple(p for p in live if isinstance(p[1], tuple))
            firsts = tuple((i, known[0]) for i, known in inner if known)
            return Agreement(FIRST_VALUE, firsts, b"", (*stack, Open(inner))) if inner else None
        if byte == ord("{"):
            inner = tuple(p for p in live if isinstance(p[1], dict))
            return _unless_empty(FIRST_NAME, inner, b"", (*stack, Open(inner)))
        if byte == ord("]"):
            return self._close(0) if self.mode == FIRST_VALUE else None
        if byte in _LITERALS:
            rest, value = _LITERALS[byte]
            return _unless_empty(LITERAL, tuple(p for p in live if p[1] is value), rest, stack)
        return self._replace(live=tuple(p for p in live if isinstance(p[1], Number)))._number(bytes([byte]))

    def _number(self, text: bytes) -> "Agreement | None":
        return _unless_empty(NUMBER, tuple(p for p in self.live if p[1].may_begin(text)), text, self.stack)

    def _in_string(self, byte: int) -> "Agreement | None":
        text = self.text
        is_name = self.mode == IN_NAME
        if byte == QUOTE and not _UNFINISHED.search(text):
            whole = unescaped(text)
            if not is_name:
                return self._complete(tuple(p for p in self.live if p[1] == whole))
            top = self.stack[-1]
            if whole in top.done:
                return None
            values = tuple((i, known[whole]) for i, known in self.live if whole in known)
            return _unless_empty(COLON, values, b"", (*self.stack[:-1], top._replace(name=whole)))
        text += bytes([byte])
        begin = unescaped(text)
        size, begun = len(begin), b""
        if BACKSLASH in text and (unfinished := _UNFINISHED.search(text)):
            begun = unfinished[1].lower()

        def may_become(known: bytes) -> bool:
            return known.startswith(begin) and (not begun or _long_escape(known[size:]).startswith(begun))

        if is_name:
            done = self.stack[-1].done
            live = tuple(p for p in self.live if any(may_become(n) and n not in done for n in p[1]))
        else:
            live = tuple(p for p in self.live if may_become(p[1]))
        return _unless_empty(self.mode, live, text, self.stack)

    def _after_value(self, byte: int) -> "Agreement | None":
        top = self.stack[-1]
        is_array = isinstance(top.known[0][1], tuple)
        if byte == ord(","):
            if not is_array:
                live = tuple(p for p in top.known if len(p[1]) > len(top.done))
                return _unless_empty(NAME, live, b"", (*self.stack[:-1], top._replace(known=live)))
            known = tuple(p for p in top.known if len(p[1]) > top.at + 1)
            values = tuple((i, value[top.at + 1]) for i, value in known)
            return _unless_empty(VALUE, values, b"", (*self.stack[:-1], top._replace(known=known, at=top.at + 1)))
        return self._close(top.at + 1 if is_array else len(top.done))

    def _close(self, count: int) -> "Agreement | None":
        """After the bracket of an array or object with so many members."""
        live = tuple(p for p in self.stack[-1].known if len(p[1]) == count)
        return self._replace(stack=self.stack[:-1])._complete(live)

    def _complete(self, live: Live) -> "Agreement | None":
        """After a value that is equal to those in ``live``."""
        if not live or not self.stack:
            return _unless_empty(DONE, live, b"", ())
        top, kept = self.stack[-1], {i for i, _ in live}
        known = tuple(p for p in top.known if p[0] in kept)
        done = top.done | {top.name} if isinstance(known[0][1], dict) else top.done
        return Agreement(AFTER, known, b"", (*self.stack[:-1], top._replace(known=known, done=done)))

    def items_by_byte(self) -> Counter[int]:
        """By byte, how many of the known values have it next, where a string that is no name is under way."""
        if self.mode != STRING:
            return Counter()
        size = len(unescaped(self.text))
        return Counter([known[size] if len(known) > size else QUOTE for _, known in self.live])

    def agreeing_bytes(self) -> frozenset[int]:
        """The bytes after which some known value may still agree, white space aside, and maybe some more."""
        match self.mode:
            case 2 | 8:  # STRING, IN_NAME
                begin = unescaped(self.text)
                size = len(begin)
                if self.mode == STRING:
                    texts: list[bytes] = [known for _, known in self.live]
                else:
                    done = self.stack[-1].done
                    texts = [n for _, known in self.live for n in known if n.startswith(begin) and n not in done]
                unfinished = _UNFINISHED.search(self.text)
                if unfinished:
                    return frozenset().union(*[_bytes_of_escape(unfinished[1], text[size:]) for text in texts])
                return frozenset({text[size] if len(text) > size else QUOTE for text in texts} | {BACKSLASH})
            case 3:  # NUMBER
                return _AFTER_NUMBER.union(*[known.bytes_after(self.text) for _, known in self.live])
            case 4:  # LITERAL
                return frozenset(self.text[:1])
            case 0 | 1:  # VALUE, FIRST_VALUE
                found = {b for _, known in self.live for b in _first_bytes(known)}
                return frozenset(found | {ord("]")} if self.mode == FIRST_VALUE else found)
            case 6 | 7:  # NAME, FIRST_NAME
                return frozenset((QUOTE, ord("}")))
            case 9:  # COLON
                return frozenset(b":")
        return frozenset(b",]}")


def agreement_with(known: Iterator[Known], *, mode: int = VALUE) -> Agreement | None:
    """Before the first byte; in the mode ``STRING`` behind the first quote. None without known values."""
    return _unless_empty(mode, tuple(enumerate(known)), b"", ())


def known_value(value: Any) -> Known:
    """A parsed JSON value as agreements keep it."""
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list):
        return tuple(map(known_value, value))
    if isinstance(value, dict):
        return {known_value(name): known_value(inner) for name, inner in value.items()}
    return Number.of(Decimal(value))


def key_of(known: Known) -> object:
    """Equal for equal JSON values, and only for them: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(known, tuple):
        return ("array", *map(key_of, known))
    if isinstance(known, dict):
        return ("object", frozenset((name, key_of(inner)) for name, inner in known.items()))
    return (type(known), known)


def unescaped(text: bytes) -> bytes:
    """The text that a string's inside spells, without an escape that has only begun."""
    if BACKSLASH not in text:
        return text
    unfinished = _UNFINISHED.search(text)
    return _ESCAPE.sub(_code, text[: unfinished.start(1)] if unfinished else text)


def _code(found: re.Match[bytes]) -> bytes:
    high, low, code, short = found.groups()
    if short is not None:
        return _CODES.get(short, short)
    if code is not None:
        return chr(int(code, 16)).encode(errors="surrogatepass")
    return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00).encode()


def _long_escape(rest: bytes) -> bytes:
    r"""The first character of a text as an escape with ``\u``, or as two; in lower case. b"" where none begins."""
    if not rest or 0x80 <= rest[0] < 0xC0:
        return b""
    size = 1 if rest[0] < 0x80 else 2 if rest[0] < 0xE0 else 3 if rest[0] < 0xF0 else 4
    units = rest[:size].decode(errors="surrogatepass").encode("utf-16-be", errors="surrogatepass")
    return b"".join([b"\\u%02x%02x" % (units[i], units[i + 1]) for i in range(0, len(units), 2)])


def _bytes_of_escape(begun: bytes, rest: bytes) -> frozenset[int]:
    """The bytes that may follow an escape that has begun, if it is to spell the first character of ``rest``."""
    spelled = _long_escape(rest)
    if not spelled.startswith(begun.lower()):
        return frozenset()
    following = spelled[len(begun) : len(begun) + 1]
    if not following:  # half of a pair that stands for itself
        return PRINTABLE
    if begun == b"\\":
        return frozenset(b for b in b'"\\/bfnrt' if _CODES.get(bytes([b]), bytes([b])) == rest[:1]) | {*following}
    return frozenset(following if following == b"u" else following + following.upper())


def _unless_empty(mode: int, live: Live, text: bytes, stack: tuple[Open, ...]) -> Agreement | None:
    return Agreement(mode, live, text, stack) if live else None


def _first_bytes(known: Known) -> bytes:
    if isinstance(known, bytes):
        return b'"'
    if isinstance(known, tuple):
        return b"["
    if isinstance(known, dict):
        return b"{"
    if isinstance(known, Number):
        return b"-" + known.digits[:1]
    return {True: b"t", False: b"f", None: b"n"}[known]
