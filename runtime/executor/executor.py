"""The executor: a step plan becomes tensors, a forward, logits and tokens. Knows nothing of programs or text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import kernels
from ..layers.batch import ForwardBatch
from ..protocol.sampling import SamplingParams
from ..scheduler import MAX_DRAFT_TOKENS, StepPlan
from .replays import Replays

if TYPE_CHECKING:
    from ...constrained import Matcher
    from ..memory import KVPool
    from ..models import Model


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to be drawn. ``token_ids`` are prompt and output so far; the draw depends on (seed, their number).

    What a grammar allows is what ``matcher`` says, or ``mask`` (uint32 words) where it was asked before.
    """

    logits_row: int
    params: SamplingParams
    seed: int
    token_ids: np.ndarray
    prompt_len: int
    matcher: Matcher | None = None
    banned: frozenset[int] = frozenset()
    mask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """``logprob``: of the model's distribution after mask, bias and penalties, before temperature."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


class Executor:
    """Owns the slot table: row r holds the slots of the sequence that runs as row r, the last rows are for branches."""

    def __init__(self, model: Model, kv: KVPool, *, max_rows: int, max_len: int, num_tokens: int = 0) -> None:
        """``num_tokens``: logits beyond it belong to no token (padded heads) and are never drawn; 0: all do."""
        self.model = model
        self.kv = kv
        self.device = torch.device(model.device)
        self.slot_table = np.zeros((max_rows + MAX_DRAFT_TOKENS, max_len), dtype=np.int32)
        self._replays = Replays(model, kv) if self.device.type == "cpu" else None
        self._num_tokens = num_tokens or model.config.vocab_size
        self._mask_words = (model.config.vocab_size + 31) // 32

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits float32 [L, V]: for each row of the plan its last ``num_logits`` positions, in order.

        They are good until the next step.
        """
        batch = ForwardBatch.from_plan(plan, self.slot_table, self.device)
        logits = self._replays.forward(batch) if self._replays is not None else None
        return self.model.forward(batch, self.kv) if logits is None else logits

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        """One token a row; ``logits`` may be changed in place."""
        if not rows:
            return []
        picked = [row.logits_row for row in rows]
        if picked != list(range(len(logits))):
            logits = logits[torch.tensor(picked, device=logits.device)]
        batch = kernels.SampleBatch.from_params(
            [row.params for row in rows],
            uniforms=kernels.uniform(
                np.array([row.seed for row in rows], dtype=np.int64),
                np.array([len(row.token_ids) for row in rows], dtype=np.int64),
            ),
        )
        self._constrain(logits, rows)
        sampled = kernels.sample(logits, batch)
        ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in rows]
        for i, row in enumerate(rows):
            if row.params.return_logprob and row.params.top_logprobs_num:
                tops[i] = self.top_logprobs(logits[i : i + 1], row.params.top_logprobs_num)[0]
        return [SampledToken(*token) for token in zip(ids, logprobs, tops, strict=True)]

    def _constrain(self, logits: torch.Tensor, rows: list[SampleRow]) -> None:
        """Padding, grammar masks, banned tokens, bias and penalties, in place."""
        if self._num_tokens < logits.shape[1]:
            logits[:, self._num_tokens :] = float("-inf")
        if any(row.matcher is not None or row.mask is not None for row in rows):
            mask = np.full((len(rows), self._mask_words), 0xFFFFFFFF, dtype=np.uint32)
            for i, row in enumerate(rows):
                if row.matcher is not None:
                    row.matcher.fill_mask(mask[i])
                elif row.mask is not None:
                    mask[i] = row.mask
            kernels.apply_bitmask(logits, mask)
        for i, row in enumerate(rows):
            if row.banned:
                logits[i, list(row.banned)] = float("-inf")
        kernels.apply_penalties(
            logits,
            [row.params for row in rows],
            [row.token_ids for row in rows],
            [row.prompt_len for row in rows],
        )

    @torch.inference_mode()
    def logprobs_of(self, logits: torch.Tensor, token_ids: np.ndarray) -> list[float]:
        """log softmax(logits)[i, token_ids[i]] of each row."""
        ids = torch.from_numpy(np.ascontiguousarray(token_ids, dtype=np.int64)).to(logits.device)
        return kernels.gather_logprobs(logits, ids).tolist()

    @torch.inference_mode()
    def top_logprobs(self, logits: torch.Tensor, k: int) -> list[list[tuple[int, float]]]:
        """Of each row the ``k`` likeliest tokens and their log-probabilities, likeliest first."""
        if k == 0:
            return [[] for _ in range(len(logits))]
        ids, values = kernels.top_logprobs(logits, k)
        return [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
