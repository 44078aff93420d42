"""The quality of each precision: perplexity, agreement with float32, and the tokens at which greedy texts diverge.

    python -m benchmarks.quality [--model smollm2] [--precisions auto int16 bfloat16] [--tokens 4096] [--kv-dtype int8]
    python -m benchmarks.quality --greedy 20 --precisions auto int16 [--sensitivity]
    LLAMA_SERVER=llama-server python -m benchmarks.quality --tokens 2048       # and llama.cpp, or --llama-server PATH

The text is English prose of this repository, in windows of 1,024 tokens, each with an empty context. ``--greedy``
continues prompts with float32's choices and lists each position where the other precision would choose another token,
with float32's margin between its two best logits. A near-tie is rounding; a difference with a larger margin is a fault.
llama.cpp's server reads the same file and texts and is compared with our float32 in the same way, one decode step for
each token, as it would answer.
``--sensitivity`` repeats this for ``int16`` and rounds the inputs of one kind of product at a time to 8 bits.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from phloem import kernels, processor
from phloem.kernels.linear import GROUP_LEN, Columns, PackedLinear
from phloem.runtime.config import EngineConfig
from phloem.runtime.layers.linear import Linear
from phloem.runtime.layers.mlp import MLP
from phloem.runtime.models import Model
from phloem.runtime.quantizing.quality import (
    NEW_TOKENS,
    WINDOW,
    GreedyText,
    Parting,
    TextReader,
    greedy_texts,
    partings,
    score_text,
)
from phloem.runtime.tokenizer import Tokenizer, load_chat_template, load_tokenizer
from phloem.runtime.weights.resolve import resolve_model

from . import print_header, save
from .llama_cpp import LlamaCpp, llama_server, perplexity
from .prose import DOCUMENT, NOTES, QUESTIONS, SUBJECTS, shared_guide


@dataclass(frozen=True, slots=True)
class Quality:
    """``top1``: the share of positions with float32's likeliest token. ``cpu_s``: CPU seconds of all threads; of
    llama.cpp not measured.
    """

    precision: str
    describe: str
    tokens: int
    perplexity: float
    reference_perplexity: float
    top1: float
    cpu_s: float | None


def prose(tokenizer: Tokenizer, num_tokens: int) -> torch.Tensor:
    root = Path(__file__).parent.parent
    files = (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md")))
    texts = [DOCUMENT, shared_guide(), *QUESTIONS, *NOTES, *(file.read_text() for file in files)]
    tokens = tokenizer.encode("\n\n".join(texts))
    if len(tokens) < num_tokens:
        raise SystemExit(f"--tokens {num_tokens:,}: the text has {len(tokens):,}; give at most that")
    return torch.tensor(tokens[:num_tokens])


def measure_quality(
    path: Path,
    precisions: Sequence[str],
    num_tokens: int,
    threads: int = 0,
    kv_dtype: str = "auto",
    llama: LlamaCpp | None = None,
) -> list[Quality]:
    kernels.set_threads(threads)
    kernels.warm_up()
    tokens = prose(load_tokenizer(path), num_tokens)
    reference = score_text(reader_of(path, "float32"), tokens)
    found = []
    for precision in precisions:
        kernels.set_threads(threads)
        scores = score_text(reader_of(path, precision, kv_dtype), tokens)
        found.append(
            Quality(
                precision,
                scores.products,
                len(tokens),
                scores.perplexity,
                reference.perplexity,
                scores.agreement(reference),
                scores.cpu_s,
            )
        )
    if llama is not None:
        best, logprobs = llama_scores(llama, tokens)
        same = sum(ours == theirs for ours, theirs in zip(reference.best.tolist(), best, strict=True))
        ours, theirs = reference.perplexity, perplexity(logprobs)
        found.append(Quality("llama.cpp", "one token a step", len(tokens), theirs, ours, same / len(tokens), None))
    return found


def llama_scores(llama: LlamaCpp, tokens: torch.Tensor) -> tuple[list[int], list[float]]:
    """llama.cpp's likeliest token after each position, and the log-probabilities of the tokens that come next."""
    best, logprobs = [], []
    for window in tokens.split(WINDOW):
        ids = window.tolist()
        for end in range(1, len(ids) + 1):
            found = llama.after(ids[:end], *ids[end : end + 1])
            best.append(found.best)
            logprobs += found.logprobs
    return best, logprobs


