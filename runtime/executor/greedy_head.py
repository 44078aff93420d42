"""Greedy draws of a step without its logits: one tape finds each row's token."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.cpu.recording import Arena, Recording
from ...kernels.cpu.tape import Tape
from ...kernels.linear import LikeliestOutputs
from ...kernels.threads import team
from .step_logits import FEW_OF_A_ROW, StepMasks

if TYPE_CHECKING:
    from ..models import Model

LEAST_ROWS = 5  # the head of fewer reads its weights no faster with half the arithmetic
MOST_ROWS = 128  # each takes room for a row of logits
MAX_KEPT = 64  # tapes of a few calls
_LOOKED_AT = 8  # one of so many words of a mask is looked at


@dataclass(frozen=True, slots=True)
class _Recorded:
    tape: Tape
    features: np.ndarray  # [L, C], see ``_bits``
    token_ids: np.ndarray  # int64 [L]
    likeliest: LikeliestOutputs  # owns the memory that the tape's calls read and write


class GreedyHead:
    """Owns the tapes of one model's head, by the number of rows."""

    def __init__(self, model: Model, *, num_tokens: int) -> None:
        """Tokens from ``num_tokens`` on are never drawn."""
        self._model, self._num_tokens = model, num_tokens
        self._likeliest: LikeliestOutputs | None = None  # made where it is first needed
        self._is_possible = True
        self._masks = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self._words, self._has_words = self._masks.numpy(), False
        self._arena = Arena()
        self._kept: OrderedDict[tuple[int, torch.dtype], _Recorded] = OrderedDict()

    def draw(self, features: torch.Tensor, masks: StepMasks | None) -> torch.Tensor | None:
        """int64 [L]: each row's token of the highest logit that its mask allows, the lowest of equal ones.

        None where the logits are needed to tell, or cost less: with few rows, or few whose masks allow many tokens.
        """
        num_rows = len(features)
        if not self._is_possible or not LEAST_ROWS <= num_rows <= MOST_ROWS or not team().can_replay:
            return None
        words = self._words
        if self._has_words:
            words[:] = 0
            self._has_words = False
        if masks is not None:
            self._has_words = True
            looked_at = masks.words[:, ::_LOOKED_AT]
            has_few = np.count_nonzero(looked_at, axis=1) <= FEW_OF_A_ROW * looked_at.shape[1]
            if num_rows - np.count_nonzero(has_few[masks.ids]) < LEAST_ROWS:
                return None
            words[masks.rows] = masks.words.ctypes.data + masks.words.strides[0] * masks.ids
        recorded = self._recorded(features)
        if recorded is None:
            return None
        recorded.features[:] = _bits(features)
        recorded.tape.replay(team().pool)
        token_ids = recorded.token_ids.copy()
        return None if token_ids.item(0) < 0 else torch.from_numpy(token_ids)  # where one is -1, all are

    def prepare(self) -> None:
        """Make what the first draw needs, before it needs it: some 20 ms."""
        if self._likeliest is None and self._is_possible:
            self._likeliest = self._model.head.likeliest(self._num_tokens)
            self._is_possible = self._likeliest is not None

    def _recorded(self, features: torch.Tensor) -> _Recorded | None:
        key = (len(features), features.dtype)
        recorded = self._kept.get(key)
        if recorded is None:
            self.prepare()
            likeliest = self._likeliest
            if likeliest is None:
                return None
            self._arena.restart()
            kept = self._arena.empty(tuple(features.shape), features.dtype)
            with Recording(self._arena) as recording:
                token_ids = likeliest(kept, self._masks)
            assert recording.foreign is None, recording.foreign
            recorded = self._kept[key] = _Recorded(
                Tape(recording.calls, self._arena), _bits(kept), token_ids.numpy(), likeliest
            )
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return recorded


def _bits(x: torch.Tensor) -> np.ndarray:
    """The tensor's memory as numpy reads it: numpy has no bfloat16, and copies without torch's bookkeeping."""
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
