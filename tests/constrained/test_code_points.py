import random
import re
import unicodedata

import pytest
from phloem.constrained.code_points import Ranges, complement, fold_case, intersection, unicode_class, union


@pytest.mark.parametrize("letters", ["σςΣ", "µμΜ", "kK", "éÉ", "ß"])
def test_letters_that_differ_in_case_alone_are_folded_to_each_other(letters: str) -> None:
    for letter in letters:
        folded = fold_case(((ord(letter), ord(letter)),))
        assert {chr(c) for lo, hi in folded for c in range(lo, hi + 1)} == set(letters)
        assert all(re.fullmatch(letter, other, re.IGNORECASE) for other in letters)


def test_set_operations_are_those_of_sets() -> None:
    rng = random.Random(0)

    def ranges() -> Ranges:
        return union([(low := rng.randrange(40), low + rng.randrange(6)) for _ in range(rng.randrange(5))])

    def members(ranges: Ranges) -> set[int]:
        return {c for lo, hi in ranges for c in range(lo, min(hi, 60) + 1)}

    for _ in range(100):
        left, right = ranges(), ranges()
        assert members(union(left, right)) == members(left) | members(right)
        assert members(intersection(left, right)) == members(left) & members(right)
        assert members(complement(left)) == set(range(61)) - members(left)


@pytest.mark.parametrize("name", ["L", "Letter", "Lu", "Nd", "General_Category=Sc", "LC"])
def test_a_unicode_class_is_that_of_the_standard_library(name: str) -> None:
    wanted = {"Letter": "L", "General_Category=Sc": "Sc"}.get(name, name)
    found = unicode_class(name)
    assert found is not None
    for code in range(0, 0x3000, 7):
        category = unicodedata.category(chr(code))
        expected = category in ("Lu", "Ll", "Lt") if wanted == "LC" else category.startswith(wanted)
        assert any(lo <= code <= hi for lo, hi in found) == expected, hex(code)
    assert unicode_class("Klingon") is None
