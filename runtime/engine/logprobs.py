"""Log-probabilities from a step's logits: of a prompt's own tokens, and of the choices being scored.

They are computed on the device with the step, and taken when the host reads the step's results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...protocol.messages import TokenLogprob
from ..executor import SampledToken

if TYPE_CHECKING:
    import torch

    from ..executor import Executor
    from ..scheduler import PlanRow, Sequence
    from ..tokenizer import Tokenizer
    from .flight import StepInFlight
    from .generation import Candidate
    from .scoring import ScoreRow


def token_logprob(token: SampledToken, tokenizer: Tokenizer) -> TokenLogprob:
    """``token`` and its alternatives with their texts, as clients receive them."""
    show = tokenizer.decode
    top = tuple((i, p, show([i], skip_special=False)) for i, p in token.top)
    return TokenLogprob(token.token_id, token.logprob, show([token.token_id], skip_special=False), top)


def want_prompt_logprobs(
    flight: StepInFlight, candidate: Candidate, row: PlanRow, span: slice, executor: Executor, tokenizer: Tokenizer
) -> None:
    """Request the prompt's log-probabilities. ``span``: the step's logits after the row's last tokens."""
    params = candidate.generation.op.params
    ids = candidate.seq.tokens.ids
    start = row.tokens_end - (span.stop - span.start)
    if start == 0 and not candidate.prompt_logprobs and params.logprob_start_len == 0:
        text = tokenizer.decode([int(ids[0])], skip_special=False)
        candidate.prompt_logprobs.append(TokenLogprob(int(ids[0]), None, text))
    targets = ids[start + 1 : min(row.tokens_end + 1, candidate.prompt_len)].tolist()
    if not targets:
        return
    part = flight.logits.whole()[span][: len(targets)]
    tensors = [executor.logprobs_of(part, np.array(targets))]
    if params.top_logprobs_num:
        tensors += executor.top_logprobs(part, params.top_logprobs_num)

    def take(values: list[torch.Tensor]) -> None:
        tops: list[list[tuple[int, float]]] = [[]] * len(targets)
        if len(values) > 1:
            pairs = zip(values[1].tolist(), values[2].tolist(), strict=True)
            tops = [list(zip(top_ids, logprobs, strict=True)) for top_ids, logprobs in pairs]
        for token_id, value, top in zip(targets, values[0].tolist(), tops, strict=True):
            candidate.prompt_logprobs.append(token_logprob(SampledToken(token_id, value, top), tokenizer))

    flight.want(tensors, take)


def want_scores(
    flight: StepInFlight,
    score_row: ScoreRow,
    row: PlanRow,
    span: slice,
    executor: Executor,
    live: Mapping[int, Sequence],
    finish_row: Callable[[ScoreRow], None],
) -> None:
    """Request the scores of ``score_row``. ``span``: the step's logits at the row's last positions."""
    part = flight.logits.whole()[span]
    seq = score_row.seq
    tokens, start = seq.tokens.ids, row.end - row.num_logits
    targets = tokens[start + 1 : start + 1 + len(part)]
    last_ids = list(score_row.last) if row.end == len(tokens) else []
    tensors = []
    if len(targets):
        tensors.append(executor.logprobs_of(part[: len(targets)], targets))
    if last_ids:
        tensors.append(executor.logprobs_of(part[-1:].expand(len(last_ids), -1), np.array(last_ids)))

    def take(values: list[torch.Tensor]) -> None:
        if live.get(row.seq_id) is not seq:
            return  # the op was cancelled
        if len(targets):
            score_row.take_inner(start + 1, values[0].tolist())
        if last_ids:
            score_row.last = dict(zip(last_ids, values[-1].tolist(), strict=True))
            finish_row(score_row)

    flight.want(tensors, take)
