from phloem.constrained import Vocabulary
from phloem.constrained.machine.agreement import known_value
from phloem.constrained.machine.item_texts import BETWEEN, ItemTexts, Level, crossing_tokens


def test_tokens_that_may_cross_from_item_to_item_are_found() -> None:
    tokens = [b",", b'",', b'","', b'","a', b"1,1", b"[1,1", b"ab", b"]", b'"},{', b'"},{"', b"[1]", b"],1", b'":["a']
    tokens += [b'{"a', b'{"a":1, "b', b'": {"a":1, "b']
    found = crossing_tokens(Vocabulary([*tokens, b"</s>"], {16}, 16))
    expected = {
        "commas": [0, 1, 2, 3, 4, 5, 8, 9, 11, 14, 15],
        "commas_after_quote": [1, 2, 3, 8, 9, 14, 15],
        "into_next": [3, 4, 5, 9, 11, 14, 15],
        "into_next_after_quote": [3, 9, 14, 15],
        "commas_after_bracket": [8, 9, 11],
        "into_next_after_bracket": [9, 11],
        "commas_after_both": [8, 9],
        "whole": [5, 10, 12, 14, 15],
        "whole_after_quote": [12, 15],  # inside a string, only a quote leads to a bracket
        "into_names": [3, 14, 15],
    }
    assert {name: getattr(found, name).tolist() for name in expected} == expected


def test_equal_lists_of_items_are_one_object_and_equal_items_are_found() -> None:
    empty = ItemTexts().empty
    one = empty.with_item(known_value([1, {"a": "b"}]), None)
    assert one.with_item(known_value(True), None) is one.with_item(known_value(True), None)
    assert one.has(known_value([1, {"a": "b"}])) and not one.has(known_value([True, {"a": "b"}]))
    assert (empty.count, one.count, list(one.with_item(b"x", "x").originals())) == (0, 1, ["x", None])


def test_the_agreement_of_a_text_is_that_of_its_parts_in_any_split() -> None:
    texts = ItemTexts()
    seen = texts.empty.with_item(b"abc", "abc").with_item(b"abd", "abd")
    whole = texts.extended(0, b' "ab')
    split = texts.extended(texts.extended(0, b' "'), b"ab")
    found = [texts.agreement(Level(1, 2, seen, text)) for text in (whole, split, texts.extended(split, b"x"))]
    assert found[0] == found[1] and found[0] is not None and len(found[0].live) == 2 and found[2] is None
    assert split == whole and texts.first_byte(whole) == ord('"') and texts.first_byte(texts.extended(0, b" ")) == 0
    assert texts.text(split) == b' "ab' and texts.agreement(Level(1, 2, texts.empty, whole)) is None


def test_a_name_is_read_without_its_quotes_and_once() -> None:
    texts = ItemTexts()
    name = texts.extended(0, b"a\\n")
    after = texts.with_name(Level(1, 0, texts.no_names, name))
    assert after is not None and after.text == BETWEEN and list(after.seen.values()) == [b"a\n"]
    assert texts.agreement(after) is None and texts.with_name(Level(1, 0, after.seen, name)) is None
    found = [texts.agreement(Level(1, 0, after.seen, texts.extended(0, text))) for text in (b"", b"a\\", b"b")]
    assert [agreement is not None and agreement.is_in_string for agreement in found] == [True, True, False]
