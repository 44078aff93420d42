"""Tokenizers of GGUF files: text survives, special tokens are out of a user's reach, and bad files are named."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from phloem.protocol.errors import InvalidRequest, UnknownModel, Unsupported
from phloem.runtime.tokenizer import Tokenizer, load_chat_template, load_tokenizer
from phloem.tests.runtime.tokenizer.vocabularies import CHATML, write_byte_level, write_sentencepiece

VARIED = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "\n\n\ttabs\r\nlines",
    "1234567890 3.14159 1,000",
    "Größe naïve café",
    "日本語 中文 한국어",
    "🦜🦜👨‍👩‍👧 flags 🇩🇪",
    "don't DON'T we'll",
    "<0x41> <|not special|> </s",
    "\x00\x01\x7f",
    "▁",
    "a▁b ▁▁ c ▁",
    "a" * 500,
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "model.gguf"
    return load_tokenizer(write_byte_level(path, eot_token_id=0, bos_token_id=1, add_bos_token=False))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_sentencepiece(tmp_path_factory.mktemp("spm") / "model.gguf"))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("text", VARIED)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()


@given(text=st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_text_survives_and_holds_no_special_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids.isdisjoint(ids)


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endo", "ftext|>", "[PAD5]", "<|python|>", "x", " "])))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_typed_special_token_is_text_unless_asked_for(byte_level: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    plain, parsed = byte_level.encode(text), byte_level.encode(text, special=True)
    assert byte_level.special_ids.isdisjoint(plain)
    assert byte_level.decode(plain) == text == byte_level.decode(parsed, skip_special=False)
    specials = [byte_level.special_text(i) for i in parsed if i in byte_level.special_ids]
    assert len(specials) == sum(map(text.count, ("<|im_start|>", "<|im_end|>", "<|python|>", "<|endoftext|>")))


def test_sentencepiece_control_tokens_cannot_be_typed(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.special_ids.isdisjoint(sentencepiece.encode("<s>hi</s><unk><0x0A>"))
    assert sentencepiece.encode("<s>hi</s>", special=True)[0] == 1
    assert sentencepiece.encode("<s>hi</s>", special=True)[-1] == 2


def test_digits_stand_alone_in_smollm(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a  12 o'clock 2048")
    tokens = [byte_level.token_bytes[i] for i in ids]
    assert [token for token in tokens if any(chr(b).isdigit() for b in token)] == [b"1", b"2", b"2", b"0", b"4", b"8"]


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>hi<|im_end|>", special=True)
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"
    for skip, text in ((True, "hi"), (False, "<|im_start|>hi<|im_end|>")):
        detokenizer = byte_level.detokenizer(skip_special=skip)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text


def test_ids_that_mean_something(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert (byte_level.eos_ids, byte_level.eos_id, byte_level.bos_id, byte_level.add_bos) == ({0, 2}, 2, 1, False)
    assert (sentencepiece.eos_ids, sentencepiece.bos_id, sentencepiece.add_bos) == ({2}, 1, True)
    # Text in the file's eyes, but shaped like a control token: users must not be able to type it. 5 is unused.
    assert byte_level.special_ids == {0, 1, 2, 4, 5}
    assert byte_level.encode("<tool_call>") == [3] and byte_level.token_bytes[3] == b"<tool_call>"


def test_only_the_start_of_a_sequence_gets_sentencepieces_space(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.decode(sentencepiece.encode("the", at_start=True)) == " the"
    assert sentencepiece.decode(sentencepiece.encode("the")) == "the"
    assert sentencepiece.encode("", at_start=True) == []


def test_sentencepiece_joins_the_best_scoring_pair_first(sentencepiece: Tokenizer) -> None:
    texts = [sentencepiece.special_text(i) for i in range(sentencepiece.vocab_size)]
    score = {text: -i for i, text in enumerate(texts) if i >= 259}
    id_of = {text: i for i, text in enumerate(texts)}
    texts_without_sign = [text for text in VARIED if "▁" not in text]  # a sign in a text is three byte tokens
    for text in [*texts_without_sign, "the quick brown fox's return of these jumps 12,048"]:
        parts = list(text.replace(" ", "▁"))
        while True:
            joined = [(score.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
            best = max((pair for pair in joined if pair[0] is not None), default=None)
            if best is None:
                break
            at = -best[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        slow: list[int] = []
        for part in parts:
            slow += [id_of[part]] if part in score else [id_of[f"<0x{byte:02X}>"] for byte in part.encode()]
        assert sentencepiece.encode(text) == slow, text


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"lone surrogate U\+D83E at character 2"):
        tokenizer.encode("ab\ud83e")


def test_the_hash_tells_vocabularies_apart(byte_level: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path) -> None:
    again = load_tokenizer(write_byte_level(tmp_path / "again.gguf"))
    assert again.vocab_hash == byte_level.vocab_hash != sentencepiece.vocab_hash


@pytest.mark.parametrize(
    ("settings_", "error", "message"),
    [
        ({"pre": "unheard-of"}, Unsupported, r"pre-tokenizer 'unheard-of'.*served are .*smollm"),
        ({"eot_token_id": 9999}, UnknownModel, r"eot_token_id is 9999, but the vocabulary has 3\d\d tokens"),
    ],
)
def test_a_broken_byte_level_file_is_named(
    tmp_path: Path, settings_: dict[str, str | int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_tokenizer(write_byte_level(tmp_path / "x.gguf", **settings_))  # type: ignore[arg-type]


def test_sentencepiece_rules_that_are_not_served_are_refused(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "x.gguf", remove_extra_whitespaces=True)
    with pytest.raises(Unsupported, match="remove_extra_whitespaces is not served"):
        load_tokenizer(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"nowhere\.gguf does not exist; give a \.gguf file"):
        load_tokenizer(tmp_path / "nowhere.gguf")


def test_a_gguf_file_brings_its_template_or_none(tmp_path: Path) -> None:
    with_template = write_byte_level(tmp_path / "a.gguf", chat_template=CHATML)
    without = write_byte_level(tmp_path / "b.gguf")
    template = load_chat_template(with_template, load_tokenizer(with_template))
    assert template is not None and template.source == CHATML
    assert load_chat_template(without, load_tokenizer(without)) is None
