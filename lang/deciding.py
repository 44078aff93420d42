"""Leaves that Python resolves, as soon as the leaves that they depend on have resolved.

``DecidedLeaf``: the runtime scores choices and Python picks one. ``DecodedLeaf``: a rule picks one of several forks.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..protocol.errors import InvalidRequest, Unsupported
from ..protocol.messages import SelectMeta
from .choices import draw, values_of
from .distribution import DistributionLeaf
from .expressions import SglSelect
from .meta import meta_info
from .values import Leaf, Picked, TextSpan, Value


class _PickedChoice(Leaf):
    """The choice that Python picks from the scores."""

    __slots__ = ("_scores",)

    def __init__(self, lock: threading.Lock, scores: DecidedLeaf) -> None:
        super().__init__(lock, scores.name)
        self._scores = weakref.ref(scores)

    def sources(self) -> tuple[Leaf, ...]:
        scores = self._scores()
        return () if scores is None else (scores,)


class DecidedLeaf(Leaf):
    """The scores of a selection, from the runtime. Once they resolve, ``answer`` resolves to the choice picked."""

    __slots__ = ("__weakref__", "_expr", "_seed", "answer")

    def __init__(self, lock: threading.Lock, expr: SglSelect, seed: str | None) -> None:
        super().__init__(lock, expr.name)
        self._expr = expr
        self._seed = seed
        self.answer = _PickedChoice(lock, self)

    def again(self, lock: threading.Lock, choices: tuple[str, ...], seed: str | None) -> DecidedLeaf:
        """A copy for another run of the program."""
        expr = SglSelect(self._expr.name, choices, self._expr.temperature, self._expr.choices_method)
        return DecidedLeaf(lock, expr, seed)

    def resolve(self, texts: Sequence[str], meta: Any = None) -> None:
        super().resolve(texts, meta)
        try:
            decision, info = self._decide(meta)
        except Exception as error:  # raised by a rule that a user wrote
            self.answer.fail(error)
        else:
            self.answer.resolve((decision,), info)

    def fail(self, error: BaseException, partial: Sequence[str] = ()) -> None:
        super().fail(error, partial)
        self.answer.fail(error)

    def _decide(self, meta: SelectMeta) -> tuple[str, dict[str, Any]]:
        expr, info = self._expr, meta_info(meta)
        if expr.temperature > 0:
            at, probabilities = draw(meta.scores, expr.temperature, random.Random(self._seed))
            return expr.choices[at], {**info, "index": at, "probabilities": probabilities}
        decision = expr.choices_method(
            choices=list(expr.choices),
            normalized_prompt_logprobs=info["normalized_prompt_logprobs"],
            input_token_logprobs=info["input_token_logprobs"],
            output_token_logprobs=info["output_token_logprobs"],
            unconditional_token_logprobs=info.get("unconditional_token_logprobs"),
        )
        return decision.decision, {**info, **decision.meta_info}


def is_decided_here(expr: SglSelect) -> bool:
    """Whether the runtime has no operation for this selection: a user's rule, or a draw with a temperature."""
    return expr.choices_method.wire_name is None or expr.temperature > 0


def seed_of(sampling: Any, *place: int) -> str | None:
    """The seed of the draw at ``place``, if the run has a seed."""
    seed = sampling.get("seed")
    return None if seed is None else f"{seed}/{place}"


@dataclass(frozen=True, slots=True)
class Branch:
    """One fork as a rule sees it. ``asked``: its generations and selections."""

    span: TextSpan
    values: Mapping[str | None, Value]
    asked: tuple[Leaf, ...]

    @property
    def text(self) -> str:
        """The text of this branch, constants included."""
        return self.span.read()

    def __getitem__(self, name: str | None) -> Any:
        if name not in self.values:
            known = ", ".join(sorted(repr(n) for n in self.values if n is not None)) or "none"
            raise InvalidRequest(f"no variable {name!r} was set in the branch; it has: {known}")
        return self.values[name].read()

    def logprobs(self) -> list[float]:
        """One per token that was generated in this branch."""
        return [value for leaf in self.asked for value in _logprobs_of(leaf)]

    def leaves(self) -> tuple[Leaf, ...]:
        return (*self.asked, *[leaf for value in self.values.values() for leaf in value.leaves()])


