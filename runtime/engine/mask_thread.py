"""The thread that derives what grammars say after a token, where that is not remembered yet.

Almost every token leads to a state whose mask is remembered: then accepting it only looks up. Most others follow at
once from what is remembered: the step's thread derives those, which takes less than asking another thread. For the rest
the step waits, up to a budget. Where that is not enough, the sequence sits out steps until the thread is done, and the
others go on. So the step's thread derives nothing that may take long, and never waits for a machine's lock, which the
thread may hold for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ...constrained.grammar import CompiledGrammar, Step
from .priority import behind_steps

if TYPE_CHECKING:
    from ...constrained import Matcher

T = TypeVar("T")
STEP_BUDGET_S = 0.002


@dataclass(slots=True)
class MaskCounters:
    """Counts since the engine started.

    ``num_deferred`` tokens were accepted in a later step than the one that drew them. ``thread_s`` is the thread's own
    processor time, ``wait_s`` the time for which steps waited for it, and derived by themselves.
    """

    num_deferred: int = 0
    thread_s: float = 0.0
    wait_s: float = 0.0


class MaskThread:
    """Takes one matcher after the other. ``budget_s`` is how long a step waits and derives, for all of its sequences
    together; at 0 every token that is not remembered is deferred.
    """

    def __init__(self, *, budget_s: float = STEP_BUDGET_S) -> None:
        self.budget_s = budget_s
        self.counters = MaskCounters()
        self._left_s = budget_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="masks", initializer=behind_steps)
        self._last: Future[Any] | None = None

    def begin_step(self) -> None:
        self._left_s = self.budget_s

    def begin(
        self, grammar: CompiledGrammar, *, text: bytes, max_tokens: int | None, drawn: Sequence[Sequence[int]]
    ) -> Future[Matcher]:
        """A matcher of ``text`` and then a text of the grammar, which is complete within ``max_tokens`` if it can be.

        Once the future is done, its first mask and accepting the tokens of each of ``drawn`` only look up.
        """
        if not isinstance(grammar, CompiledGrammar) or not (text or drawn):  # a peer makes its masks in the step
            matcher = _matcher_of(grammar, text, max_tokens)
            if matcher.knows(()):
                known: Future[Matcher] = Future()
                known.set_result(matcher)
                return known
        return self._submit(self._begin, grammar, text, max_tokens, drawn)

    def prepare(self, matcher: Matcher, token_ids: Sequence[int]) -> Future[None] | None:
        """None if accepting these tokens, and what they force, only looks up; else what has to be awaited for that."""
        if matcher.knows(token_ids) or self._prepare_at_once(matcher, token_ids):
            return None
        future = self._submit(self._prepare, matcher.clone(), token_ids)
        return None if self._is_done(future) else future

    def prepare_all(self, asked: Sequence[tuple[Matcher, Sequence[int]]]) -> list[Future[None] | None]:
        """``prepare`` of each. What the thread derives for them is one job, so that the step waits once for all."""
        is_ready = [
            matcher.knows(token_ids) or self._prepare_at_once(matcher, token_ids) for matcher, token_ids in asked
        ]
        unknown = [
            (matcher.clone(), token_ids)
            for (matcher, token_ids), is_known in zip(asked, is_ready, strict=True)
            if not is_known
        ]
        if not unknown or self._is_done(job := self._submit(self._prepare_each, unknown)):
            return [None] * len(asked)
        if len(unknown) == 1:
            return [None if is_known else job for is_known in is_ready]
        return [
            None if is_known else self.prepare(matcher, token_ids)
            for (matcher, token_ids), is_known in zip(asked, is_ready, strict=True)
        ]

    def step_at_once(self, grammar: CompiledGrammar, state: int, token_id: int) -> Step | None:
        """``CompiledGrammar.step_at_once``; None once the step has no time left for it."""
        if self._left_s <= 0.0:
            return None
        begin_s = time.perf_counter()
        step = grammar.step_at_once(state, token_id)
        self._spend(time.perf_counter() - begin_s)
        return step

    def is_ready(self, matcher: Matcher, token_ids: Sequence[int]) -> bool:
        """As ``prepare``, for tokens that need not be accepted. A busy thread is not asked."""
        if matcher.knows(token_ids) or self._prepare_at_once(matcher, token_ids):
            return True
        return (
            not self._is_busy
            and self._left_s > 0.0
            and self._is_done(self._submit(self._prepare, matcher.clone(), token_ids))
        )

    def close(self) -> None:
        """Drop what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def _is_busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def _prepare_at_once(self, matcher: Matcher, token_ids: Sequence[int]) -> bool:
        if self._left_s <= 0.0:
            return False
        begin_s = time.perf_counter()
        is_done = matcher.prepare_at_once(token_ids)
        self._spend(time.perf_counter() - begin_s)
        return is_done

    def _spend(self, seconds: float) -> None:
        self._left_s -= seconds
        self.counters.wait_s += seconds

    def _submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        is_busy = self._is_busy
        future = self._executor.submit(self._timed, work, *args)
        self._last = future
        if not is_busy and self._left_s > 0.0:  # behind a longer one, waiting would gain nothing
            begin_s = time.perf_counter()
            wait([future], self._left_s)
            self._spend(time.perf_counter() - begin_s)
        return future

    def _is_done(self, future: Future[None]) -> bool:
        if not self.budget_s or not future.done():
            return False
        future.result()
        return True

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _timed(self, work: Callable[..., T], *args: Any) -> T:
        begin_s = time.thread_time()
        try:
            return work(*args)
        finally:
            self.counters.thread_s += time.thread_time() - begin_s

    @staticmethod
    def _prepare(matcher: Matcher, token_ids: Sequence[int]) -> None:
        matcher.prepare(token_ids)

    @staticmethod
    def _prepare_each(asked: Sequence[tuple[Matcher, Sequence[int]]]) -> None:
        for matcher, token_ids in asked:
            matcher.prepare(token_ids)

    @staticmethod
    def _begin(
        grammar: CompiledGrammar, text: bytes, max_tokens: int | None, drawn: Sequence[Sequence[int]]
    ) -> Matcher:
        matcher = _matcher_of(grammar, text, max_tokens)
        for token_ids in drawn or ((),):
            matcher.clone().prepare(token_ids)
        return matcher


def _matcher_of(grammar: CompiledGrammar, text: bytes, max_tokens: int | None) -> Matcher:
    grammar = grammar.after(text)
    matcher = grammar.matcher()
    if max_tokens is not None and (least := grammar.least_tokens) is not None:
        # ``text`` is generated anew; its tokens do not count, so there is room for the shortest text.
        matcher.limit_rest(max(max_tokens, least) if text else max_tokens)
    return matcher
