"""Drafts by grammar: the token that most often followed this grammar state and this token before.

It drafts the usual key, enum value or closing bracket without a text to copy from. Tokens that the grammar forces need
no draft: the engine appends them. Counts are kept by namespace and grammar, in bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from ..scheduler import Draft
from .drafter import Price, Proposal, Want

if TYPE_CHECKING:
    from ...constrained import CompiledGrammar

_MAX_GRAMMARS = 64
_MAX_PLACES = 4096  # of a grammar
_MAX_COUNT = 64  # of a place; then its counts are halved, so that recent tokens count more
_LONGEST = 8
_LEAST = 0.25  # chance of the whole draft below which it gets no further token

Place = tuple[int, int]  # the grammar's state and the token before
Counts = dict[Place, dict[int, int]]


class GrammarDrafter:
    source = "grammar"

    def __init__(self) -> None:
        self._grammars: OrderedDict[tuple[str, str], tuple[CompiledGrammar, Counts]] = OrderedDict()
        # By sequence: the places of its last draft, and the draft's tokens.
        self._waiting: dict[int, tuple[Counts, list[Place], list[int]]] = {}

    def propose(self, want: Want, price: Price) -> Proposal | None:
        matcher = want.matcher
        if matcher is None or not len(want.tokens):
            return None
        counts = self._counts_of(want.namespace, matcher.grammar)
        places: list[Place] = [(matcher.state, want.tokens.item(-1))]
        tokens: list[int] = []
        chances: list[float] = []
        reached = 1.0
        while len(tokens) < min(want.limit, _LONGEST):
            known = counts.get(places[-1])
            if not known:
                break
            token = max(known, key=known.__getitem__)
            chance = known[token] / (sum(known.values()) + 1)
            reached *= chance
            if reached < _LEAST or token in want.ends:
                break
            if want.is_ready is not None and not want.is_ready((token,)):
                break
            if not matcher.accept(token):
                matcher.error = None  # the grammar ran into a limit on a path that the model may not take
                break
            tokens.append(token)
            chances.append(chance)
            places.append((matcher.state, token))
        matcher.rollback(len(tokens))
        self._waiting[want.seq_id] = (counts, places, tokens)
        if not tokens:
            return None
        return Proposal(Draft(np.array(tokens, np.int32), source=self.source), np.array(chances))

    def observe(self, seq_id: int, made: np.ndarray) -> None:
        waiting = self._waiting.pop(seq_id, None)
        if waiting is None:
            return
        counts, places, tokens = waiting
        for i, (place, token) in enumerate(zip(places, made.tolist(), strict=False)):
            _count(counts, place, token)
            if i == len(tokens) or tokens[i] != token:
                return  # the text left the draft here

    def rest(self, seq_id: int) -> None: ...

    def flush(self) -> None:
        self._grammars.clear()
        self._waiting.clear()

    def forget(self, seq_id: int) -> None:
        self._waiting.pop(seq_id, None)

    def _counts_of(self, namespace: str, grammar: CompiledGrammar) -> Counts:
        key = (namespace, grammar.spec.key)
        known = self._grammars.get(key)
        if known is None or known[0] is not grammar:  # a grammar compiled again has other state numbers
            known = self._grammars[key] = (grammar, {})
        self._grammars.move_to_end(key)
        if len(self._grammars) > _MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        return known[1]


def _count(counts: Counts, place: Place, token: int) -> None:
    known = counts.get(place)
    if known is None:
        if len(counts) == _MAX_PLACES:
            del counts[next(iter(counts))]
        known = counts[place] = {}
    known[token] = known.get(token, 0) + 1
    if sum(known.values()) > _MAX_COUNT:
        for one in list(known):
            known[one] //= 2
            if not known[one]:
                del known[one]
