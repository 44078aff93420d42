"""The quality of each precision: perplexity, agreement with float32, and the tokens at which greedy texts diverge.

    python -m benchmarks.quality [--model smollm2] [--precisions auto int16 bfloat16] [--tokens 4096]
    python -m benchmarks.quality --greedy 20 --precisions auto int16 [--sensitivity]

The text is English prose of this repository, in windows of 1,024 tokens, each with an empty context. ``--greedy``
continues prompts with float32's choices and lists each position where the other precision would choose another token,
with float32's margin between its two best logits. A near-tie is rounding; a difference with a larger margin is a fault.
``--sensitivity`` repeats this for ``int16`` and rounds the inputs of one kind of product at a time to 8 bits.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from phloem import kernels, processor
from phloem.kernels.linear import GROUP_LEN, PackedLinear
from phloem.runtime.config import EngineConfig
from phloem.runtime.layers.batch import ForwardBatch
from phloem.runtime.layers.linear import Linear
from phloem.runtime.layers.mlp import MLP
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.tokenizer import Tokenizer, load_chat_template, load_tokenizer
from phloem.runtime.weights.resolve import resolve_model

from . import print_header, save
from .prose import DOCUMENT, NOTES, QUESTIONS, SUBJECTS, shared_guide

WINDOW, CHUNK = 1024, 256
NEAR_TIE = 0.05  # largest margin between float32's two best logits that counts as a near-tie
NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Quality:
    """``top1``: the share of positions with float32's likeliest token. ``cpu_s``: CPU seconds of all threads."""

    precision: str
    describe: str
    tokens: int
    perplexity: float
    reference_perplexity: float
    top1: float
    cpu_s: float


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


class Reader:
    """Runs whole sequences through a model."""

    def __init__(self, path: Path, precision: str) -> None:
        self.model: Model = load_model(path, EngineConfig(model=str(path), precision=precision, max_seq_len=2 * WINDOW))
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


