"""The arguments and results of the sampling ops.

Parameters come from the host as numpy arrays; results are tensors on the device of the logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


class Choosing(Protocol):
    """The sampling parameters of one row; any object with these fields will do."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """One entry per row of logits. ``draw`` is the row's uniform number in [0, 1), see ``uniform``."""

    temperature: np.ndarray  # float32 [R]; 0: the highest logit, the lowest id among equals
    top_k: np.ndarray  # int32 [R]; below 1: off
    top_p: np.ndarray  # float32 [R]; 1: off
    min_p: np.ndarray  # float32 [R]; 0: off
    draw: np.ndarray  # float64 [R]
    wants_logprob: np.ndarray | None = None  # bool [R]; None: all rows

    @classmethod
    def from_params(cls, params: Sequence[Choosing], *, uniforms: np.ndarray) -> "SampleBatch":
        if len(params) != len(uniforms):
            raise ValueError(f"{len(uniforms)} draws for {len(params)} rows")
        return cls(
            temperature=np.array([row.temperature for row in params], np.float32),
            top_k=np.array([row.top_k for row in params], np.int32),
            top_p=np.array([row.top_p for row in params], np.float32),
            min_p=np.array([row.min_p for row in params], np.float32),
            draw=np.asarray(uniforms, np.float64),
        )

    def take(self, order: np.ndarray) -> "SampleBatch":
        """The rows in a new order: row i is this batch's row ``order[i]``."""
        return SampleBatch(
            self.temperature[order],
            self.top_k[order],
            self.top_p[order],
            self.min_p[order],
            self.draw[order],
            None if self.wants_logprob is None else self.wants_logprob[order],
        )

    @classmethod
    def greedy(cls, num_rows: int) -> "SampleBatch":
        zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
        return cls(zeros, np.full(num_rows, -1, np.int32), ones, zeros, np.zeros(num_rows))


@dataclass(frozen=True, slots=True)
class Sampled:
    """``logprobs`` are after mask, bias and penalties, at temperature 1 and before top-k, top-p and min-p.

    A row in which every token is forbidden has token -1 and logprob minus infinity. What a row that wants no logprob
    has there is not defined: it costs a pass over the vocabulary, which a backend may leave out.
    """

    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Biases and penalties, for the rows that have any.

    Penalised row p is row ``rows[p]`` of the logits. Its tokens are ``ids[starts[p]:starts[p + 1]]``, and the first
    ``prompt_lens[p]`` of them are the prompt. ``repetition`` counts all tokens, ``frequency`` and ``presence`` only
    generated ones. Bias b adds ``bias_values[b]`` to token ``bias_ids[b]`` of row ``bias_rows[b]``; minus infinity
    forbids the token.
    """

    bias_rows: np.ndarray  # int64 [B]
    bias_ids: np.ndarray  # int64 [B]
    bias_values: np.ndarray  # float32 [B]
    rows: np.ndarray  # int64 [P]
    starts: np.ndarray  # int64 [P + 1]
    ids: np.ndarray  # int32 [N]
    prompt_lens: np.ndarray  # int64 [P]
    frequency: np.ndarray  # float32 [P]
    presence: np.ndarray  # float32 [P]
    repetition: np.ndarray  # float32 [P]; 1: off

    @classmethod
    def from_params(
        cls, params: Sequence[Choosing], token_ids: Sequence[np.ndarray], prompt_lens: Sequence[int]
    ) -> "LogitEdits | None":
        """The edits of these rows; None without any. ``token_ids[r]``: the prompt, then the generated tokens."""
        biased = [r for r, row in enumerate(params) if row.logit_bias]
        rows = [
            r
            for r, row in enumerate(params)
            if row.frequency_penalty or row.presence_penalty or row.repetition_penalty != 1.0
        ]
        if not biased and not rows:
            return None
        bias_counts = [len(params[r].logit_bias) for r in biased]
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(token_ids[r]) for r in rows], out=starts[1:])
        return cls(
            bias_rows=np.repeat(np.array(biased, np.int64), bias_counts),
            bias_ids=np.array([token for r in biased for token in params[r].logit_bias], np.int64),
            bias_values=np.array([value for r in biased for value in params[r].logit_bias.values()], np.float32),
            rows=np.array(rows, np.int64),
            starts=starts,
            ids=np.concatenate([token_ids[r] for r in rows]).astype(np.int32) if rows else np.zeros(0, np.int32),
            prompt_lens=np.array([prompt_lens[r] for r in rows], np.int64),
            frequency=np.array([params[r].frequency_penalty for r in rows], np.float32),
            presence=np.array([params[r].presence_penalty for r in rows], np.float32),
            repetition=np.array([params[r].repetition_penalty for r in rows], np.float32),
        )
