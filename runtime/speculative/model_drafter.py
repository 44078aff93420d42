"""Guesses that take a model's time: run one after the other while they are expected to save more than they take.

They are drawn with the target's random numbers: where the two models agree on the law they agree on the token, also
when sampling. The target's own draw decides, so nothing depends on how well they do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ... import kernels
from ...radix_cache.tree import common_prefix_len
from ..scheduler import Draft
from .drafter import Price, Proposal, Want

if TYPE_CHECKING:
    from torch import Tensor

_PROBE = 96  # times that a guess does not seem to pay before one is made to see whether it does by now
_HORIZON = 256  # tokens at most in which what was spent on reading a text must come back
_PREPARING = 2  # guesses whose time says nothing
_SURE = 0.98
_OWN = 0.1  # weight of a guess in what is known of its sequence's
_ALL = 0.02


class Guesser(Protocol):
    """A model that says what follows. ``token_ids``: the tokens its logits are of, ascending; None: all."""

    token_ids: np.ndarray | None
    max_len: int
    reads_features: bool

    def num_unread(self, seq_id: int, tokens: np.ndarray) -> int:
        """How many of ``tokens`` it has to read before it can say what follows; 0: it cannot."""
        ...

    def logits(self, seq_id: int, tokens: np.ndarray) -> Tensor:
        """[1, V] after ``tokens``: those of the sequence, and what was guessed since."""
        ...

    def read(self, seq_id: int, position: int, features: Tensor) -> None:
        """The target's features [n, C] of the sequence's tokens from ``position`` on, for whoever goes on from them."""
        ...

    def forget(self, seq_id: int) -> None: ...


class _Record:
    """How guesses went: ``rate`` of them came true, ``trust`` times as many as their own chances said."""

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
    """Owns ``guesser``, and what is known of its speed and its luck. ``source``: what its drafts are counted under."""

    def __init__(self, guesser: Guesser, *, source: str) -> None:
        self.guesser = guesser
        self.source = source
        self.token_s = 0.0  # of a guess; 0: none has been made
        self.read_s = 0.0  # of a token that is only read
        self.num_right = self.num_judged = 0  # of guesses that followed nothing but right ones
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
        """Tokens, and the chance that the guesser gives each."""
        tokens: list[int] = []
        said: list[float] = []
        reached = 1.0
        while True:
            start_s = time.perf_counter()
            text = np.concatenate((want.tokens, np.array(tokens, np.int32))) if tokens else want.tokens
            token, chance = self._draw(self.guesser.logits(want.seq_id, text), want, len(text))
            self._note_time(time.perf_counter() - start_s, 1 if tokens else num_unread)
            tokens.append(token)
            said.append(chance)
            reached *= min(chance * record.trust, _SURE)
            # The next must be worth its own forward and its row.
            if reached * record.rate * price.token_s <= self.token_s + price.row_s:
                return tokens, said
            if token in want.ends or len(tokens) == want.limit:
                return tokens, said

    def read(self, seq_id: int, position: int, features: Tensor) -> None:
        self.guesser.read(seq_id, position, features)

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
        """Noise only ever adds time, and the first few prepare kernels."""
        if num_tokens == 1:
            self._num_timed += 1
            if self._num_timed > _PREPARING:
                self.token_s = _pulled(self.token_s, seconds)
        elif num_tokens >= 32:
            self.read_s = _pulled(self.read_s, seconds / num_tokens)

    def _draw(self, logits: Tensor, want: Want, position: int) -> tuple[int, float]:
        """The token that the target's random number picks here, and the chance that the guesser gives it."""
        params = want.params
        if params is None or params.temperature == 0.0:
            batch = kernels.SampleBatch.greedy(1)
        else:
            uniforms = kernels.uniform(np.array([want.seed]), np.array([position]))
            batch = kernels.SampleBatch.from_params([params], uniforms=uniforms)
        with torch.inference_mode():
            sampled = kernels.sample(logits, batch)
            token, chance = int(sampled.token_ids[0]), float(sampled.logprobs[0].exp())
        return (token if self.guesser.token_ids is None else self.guesser.token_ids.item(token)), chance


def _pulled(known: float, seconds: float) -> float:
    if known == 0.0:
        return seconds
    return known + (0.5 if seconds < known else 0.05) * (min(seconds, 2.0 * known) - known)
