"""What a precision costs in quality: perplexity, agreement with float32, and where greedy texts part.

    python -m benchmarks.quality [--model smollm2] [--precisions auto int16 bfloat16] [--tokens 4096]
    python -m benchmarks.quality --greedy 20 --precisions auto

The text is English prose of this repository, in windows of 1,024 tokens, each from an empty context. ``--greedy``
continues prompts with float32's own choices, and lists each place where the other precision would choose differently,
with float32's margin between its two best logits: a difference that is no near-tie would be a fault, not rounding.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from phloem import kernels
from phloem.runtime.config import EngineConfig
from phloem.runtime.layers.batch import ForwardBatch
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.tokenizer import Tokenizer, load_chat_template, load_tokenizer
from phloem.runtime.weights.resolve import resolve_model

from . import header
from .prose import DOCUMENT, NOTES, QUESTIONS, SUBJECTS, shared_guide

WINDOW, CHUNK = 1024, 256
NEAR_TIE = 0.05  # of the two best logits, in float32
NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Quality:
    """``top1``: how often the likeliest token is float32's. ``cpu_s`` of all threads, to see what it costs."""

    precision: str
    describe: str
    tokens: int
    perplexity: float
    reference_perplexity: float
    top1: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Parting:
    """A place where the precision's likeliest token, after the same tokens, is not float32's."""

    prompt: int
    position: int
    margin: float
    reference: str
    other: str

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


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
        """float32 [n, V] of up to 256 positions at a time; what lies before ``start`` has been read already."""
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


def partings(path: Path, precision: str, num_prompts: int, threads: int = 0) -> list[Parting]:
    """Greedy text of float32, read by the other precision: every place where that would have written another token."""
    kernels.warm_up()
    tokenizer = load_tokenizer(path)
    template = load_chat_template(path, tokenizer)
    kernels.set_threads(threads)
    reference = Reader(path, "float32")
    texts: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for i in range(num_prompts):
        prompt = f"Write a short story about {SUBJECTS[i]}." if i % 2 else QUESTIONS[i]
        tokens = prompt_tokens(tokenizer, template, prompt)
        first, best, margins = len(tokens), [], []
        logits = torch.cat(list(reference.logits(torch.tensor(tokens))))[-1]
        while len(best) < NEW_TOKENS:
            top = logits.topk(2)
            best.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            if best[-1] in tokenizer.eos_ids:
                break
            tokens.append(best[-1])
            (logits,) = next(reference.logits(torch.tensor(tokens), len(tokens) - 1))
        texts.append((first, torch.tensor(tokens), torch.tensor(best), torch.tensor(margins)))
    kernels.set_threads(threads)
    other = Reader(path, precision)
    found = []
    for i, (first, tokens, best, margins) in enumerate(texts):
        chosen = torch.cat([logits.argmax(dim=-1) for logits in other.logits(tokens)])[first - 1 :][: len(best)]
        for at in (chosen != best[: len(chosen)]).nonzero().flatten().tolist():
            shown = [tokenizer.decode([int(ids[at])], skip_special=False) for ids in (best, chosen)]
            found.append(Parting(i, at, float(margins[at]), *shown))
    return found


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
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args(argv)
    if not 0 <= args.greedy <= len(SUBJECTS):
        parser.error(f"--greedy {args.greedy}: there are {len(SUBJECTS)} prompts")
    path = resolve_model(args.model)
    report: dict[str, Any] = header()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    faults = 0
    if args.greedy:
        for precision in args.precisions:
            found = partings(path, precision, args.greedy, args.threads)
            faults += sum(not parting.is_near_tie for parting in found)
            report[precision] = [asdict(parting) for parting in found]
            print(f"\n{precision}: {len(found)} partings in {args.greedy} texts of up to {NEW_TOKENS} tokens")
            for p in found:
                kind = "near-tie" if p.is_near_tie else "NO NEAR-TIE"
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
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
