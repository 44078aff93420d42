"""One ``Select`` or ``Score`` being computed: which rows to run, and which choice wins.

    prefix [0, common)   then per choice its own tokens; the last of them is only scored, never run

Choices that differ only in their last token share one row. ``common`` is less than the prompt's length where a
choice's first characters merge with the prompt's last ones into one token; every choice is then scored from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...protocol.errors import Cancelled
from ...protocol.messages import SelectMeta
from ...protocol.ops import Score, Select
from ..scheduler import Sequence

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from .program import OpState, SequenceState


class ScoreRow:
    """One row of tokens, and the log-probabilities wanted from it.

    ``inner[i]`` is the log-probability of token ``first + i`` given the tokens before it. ``last`` maps each choice's
    final token id to its log-probability after all of the row's tokens; NaN until it is known.
    """

    __slots__ = ("cached_tokens", "first", "inner", "last", "scoring", "seq")

    def __init__(self, scoring: Scoring, seq: Sequence, first: int) -> None:
        self.scoring = scoring
        self.seq = seq
        self.first = first
        self.inner: list[float] = []
        self.last: dict[int, float] = {}
        self.cached_tokens = 0

    @property
    def owner(self) -> SequenceState:
        return self.scoring.owner

    @property
    def is_finished(self) -> bool:
        return all(not np.isnan(value) for value in self.last.values())

    def take_inner(self, position: int, values: list[float]) -> None:
        """Store the log-probabilities of the tokens from ``position`` on. A preempted row stores some of them twice."""
        at = position - self.first
        assert 0 <= at <= len(self.inner), (at, len(self.inner))
        self.inner[at : at + len(values)] = values


class Scoring:
    """``choices`` are continuations of ``owner``'s tokens; ``suffixes`` are their tokens from ``common`` on."""

    __slots__ = (
        "choices",
        "common",
        "op",
        "op_state",
        "owner",
        "prompt_len",
        "rows",
        "start_s",
        "suffixes",
        "unconditional",
    )

    def __init__(
        self,
        op_state: OpState,
        owner: SequenceState,
        choices: tuple[str, ...],
        *,
        common: int,
        suffixes: list[list[int]],
        start_s: float,
    ) -> None:
        op = op_state.op
        assert isinstance(op, Select | Score)
        self.op: Select | Score = op
        self.op_state = op_state
        self.owner = owner
        self.start_s = start_s
        self.prompt_len = len(owner.seq.tokens)
        self.choices, self.common, self.suffixes = choices, common, suffixes
        self.rows: dict[tuple[int, ...], ScoreRow] = {}
        self.unconditional: dict[tuple[int, ...], ScoreRow] = {}

    @property
    def needs_unconditional(self) -> bool:
        return isinstance(self.op, Select) and self.op.method == "unconditional_likelihood_normalized"

    @property
    def is_finished(self) -> bool:
        return all(row.is_finished for row in (*self.rows.values(), *self.unconditional.values()))

    def unlink(self) -> None:
        """Break the reference cycles with its rows, once it has ended."""
        self.rows.clear()
        self.unconditional.clear()

    def logprobs(self, choice: int) -> list[float | None]:
        """Log-probability of each token of ``suffixes[choice]``; None for a token with nothing before it."""
        return _collect(self.rows, self.suffixes[choice], has_context=self.common > 0)

    def unconditional_logprobs(self, choice: int) -> list[float | None]:
        return _collect(self.unconditional, self.suffixes[choice], has_context=False)

    def meta(self, *, now_s: float) -> SelectMeta:
        count = len(self.suffixes)
        logprobs = [self.logprobs(i) for i in range(count)]
        unconditional = [self.unconditional_logprobs(i) for i in range(count)] if self.needs_unconditional else []
        method = self.op.method if isinstance(self.op, Select) else "token_length_normalized"
        index, scores = decide(method, logprobs, unconditional)
        admitted_s = min((row.seq.admitted_s for row in self.rows.values() if row.seq.admitted_s), default=now_s)
        return SelectMeta(
            index=index,
            scores=tuple(scores),
            token_ids=tuple(tuple(suffix) for suffix in self.suffixes),
            logprobs=tuple(tuple(values) for values in logprobs),
            unconditional=tuple(tuple(values) for values in unconditional),
            prompt_tokens=self.prompt_len,
            cached_tokens=max((row.cached_tokens for row in self.rows.values()), default=0),
            start_s=self.start_s - self.owner.program.start_s,
            queue_s=max(0.0, admitted_s - self.start_s),
            prefill_s=max(0.0, now_s - admitted_s),
        )


