"""The quality of a model's answers at a precision: the probabilities of a text, and where greedy texts part.

Every text starts with an empty context. All work is done on this machine's CPU, whole sequences at a time.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from ... import kernels
from ..config import EngineConfig
from ..layers.batch import ForwardBatch
from ..memory import KVPool
from ..models import Model, load_model
from ..tokenizer import ModelTemplate, Tokenizer
from ..weights import open_weights

WINDOW, CHUNK = 1024, 256
NEAR_TIE = 0.05  # largest margin between float32's two best logits that counts as a near-tie
NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TextScores:
    """``best``: the likeliest token after each position (int64 [N]); ``logprobs``: of the tokens that come next.

    ``products``: how the model multiplies. ``cpu_s``: CPU seconds of all threads.
    """

    best: torch.Tensor
    logprobs: torch.Tensor
    cpu_s: float
    products: str

    @property
    def perplexity(self) -> float:
        return float((-self.logprobs.double().mean()).exp())

    def agreement(self, other: "TextScores") -> float:
        """The share of positions with the same likeliest token."""
        return float((self.best == other.best).float().mean())


@dataclass(frozen=True, slots=True)
class Parting:
    """A position where, after the same tokens, the precision's likeliest token is not float32's."""

    prompt: int
    position: int
    margin: float
    reference: str
    other: str

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


@dataclass(frozen=True, slots=True)
class GreedyText:
    """``tokens``: a prompt and float32's continuation. ``best``: float32's choices for the positions from ``first`` on;
    ``margins``: their logits less those of ``second``. The last choice may be the end token: ``tokens`` leaves it out.
    """

    first: int
    tokens: torch.Tensor
    best: torch.Tensor
    second: torch.Tensor
    margins: torch.Tensor


class TextReader:
    """Runs whole sequences through a model."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        """``config.max_seq_len`` 0 becomes two windows, or fewer where the model has no more positions."""
        if not config.max_seq_len:
            positions = open_weights(path).config.max_positions
            config = msgspec.structs.replace(config, max_seq_len=min(positions, 2 * WINDOW))
        self.model: Model = load_model(path, config)
        if not self.model.needs_torch_threads:
            kernels.set_kernel_threads(torch.get_num_threads())
        self.kv = KVPool.for_model(self.model.config, num_slots=2 * WINDOW, dtype=self.model.kv_dtype)
        self.slots = torch.arange(2 * WINDOW)
        self.table = self.slots.int().view(1, -1)

    def logits(self, tokens: torch.Tensor, start: int = 0) -> Iterator[torch.Tensor]:
        """float32 [n, V] of up to 256 positions at a time. The KV of the positions before ``start`` is in the pool."""
        for first in range(start, len(tokens), CHUNK):
            piece = tokens[first : first + CHUNK]
            n = len(piece)
            yield self.model.forward(
                ForwardBatch(
                    token_ids=piece,
                    positions=torch.arange(first, first + n),
                    out_slots=self.slots[first : first + n],
                    row_ids=torch.zeros(1, dtype=torch.int32),
                    query_starts=torch.tensor([0, n], dtype=torch.int32),
                    kv_lens=torch.tensor([first + n], dtype=torch.int32),
                    slot_table=self.table,
                    logits_rows=torch.arange(n),
                ),
                self.kv,
            )


def score_text(reader: TextReader, tokens: torch.Tensor) -> TextScores:
    """Of tokens int64 [N], in windows of 1,024 tokens, each with an empty context."""
    best, logprobs = [], []
    start = time.process_time()
    for window in tokens.split(min(WINDOW, reader.model.max_positions)):
        place = 0
        for logits in reader.logits(window):
            best.append(logits.argmax(dim=-1))
            following = window[place + 1 : place + 1 + len(logits)]
            logprobs.append(kernels.gather_logprobs(logits[: len(following)].contiguous(), following))
            place += len(logits)
    return TextScores(torch.cat(best), torch.cat(logprobs), time.process_time() - start, reader.model.describe())


def greedy_texts(
    reference: TextReader, tokenizer: Tokenizer, template: ModelTemplate | None, prompts: Sequence[str]
) -> list[GreedyText]:
    """``reference``'s likeliest continuations of up to 64 tokens."""
    texts = []
    for prompt in prompts:
        tokens = prompt_tokens(tokenizer, template, prompt)
        first = len(tokens)
        best: list[int] = []
        second: list[int] = []
        margins: list[float] = []
        logits = torch.cat(list(reference.logits(torch.tensor(tokens))))[-1]
        while len(best) < NEW_TOKENS:
            top = logits.topk(2)
            best.append(int(top.indices[0]))
            second.append(int(top.indices[1]))
            margins.append(float(top.values[0] - top.values[1]))
            if best[-1] in tokenizer.eos_ids:
                break
            tokens.append(best[-1])
            (logits,) = next(reference.logits(torch.tensor(tokens), len(tokens) - 1))
        texts.append(GreedyText(first, *map(torch.tensor, (tokens, best, second, margins))))
    return texts


def partings(reader: TextReader, texts: Sequence[GreedyText], tokenizer: Tokenizer) -> tuple[list[Parting], float]:
    """(every position where the reader would choose another token, the margins' error as root mean square)."""
    found, squares = [], []
    for i, text in enumerate(texts):
        logits = torch.cat(list(reader.logits(text.tokens)))[text.first - 1 :][: len(text.best)]
        rows = torch.arange(len(logits))
        best, second, margins = (x[: len(logits)] for x in (text.best, text.second, text.margins))
        squares.append((logits[rows, best] - logits[rows, second] - margins).pow(2))
        chosen = logits.argmax(dim=-1)
        for at in (chosen != best).nonzero().flatten().tolist():
            shown = [tokenizer.decode([int(ids[at])], skip_special=False) for ids in (best, chosen)]
            found.append(Parting(i, at, float(margins[at]), *shown))
    return found, float(torch.cat(squares).mean().sqrt())


def prompt_tokens(tokenizer: Tokenizer, template: ModelTemplate | None, prompt: str) -> list[int]:
    if template is None:
        return tokenizer.encode(prompt)
    tokens: list[int] = []
    for part in template.render([{"role": "user", "content": prompt}], add_generation_prompt=True):
        tokens.extend(tokenizer.encode(part) if isinstance(part, str) else part)
    return tokens
