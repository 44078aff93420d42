"""Where each family cuts text before merging."""

import pytest
from phloem.runtime.tokenizer.pretokenizers import PRE_TOKENIZERS

TEXT = "I'LL pay  1234567 for\n\n  it's (ok)! ÉtéX"


def cuts(name: str, text: str) -> list[str]:
    offsets = [span for _, span in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]
    assert [a for a, _ in offsets] == [0, *[b for _, b in offsets[:-1]]], "the cuts leave text out"
    return [text[start:end] for start, end in offsets]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("smollm", "a  12 o'clock", ["a", "  ", "1", "2", " o", "'", "clock"]),
        ("smollm", "it's\n\n  x", ["it", "'s", "\n\n ", " x"]),
        ("gpt-2", "a  12", ["a", " ", " 12"]),
        ("llama-bpe", "a  1234567", ["a", " ", " ", "123", "456", "7"]),
        ("llama-bpe", "I'LL (ok)!\n\n x", ["I", "'LL", " (", "ok", ")!\n\n", " x"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("gpt-4o", "camelCase it's 1234", ["camel", "Case", " it's", " ", "123", "4"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("deepseek-v3", "日本語 1234 ab", ["日本語", " ", "123", "4", " ab"]),
        ("deepseek-llm", "Éte日本 12345\n (a)  ", ["É", "te", "日本", " ", "12345", "\n", " (", "a", ")", "  "]),
        ("deepseek-llm", "ჯa\U0001d400", ["ჯ", "a", "\U0001d400"]),
        ("falcon", "f(x) 12345", ["f", "(", "x", ")", " ", "123", "45"]),
        ("default", "a=1234", ["a", "=", "123", "4"]),
        ("deepseek-coder", "ab\n c1", ["ab", "\n", " c", "1"]),
    ],
)
def test_cuts(name: str, text: str, pieces: list[str]) -> None:
    assert cuts(name, text) == pieces


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_cut_leaves_text_out(name: str) -> None:
    assert "".join(cuts(name, TEXT)) == TEXT
