"""Drafts in the engine's step: which candidates get one, and the draws that verify it.

After the sequence's last token and after every draft token the model's own token is drawn, exactly as without the
draft: same logits, mask and penalties, same random number for the position. The engine accepts draws for as long as
each one equals a draft token. So drafts change no token, greedy or sampled. For a draft token that the drafter
proposes with certainty this is the rejection rule of Leviathan et al. (2023): it is accepted with probability p.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..executor import SampleRow
from ..scheduler import Draft, Sequence, StepPlan
from ..speculative import Want
from .generation import Candidate

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer


def wants_of(
    plan: StepPlan,
    live: Mapping[int, Sequence],
    tokenizer: Tokenizer,
    *,
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
                params=params,
                seed=candidate.seed,
            )
        )
        candidate.num_asked += 1
    return wants


def draft_rows(draft: Draft, first: SampleRow, *, min_tokens_left: int) -> list[SampleRow]:
    """The draws that verify ``draft``: row i is the draw after draft token i. ``first`` is the draw before them all.

    ``min_tokens_left``: tokens, counted from ``first`` on, for which end tokens stay banned.
    """
    tokens = first.token_ids
    parents = draft.parent_list()
    depths: list[int] = []
    rows: list[SampleRow] = []
    chain = np.concatenate((tokens, draft.token_ids)) if draft.parents is None else None
    masks = _masks(draft, parents, first)
    for i, parent in enumerate(parents):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if chain is not None:
            text = chain[: len(tokens) + i + 1]
        else:
            before = tokens if parent < 0 else rows[parent].token_ids
            text = np.append(before, draft.token_ids[i])
        rows.append(
            msgspec.structs.replace(
                first,
                logits_row=first.logits_row + i + 1,
                token_ids=text,
                matcher=None,
                mask=masks[i],
                banned=first.banned if depths[i] < min_tokens_left else frozenset(),
            )
        )
    return rows


def _masks(draft: Draft, parents: list[int], first: SampleRow) -> list[np.ndarray | None]:
    """The grammar's mask after each draft token; the grammar allows every token of ``draft``."""
    matcher = first.matcher
    if matcher is None:
        return [None] * len(draft)
    masks: list[np.ndarray | None] = []
    path: list[int] = []
    for i, (token, parent) in enumerate(zip(draft.token_ids.tolist(), parents, strict=True)):
        back = 0
        while path and path[-1] != parent:
            path.pop()
            back += 1
        matcher.rollback(back)
        assert matcher.accept(token), matcher.error
        path.append(i)
        masks.append(matcher.mask())
    matcher.rollback(len(path))
    return masks


class DraftPath:
    """Walks accepted tokens through a draft: ``path`` holds the accepted draft tokens, by number."""

    __slots__ = ("_children", "at", "path")

    def __init__(self, draft: Draft) -> None:
        self._children = draft.children()
        self.path: list[int] = []
        self.at = -1  # the draft token reached

    def follow(self, token_id: int) -> bool:
        found = self._children[self.at + 1].get(token_id)
        if found is None:
            return False
        self.at = found
        self.path.append(found)
        return True
