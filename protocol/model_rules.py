"""Rules by which one of two models answers: which one, for what reason, and what that has saved.

A rule sends to its cheap model what does not meet one of its conditions. Three conditions are decided before anything
is generated, in this order: the caller's tenant, the prompt's length, a probe. The last one, a check, looks at the
cheap model's answer; where the answer fails it, the strong model answers again.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from .errors import InvalidRequest

# Why a model answers: it was named; no condition was met; or the condition that was.
Reason = Literal["named", "cheap", "tenant", "length", "probe", "check"]


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question that the cheap model scores before it answers.

    ``question`` is a text with ``{prompt}``, which the model reads without a template. The strong model answers where
    ``hard`` is a more probable continuation than ``easy`` by more than ``limit`` allows: p(hard) > limit, with p the
    softmax of the two scores of ``select``. A prompt that the cheap model cannot read is hard.
    """

    question: str
    easy: str = " easy"
    hard: str = " hard"
    limit: float = 0.5

    def text(self, prompt: str) -> str:
        return self.question.replace("{prompt}", prompt)

    @property
    def choices(self) -> tuple[str, str]:
        return self.easy, self.hard

    def is_hard(self, scores: Sequence[float]) -> bool:
        """``scores``: of ``choices``, as ``select`` gives them."""
        easy, hard = scores
        return 1 / (1 + math.exp(min(easy - hard, 700.0))) > self.limit


class AnswerCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer of the cheap model must be; all that is given must hold.

    ``whole``: no generation has stopped at its token limit. ``regex``: the text of each answer matches it, from its
    first to its last character. ``json_schema``: each text is JSON of that schema. These two are for HTTP, where
    each choice of a response is an answer. ``holds``: a function of a program's state, true where the run is good.
    """

    whole: bool = False
    regex: str | None = None
    json_schema: dict[str, Any] | None = None
    holds: Any = None


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conditions; one that is met is enough. ``longer_than_chars``: characters of the prompt."""

    tenants: tuple[str, ...] = ()
    longer_than_chars: int | None = None
    probe: Probe | None = None
    check: AnswerCheck | None = None

    @property
    def is_empty(self) -> bool:
        return self == When()

    def met(self, *, tenant: str, prompt_chars: int) -> Reason | None:
        """The condition that can be told without a model; None where none is met."""
        if tenant in self.tenants:
            return "tenant"
        if self.longer_than_chars is not None and prompt_chars > self.longer_than_chars:
            return "length"
        return None


class ModelRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``cheap`` answers, and where a condition of ``when`` is met ``strong``: both are names of models."""

    cheap: str
    strong: str
    when: When


def check_rules(rules: Mapping[str, ModelRule], models: Collection[str]) -> None:
    """Raise InvalidRequest for a rule that cannot work, with its name and the field at fault."""
    for name, rule in rules.items():
        if name in models:
            raise _fault(name, "", "this is the name of a model as well; give the rule another one")
        for where in ("cheap", "strong"):
            if (model := getattr(rule, where)) not in models:
                raise _fault(name, where, f"{model!r} is not served; there are {', '.join(map(repr, models))}")
        if rule.cheap == rule.strong:
            raise _fault(name, "strong", f"{rule.strong!r} is the cheap model too; name another one")
        _check_conditions(name, rule.when)


def _check_conditions(name: str, when: When) -> None:
    if when.is_empty:
        text = "no condition is given, so the strong model would never answer; give one of"
        raise _fault(name, "when", f"{text} {', '.join(When.__struct_fields__)}")
    if when.longer_than_chars is not None and when.longer_than_chars < 1:
        raise _fault(name, "when.longer_than_chars", f"{when.longer_than_chars} must be 1 or more")
    if (probe := when.probe) is not None:
        if "{prompt}" not in probe.question:
            raise _fault(name, "when.probe.question", "it has no {prompt}, the place of the prompt's text")
        if not 0 < probe.limit < 1:
            raise _fault(name, "when.probe.limit", f"{probe.limit:g} must be between 0 and 1")
        if not probe.easy or not probe.hard or probe.easy == probe.hard:
            raise _fault(
                name, "when.probe", f"easy={probe.easy!r} and hard={probe.hard!r} must be two texts that differ"
            )
    if (check := when.check) is not None:
        if check == AnswerCheck():
            raise _fault(
                name, "when.check", f"it checks nothing; give one of {', '.join(AnswerCheck.__struct_fields__)}"
            )
        if check.regex is not None:
            try:
                re.compile(check.regex)
            except re.error as error:
                raise _fault(name, "when.check.regex", f"{check.regex!r}: {error}") from None


def _fault(name: str, where: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"rule {name!r}{', ' + where if where else ''}: {message}", where="rules")


class _Speed:
    """Of one model: the seconds of a token."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0

    @property
    def token_s(self) -> float | None:
        return self.seconds / self.tokens if self.tokens else None


@dataclass(slots=True)
class RuleCounts:
    """What one rule has done. ``answered``: requests or programs by model and reason.

    ``cheap_tokens``: generated tokens of answers that the cheap model gave; ``dropped_tokens``: those of its answers
    that failed the check. ``saved_s``: an estimate, ``cheap_tokens`` x (seconds of a token of strong - of cheap) -
    ``dropped_tokens`` x seconds of a token of cheap; None until both models have generated something.
    """

    answered: dict[tuple[str, Reason], int] = field(default_factory=dict)
    cheap_tokens: int = 0
    dropped_tokens: int = 0
    saved_s: float | None = None


class Savings:
    """Counts of each rule, and the speed of each model. May be used by several threads."""

    def __init__(self, rules: Mapping[str, ModelRule]) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._counts = {name: RuleCounts() for name in rules}
        self._speeds: dict[str, _Speed] = {}

    def add_speed(self, model: str, *, tokens: int, seconds: float) -> None:
        """``seconds`` of decoding for ``tokens``, whoever asked for them."""
        with self._lock:
            speed = self._speeds.setdefault(model, _Speed())
            speed.tokens += tokens
            speed.seconds += seconds

    def add_answer(self, rule: str, model: str, reason: Reason, *, tokens: int) -> None:
        with self._lock:
            counts = self._counts[rule]
            counts.answered[model, reason] = counts.answered.get((model, reason), 0) + 1
            if model == self._rules[rule].cheap:
                counts.cheap_tokens += tokens

    def add_dropped(self, rule: str, *, tokens: int) -> None:
        """An answer of the cheap model has failed the check."""
        with self._lock:
            self._counts[rule].dropped_tokens += tokens

    def report(self) -> dict[str, RuleCounts]:
        with self._lock:
            found = {}
            for name, rule in self._rules.items():
                counts = self._counts[name]
                cheap, strong = (self._speeds.get(model, _Speed()).token_s for model in (rule.cheap, rule.strong))
                saved_s = None
                if cheap is not None and strong is not None:
                    saved_s = counts.cheap_tokens * (strong - cheap) - counts.dropped_tokens * cheap
                found[name] = RuleCounts(dict(counts.answered), counts.cheap_tokens, counts.dropped_tokens, saved_s)
            return found
