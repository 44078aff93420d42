"""Rank 0's side: it gives the orders that the other ranks follow, and takes part in their collectives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
from torch import Tensor

from ..executor.split_steps import Shortlist
from ..executor.step_logits import StepMasks
from ..layers.batch import StepArrays
from ..models import Model
from .expert_copies import ExpertCopies
from .group import Group
from .lost import GangLost
from .order_line import OrderLine
from .orders import Beat, End, HeadInput, Likeliest, Order, ReviewExperts, Whole
from .tensor import SplitHead

log = logging.getLogger(__name__)


class Leader:
    """Implements ``SplitSteps``. One thread calls it: the engine's.

    ``beat_s``: after so long without an order, ``rest`` sends one, so that the others know that rank 0 lives.
    """

    def __init__(
        self,
        group: Group,
        model: Model,
        *,
        num_tokens: int,
        beat_s: float,
        copies: ExpertCopies | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert isinstance(model.head, SplitHead)
        self.group = group
        self._head, self._width = model.head, model.config.hidden_size
        self._head.before = lambda num_rows: self._give(Whole(num_rows))
        self._line = OrderLine(group)
        self._num_tokens = num_tokens
        self.copies = copies  # None: no experts are copied
        self._beat_s, self._clock = beat_s, clock
        self._given_s = clock()
        self._lost: str | None = None

    @property
    def num_orders(self) -> int:
        return self._line.num_orders

    def announce(self, step: StepArrays, drawn: Tensor | None) -> None:
        self._review(is_idle=False)
        self._give(step)
        if step.num_fed:
            assert drawn is not None
            self.group.broadcast(drawn[: step.num_fed])
        if self.copies is not None:
            self.copies.note_step(step.num_tokens)

    def shortlist(self, features: Tensor, k: int, masks: StepMasks | None) -> Shortlist:
        rows, words = np.zeros(0, np.int64), np.zeros((0, 0), np.uint32)
        if masks is not None:
            rows, words = masks.rows, masks.words[masks.ids]
        self._give(Likeliest(k, rows, words))
        return self._head.shortlist(features, k, num_tokens=self._num_tokens, rows=rows, words=words)

    def inputs(self, features: Tensor) -> Tensor:
        if self._head.is_holder:
            return features
        self._give(HeadInput())
        return self._head.fetch_input(len(features), self._width)

    def rest(self) -> None:
        """Call it while no step runs. Raises GangLost if a rank was lost meanwhile."""
        self._review(is_idle=True)
        if self._clock() - self._given_s >= self._beat_s:
            self._give(Beat())
        self.check()

    def _review(self, *, is_idle: bool) -> None:
        if self.copies is not None and self.copies.is_due(is_idle=is_idle):
            self._give(ReviewExperts())
            self.copies.review()

    def check(self) -> None:
        if self._lost is not None:
            raise GangLost(self._lost)

    def note_lost(self, reason: str) -> None:
        """A rank has ended. Callable on any thread; the next order raises GangLost."""
        self._lost = self._lost or reason

    def close(self) -> bool:
        """Tell the other ranks to end; False where one of them is lost already."""
        try:
            self._give(End())
        except GangLost as error:
            log.info("the ranks were not told to end: %s", error)
            return False
        return True

    def expert_copies(self) -> dict[str, object] | None:
        """What ``info`` says about copies of experts; None where none are made."""
        if self.copies is None:
            return None
        return {
            "spare_bytes": self.copies.spare_bytes,
            "num_copied": self.copies.num_copied,
            "mixtures": [asdict(one) for one in self.copies.reports()],
        }

    def _give(self, order: Order) -> None:
        self.check()
        self._line.send(order)
        self._given_s = self._clock()
