"""Decoders: ``sample``, ``best_of`` and ``vote`` generate several continuations in forks and keep one of them.

The sequence continues with the tokens of the fork that is picked. Log-probabilities and votes are compared without a
wait in the body: only what is generated after the decoder waits for its decision.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import InvalidRequest
from .deciding import Branch, BranchRule, Decision, DecodedLeaf
from .expressions import SglExpr, SglMacro, SglWaiting, WaitingSteps
from .function import SglFunction
from .nodes import CloseNode, JoinNode, SettleNode
from .program import SequenceLog
from .tracer import state_of
from .types import ParseError
from .values import Gathered, Picked, TextSpan

Body = SglExpr | str | Callable[[Any], Any]
MAX_BRANCHES = 1024


class SglDecode(SglMacro, frozen=True, eq=False):
    """Run ``body`` in ``n`` forks and continue with the one that ``rule`` picks."""

    body: Any
    n: int
    rule: BranchRule
    name: str | None = None
    needs_logprobs: bool = False

    def append_to(self, sequence: SequenceLog) -> None:
        children, branches = _run_branches(sequence, self.body, self.n, needs_logprobs=self.needs_logprobs)
        leaf = DecodedLeaf(sequence.program.lock, self.name, branches, self.rule)
        _continue_as(sequence, leaf, children, branches)
        sequence.log.append(SettleNode(sequence.seq, leaf, tuple([child.seq for child in children])))
        leaf.watch()

    def __repr__(self) -> str:
        return f"Decode({self.body!r}, n={self.n})"


class SglScored(SglWaiting, frozen=True, eq=False):
    """The same with ``score``, a user's function of a branch, called in the thread that runs the body."""

    body: Any
    n: int
    score: Callable[[Branch], Any]
    name: str | None = None

    def steps(self, sequence: SequenceLog) -> WaitingSteps:
        children, branches = _run_branches(sequence, self.body, self.n)
        yield [leaf for branch in branches for leaf in branch.leaves()]
        scores: list[float] = []
        for branch in branches:
            score = self.score(branch)
            if inspect.isawaitable(score):
                score = yield score
            scores.append(score)
        index = max(range(len(scores)), key=lambda i: (scores[i], -i))
        leaf = DecodedLeaf(sequence.program.lock, self.name, branches, _logprob_rule)
        _continue_as(sequence, leaf, children, branches)
        leaf.decide(Decision(index, {"scores": scores}))
        log = sequence.log
        log.append(JoinNode(sequence.seq, (children[index].seq,), "concate_and_append"))
        log += [CloseNode(child.seq) for child in children]

    def __repr__(self) -> str:
        return f"best_of({self.body!r}, n={self.n}, score={getattr(self.score, '__name__', self.score)!r})"


class SglSample(SglMacro, frozen=True, eq=False):
    """Run ``body`` in ``n`` forks. Every variable becomes a list; the text continues with the first fork."""

    body: Any
    n: int

    def append_to(self, sequence: SequenceLog) -> None:
        children, branches = _run_branches(sequence, self.body, self.n)
        first = children[0]
        log = sequence.log
        log.append(JoinNode(sequence.seq, (first.seq,), "concate_and_append"))
        for child in children:
            child.close()
            sequence.leaves += child.leaves
        sequence.pieces += first.pieces[first.fork_at :]
        for name in dict.fromkeys(name for branch in branches for name in branch.values):
            sequence.bind(name, Gathered([branch.values[name] for branch in branches if name in branch.values]))

    def __repr__(self) -> str:
        return f"sample({self.body!r}, n={self.n})"


def _run_branches(
    sequence: SequenceLog, body: Body, n: int, *, needs_logprobs: bool = False
) -> tuple[list[SequenceLog], list[Branch]]:
    """Run ``body`` in ``n`` forks of ``sequence``."""
    children = sequence.fork(n)
    for child in children:
        if needs_logprobs:
            child.sampling = {**child.sampling, "return_logprob": True}
        _write(child, body)
        if child.role != sequence.role or len(child.messages) != len(sequence.messages):
            raise InvalidRequest(
                "a role begins or ends inside a decoder; put the decoder into the role: "
                "s += assistant(vote(gen(...), ...))"
            )
    branches = [
        Branch(
            TextSpan(child.pieces[child.fork_at :]),
            {name: child.variables[name] for name in child.fresh},
            tuple(child.leaves),
        )
        for child in children
    ]
    return children, branches


def _write(child: SequenceLog, body: Body) -> None:
    if isinstance(body, SglExpr | str):
        child.append(body)
        return
    state = state_of(child)
    said = body.func(state, **body.bind_arguments) if isinstance(body, SglFunction) else body(state)
    if inspect.iscoroutine(said):
        said.close()
        raise InvalidRequest("the body of a decoder was an async function; give an expression or a plain function")
    if isinstance(said, SglExpr | str):
        child.append(said)


