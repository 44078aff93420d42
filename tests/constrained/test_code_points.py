import re

import pytest
from phloem.constrained.code_points import fold_case


@pytest.mark.parametrize("letters", ["σςΣ", "µμΜ", "kK", "éÉ", "ß"])
def test_letters_that_differ_in_case_alone_are_folded_to_each_other(letters: str) -> None:
    for letter in letters:
        folded = fold_case(((ord(letter), ord(letter)),))
        assert {chr(c) for lo, hi in folded for c in range(lo, hi + 1)} == set(letters)
        assert all(re.fullmatch(letter, other, re.IGNORECASE) for other in letters)
