"""Tokenizers of folders: the file's rules, without those for special tokens and the first space."""

import json
from pathlib import Path
from typing import Any

import pytest
from phloem.protocol.errors import UnknownModel, Unsupported
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["The quick brown fox jumps over the lazy dog, 12 times; the other there these\n"] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]


def write(folder: Path, tokenizer: Tokenizer, **files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def llama() -> Tokenizer:
    """As Llama 2's tokenizer.json: special tokens inside the model, a space before the first word, byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*SPECIAL, *byte_tokens], show_progress=False, max_token_length=6
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, llama, unigram])
def test_ids_equal_the_files_own_rules_at_the_start_of_a_text(tmp_path: Path, make: Any) -> None:
    reference = make()
    tokenizer = load_tokenizer(write(tmp_path / "m", reference))
    assert tokenizer.vocab_size == reference.get_vocab_size()
    for text in ("the quick fox", "these  lazy\n dogs, 12", "The other there"):
        assert tokenizer.encode(text, at_start=True) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("make", [byte_level, llama])
def test_text_survives_in_the_middle_of_a_sequence(tmp_path: Path, make: Any) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m", make()))
    for text in ("the", " the", "naïve 🦜 日本", "<s></s><|user|><unk>", "\n\n", "▁ the▁"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("make", [byte_level, llama, unigram])
def test_special_tokens_cannot_be_typed(tmp_path: Path, make: Any) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m", make()))
    text = "the <s>fox</s><|user|>the"
    typed = set(tokenizer.encode(text))
    assert {tokenizer.bos_id, *tokenizer.eos_ids}.isdisjoint(typed)
    named = [tokenizer.special_text(i) for i in tokenizer.encode(text, special=True) if i in tokenizer.special_ids]
    assert [name for name in named if name != "<unk>"] == ["<s>", "</s>", "<|user|>"]


def test_added_text_tokens_are_found_in_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "m", byte_level()))
    ids = tokenizer.encode("a<think>b")
    assert len(ids) == 3 and tokenizer.token_bytes[ids[1]] == b"<think>"


def test_white_space_that_a_special_token_swallows_goes_with_it(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|end_it|>", rstrip=True)])
    tokenizer = load_tokenizer(write(tmp_path / "m", backend))
    ids = tokenizer.encode("a<|end_it|> \n b<|end_it|>", special=True)
    assert tokenizer.decode(ids, skip_special=False) == "a<|end_it|>b<|end_it|>"


def test_ends_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    backend = byte_level()
    user = backend.token_to_id("<|user|>")
    folder = write(tmp_path / "m", backend, generation_config={"eos_token_id": [user]})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == {user, backend.token_to_id("</s>")}
    assert tokenizer.eos_id == backend.token_to_id("</s>")


def test_bos_is_added_where_the_file_adds_it(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path / "a", llama())).add_bos
    assert not load_tokenizer(write(tmp_path / "b", byte_level())).add_bos
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    assert load_tokenizer(write(tmp_path / "c", byte_level(), tokenizer_config=settings)).add_bos


def test_ids_that_no_token_has_are_special_and_show_nothing(tmp_path: Path) -> None:
    spec = json.loads(byte_level().to_str())
    last = max(token["id"] for token in spec["added_tokens"])
    token = {**spec["added_tokens"][0], "id": last + 3, "content": "<far>", "special": True}
    spec["added_tokens"].append(token)
    folder = write(tmp_path / "m", byte_level())
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == last + 4
    assert {last + 1, last + 2} <= tokenizer.special_ids
    assert tokenizer.decode([last + 1], skip_special=False) == ""


def test_a_template_stands_in_its_own_file_or_in_the_config(tmp_path: Path) -> None:
    def source(folder: Path) -> str | None:
        template = load_chat_template(folder, load_tokenizer(folder))
        return None if template is None else template.source

    names = {"eos_token": "</s>"}
    many = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert source(write(tmp_path / "a", byte_level())) is None
    assert source(write(tmp_path / "b", byte_level(), tokenizer_config={**names, "chat_template": "c"})) == "c"
    assert source(write(tmp_path / "c", byte_level(), tokenizer_config={**names, "chat_template": many})) == "d"
    (tmp_path / "c" / "chat_template.jinja").write_text("own")
    assert source(tmp_path / "c") == "own"


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    folder = write(tmp_path / "m", byte_level(), tokenizer_config={})
    with pytest.raises(UnknownModel, match="names no end-of-text token; set eos_token"):
        spec = json.loads((folder / "tokenizer.json").read_text())
        spec["added_tokens"] = []
        (folder / "tokenizer.json").write_text(json.dumps(spec))
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UnknownModel, match=r"tokenizer\.json cannot be read as JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordPiece", "vocab": {}}}')
    with pytest.raises(Unsupported, match="a WordPiece model is not served; served are BPE and Unigram"):
        load_tokenizer(folder)