def prose(tokenizer: Tokenizer, num_tokens: int) -> torch.Tensor:
    root = Path(__file__).parent.parent
    files = (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md")))
    texts = [DOCUMENT, shared_guide(), *QUESTIONS, *NOTES, *(file.read_text() for file in files)]
    tokens = tokenizer.encode("\n\n".join(texts))
    if len(tokens) < num_tokens:
        raise SystemExit(f"--tokens {num_tokens:,}: the text has {len(tokens):,}; give at most that")
    return torch.tensor(tokens[:num_tokens])


def read(path: Path, precision: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, str]:
    """(likeliest ids [N], log-probabilities of the next tokens, CPU seconds, how the products run)."""
    reader = Reader(path, precision)
    best, logprobs = [], []
    start = time.process_time()
    for window in tokens.split(WINDOW):
        place = 0
        for logits in reader.logits(window):
            best.append(logits.argmax(dim=-1))
            following = window[place + 1 : place + 1 + len(logits)]
            logprobs.append(kernels.gather_logprobs(logits[: len(following)].contiguous(), following))
            place += len(logits)
    return torch.cat(best), torch.cat(logprobs), time.process_time() - start, reader.model.describe()


def measure_quality(path: Path, precisions: Sequence[str], num_tokens: int, threads: int = 0) -> list[Quality]:
    kernels.set_threads(threads)
    kernels.warm_up()
    tokens = prose(load_tokenizer(path), num_tokens)
    expected, reference, _, _ = read(path, "float32", tokens)
    found = []
    for precision in precisions:
        kernels.set_threads(threads)
        best, logprobs, cpu_s, how = read(path, precision, tokens)
        found.append(
            Quality(
                precision,
                how,
                len(tokens),
                math.exp(-float(logprobs.mean())),
                math.exp(-float(reference.mean())),
                float((best == expected).float().mean()),
                cpu_s,
            )
        )
    return found


def greedy_texts(path: Path, num_prompts: int, threads: int = 0) -> list[GreedyText]:
    kernels.warm_up()
    tokenizer = load_tokenizer(path)
    template = load_chat_template(path, tokenizer)
    kernels.set_threads(threads)
    reference = Reader(path, "float32")
    texts = []
    for i in range(num_prompts):
        prompt = f"Write a short story about {SUBJECTS[i]}." if i % 2 else QUESTIONS[i]
        tokens = prompt_tokens(tokenizer, template, prompt)
        first, best, second, margins = len(tokens), [], [], []
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


def partings(reader: Reader, texts: Sequence[GreedyText], tokenizer: Tokenizer) -> tuple[list[Parting], float]:
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


class CoarseInput(PackedLinear):
    """A product that first rounds x to 8 bits, with a scale for every 32 neighbours."""

    def __init__(self, product: PackedLinear) -> None:
        vars(self).update(vars(product))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(_rounded(x))

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        super().write(_rounded(x), out)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().view(len(x), -1, GROUP_LEN)
    step = (groups.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return ((groups / step).round() * step).view(x.shape)


def linears(model: Model) -> dict[str, list[Linear]]:
    """A model's products by kind."""
    blocks = [(layer.attention, layer.mlp) for layer in model.layers]
    mlps = [mlp for _, mlp in blocks if isinstance(mlp, MLP)]
    return {
        "qkv": [attention.qkv for attention, _ in blocks],
        "output": [attention.output for attention, _ in blocks],
        "gate_up": [mlp.gate_up for mlp in mlps],
        "down": [mlp.down for mlp in mlps],
        "head": [model.head],
    }


def sensitivity(
    path: Path, texts: Sequence[GreedyText], tokenizer: Tokenizer
) -> Iterator[tuple[str, list[Parting], float]]:
    reader = Reader(path, "int16")
    kinds = linears(reader.model)
    for coarse in ([], *([kind] for kind in kinds), [kind for kind in kinds if kind != "head"]):
        changed = [(linear, linear.parts) for kind in coarse for linear in kinds[kind]]
        for linear, parts in changed:
            linear.parts = tuple(CoarseInput(part) for part in parts)
        yield f"int16 but {', '.join(coarse)} by int8" if coarse else "int16", *partings(reader, texts, tokenizer)
        for linear, parts in changed:
            linear.parts = parts


def compared(path: Path, args: argparse.Namespace) -> Iterator[tuple[str, list[Parting], float]]:
    """For each precision or kind of product: (name, positions that differ from float32, error of its margins)."""
    texts = greedy_texts(path, args.greedy, args.threads)
    tokenizer = load_tokenizer(path)
    for precision in args.precisions:
        kernels.set_threads(args.threads)
        yield precision, *partings(Reader(path, precision), texts, tokenizer)
    if args.sensitivity:
        kernels.set_threads(args.threads)
        yield from sensitivity(path, texts, tokenizer)


def prompt_tokens(tokenizer: Tokenizer, template: Any, prompt: str) -> list[int]:
    if template is None:
        return tokenizer.encode(prompt)
    tokens: list[int] = []
    for part in template.render([{"role": "user", "content": prompt}], add_generation_prompt=True):
        tokens.extend(tokenizer.encode(part) if isinstance(part, str) else part)
    return tokens


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precisions", nargs="+", default=["auto", "int16", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--greedy", type=int, default=0, metavar="N", help="compare greedy texts of N prompts instead")
    parser.add_argument("--sensitivity", action="store_true", help="with --greedy: also 8 bits by kind of product")
    parser.add_argument("--threads", type=int, default=processor.num_cores())
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args(argv)
    if not 0 <= args.greedy <= len(SUBJECTS):
        parser.error(f"--greedy {args.greedy}: there are {len(SUBJECTS)} prompts")
    path = resolve_model(args.model)
    report = print_header()
    faults = 0
    if args.greedy:
        for name, found, error in compared(path, args):
            num_faults = sum(not parting.is_near_tie for parting in found)
            faults += num_faults
            report[name] = {"margin_error": error, "partings": [asdict(parting) for parting in found]}
            print(
                f"\n{name}: {len(found)} differences in {args.greedy} texts of up to {NEW_TOKENS} tokens, {num_faults} "
                f"of them not near-ties; margins differ by {error:.4f} (root mean square)",
                flush=True,
            )
            for p in found:
                kind = "near-tie" if p.is_near_tie else "NOT A NEAR-TIE"
                print(
                    f"  prompt {p.prompt:>2} token {p.position:>3}: {p.reference!r} or {p.other!r}, "
                    f"margin {p.margin:.3f} {kind}"
                )
    else:
        for q in measure_quality(path, args.precisions, args.tokens, args.threads):
            report[q.precision] = asdict(q)
            print(
                f"{q.precision:<10} perplexity {q.perplexity:.3f} ({q.perplexity / q.reference_perplexity - 1:+.2%}), "
                f"top-1 as float32 {q.top1:.2%}, {q.cpu_s:.1f} s of CPU for {q.tokens:,} tokens   {q.describe}",
                flush=True,
            )
    if args.out:
        save(args.out, report)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
