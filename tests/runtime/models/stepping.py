"""Runs a model by hand, one step plan after another, without an engine's scheduling."""

from collections.abc import Sequence

import numpy as np
import torch
from phloem.runtime.layers.batch import ForwardBatch
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model
from phloem.runtime.scheduler.plan import PlanRow, StepPlan


class Stepper:
    """Sequences over one pool. Slots are in random order, so that a kernel that relies on their order fails."""

    def __init__(self, model: Model, *, num_slots: int = 512, max_rows: int = 17, seed: int = 0) -> None:
        self.model = model
        self.kv = KVPool.for_model(model.config, num_slots=num_slots, dtype=model.kv_dtype, device=model.device)
        self.table = np.full((max_rows, model.max_positions), -1, dtype=np.int32)
        self.free = list(np.random.default_rng(seed).permutation(num_slots))
        self.slots: dict[int, list[int]] = {}

    def step(self, rows: Sequence[tuple[int, np.ndarray, int]]) -> torch.Tensor:
        """Run ``(sequence, its next tokens, logits wanted)`` of each row; the logits of all rows, one under another."""
        return self.model.forward(self.batch(rows), self.kv)

    def batch(self, rows: Sequence[tuple[int, np.ndarray, int]]) -> ForwardBatch:
        """The step that ``step`` runs; the tokens have their slots now."""
        made = []
        for sequence, token_ids, num_logits in rows:
            slots = self.slots.setdefault(sequence, [])
            start = len(slots)
            slots.extend(self.free.pop() for _ in token_ids)
            made.append(
                PlanRow(
                    seq_id=100 + sequence,
                    row_id=sequence,
                    start=start,
                    token_ids=np.asarray(token_ids, dtype=np.int32),
                    slot_ids=np.array(slots, dtype=np.int32),
                    stale_from=start if self.table[sequence, 0] >= 0 else 0,
                    num_logits=num_logits,
                )
            )
        return ForwardBatch.from_plan(StepPlan(step=0, rows=tuple(made)), self.table, self.model.device)

    def fork(self, parent: int, child: int) -> None:
        """``child`` starts as ``parent`` is now, in the same slots."""
        self.slots[child] = list(self.slots[parent])

    def prefill(self, sequence: int, token_ids: np.ndarray, *, chunk: int = 1 << 30) -> torch.Tensor:
        """Logits of every token, in chunks."""
        pieces = [token_ids[i : i + chunk] for i in range(0, len(token_ids), chunk)]
        return torch.cat([self.step([(sequence, piece, len(piece))]) for piece in pieces])


def greedy(
    model: Model, prompts: Sequence[np.ndarray], num_tokens: int, *, chunk: int = 1 << 30, num_slots: int = 4096
) -> list[list[int]]:
    """The ``num_tokens`` likeliest tokens after each prompt, all in one batch, ``chunk`` tokens of each a step."""
    stepper = Stepper(model, num_slots=num_slots, max_rows=len(prompts))
    waiting = [np.asarray(prompt) for prompt in prompts]
    out: list[list[int]] = [[] for _ in prompts]
    while True:
        rows = []
        for i, tokens in enumerate(waiting):
            if len(tokens):
                piece, waiting[i] = tokens[:chunk], tokens[chunk:]
                rows.append((i, piece, 0 if len(waiting[i]) else 1))
        if not rows:
            return out
        chosen = stepper.step(rows).argmax(dim=-1).tolist()
        for (i, _, wanted), token in zip([row for row in rows if row[2]], chosen, strict=True):
            assert wanted == 1
            out[i].append(token)
            if len(out[i]) < num_tokens:
                waiting[i] = np.array([token])
