"""Drafts in the engine's step: which candidates get one, and the draws that verify it.

After the sequence's last token and after every draft token the model's own token is drawn, exactly as without the
draft: same logits, mask and penalties, same random number for the position. The engine accepts draws for as long as
each one equals a draft token. So drafts change no token, greedy or sampled. For a draft token that the drafter
proposes with certainty this is the rejection rule of Leviathan et al. (2023): it is accepted with probability p.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..executor import SampleRow
from ..scheduler import Draft, Sequence, StepPlan
from ..speculative import Want
from .generation import Candidate

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from .mask_thread import MaskThread


def wants_of(
    plan: StepPlan,
    live: Mapping[int, Sequence],
    tokenizer: Tokenizer,
    *,
    masks: MaskThread,
    context_len: int,
    max_draft: int,
) -> list[Want]:
    """The candidates of ``plan`` whose next token is drawn in this step and that may be drafted."""
    wants = []
    for row in plan.rows:
        seq = live[row.seq_id]
        candidate = seq.tag
        if not row.num_logits or row.end != len(seq.tokens) or not isinstance(candidate, Candidate):
            continue
        if candidate.is_awaited:
            continue
        params = candidate.generation.op.params
        # A step makes one token more than it accepts from the draft.
        limit = min(max_draft, params.max_tokens - candidate.num_generated - 1, context_len - len(seq.tokens) - 1)
        if limit <= 0 or not candidate.is_drafted:
            continue
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= tokenizer.eos_ids
        wants.append(
            Want(
                seq.seq_id,
                seq.tokens.ids,
                is_first=not candidate.num_asked,
                num_cached=seq.num_cached,
                namespace=seq.namespace,
                limit=limit,
                ends=ends,
                matcher=candidate.matcher,
                is_ready=None if candidate.matcher is None else partial(masks.is_ready, candidate.matcher),
                params=params,
                seed=candidate.seed,
                adapter=seq.adapter,
            )
        )
        candidate.num_asked += 1
    return wants


def draft_rows(draft: Draft, first: SampleRow, *, min_tokens_left: int) -> list[SampleRow]:
    """The draws that verify ``draft``: row i is the draw after draft token i. ``first`` is the draw before them all.

    ``min_tokens_left``: tokens, counted from ``first`` on, for which end tokens stay banned. The grammar allows every
    token of ``draft``.
    """
    masks: list[np.ndarray | None] = [None] * len(draft)
    if first.matcher is not None:
        for i, token in enumerate(draft.token_ids.tolist()):
            assert first.matcher.accept(token), first.matcher.error
            masks[i] = first.matcher.mask()
        first.matcher.rollback(len(draft))
    text, length = np.concatenate((first.token_ids, draft.token_ids)), len(first.token_ids)
    return [
        msgspec.structs.replace(
            first,
            logits_row=first.logits_row + depth,
            token_ids=text[: length + depth],
            matcher=None,
            mask=mask,
            banned=first.banned if depth < min_tokens_left else frozenset(),
        )
        for depth, mask in enumerate(masks, 1)
    ]