def llama_partings(llama: LlamaCpp, texts: Sequence[GreedyText], tokenizer: Tokenizer) -> tuple[list[Parting], float]:
    """As ``partings``."""
    found, squares = [], []
    for i, text in enumerate(texts):
        ids = text.tokens.tolist()
        choices = zip(text.best.tolist(), text.second.tolist(), text.margins.tolist(), strict=True)
        for at, (best, second, margin) in enumerate(choices):
            coming = llama.after(ids[: text.first + at], best, second)
            squares.append((coming.logprobs[0] - coming.logprobs[1] - margin) ** 2)
            if coming.best != best:
                shown = [tokenizer.decode([token], skip_special=False) for token in (best, coming.best)]
                found.append(Parting(i, at, margin, *shown))
    return found, (sum(squares) / len(squares)) ** 0.5


def reader_of(path: Path, precision: str, kv_dtype: str = "auto") -> TextReader:
    return TextReader(path, EngineConfig(model=str(path), precision=precision, kv_dtype=kv_dtype))


class CoarseInput(PackedLinear):
    """A product that first rounds x to 8 bits, with a scale for every 32 neighbours."""

    def __init__(self, product: PackedLinear) -> None:
        vars(self).update(vars(product))

    def __call__(self, x: torch.Tensor | Columns) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
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
    reader = reader_of(path, "int16")
    kinds = linears(reader.model)
    for coarse in ([], *([kind] for kind in kinds), [kind for kind in kinds if kind != "head"]):
        changed = [(linear, linear.parts) for kind in coarse for linear in kinds[kind]]
        for linear, parts in changed:
            linear.parts = tuple(CoarseInput(part) for part in parts)
        yield f"int16 but {', '.join(coarse)} by int8" if coarse else "int16", *partings(reader, texts, tokenizer)
        for linear, parts in changed:
            linear.parts = parts


def compared(
    path: Path, args: argparse.Namespace, llama: LlamaCpp | None
) -> Iterator[tuple[str, list[Parting], float]]:
    """For each precision or kind of product: (name, positions that differ from float32, error of its margins)."""
    kernels.warm_up()
    tokenizer = load_tokenizer(path)
    kernels.set_threads(args.threads)
    prompts = [f"Write a short story about {SUBJECTS[i]}." if i % 2 else QUESTIONS[i] for i in range(args.greedy)]
    texts = greedy_texts(reader_of(path, "float32"), tokenizer, load_chat_template(path, tokenizer), prompts)
    for precision in args.precisions:
        kernels.set_threads(args.threads)
        yield precision, *partings(reader_of(path, precision, args.kv_dtype), texts, tokenizer)
    if llama is not None:
        yield "llama.cpp", *llama_partings(llama, texts, tokenizer)
    if args.sensitivity:
        kernels.set_threads(args.threads)
        yield from sensitivity(path, texts, tokenizer)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precisions", nargs="+", default=["auto", "int16", "bfloat16"])
    kv_help = "keys and values of the precisions that are compared with float32"
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "float32", "bfloat16", "int8"], help=kv_help)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--greedy", type=int, default=0, metavar="N", help="compare greedy texts of N prompts instead")
    parser.add_argument("--sensitivity", action="store_true", help="with --greedy: also 8 bits by kind of product")
    parser.add_argument("--threads", type=int, default=processor.num_cores())
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER"), metavar="PATH")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args(argv)
    if not 0 <= args.greedy <= len(SUBJECTS):
        parser.error(f"--greedy {args.greedy}: there are {len(SUBJECTS)} prompts")
    path = resolve_model(args.model)
    with contextlib.ExitStack() as stack:
        llama = None
        if args.llama_server:
            llama = LlamaCpp(stack.enter_context(llama_server(args.llama_server, path, args.threads)))
        return report_of(path, args, llama)


def report_of(path: Path, args: argparse.Namespace, llama: LlamaCpp | None) -> int:
    """Print and save what was asked for; 1 where one of our precisions parts from float32 by more than a near-tie."""
    report = print_header()
    faults = 0
    if args.greedy:
        for name, found, error in compared(path, args, llama):
            num_faults = sum(not parting.is_near_tie for parting in found)
            faults += num_faults if name != "llama.cpp" else 0
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
        for q in measure_quality(path, args.precisions, args.tokens, args.threads, args.kv_dtype, llama):
            report[q.precision] = asdict(q)
            spent = "" if q.cpu_s is None else f", {q.cpu_s:.1f} s of CPU"
            print(
                f"{q.precision:<10} perplexity {q.perplexity:.3f} ({q.perplexity / q.reference_perplexity - 1:+.2%}), "
                f"top-1 as float32 {q.top1:.2%}{spent} for {q.tokens:,} tokens   {q.describe}",
                flush=True,
            )
    if args.out:
        save(args.out, report)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
