"""The trace of an op, for programs with ``ProgramSettings.trace``: each token's text, origin and probability."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from ...protocol.messages import OpTrace, SelectMeta, TokenTrace
from ...protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from .generation import Generation
    from .scoring import Scoring

NUM_ALTERNATIVES = 5


def traced_params(params: SamplingParams) -> SamplingParams:
    """``params`` with the log-probabilities of the likeliest alternatives switched on."""
    num = max(params.top_logprobs_num, NUM_ALTERNATIVES)
    return msgspec.structs.replace(params, return_logprob=True, top_logprobs_num=num)


def trace_generation(generation: Generation, tokenizer: Tokenizer) -> OpTrace:
    """The trace of a generation that has ended. Marks all tokens of the sequence as reported."""
    first, owner = generation.candidates[0], generation.owner
    prompt = _prompt(
        first.seq.tokens.ids[: first.prompt_len].tolist(), owner.num_traced, first.cached_tokens, tokenizer
    )
    outputs = []
    for candidate in generation.candidates:
        record = candidate.record
        assert record is not None
        ids = candidate.output_ids
        # A stop string may have removed tokens, and replaced the token that it cut through.
        origins = [*record.origins[: len(ids)], *["generated"] * (len(ids) - len(record.origins))]
        drawn = [*record.drawn[: len(ids)], *[None] * (len(ids) - len(record.drawn))]
        tokens = []
        for token_id, text, origin, draw in zip(ids, texts_of(ids, tokenizer), origins, drawn, strict=True):
            if draw is None or draw.token_id != token_id:
                tokens.append(TokenTrace(text, origin))
            else:
                top = tuple(
                    [(tokenizer.decode([i], skip_special=False), value) for i, value in draw.top if value > -math.inf]
                )
                tokens.append(TokenTrace(text, origin, draw.logprob, top))
        outputs.append(tuple(tokens))
    owner.num_traced = len(owner.seq.tokens)
    return OpTrace(start=owner.num_traced - len(first.output_ids) - len(prompt), prompt=prompt, outputs=tuple(outputs))


def trace_scoring(scoring: Scoring, meta: SelectMeta, tokenizer: Tokenizer) -> OpTrace:
    """The trace of a decided choice; its tokens are ``selected``. Call it before the winner is appended."""
    index = meta.index
    owner = scoring.owner
    start = min(owner.num_traced, scoring.common)
    ids = owner.seq.tokens.ids[: scoring.common].tolist()
    prompt = _prompt(ids, start, meta.cached_tokens, tokenizer)
    suffix = scoring.suffixes[index]
    texts = texts_of(suffix, tokenizer)
    output = tuple([TokenTrace(t, "selected", p) for t, p in zip(texts, meta.logprobs[index], strict=True)])
    owner.num_traced = start + len(prompt) + (len(suffix) if scoring.op.append else 0)
    return OpTrace(start=start, prompt=prompt, outputs=(output,))


def _prompt(ids: list[int], start: int, num_cached: int, tokenizer: Tokenizer) -> tuple[TokenTrace, ...]:
    texts = texts_of(ids[start:], tokenizer)
    return tuple([TokenTrace(t, "cached" if i < num_cached else "prompt") for i, t in enumerate(texts, start)])


def texts_of(ids: Iterable[int], tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds; a character of several tokens counts for the last of them.

    Bytes of a character that is not complete at the end, or before a special token, are a replacement character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for i in ids:
        if i in tokenizer.special_ids:
            texts.append(decoder.decode(b"", True) + tokenizer.special_text(i))
        else:
            texts.append(decoder.decode(tokenizer.token_bytes[i]))
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts
