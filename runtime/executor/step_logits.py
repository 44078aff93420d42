"""One step's logits, computed when somebody asks and as far as they are asked for. Never draws a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...kernels.linear import BLOCK_LEN

FEW = 0.25  # of the head's blocks; beyond, the whole head streams as fast as its parts
Head = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class StepLogits:
    """float32 [L, V]. Good until the next step, as what the head is given."""

    __slots__ = ("_features", "_head", "_num_blocks", "_whole")

    def __init__(self, features: torch.Tensor, head: Head, *, num_blocks: int) -> None:
        """``features``: [L, C], after the last norm. ``head(features, blocks)``: of all tokens, or of these blocks of
        16, of which it has ``num_blocks``; 0: it has none.
        """
        self._features, self._head, self._num_blocks = features, head, num_blocks
        self._whole: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._features)

    def whole(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = self._head(self._features, None)
        return self._whole

    def allowed(self, masks: np.ndarray) -> torch.Tensor:
        """As ``whole``; but where few tokens are allowed by any of ``masks`` (uint32 [.., words]), the head is run for
        these and their neighbours only, and the other numbers mean nothing.
        """
        assert BLOCK_LEN == 16
        if self._whole is not None or not self._num_blocks:
            return self.whole()
        words = masks.view(np.uint16)[:, : self._num_blocks]  # each the tokens of one block
        blocks = np.flatnonzero(words.any(axis=0))
        if len(blocks) > FEW * self._num_blocks:
            return self.whole()
        return self._head(self._features, torch.from_numpy(blocks.astype(np.int32)))
