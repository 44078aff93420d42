"""The automaton of the white space before a state's bytes.

A code is one of its states. The code of a machine's state says which white space may or must stand before the state's
bytes: ``COMPACT`` none, ``FLEXIBLE`` none, or one space, or a line end and any indentation of up to ``MAX_INDENT``
characters, ``ONE_SPACE`` none or one space, and the codes of ``indent`` and ``new_line`` exactly what they name.
"""

import numpy as np

MAX_INDENT = 40
MAX_SPACES, MAX_TABS = 256, 64  # of ``indent`` and ``new_line``
COMPACT, FLEXIBLE = 0, 1
ONE_SPACE = 5 + MAX_INDENT
_SPACES = ONE_SPACE + 1  # _SPACES + n: n more spaces have to follow; 0: the state's bytes
_TABS = _SPACES + MAX_SPACES  # _TABS + n, n >= 1: the same with tabs
_BEFORE_LINE_END = _TABS + MAX_TABS - _SPACES + 1  # added to one of these: a line feed has to come first
NUM_CODES = _SPACES + 2 * _BEFORE_LINE_END
SPACE, TAB, LINE_FEED, CARRIAGE_RETURN = 1, 2, 3, 4  # classes of bytes; 0 are all others


def indent(count: int, byte: int = 0x20) -> int:
    """The code of exactly ``count`` spaces, or tabs."""
    assert count <= (MAX_TABS if byte == 0x09 else MAX_SPACES)
    return _TABS + count if count and byte == 0x09 else _SPACES + count


def new_line(count: int, byte: int = 0x20) -> int:
    """The code of exactly a line feed and ``count`` spaces, or tabs."""
    return indent(count, byte) + _BEFORE_LINE_END


def space_classes() -> np.ndarray:
    """uint8 [256]: the class of each byte."""
    classes = np.zeros(256, np.uint8)
    classes[[0x20, 0x09, 0x0A, 0x0D]] = (SPACE, TAB, LINE_FEED, CARRIAGE_RETURN)
    return classes


def needed_spaces(code: int) -> bytes:
    """The bytes of which one has to follow; none if the white space may end here."""
    if code <= _SPACES:
        return b""
    return b"\n" if code >= _SPACES + _BEFORE_LINE_END else b"\t" if code > _TABS else b" "


def space_automaton() -> np.ndarray:
    """uint16 [NUM_CODES, 8]: the code after a byte of each class, 0 for none; for class 0, whether the white space may
    end there."""
    delta = np.zeros((NUM_CODES, 8), np.uint16)
    delta[: ONE_SPACE + 2, 0] = 1
    delta[FLEXIBLE, [SPACE, LINE_FEED, CARRIAGE_RETURN]] = 2, 4, 3
    delta[3, LINE_FEED] = 4
    for i in range(4, ONE_SPACE - 1):
        delta[i, [SPACE, TAB]] = i + 1
    delta[ONE_SPACE, SPACE] = _SPACES
    delta[_SPACES + 1 : _TABS + 1, SPACE] = np.arange(_SPACES, _TABS)
    delta[_TABS + 1 : _TABS + MAX_TABS + 1, TAB] = [_SPACES, *range(_TABS + 1, _TABS + MAX_TABS)]
    first = _SPACES + _BEFORE_LINE_END
    delta[first:, LINE_FEED] = np.arange(_SPACES, first)
    return delta
