"""Requests as programs: the ops that each endpoint's request becomes.

One request is one program: a sequence per prompt, each with its ``Text`` and ``Special``, one ``Gen``, one ``Close``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol import errors
from ...protocol.messages import Limits, ProgramSettings
from ...protocol.ops import AnyOp, Close, Gen, Special, Text
from ..tokenizer import Tokenizer

Part = str | tuple[int, ...]  # text, or token ids as they are


@dataclass(frozen=True, slots=True)
class Job:
    """A whole program as one submit: ``gens[i]`` is the id of the Gen of prompt i."""

    ops: tuple[AnyOp, ...]
    gens: tuple[int, ...]
    settings: ProgramSettings


def make_job(
    prompts: Sequence[Iterable[Part]], gens: Sequence[Gen], *, settings: ProgramSettings, limits: Limits
) -> Job:
    """``gens[i]`` says what to generate after ``prompts[i]``; its ids are replaced."""
    ops: list[AnyOp] = []
    gen_ids = []
    for seq, (parts, gen) in enumerate(zip(prompts, gens, strict=True)):
        if gen.n > limits.max_candidates:
            raise errors.LimitExceeded(f"n={gen.n}: must be at most {limits.max_candidates}", where="n")
        for part in parts:
            if isinstance(part, str):
                ops.append(Text(op=len(ops), seq=seq, text=part))
            else:
                ops.append(Special(op=len(ops), seq=seq, ids=part))
        gen_ids.append(len(ops))
        ops.append(Gen(op=len(ops), seq=seq, params=gen.params, grammar=gen.grammar, n=gen.n, stream=gen.stream))
        ops.append(Close(op=len(ops), seq=seq))
    return Job(tuple(ops), tuple(gen_ids), settings)


def raw_parts(prompt: str | list[int], tokenizer: Tokenizer, *, parse_special: bool, name: str) -> list[Part]:
    """A prompt that no template touches. ``parse_special``: special tokens written in the text count as such."""
    if isinstance(prompt, str):
        return [tuple(tokenizer.encode(prompt, special=True, at_start=True))] if parse_special else [prompt]
    for token in prompt:
        if not 0 <= token < tokenizer.vocab_size:
            message = f"{name} holds token id {token}, but the vocabulary has {tokenizer.vocab_size:,}"
            raise errors.InvalidRequest(message, where=name)
    return [tuple(prompt)]
