"""What the sampling ops are told about a batch, and what they answer. Never holds logits.

Parameters come from the host and are numpy arrays; results are tensors on the device of the logits.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """One entry per row of logits. ``draw`` is the row's uniform number in [0, 1), see ``uniform``."""

    temperature: np.ndarray  # float32 [R]; 0: the highest logit, the lowest id among equals
    top_k: np.ndarray  # int32 [R]; below 1: off
    top_p: np.ndarray  # float32 [R]; 1: off
    min_p: np.ndarray  # float32 [R]; 0: off
    draw: np.ndarray  # float64 [R]

    @classmethod
    def greedy(cls, num_rows: int) -> "SampleBatch":
        zeros, ones = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
        return cls(zeros, np.full(num_rows, -1, np.int32), ones, zeros, np.zeros(num_rows))


@dataclass(frozen=True, slots=True)
class Sampled:
    """``logprobs`` are of the model's distribution: after mask, bias and penalties, at temperature 1, before any cut.

    A row in which nothing is allowed has token -1 and logprob minus infinity.
    """

    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Biases and penalties, for the rows that have any.

    Penalised row p is row ``rows[p]`` of the logits and has the tokens ``ids[starts[p]:starts[p + 1]]``, of which the
    first ``prompt_lens[p]`` are its prompt: ``repetition`` counts both, ``frequency`` and ``presence`` only what was
    generated. Bias b adds ``bias_values[b]`` to token ``bias_ids[b]`` of row ``bias_rows[b]``; minus infinity forbids.
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