class Decision(msgspec.Struct, frozen=True):
    """``index``: the branch picked. ``info``: what ``s.get_meta_info`` returns for the decoder's name."""

    index: int
    info: dict[str, Any]


def _logprobs_of(leaf: Leaf) -> list[float]:
    leaf.raise_error()
    if isinstance(leaf, DistributionLeaf):
        return []  # it generates no text
    if isinstance(leaf, DecodedLeaf):
        return leaf.picked.logprobs()
    info = leaf.report() or {}
    if "input_token_logprobs" in info and "index" in info:  # a selection: the tokens of the choice taken
        tokens = info["input_token_logprobs"][info["index"]]
    else:
        tokens = info.get("output_token_logprobs")
    if tokens is None:
        raise Unsupported("best_of() compares log-probabilities, and this backend gave none; give best_of(score=...)")
    return [value for value in values_of(tokens) if value is not None]


BranchRule = Callable[[Sequence[Branch]], Decision]


class DecodedLeaf(Leaf):
    """Resolves once all ``branches`` have: ``index`` is the branch that ``rule`` picks, the value its text."""

    __slots__ = ("_branches", "_pending", "_rule")

    def __init__(self, lock: threading.Lock, name: str | None, branches: Sequence[Branch], rule: BranchRule) -> None:
        super().__init__(lock, name)
        self._branches = branches
        self._rule = rule
        self._pending: list[Leaf] = []

    def again(self, lock: threading.Lock, copy: Callable[[Branch], Branch]) -> DecodedLeaf:
        """A copy for another run of the program."""
        leaf = DecodedLeaf(lock, self.name, [copy(branch) for branch in self._branches], self._rule)
        leaf.watch()
        return leaf

    def watch(self) -> None:
        """Begin to wait for the branches. Called once."""
        self._pending = [leaf for branch in self._branches for leaf in branch.leaves()]
        self._advance()

    def _advance(self) -> None:
        while self._pending:
            leaf = self._pending[-1]
            if not leaf.subscribe(leaf.done, self._advance):
                return
            self._pending.pop()
        try:
            self.decide(self._rule(self._branches))
        except Exception as error:  # raised by a generation that failed, or by a user's key function
            self.fail(error)

    def sources(self) -> tuple[Leaf, ...]:
        return tuple([source for branch in self._branches for leaf in branch.leaves() for source in leaf.sources()])

    @property
    def picked(self) -> Branch:
        return self._branches[self.index]

    def decide(self, decision: Decision) -> None:
        self.index = decision.index
        self.resolve((self._branches[decision.index].text,), {"index": decision.index, **decision.info})


class PickedLeaf(Leaf):
    """The text of a variable of the fork that a decision picks. It can be pasted before the decision is known."""

    __slots__ = ("_value",)

    def __init__(self, lock: threading.Lock, value: Picked) -> None:
        super().__init__(lock, value.name)
        self._value = value
        self._advance()

    def again(self, lock: threading.Lock, copy: Callable[[Picked], Value]) -> PickedLeaf:
        """A copy for another run of the program."""
        value = copy(self._value)
        assert isinstance(value, Picked)
        return PickedLeaf(lock, value)

    def sources(self) -> tuple[Leaf, ...]:
        return self._value.decision.sources()

    def _advance(self) -> None:
        decision = self._value.decision
        if not decision.subscribe(decision.done, self._advance):
            return
        try:
            self.resolve((self._value.text(),))
        except Exception as error:
            self.fail(error)
