"""A quantized model beside its original: size, speed, perplexity and agreement."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import kernels
from ..config import EngineConfig, Precision
from ..engine import EngineCore
from ..profiling import Load, run_load
from ..tokenizer import load_chat_template, load_tokenizer
from .quality import TextReader, greedy_texts, partings, score_text
from .writers import size_bytes_of

_SPEED = Load(rows=1, prompt_tokens=32, new_tokens=64)
MOST_TOKENS = 8192  # of the text


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model at one precision. ``top1``: the share of the text's positions with the reference's likeliest token;
    ``greedy``: the same of the reference's own greedy texts. ``tokens_per_s``: one request, after its prompt.
    """

    name: str
    precision: str
    size_bytes: int
    tokens_per_s: float
    perplexity: float
    top1: float
    greedy: float


def compare(
    original: Path, quantized: Path, text: str, prompts: Sequence[str], *, say: Callable[[str, int, int], None]
) -> Iterator[Comparison]:
    """The original in float32, which is the reference, then the original and the quantized model as they are served."""
    tokenizer = load_tokenizer(original)
    tokens = torch.tensor(tokenizer.encode(text)[:MOST_TOKENS])
    say("measuring", 0, 3)
    reader = _reader(original, "float32")
    reference = score_text(reader, tokens)
    texts = greedy_texts(reader, tokenizer, load_chat_template(original, tokenizer), prompts)
    num_greedy = sum(len(text.best) for text in texts)
    del reader
    speed = _tokens_per_s(original, "float32")
    yield Comparison("original", "float32", size_bytes_of(original), speed, reference.perplexity, 1.0, 1.0)
    for done, (name, path) in enumerate((("original", original), ("quantized", quantized)), start=1):
        say("measuring", done, 3)
        reader = _reader(path, "auto")
        scores = score_text(reader, tokens)
        parted, _ = partings(reader, texts, tokenizer)
        del reader
        yield Comparison(
            name,
            "auto",
            size_bytes_of(path),
            _tokens_per_s(path, "auto"),
            scores.perplexity,
            scores.agreement(reference),
            1 - len(parted) / max(1, num_greedy),
        )
    say("measuring", 3, 3)


def _reader(path: Path, precision: Precision) -> TextReader:
    kernels.warm_up()
    return TextReader(path, EngineConfig(model=str(path), precision=precision))


def _tokens_per_s(path: Path, precision: Precision) -> float:
    engine = EngineCore(EngineConfig(model=str(path), precision=precision, num_slots=1024, speculative="off"))
    try:
        longest = engine.context_len
        load = Load(1, min(_SPEED.prompt_tokens, longest // 2), min(_SPEED.new_tokens, longest // 2))
        run_load(engine, load)  # compiles kernels and records tapes
        return 1e3 / run_load(engine, load).decode_median_ms
    finally:
        engine.close()
