"""The bytes of a whole vocabulary are those of its tokens one by one."""

from phloem.runtime.tokenizer.spelling import BYTE_OF_CHAR, all_byte_level_bytes, byte_level_bytes


def test_a_vocabulary_is_spelled_as_its_tokens_are() -> None:
    tokens = [
        "",
        "\u0120the",
        "".join(BYTE_OF_CHAR),
        "a b",
        "x",
        "\u4f60",
        "\udc80",
        "\U0001f600a",
        "",
        "\u0143\u0144",
        "z",
    ]
    assert all_byte_level_bytes(tokens) == [byte_level_bytes(token) for token in tokens]
    assert all_byte_level_bytes([]) == []
    assert byte_level_bytes("\u0120the") == b" the" and byte_level_bytes("a b") == b"a b"
