"""Host names against the package ``idna``, which implements the same standards with the decoded labels in hand."""

import random
import unicodedata

import pytest
from phloem.constrained.expressions import Expressions
from phloem.constrained.json.host_names import host_name, international_host_name

idna = pytest.importorskip("idna")


@pytest.fixture(scope="module")
def ex() -> Expressions:
    return Expressions()


def is_valid(name: str) -> bool:
    try:
        idna.encode(name)
    except idna.IDNAError:
        return False
    return True


ALPHABET = "ab5l-0xnA·͵αβςß״׳אבツ・ァ一〇가٠۰بيادक़क्ाé́ \u200c\u200dЖжŁłᄀﬁʼn\u302e\u0640ぁ"


def test_no_international_name_is_taken_that_cannot_be_encoded(ex: Expressions) -> None:
    names, rng = international_host_name(ex), random.Random(7)
    taken = 0
    for _ in range(20_000):
        name = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 7)))
        if ex.matches(names, name.encode()):
            taken += 1
            # what composes with a letter of India is not known here
            assert is_valid(name) or not unicodedata.is_normalized("NFC", name), ascii(name)
    assert taken > 1_000


def test_international_names_are_refused_for_known_reasons_only(ex: Expressions) -> None:
    names, rng = international_host_name(ex), random.Random(8)
    alphabet = "abl-0éαβאבツ一가٠۰بيदकाж\u094d"
    for _ in range(20_000):
        name = "".join(rng.choices(alphabet, k=rng.randrange(1, 7)))
        if is_valid(name) and "--" not in name and "-\u094d" not in name:
            assert ex.matches(names, name.encode()), ascii(name)


@pytest.mark.parametrize("dot", [".", "\u3002", "\uff0e", "\uff61"])
def test_every_dot_of_the_standard_stands_between_two_labels(ex: Expressions, dot: str) -> None:
    names = international_host_name(ex)
    assert ex.matches(names, f"bücher{dot}example".encode())
    for name in (dot, f"{dot}a", f"a{dot}", f"a{dot}{dot}b"):
        assert not ex.matches(names, name.encode())


def test_letters_that_need_neighbours_have_them(ex: Expressions) -> None:
    names = international_host_name(ex)
    for good in ("l·l", "l·l·l", "α͵β", "א״ב", "・ァ", "一・一", "क्\u200dष", "क्\u200cष", "بي\u200cبي", "ب٠", "a۰"):
        assert ex.matches(names, good.encode()) and is_valid(good), ascii(good)
    for bad in ("a·l", "l·", "α͵", "״ב", "a・b", "क\u200dष", "a\u200cb", "٠ب", "ب٠۰", "بa", "aא"):
        assert not ex.matches(names, bad.encode()) and not is_valid(bad), ascii(bad)


def test_an_ascii_name_has_no_encoded_label(ex: Expressions) -> None:
    names = host_name(ex)
    for good in ("www.example.com", "x", "xn", "xn-a", "x-n--a", "X1.xN0", "a--b", "x--a", "1.2"):
        assert ex.matches(names, good.encode()), good
    for bad in ("xn--a", "a.XN--b", "-a", "a-", "a_b", "a..b", "a.", "", "ä", "xn-", "x-", "xn--"):
        assert not ex.matches(names, bad.encode()), bad
