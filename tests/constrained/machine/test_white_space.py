import pytest
from phloem.constrained.machine.white_space import (
    COMPACT,
    FLEXIBLE,
    MAX_INDENT,
    MAX_SPACES,
    MAX_TABS,
    NUM_CODES,
    ONE_SPACE,
    indent,
    needed_spaces,
    new_line,
    space_automaton,
    space_classes,
)

WIDE = "\n" + " " * MAX_INDENT
DELTA, CLASSES = space_automaton(), space_classes()


def takes(code: int, text: str) -> bool:
    for byte in text.encode():
        code = int(DELTA[code, CLASSES[byte]])
        if not code:
            return False
    return bool(DELTA[code, 0])


@pytest.mark.parametrize(
    ("code", "allowed", "refused"),
    [
        (COMPACT, [""], [" ", "\n"]),
        (ONE_SPACE, ["", " "], ["  ", "\n", "\t"]),
        (FLEXIBLE, ["", " ", "\n", "\r\n", "\n \t", WIDE], ["  ", "\t", "\n\n", WIDE + " "]),
        (indent(0), [""], [" "]),
        (indent(3), ["   "], ["", "  ", "    ", "  \t", "\n   "]),
        (indent(MAX_SPACES), [" " * MAX_SPACES], [" " * (MAX_SPACES - 1), " " * (MAX_SPACES + 1)]),
        (indent(1, 9), ["\t"], ["", "\t\t", " "]),
        (indent(MAX_TABS, 9), ["\t" * MAX_TABS], ["\t" * (MAX_TABS + 1)]),
        (new_line(0), ["\n"], ["", "\n ", "\r\n"]),
        (new_line(2), ["\n  "], ["", "\n", "\n   ", "  ", "\n\n  "]),
        (new_line(MAX_SPACES), ["\n" + " " * MAX_SPACES], ["\n" + " " * (MAX_SPACES + 1)]),
        (new_line(2, 9), ["\n\t\t"], ["\n\t", "\n  "]),
    ],
)  # fmt: skip
def test_each_code_takes_its_white_space_and_nothing_else(code: int, allowed: list[str], refused: list[str]) -> None:
    assert [text for text in allowed if not takes(code, text)] == []
    assert [text for text in refused if takes(code, text)] == []


def test_codes_are_distinct_and_within_the_table() -> None:
    codes = [indent(n) for n in range(MAX_SPACES + 1)] + [indent(n, 9) for n in range(1, MAX_TABS + 1)]
    codes += [new_line(n) for n in range(MAX_SPACES + 1)] + [new_line(n, 9) for n in range(1, MAX_TABS + 1)]
    assert len({*codes, COMPACT, FLEXIBLE, ONE_SPACE}) == len(codes) + 3 and max(codes) == NUM_CODES - 1
    assert indent(0, 9) == indent(0) and new_line(0, 9) == new_line(0)


def test_needed_spaces_are_the_bytes_that_the_automaton_asks_for() -> None:
    for code in range(NUM_CODES):
        follows = bytes(b for b in b" \t\n\r" if DELTA[code, CLASSES[b]])
        assert needed_spaces(code) == (b"" if DELTA[code, 0] else follows)
