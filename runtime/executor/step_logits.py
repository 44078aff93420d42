"""One step's logits, computed when somebody asks and as far as they are asked for. Never draws a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...kernels.linear import BLOCK_LEN

FEW = 0.25  # of the head's blocks; beyond, the whole head streams as fast as its parts
FEW_OF_A_ROW = 0.125


class LogitsHead(Protocol):
    """``features`` [L, C] to logits [L, V], in ``out`` if given; of all tokens, or of these blocks of 16 alone."""

    def __call__(
        self, features: torch.Tensor, blocks: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StepMasks:
    """``rows[i]`` may draw what ``words[ids[i]]`` (uint32 [.., W]) allows; the others may draw everything."""

    rows: np.ndarray  # int64, ascending
    ids: np.ndarray  # int64
    words: np.ndarray

    def take(self, order: np.ndarray) -> StepMasks:
        """The same where row i is what row ``order[i]`` was."""
        rows = np.argsort(order)[self.rows]
        by_row = np.argsort(rows)
        return StepMasks(rows[by_row], self.ids[by_row], self.words)


class StepLogits:
    """float32 [L, V]. Good until the next step, as what the head is given."""

    __slots__ = ("_can_pick", "_features", "_head", "_vocab_size", "_whole")

    def __init__(self, features: torch.Tensor, head: LogitsHead, *, vocab_size: int, can_pick: bool) -> None:
        """``features``: [L, C], after the last norm. ``can_pick``: whether ``head`` takes blocks."""
        self._features, self._head = features, head
        self._vocab_size, self._can_pick = vocab_size, can_pick
        self._whole: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._features)

    def whole(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = self._head(self._features, None, None)
        return self._whole

    def allowed(self, masks: StepMasks, *, may_move: bool = True) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits [L, V], and which row of the step each is of (int64 [L]); None: as they come, as without ``may_move``.

        Where a row may have few tokens, the head is run for these and their neighbours only, and its other numbers
        mean nothing: a row of free text does not make all others wait for the whole vocabulary.
        """
        assert BLOCK_LEN == 16
        if self._whole is not None or not self._can_pick:
            return self.whole(), None
        num_blocks = -(-self._vocab_size // BLOCK_LEN)
        words = masks.words.view(np.uint16)[:, :num_blocks]  # each the tokens of one block
        has_few = np.count_nonzero(words, axis=1) <= max(1, FEW_OF_A_ROW * num_blocks)
        blocks = np.flatnonzero(words[has_few].any(axis=0))
        picked = masks.rows[has_few[masks.ids]]
        if not len(picked) or len(blocks) > FEW * num_blocks:
            return self.whole(), None
        wanted = torch.from_numpy(blocks.astype(np.int32))
        if len(picked) == len(self):
            return self._head(self._features, wanted, None), None
        if not may_move:
            return self.whole(), None
        is_picked = np.zeros(len(self), np.bool_)
        is_picked[picked] = True
        order = np.argsort(is_picked, kind="stable")
        features = self._features[torch.from_numpy(order)]
        num_whole = len(order) - len(picked)
        logits = torch.empty((len(order), self._vocab_size), dtype=torch.float32)
        self._head(features[:num_whole], None, logits[:num_whole])
        self._head(features[num_whole:], wanted, logits[num_whole:])
        return logits, order
