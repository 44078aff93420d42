"""Drafts by a model: its forwards run one after the other for as long as each is expected to save more than it costs.

Draft tokens are drawn with the target's random numbers, so where the two models have equal distributions they draw
equal tokens, also when sampling. The target verifies every token, so the drafter's quality changes only the speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ... import kernels
from ...radix_cache.tree import common_prefix_len
from ..scheduler import Draft
from .drafter import Price, Proposal, Want

if TYPE_CHECKING:
    from torch import Tensor

_PROBE = 96  # requests that do not seem to pay, after which one is drafted as a trial
_HORIZON = 256  # tokens within which drafts must win back the time of reading a text
_PREPARING = 2  # first forwards, whose time is not counted
_SURE = 0.98  # largest chance of a draft token
_OWN = 0.1  # weight of a draft token in its sequence's record
_ALL = 0.02  # weight of a draft token in the record of all sequences


class Guesser(Protocol):
    """A model that drafts, for texts of at most ``max_len`` tokens."""

    max_len: int

    def num_unread(self, seq_id: int, tokens: np.ndarray) -> int:
        """How many of ``tokens`` it must read to draft; 0: it cannot draft now."""
        ...

    def logits(self, seq_id: int, tokens: np.ndarray, adapter: int) -> Tensor:
        """Logits [1, V] after ``tokens``: the sequence's tokens and the draft so far. ``adapter``: that of the
        sequence, by the target's number.
        """
        ...

    def forget(self, seq_id: int) -> None: ...


class _Record:
    """``rate``: share of draft tokens accepted; ``trust``: accepted tokens divided by the model's own expectation."""

    __slots__ = ("proposed", "rate", "said", "trust")

    def __init__(self, rate: float, trust: float) -> None:
        self.rate, self.trust = rate, trust
        self.proposed = self.said = np.zeros(0)

    def add(self, right: int, judged: int, said: float, weight: float) -> None:
        keep = (1.0 - weight) ** judged
        self.rate += (right / judged - self.rate) * (1.0 - keep)
        share = min(right / max(said, 0.1), 2.0)
        self.trust = min(2.0, max(0.05, self.trust + (share - self.trust) * (1.0 - keep)))


class ModelDrafter:
    """Owns ``guesser`` and the records of its speed and acceptance. ``source``: the name of its drafts in metrics."""

    def __init__(self, guesser: Guesser, *, source: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.guesser = guesser
        self._clock = clock
        self.source = source
        self.token_s = 0.0  # of a draft token; 0: not measured yet
        self.read_s = 0.0  # of a token of the text
        self.num_right = self.num_judged = 0  # of draft tokens after accepted ones only
        self._all = _Record(rate=0.7, trust=0.9)
        self._records: dict[int, _Record] = {}
        self._idle = 0
        self._num_timed = 0

    def propose(self, want: Want, price: Price) -> Proposal | None:
        record = self._records.get(want.seq_id)
        if record is None:
            record = self._records[want.seq_id] = _Record(self._all.rate, self._all.trust)
        record.proposed = record.said = np.zeros(0)
        if len(want.tokens) + want.limit > self.guesser.max_len:
            return None
        num_unread = self.guesser.num_unread(want.seq_id, want.tokens)
        if num_unread <= 0:
            return None
        expected = Price(price.token_s, price.row_s + self.token_s).gain(record.rate ** np.arange(1, want.limit + 1))
        reading_s = (num_unread - 1) * self.read_s
        horizon = _HORIZON if want.params is None else min(_HORIZON, want.params.max_tokens)
        if expected <= price.gain_s or reading_s > horizon * (expected - price.gain_s):
            if price.gain_s > 0.0 or reading_s > 10.0 * price.token_s:
                return None
            self._idle += 1
            if self._idle < _PROBE:
                return None
        self._idle = 0
        tokens, said = self._guess(want, price, record, num_unread)
        record.proposed = np.array(tokens, np.int32)
        record.said = np.array(said)
        return Proposal(Draft(record.proposed, source=self.source), np.minimum(record.said * record.trust, _SURE))

    def _guess(self, want: Want, price: Price, record: _Record, num_unread: int) -> tuple[list[int], list[float]]:
        """The draft's tokens, and the probability that the guesser gives each."""
        tokens: list[int] = []
        said: list[float] = []
        reached = 1.0
        while True:
            start_s = self._clock()
            text = np.concatenate((want.tokens, np.array(tokens, np.int32))) if tokens else want.tokens
            token, chance = self._draw(self.guesser.logits(want.seq_id, text, want.adapter), want, len(text))
            self._note_time(self._clock() - start_s, 1 if tokens else num_unread)
            tokens.append(token)
            said.append(chance)
            reached *= min(chance * record.trust, _SURE)
            # The next token must be worth one forward of the guesser and one row of the step.
            if reached * record.rate * price.token_s <= self.token_s + price.row_s:
                return tokens, said
            if token in want.ends or len(tokens) == want.limit:
                return tokens, said

    def observe(self, seq_id: int, made: np.ndarray) -> None:
        record = self._records.get(seq_id)
        if record is None or not len(record.proposed):
            return
        n = min(len(record.proposed), len(made))
        right = common_prefix_len(record.proposed[:n], made[:n])
        judged = min(right + 1, n)
        self.num_right += right
        self.num_judged += judged
        if judged:
            said = float(record.said[:judged].sum())
            record.add(right, judged, said, _OWN)
            self._all.add(right, judged, said, _ALL)
        record.proposed = record.said = np.zeros(0)

    def rest(self, seq_id: int) -> None: ...

    def flush(self) -> None:
        for seq_id in list(self._records):
            self.forget(seq_id)

    def forget(self, seq_id: int) -> None:
        self._records.pop(seq_id, None)
        self.guesser.forget(seq_id)

    def _note_time(self, seconds: float, num_tokens: int) -> None:
        """Update the mean time. Noise only adds time, so fast forwards have more weight; the first ones compile."""
        if num_tokens == 1:
            self._num_timed += 1
            if self._num_timed > _PREPARING:
                self.token_s = _pulled(self.token_s, seconds)
        elif num_tokens >= 32:
            self.read_s = _pulled(self.read_s, seconds / num_tokens)

    def _draw(self, logits: Tensor, want: Want, position: int) -> tuple[int, float]:
        """The token drawn with the target's random number, and the probability that the guesser gives it."""
        params = want.params
        if params is None or params.temperature == 0.0:
            batch = kernels.SampleBatch.greedy(1)
        else:
            uniforms = kernels.uniform(np.array([want.seed]), np.array([position]))
            batch = kernels.SampleBatch.from_params([params], uniforms=uniforms)
        with torch.inference_mode():
            sampled = kernels.sample(logits, batch)
            return int(sampled.token_ids[0]), float(sampled.logprobs[0].exp())


def _pulled(known: float, seconds: float) -> float:
    if known == 0.0:
        return seconds
    return known + (0.5 if seconds < known else 0.05) * (min(seconds, 2.0 * known) - known)
