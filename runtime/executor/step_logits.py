"""One step's logits, computed on demand: all of them, or only those that a grammar's masks allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...kernels.linear import BLOCK_LEN

FEW = 0.25  # of the head's blocks; with more, the whole head runs as fast as the blocks
FEW_OF_A_ROW = 0.125  # of the head's blocks
ROWS_AT_ONCE = 4  # of a tile of the head: fewer of them cost almost as much


class LogitsHead(Protocol):
    """``features`` [L, C] to logits [L, V], in ``out`` if given; of all tokens or of some blocks of 16."""

    def __call__(
        self, features: torch.Tensor, blocks: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StepMasks:
    """``words[ids[i]]`` (uint32 [.., W]) says which tokens row ``rows[i]`` may draw; other rows may draw any token."""

    rows: np.ndarray  # int64, ascending
    ids: np.ndarray  # int64
    words: np.ndarray

    def take(self, order: np.ndarray) -> StepMasks:
        """These masks for rows in a new order: row i was row ``order[i]``."""
        rows = np.argsort(order)[self.rows]
        by_row = np.argsort(rows)
        return StepMasks(rows[by_row], self.ids[by_row], self.words)


class StepLogits:
    """float32 [L, V]. Valid until the next step, which overwrites the head's input."""

    __slots__ = ("_can_pick", "_features", "_head", "_vocab_size", "_whole")

    def __init__(self, features: torch.Tensor, head: LogitsHead, *, vocab_size: int, can_pick: bool) -> None:
        """``features``: [L, C], after the last norm. ``can_pick``: whether ``head`` takes blocks."""
        self._features, self._head = features, head
        self._vocab_size, self._can_pick = vocab_size, can_pick
        self._whole: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._features)

    @property
    def features(self) -> torch.Tensor:
        """The head's input, [L, C]."""
        return self._features

    @property
    def is_computed(self) -> bool:
        return self._whole is not None

    def whole(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = self._head(self._features, None, None)
        return self._whole

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of ``rows`` (int64), which may be changed in place."""
        if self._whole is not None:
            return self._whole[rows]
        return self._head(self._features[rows], None, None)

    def allowed(self, masks: StepMasks, *, may_move: bool = True) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits [L, V], and the row of the step that each belongs to (int64 [L]; None: rows are in order).

        For rows whose mask allows few tokens the head computes only the blocks with these tokens; the other logits of
        such a row are undefined. With ``may_move`` rows are sorted so that rows of free text get the whole head, if
        that reads its weights less often.
        """
        assert BLOCK_LEN == 16
        if self._whole is not None or not self._can_pick:
            return self.whole(), None
        num_blocks = -(-self._vocab_size // BLOCK_LEN)
        words = masks.words.view(np.uint16)[:, :num_blocks]  # one word a block
        has_few = np.count_nonzero(words, axis=1) <= max(1, FEW_OF_A_ROW * num_blocks)
        picked = masks.rows[has_few[masks.ids]]
        num_whole = len(self) - len(picked)
        if num_whole and (not may_move or _num_readings(num_whole) == _num_readings(len(self))):
            return self.whole(), None
        blocks = np.flatnonzero(words[has_few].any(axis=0))
        if len(blocks) > FEW * num_blocks:
            return self.whole(), None
        wanted = torch.from_numpy(blocks.astype(np.int32))
        if not num_whole:
            return self._head(self._features, wanted, None), None
        is_picked = np.zeros(len(self), np.bool_)
        is_picked[picked] = True
        order = np.argsort(is_picked, kind="stable")
        features = self._features[torch.from_numpy(order)]
        logits = torch.empty((len(order), self._vocab_size), dtype=torch.float32)
        self._head(features[:num_whole], None, logits[:num_whole])
        self._head(features[num_whole:], wanted, logits[num_whole:])
        return logits, order


def _num_readings(num_rows: int) -> int:
    return -(-num_rows // ROWS_AT_ONCE)
