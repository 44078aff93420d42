"""Numbers for grammar states, and a table of the transitions that were taken before: (state, token) -> next state.

With it, a step over hundreds of texts asks a matcher only where a text takes a transition for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...constrained.grammar import CompiledGrammar, Matcher, Step

if TYPE_CHECKING:
    from ...constrained.machine import Machine

StepAtOnce = Callable[[CompiledGrammar, int, int], Step | None]  # of a grammar, a state and a token

MOST_STATES = 8_192  # each may hold a mask of its own
MOST_STEPS = 1_000_000
MIN_JUMP = 4  # forced tokens; to leave the arrays costs a sequence more than to draw fewer of them


class GrammarStates:
    """Numbers count from 0 and are valid until ``forget``. -1 is a state without a number."""

    def __init__(self, vocab_size: int) -> None:
        self.masks: list[np.ndarray] = []  # by number
        self._states: list[int] = []  # by number
        self._grammars: list[CompiledGrammar] = []  # by number: one whose machine has the state
        self._numbers: dict[tuple[Machine, int], int] = {}
        self._steps: dict[int, int] = {}
        self._vocab_size = vocab_size

    @property
    def is_full(self) -> bool:
        return len(self._states) >= MOST_STATES or len(self._steps) >= MOST_STEPS

    def number_of(self, matcher: object) -> int:
        """The number of ``matcher``'s state; -1 if the text has ended or is to be closed, or a peer compiled it."""
        if not isinstance(matcher, Matcher):
            return -1
        mask = matcher.mask()
        state = matcher.state
        if matcher.error is not None or state < 0 or matcher.is_short:
            return -1
        return self._number(matcher.grammar, state, mask)

    def _number(self, grammar: CompiledGrammar, state: int, mask: np.ndarray) -> int:
        key = (grammar.machine, state)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._states)
            self._states.append(state)
            self._grammars.append(grammar)
            self.masks.append(mask)
        return number

    def after(self, numbers: np.ndarray, token_ids: np.ndarray, step_at_once: StepAtOnce, *, jumps: bool) -> np.ndarray:
        """int64 [R]: the next states, of tokens that end no text; -1 where the matcher has to be asked.

        That is where neither a transition that was learnt nor ``step_at_once`` tells it, where the text is then
        complete, and with ``jumps`` where ``MIN_JUMP`` tokens are forced.
        """
        keys = (numbers * self._vocab_size + token_ids).tolist()  # negative for -1
        find = self._steps.get
        found = [find(key, -1) for key in keys]
        if -1 in found:
            for i, number in enumerate(found):
                if number < 0 and keys[i] >= 0:
                    known = find(keys[i])  # another row's derivation may have told it
                    found[i] = self._derive(keys[i], step_at_once, jumps) if known is None else known
        return np.array(found, np.int64)

    def _derive(self, key: int, step_at_once: StepAtOnce, jumps: bool) -> int:
        before, token_id = divmod(key, self._vocab_size)
        if self.is_full:
            return -1
        grammar = self._grammars[before]
        step = step_at_once(grammar, self._states[before], token_id)
        if step is None or step.only_token == grammar.machine.vocabulary.eos:
            return -1
        if jumps and not self._forces_few(grammar, step, step_at_once):
            return -1
        after = self._steps[key] = self._number(grammar, step.state, step.mask)
        return after

    @staticmethod
    def _forces_few(grammar: CompiledGrammar, step: Step | None, step_at_once: StepAtOnce) -> bool:
        """Whether it is known that fewer than ``MIN_JUMP`` tokens are forced after a step."""
        for _ in range(MIN_JUMP):
            if step is None or step.only_token in (-1, grammar.machine.vocabulary.eos):
                return step is not None
            step = step_at_once(grammar, step.state, step.only_token)
        return False

    def learn(self, before: int, token_id: int, after: int) -> None:
        """Record the transition of ``token_id``, which ended no text and after which the sequence does not jump."""
        if before >= 0 and after >= 0:
            self._steps[before * self._vocab_size + token_id] = after

    def follow(self, matcher: Matcher, numbers: np.ndarray) -> None:
        """Move ``matcher`` through these states, as if it had accepted the tokens that lead to them."""
        states = self._states
        matcher.follow([states[number] for number in numbers.tolist()])

    def forget(self) -> None:
        self.masks.clear()
        self._states.clear()
        self._grammars.clear()
        self._numbers.clear()
        self._steps.clear()
