"""How a ``select`` decides: three rules over the log-probabilities of each choice's tokens.

A runtime of Phloem applies these rules itself; these Python classes serve the other backends.
Let L_i be the log-probabilities of choice i's tokens and U_i the same without the prompt (first one: 0):

- token_length_normalized: argmax mean(L_i)
- greedy_token_selection: at each token keep the likeliest choices; a short one is padded with its mean
- unconditional_likelihood_normalized: argmax mean(L_i - U_i)

The first choice wins a tie.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ..protocol.ops import ChoicesMethod

TokenLogprobs = Sequence[Any]  # one choice: floats, or tuples that begin with one; None where unknown


@dataclass(frozen=True)
class ChoicesDecision:
    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesSamplingMethod(ABC):
    """A rule. ``wire_name`` is its name in the runtime; a rule written by a user has None and is applied in Python."""

    wire_name: ChoicesMethod | None = None

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[TokenLogprobs],
        output_token_logprobs: Sequence[TokenLogprobs],
        unconditional_token_logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> ChoicesDecision: ...

    def __repr__(self) -> str:
        return self.wire_name or type(self).__name__


def values_of(tokens: TokenLogprobs) -> list[float | None]:
    """The log-probabilities alone."""
    return [t[0] if isinstance(t, tuple | list) else t for t in tokens]


def mean_logprob(tokens: TokenLogprobs) -> float:
    """Mean of the known values; 0.0, which is certainty, counts."""
    known = [v for v in values_of(tokens) if v is not None]
    return sum(known) / len(known) if known else 0.0


def draw(scores: Sequence[float], temperature: float, random: Random) -> tuple[int, list[float]]:
    """An index drawn with probabilities softmax(scores / temperature), and the probabilities."""
    best = max(scores)
    weights = [math.exp((score - best) / temperature) for score in scores]
    total = sum(weights)
    return random.choices(range(len(scores)), weights)[0], [weight / total for weight in weights]


def _first_max(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


class _RuntimeRule(ChoicesSamplingMethod):
    """A rule that a runtime of Phloem knows too. A subclass writes ``_pick``."""

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[TokenLogprobs],
        output_token_logprobs: Sequence[TokenLogprobs],
        unconditional_token_logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> ChoicesDecision:
        index, found = self._pick(normalized_prompt_logprobs, input_token_logprobs, unconditional_token_logprobs)
        meta = {
            "normalized_prompt_logprobs": list(normalized_prompt_logprobs),
            "input_token_logprobs": list(input_token_logprobs),
            "output_token_logprobs": list(output_token_logprobs),
        }
        return ChoicesDecision(choices[index], {**meta, **found})

    @abstractmethod
    def _pick(
        self, means: Sequence[float], given: Sequence[TokenLogprobs], alone: Sequence[TokenLogprobs] | None
    ) -> tuple[int, dict[str, Any]]:
        """(index of the choice, meta information of this rule) from L: means, tokens; ``alone``: U, where needed."""


class TokenLengthNormalized(_RuntimeRule):
    wire_name = "token_length_normalized"

    def _pick(self, means: Sequence[float], given: Any, alone: Any) -> tuple[int, dict[str, Any]]:
        return _first_max(means), {}


class GreedyTokenSelection(_RuntimeRule):
    wire_name = "greedy_token_selection"

    def _pick(self, means: Any, given: Sequence[TokenLogprobs], alone: Any) -> tuple[int, dict[str, Any]]:
        rows = [[v for v in values_of(tokens) if v is not None] for tokens in given]
        width = max((len(row) for row in rows), default=0)
        matrix = [row + [mean_logprob(row)] * (width - len(row)) for row in rows]
        alive = list(range(len(rows)))
        for column in range(width):
            best = max(matrix[i][column] for i in alive)
            alive = [i for i in alive if matrix[i][column] == best]
            if len(alive) == 1:
                break
        return alive[0], {"greedy_logprob_matrix": matrix}


class UnconditionalLikelihoodNormalized(_RuntimeRule):
    wire_name = "unconditional_likelihood_normalized"

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def _pick(
        self, means: Any, given: Sequence[TokenLogprobs], alone: Sequence[TokenLogprobs] | None
    ) -> tuple[int, dict[str, Any]]:
        if alone is None:
            raise ValueError(
                "unconditional_likelihood_normalized needs the choices' log-probabilities without a prompt"
            )
        scores = []
        for with_prompt, without in zip(given, alone, strict=True):
            gains = [(a or 0.0) - (b or 0.0) for a, b in zip(values_of(with_prompt), values_of(without), strict=True)]
            scores.append(sum(gains) / len(gains) if gains else 0.0)
        return _first_max(scores), {
            "unconditional_token_logprobs": list(alone),
            "normalized_unconditional_prompt_logprobs": scores,
        }


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
