"""The probabilities of several choices at one place of a text, and their calibration.

The scores come from one ``Select`` that appends nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..protocol.errors import InvalidRequest, Unsupported
from .choices import token_length_normalized, values_of
from .expressions import SglMacro
from .nodes import SelectNode
from .values import Leaf

Prior = Mapping[str, float]


class Distribution(Mapping[str, float]):
    """Choice to probability, in the order in which the choices were given. ``logprobs`` are the model's own.

    p(choice) is proportional to exp((log p_model(choice) - log prior(choice)) / temperature), where p_model is the
    probability of the choice's text at this place: the product over its tokens.
    """

    __slots__ = ("_probabilities", "logprobs")

    def __init__(self, logprobs: Mapping[str, float], probabilities: Mapping[str, float] | None = None) -> None:
        self.logprobs = dict(logprobs)
        self._probabilities = dict(_softmax(self.logprobs) if probabilities is None else probabilities)

    def __getitem__(self, choice: str) -> float:
        try:
            return self._probabilities[choice]
        except KeyError:
            raise KeyError(f"{choice!r} is none of the choices: {', '.join(map(repr, self))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._probabilities)

    def __len__(self) -> int:
        return len(self._probabilities)

    @property
    def best(self) -> str:
        """The likeliest choice; the first one in a tie."""
        return max(self, key=self.__getitem__)

    @property
    def entropy(self) -> float:
        """In nats: 0 if one choice is certain, log(number of choices) if all are equally likely."""
        return -sum(p * math.log(p) for p in self.values() if p > 0)

    def calibrated(self, *, prior: Prior | None = None, temperature: float = 1.0) -> Distribution:
        """The same with another prior or temperature, from the model's own log-probabilities.

        ``prior``: the model's probabilities for an input without content ("N/A", an empty review), as a mapping or
        a ``Distribution``. Dividing by it removes the model's bias towards some labels (contextual calibration, Zhao
        et al., 2021). ``temperature``: see ``fit_temperature``.
        """
        if not temperature > 0:
            raise InvalidRequest(f"temperature={temperature!r}: must be above 0")
        scores = self.logprobs
        if prior is not None:
            missing = [choice for choice in scores if not prior.get(choice, 0.0) > 0]
            if missing:
                raise InvalidRequest(f"prior: needs a probability above 0 for each choice, and has none for {missing}")
            scores = {choice: value - math.log(prior[choice]) for choice, value in scores.items()}
        return Distribution(self.logprobs, _softmax({c: value / temperature for c, value in scores.items()}))

    def __repr__(self) -> str:
        return "Distribution({" + ", ".join(f"{choice!r}: {p:.4f}" for choice, p in self.items()) + "})"


def fit_temperature(
    distributions: Sequence[Distribution], answers: Sequence[str], *, prior: Prior | None = None
) -> float:
    """The temperature under which ``distributions`` give their right ``answers`` the best likelihood: 0.05 to 20.

    Fitted on examples whose answers are known (Guo et al., 2017). An overconfident model gets a value above 1.
    """
    if len(distributions) != len(answers) or not answers:
        raise InvalidRequest(f"{len(distributions)} distributions and {len(answers)} answers; give one answer for each")

    def loss(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        return -sum(
            math.log(max(d.calibrated(prior=prior, temperature=temperature)[answer], 1e-300))
            for d, answer in zip(distributions, answers, strict=True)
        )

    low, high = math.log(0.05), math.log(20.0)
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:  # golden section: the loss has one minimum in 1 / temperature
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def _softmax(scores: Mapping[str, float]) -> dict[str, float]:
    best = max(scores.values())
    weights = {choice: math.exp(score - best) for choice, score in scores.items()}
    total = sum(weights.values())
    return {choice: weight / total for choice, weight in weights.items()}


class SglDistribution(SglMacro, frozen=True, eq=False):
    """Score the choices at this place."""

    name: str
    choices: tuple[str, ...]
    prior: Any = None
    temperature: float = 1.0

    def append_to(self, sequence: Any) -> None:
        leaf = DistributionLeaf(sequence.program.lock, self, self.choices)
        sequence.leaves.append(leaf)
        sequence.bind(self.name, leaf)
        sequence.log.append(SelectNode(sequence.seq, leaf, self.choices, token_length_normalized, append=False))

    def __repr__(self) -> str:
        return f"Distribution({self.name!r}, choices={list(self.choices)})"


class DistributionLeaf(Leaf):
    """Its value is a ``Distribution``, its text the likeliest choice."""

    __slots__ = ("_choices", "_expr")

    def __init__(self, lock: threading.Lock, expr: SglDistribution, choices: tuple[str, ...]) -> None:
        super().__init__(lock, expr.name)
        self._expr = expr
        self._choices = choices

    def again(self, lock: threading.Lock, choices: tuple[str, ...]) -> DistributionLeaf:
        """A copy for another run of the program."""
        return DistributionLeaf(lock, self._expr, choices)

    def read(self) -> Distribution:
        self.raise_error()
        expr, info = self._expr, self.report()
        scored = info.get("input_token_logprobs")
        if not scored:
            raise Unsupported(
                "distribution() needs the log-probabilities of its choices, and this backend returned none"
            )
        logprobs = [sum(value or 0.0 for value in values_of(row)) for row in scored]
        found = Distribution(dict(zip(self._choices, logprobs, strict=True)))
        if expr.prior is None and expr.temperature == 1.0:
            return found
        return found.calibrated(prior=expr.prior, temperature=expr.temperature)

    def text(self) -> str:
        return self.read().best
