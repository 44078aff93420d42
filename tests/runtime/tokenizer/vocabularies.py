"""Small vocabularies, trained on the spot, as GGUF files: a byte-level one and a SentencePiece-style one."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 12 o'clock; we'll see 2,048 of them -- don't you?\n\n",
    "def f(x):\n    return x ** 2  # squared\n",
    "Größe, naïve café, 日本語のテキスト, Привет мир! 🦜 the the there these\n",
] * 4


def write_byte_level(path: Path, *, pre: str | None = "smollm", **metadata: Any) -> Path:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    vocab = trained.get_vocab()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|python|>", "[PAD5]"]
    types = [CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, UNUSED]
    tokens += sorted(vocab, key=vocab.__getitem__)
    types += [NORMAL] * len(vocab)
    merges = [" ".join(pair) for pair in _merges(trained)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    return _close(writer, path, metadata)


def write_sentencepiece(path: Path, **metadata: Any) -> Path:
    """Scores fall with the order of the merges, as SentencePiece's trainer writes them."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = trained.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    long = [piece for piece in pieces if len(piece) > 1]
    single = [piece for piece in pieces if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *long, *single]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return _close(writer, path, metadata)


def _merges(trained: Tokenizer) -> list[tuple[str, str]]:
    import json

    merges = json.loads(trained.to_str())["model"]["merges"]
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


def _close(writer: gguf.GGUFWriter, path: Path, metadata: dict[str, Any]) -> Path:
    for name, value in metadata.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