def _collect(rows: dict[tuple[int, ...], ScoreRow], suffix: list[int], *, has_context: bool) -> list[float | None]:
    head: list[float | None] = [] if has_context else [None]
    row = rows.get(tuple(suffix[:-1]))
    if row is None:  # a single token with nothing before it
        return head
    inner: list[float | None] = list(row.inner)
    return [*head, *inner, row.last[suffix[-1]]]


def num_chars_of_choices(owner: SequenceState, choices: tuple[str, ...]) -> int:
    """The characters that ``tokenize_choices`` tokenizes."""
    return len(choices) * len(_last_text(owner)) + sum(map(len, choices))


def _last_text(owner: SequenceState) -> str:
    last = owner.segments[-1] if owner.segments else None
    return last.text if last is not None and last.kind == "text" else ""


def tokenize_choices(
    owner: SequenceState,
    choices: tuple[str, ...],
    tokenizer: Tokenizer,
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> tuple[int, list[list[int]]]:
    """(common, suffixes): ``tokens[:common] + suffixes[i]`` is the sequence followed by choice i.

    The prompt's last text segment is tokenized together with each choice, as text was in training. Raises Cancelled
    where ``is_wanted`` turns false.
    """

    def encoded(text: str) -> list[int]:
        if not is_wanted():
            raise Cancelled("nobody waits for these choices any more")
        return tokenizer.encode(text)

    tokens = owner.seq.tokens.ids
    last = owner.segments[-1] if owner.segments else None
    if last is None or last.kind != "text":
        return len(tokens), [encoded(choice) for choice in choices]
    tail = tokens[last.token_start :].tolist()
    merged = [encoded(last.text + choice) for choice in choices]
    shared = min(min(_shared_len(tail, ids), len(ids) - 1) for ids in merged)
    return last.token_start + shared, [ids[shared:] for ids in merged]


def _shared_len(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def decide(
    method: str, logprobs: list[list[float | None]], unconditional: list[list[float | None]]
) -> tuple[int, list[float]]:
    """(winner, score of each choice) by one of SGLang's three rules; ties go to the first.

    - token_length_normalized: mean log-probability of the choice's tokens
    - unconditional_likelihood_normalized: the same, minus that of the tokens without the prompt (first one: 0)
    - greedy_token_selection: token by token keep the choices whose token is likeliest; short ones go on with their mean
    """
    given = [[value for value in row if value is not None] for row in logprobs]
    means = [sum(row) / len(row) if row else 0.0 for row in given]
    if method == "token_length_normalized":
        return _first_max(means), means
    if method == "unconditional_likelihood_normalized":
        scores = []
        for row, alone in zip(logprobs, unconditional, strict=True):
            gains = [(a or 0.0) - (b or 0.0) for a, b in zip(row, alone, strict=True)]
            scores.append(sum(gains) / len(gains))
        return _first_max(scores), scores
    assert method == "greedy_token_selection", method
    longest = max(len(row) for row in given)
    alive = list(range(len(given)))
    for j in range(longest):
        column = [given[i][j] if j < len(given[i]) else means[i] for i in alive]
        best = max(column)
        alive = [i for i, value in zip(alive, column, strict=True) if value == best]
        if len(alive) == 1:
            break
    return alive[0], means


def _first_max(values: list[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))
