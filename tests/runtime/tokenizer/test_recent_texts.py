"""Texts that were tokenized lately are not tokenized again, within a budget."""

from phloem.runtime.tokenizer.recent_texts import LEAST_CHARS, RecentTexts


class Counted:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return [ord(character) for character in text]


def test_a_long_text_is_tokenized_once_and_its_list_belongs_to_the_caller():
    encode = Counted()
    recent = RecentTexts(encode)
    text = "é" * LEAST_CHARS
    first = recent.encode(text)
    first.append(7)
    assert recent.encode(text) == [ord("é")] * LEAST_CHARS
    assert encode.asked == [text]


def test_short_texts_and_texts_beyond_a_quarter_of_the_budget_are_tokenized_each_time():
    encode = Counted()
    recent = RecentTexts(encode, most_chars=4000)
    for text in ("a" * (LEAST_CHARS - 1), "b" * 1001):
        assert recent.encode(text) == recent.encode(text)
    assert len(encode.asked) == 4


def test_the_text_used_longest_ago_is_dropped_first():
    encode = Counted()
    recent = RecentTexts(encode, most_chars=2000)
    a, b, c = ("a" * 500, "b" * 500, "c" * 500)
    for text in (a, b, c, a, "d" * 500, "e" * 500):  # four have room: e drops b
        recent.encode(text)
    encode.asked.clear()
    for text in (a, c, b):
        recent.encode(text)
    assert encode.asked == [b]
