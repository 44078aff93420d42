"""Selections that Python decides: the runtime scores the choices, a rule or a draw picks one.

Happens as soon as the scores are there; nothing waits for it but what needs its text. Never asks the runtime anything.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING, Any

from ..protocol.messages import SelectMeta
from .choices import draw, token_length_normalized
from .expressions import SglSelect
from .meta import meta_info
from .nodes import SelectNode, SettleNode
from .values import Leaf

if TYPE_CHECKING:
    from .sequence import Sequence


class _Answer(Leaf):
    """What is picked by the scores."""

    __slots__ = ("_scores",)

    def __init__(self, lock: threading.Lock, scores: DecidedLeaf) -> None:
        super().__init__(lock, scores.name)
        self._scores = weakref.ref(scores)

    def sources(self) -> tuple[Leaf, ...]:
        scores = self._scores()
        return () if scores is None else (scores,)


class DecidedLeaf(Leaf):
    """The scores of a selection; ``answer`` becomes what is picked by them."""

    __slots__ = ("__weakref__", "_expr", "_seed", "answer")

    def __init__(self, lock: threading.Lock, expr: SglSelect, seed: str | None) -> None:
        super().__init__(lock, expr.name)
        self._expr = expr
        self._seed = seed
        self.answer = _Answer(lock, self)

    def again(self, lock: threading.Lock, choices: tuple[str, ...], seed: str | None) -> DecidedLeaf:
        """The same for another program."""
        expr = SglSelect(self._expr.name, choices, self._expr.temperature, self._expr.choices_method)
        return DecidedLeaf(lock, expr, seed)

    def resolve(self, texts: ListLike[str], meta: Any = None) -> None:
        super().resolve(texts, meta)
        try:
            decision, info = self._decide(meta)
        except Exception as error:  # of a rule that a user wrote
            self.answer.fail(error)
        else:
            self.answer.resolve((decision,), info)

    def fail(self, error: BaseException, partial: ListLike[str] = ()) -> None:
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
    """Whether the runtime has no operation for it."""
    return expr.choices_method.wire_name is None or expr.temperature > 0


def seed_of(sampling: Any, *place: int) -> str | None:
    """The seed of one draw of a run that has a seed."""
    seed = sampling.get("seed")
    return None if seed is None else f"{seed}/{place}"


def append_decided(sequence: Sequence, expr: SglSelect) -> None:
    """Score, and go on with what is picked."""
    program = sequence.program
    leaf = DecidedLeaf(program.lock, expr, seed_of(program.sampling, sequence.seq, len(sequence.log)))
    method = expr.choices_method if expr.choices_method.wire_name else token_length_normalized
    sequence.log.append(SelectNode(sequence.seq, leaf, expr.choices, method, expr.temperature, append=False))
    sequence.log.append(SettleNode(sequence.seq, leaf.answer))
    sequence.leaves.append(leaf.answer)
    sequence.bind(expr.name, leaf.answer)
    sequence.pieces.append(leaf.answer)
