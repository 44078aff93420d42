import json
import random
from typing import Any

import pytest
from phloem.constrained.machine.agreement import DONE, Agreement, agreement_with, key_of, known_value, unescaped

VALUES: list[Any] = [
    "a", "ab", "", 'q"\\', "é\n", 1, 10, 1.5, -2, 0, 105, True, False, None, [], [[]], [1], [1, 2], ["a", {"b": 1}],
    {}, {"a": 1}, {"b": 1}, {"a": 1, "b": [2]}, {"a": {"a": 1}},
]  # fmt: skip


def read(text: str, known: list[Any]) -> Agreement | None:
    found = agreement_with(map(known_value, known))
    for byte in text.encode():
        found = found.step(byte) if found is not None and found.mode != DONE else found
    return found


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_text_agrees_with_its_value_to_the_end_and_then_with_no_other(value: Any) -> None:
    rng = random.Random(1)
    for _ in range(20):
        known = rng.sample([v for v in VALUES if v is not value], 6)
        spelled = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])) + ","
        at = rng.randrange(7)
        found = read(spelled, [*known[:at], value, *known[at:]])
        assert found is not None and found.mode == DONE and [i for i, _ in found.live] == [at]
        assert read(spelled, known) is None
        begin = read(spelled[: rng.randrange(len(spelled))], [*known[:at], value, *known[at:]])
        assert begin is not None and at in [i for i, _ in begin.live] + [i for o in begin.stack for i, _ in o.known]


@pytest.mark.parametrize(
    ("text", "known", "agrees"),
    [
        ("1.0", 1, True),
        ("1.05", 1.5, False),
        ("1.50", 1.5, True),
        ("1e", 10, True),
        ("-0", 0, True),
        ("-", 2, False),
        ('"\\u00', "é", True),
        ('"\\ud83d\\ude0', "\U0001f600", True),
        ('"\\n', "\n", True),
        ('"\\n', "n", False),
        ('{"b": 1', {"a": 2, "b": 1}, True),
        ('{"b": 1, "b"', {"a": 2, "b": 1}, False),
        ('{"b": 1}', {"a": 2, "b": 1}, False),
        ("[1,", [1], False),
        ("[1, ", [1, 2], True),
        (" [ ", [], True),
    ],
)
def test_a_text_agrees_as_long_as_it_may_spell_the_value(text: str, known: Any, agrees: bool) -> None:
    assert (read(text, [known]) is not None) == agrees


def test_every_byte_that_leads_on_is_named() -> None:
    for value in VALUES:
        spelled = json.dumps(value, separators=(",", ":")).encode() + b","
        found = agreement_with(iter([known_value(value)]))
        for byte in spelled:
            assert found is not None and byte in found.agreeing_bytes(), (value, byte)
            found = found.step(byte)
            if found is not None and found.mode == DONE:
                break


@pytest.mark.parametrize("value", ["é\n", 'q"\\/', "\U0001f600a", "\ud83d", "\ud83dx"], ids=repr)
def test_a_byte_that_is_not_named_leads_on_to_no_value(value: Any) -> None:
    rng = random.Random(1)
    for _ in range(200):
        found = agreement_with(iter([known_value(value), known_value("e\U0001f601")]))
        begun = b""  # of an escape
        for _ in range(40):
            if found is None or found.mode == DONE:
                break
            valid = range(0x20, 0x7F)
            if begun:
                valid = b'"\\/bfnrtu' if begun == b"\\" else b"\\" if len(begun) == 6 else b"0123456789abcdefABCDEF"
                valid = b"u" if len(begun) == 7 else valid
            after = {byte: to for byte in valid if (to := found.step(byte)) is not None}
            if found.is_in_string:
                assert all(byte in found.agreeing_bytes() for byte in after)
            if not after:
                break
            byte = rng.choice([b for b in after if b in b"u\\"] or [*after])
            if found.is_in_string:
                begun = begun + bytes([byte]) if begun or byte == 0x5C else b""
                is_high = begun[2:3] in b"dD" and begun[3:4] in b"89abAB" and len(begun) > 3
                if len(begun) == (12 if is_high else 6) or (len(begun) == 2 and byte != 0x75):
                    begun = b""
            found = after[byte]


@pytest.mark.parametrize(("text", "agrees"), [("\\u00e", True), ("\\u00f", False), ("\\n", False), ("\\u00E9", True)])
def test_an_escape_that_spells_another_character_agrees_no_more(text: str, agrees: bool) -> None:
    assert (read(f'"{text}', ["é"]) is not None) == agrees


def test_an_escape_in_the_middle_of_a_character_agrees_no_more() -> None:
    agreement = agreement_with(iter(["é".encode()]))
    for byte in b'"\xc3':
        assert agreement is not None
        agreement = agreement.step(byte)
    assert agreement is not None and agreement.agreeing_bytes() >= {0xA9}
    assert agreement.step(0x5C) is None


def test_keys_are_equal_for_equal_values_alone() -> None:
    keys = [key_of(known_value(value)) for value in VALUES]
    assert len(set(keys)) == len(VALUES)
    assert key_of(known_value({"a": 1, "b": 2.0})) == key_of(known_value({"b": 2, "a": 1.0}))
    assert key_of(known_value([True])) != key_of(known_value([1]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"a\\", b"a"), (b"a\\\\", b"a\\"), (b"\\u00e9x", "éx".encode()), (b"\\ud83d", b""), (b"\\ud83d\\u", b"")],
)
def test_an_escape_that_has_only_begun_is_left_out(text: bytes, expected: bytes) -> None:
    assert unescaped(text) == expected
