import pytest
from phloem.constrained import Vocabulary
from phloem.constrained.machine.item_texts import crossing_tokens, is_in_string


def test_tokens_that_may_cross_from_item_to_item_are_found() -> None:
    tokens = [b",", b'",', b'","', b'","a', b"1,1", b"[1,1", b"ab", b"]", b'"]', b"[1]"]
    crossing = crossing_tokens(Vocabulary([*tokens, b"</s>"], {10}, 10))
    assert crossing.ends == (0, 1, 2, 3, 4, 5, 7, 8, 9) and crossing.ends_after_quote == (1, 2, 3, 8)
    assert crossing.commas == (0, 1, 2, 3, 4, 5) and crossing.commas_after_quote == (1, 2, 3)
    assert crossing.into_next == (3, 4, 5) and crossing.into_next_after_quote == (3,)
    assert crossing.whole_commas == (5,) and crossing.whole == (5, 9)


@pytest.mark.parametrize(
    ("text", "is_open"),
    [("", False), ('"a', True), ('"a\\"', True), ('"a"', False), ('"\\\\"', False), ('{"a": "', True)],
)
def test_an_open_string_is_seen(text: str, is_open: bool) -> None:
    assert is_in_string(text.encode()) == is_open