def _continue_as(sequence: SequenceLog, leaf: DecodedLeaf, children: list[SequenceLog], branches: list[Branch]) -> None:
    """``sequence`` continues as the fork that ``leaf`` picks."""
    for child in children:
        child.is_closed = True  # the SettleNode of the decision closes it
    sequence.leaves.append(leaf)
    sequence.pieces.append(leaf)
    for name in dict.fromkeys(name for branch in branches for name in branch.values):
        sequence.bind(name, Picked(leaf, name, [branch.values.get(name) for branch in branches]))
    if leaf.name is not None:
        sequence.bind(leaf.name, leaf)


# -- rules ------------------------------------------------------------------------------------------------------------


def _logprob_rule(branches: Sequence[Branch]) -> Decision:
    """Picks the branch with the highest mean log-probability of its tokens."""
    scores = []
    for branch in branches:
        found = branch.logprobs()
        scores.append(sum(found) / len(found) if found else 0.0)
    return Decision(max(range(len(scores)), key=lambda i: (scores[i], -i)), {"scores": scores})


@dataclass(frozen=True, slots=True)
class Vote:
    """Picks the first branch that has the commonest value of ``on``. A value that cannot be parsed does not vote."""

    on: str
    key: Callable[[Any], Any] | None

    def __call__(self, branches: Sequence[Branch]) -> Decision:
        ballots: list[Any] = []
        last: ParseError | None = None
        for branch in branches:
            try:
                value = branch[self.on]
            except ParseError as error:
                ballots.append(None)
                last = error
                continue
            if self.key is not None:
                value = self.key(value)
            ballots.append(value.strip() if isinstance(value, str) else value)
        counts: list[tuple[Any, int]] = []  # values need not be hashable
        for ballot in ballots:
            if ballot is not None and not any(ballot == seen for seen, _ in counts):
                counts.append((ballot, sum(ballot == other for other in ballots)))
        if not counts:
            raise last or InvalidRequest(f"vote(on={self.on!r}): every vote was None, so there is nothing to choose")
        winner, count = max(counts, key=lambda item: item[1])  # the first one of equal counts
        index = next(i for i, ballot in enumerate(ballots) if ballot is not None and ballot == winner)
        return Decision(index, {"answer": winner, "votes": counts, "share": count / len(ballots)})


# -- the words --------------------------------------------------------------------------------------------------------


def sample(body: Body, n: int) -> SglExpr:
    """Run ``body`` ``n`` times in parallel. Every variable it sets becomes a list; the text continues with the first.

    ``body``: an expression, a function that is given a state to write on, or a whole program with its arguments bound
    (``solve.bind(question=...)``).
    """
    return SglSample(_checked("sample", body, n), n)


def best_of(body: Body, n: int, *, score: Callable[[Branch], Any] | None = None, name: str | None = None) -> SglExpr:
    """Run ``body`` ``n`` times in parallel and continue with the best text and its variables.

    The best has the highest mean log-probability of its tokens, or the highest ``score(branch)``: ``branch["x"]`` is a
    variable, ``branch.text`` its whole text, ``branch.logprobs()`` one number per token. With a score the program waits
    here; an async program, whose ``score`` may be async, writes ``await s.append_async(best_of(...))``.
    ``s.get_meta_info(name)``: ``index`` and all ``scores``.
    """
    checked = _checked("best_of", body, n)
    if score is not None:
        if not callable(score):
            raise InvalidRequest(f"best_of(score={score!r}): must be a function of a branch, or None")
        return SglScored(checked, n, score, name)
    return SglDecode(checked, n, _logprob_rule, name, needs_logprobs=True)


def vote(body: Body, n: int, *, on: str, key: Callable[[Any], Any] | None = None, name: str | None = None) -> SglExpr:
    """Run ``body`` ``n`` times in parallel and continue with the first branch that has the commonest value of ``on``.

    Self-consistency (Wang et al., 2023): several reasoning paths, one vote on the answer. ``key(value)`` is what is
    compared: a quick function that does not wait. A branch whose key is None does not vote. ``s.get_meta_info(name)``:
    ``answer``, ``votes`` (value and count), ``share`` (of the winner), ``index``.
    """
    if not isinstance(on, str):
        raise InvalidRequest(f"vote(on={on!r}): must be the name of a variable that the body sets")
    return SglDecode(_checked("vote", body, n), n, Vote(on, key), name)


def _checked(word: str, body: Any, n: Any) -> Any:
    if not isinstance(n, int) or not 1 <= n <= MAX_BRANCHES:
        raise InvalidRequest(f"{word}(n={n!r}): must be between 1 and {MAX_BRANCHES:,}")
    if not isinstance(body, SglExpr | str) and not callable(body):
        raise InvalidRequest(f"{word}({body!r}): must be an expression, or a function that is given a state")
    return body
