"""The record of a run: its operations with times and counts, and the tokens of each text.

It is read from the log of the run and from the runtime's reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...protocol.messages import GenMeta, SelectMeta, TokenTrace
from ..graph import Graph
from ..nodes import ForkNode, GenNode, SelectNode
from ..program import ProgramRun, SequenceLog
from ..values import DrawnText, Hole, Leaf, Piece


@dataclass(frozen=True, slots=True)
class OpView:
    """One generation or selection. Seconds count from the program's start in the runtime, if ``is_timed``."""

    number: int
    seq: int
    kind: str
    name: str
    is_timed: bool = False
    start_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    accepted_tokens: int = 0
    finish: str = ""
    scores: tuple[tuple[str, float], ...] = ()  # of a selection: (choice, score)
    error: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.queue_s + self.prefill_s + self.decode_s

    @property
    def decoded_tokens(self) -> int:
        """Generated tokens that took one step of the model each."""
        return max(self.generated_tokens - self.forced_tokens - self.accepted_tokens, 0)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens in order. ``op``: the number of the op that generated them; None for text of the prompt.

    ``others``: the tokens of the op's further candidates.
    """

    tokens: tuple[TokenTrace, ...]
    op: int | None = None
    others: tuple[tuple[TokenTrace, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LaneView:
    """One sequence: its tokens after the fork from its parent."""

    seq: int
    parent: int | None
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class RunView:
    """``stats``: the run's costs as the runtime counts them. ``is_traced``: tokens have their origins."""

    title: str
    ops: tuple[OpView, ...]
    lanes: tuple[LaneView, ...]
    graph: Graph
    stats: dict[str, Any]
    is_traced: bool

    @property
    def total_s(self) -> float:
        return max((op.end_s for op in self.ops), default=0.0)


def record_of(program: ProgramRun, title: str = "program") -> RunView:
    """Waits until everything that was appended has been computed."""
    program.wait_body()
    log = list(program.log)
    asked = [node for node in log if isinstance(node, GenNode | SelectNode)]
    program.wait_leaves([node.leaf for node in asked])
    ops = tuple([_op(i, node) for i, node in enumerate(asked)])
    number_of = {id(node.leaf): i for i, node in enumerate(asked)}
    parents = {child: node.seq for node in log if isinstance(node, ForkNode) for child in node.children}
    lanes = []
    for sequence in list(program.sequences):
        if sequence is not None:
            own = [node.leaf for node in asked if node.seq == sequence.seq]
            lanes.append(LaneView(sequence.seq, parents.get(sequence.seq), _stretches(sequence, own, number_of)))
    stats: dict[str, Any] = {"messages": program.num_messages}
    if program.is_over:
        closed = program.session.closed
        closed.wait_for(closed.done)
        stats |= closed.meta or {}
    is_traced = any(_trace(node.leaf) is not None for node in asked)
    return RunView(title, ops, tuple(lanes), Graph.of(title, log), stats, is_traced)


def _trace(leaf: Leaf) -> Any:
    return leaf.meta.trace if isinstance(leaf.meta, GenMeta | SelectMeta) else None


def _op(number: int, node: GenNode | SelectNode) -> OpView:
    leaf, meta = node.leaf, node.leaf.meta
    error = "" if leaf.error is None else f"{type(leaf.error).__name__}: {leaf.error}"
    kind = "gen" if isinstance(node, GenNode) else "select"
    seen = OpView(number, node.seq, kind, leaf.name or "(unnamed)", error=error)
    if not isinstance(meta, GenMeta | SelectMeta):
        return seen
    seen = replace(
        seen,
        is_timed=True,
        start_s=meta.start_s,
        queue_s=meta.queue_s,
        prefill_s=meta.prefill_s,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
    )
    if isinstance(meta, SelectMeta):
        choices = node.choices if isinstance(node, SelectNode) else ()
        scores = tuple(zip(choices, meta.scores, strict=False))
        return replace(seen, cached_tokens=min(meta.cached_tokens, meta.prompt_tokens), finish="select", scores=scores)
    return replace(
        seen,
        decode_s=meta.decode_s,
        generated_tokens=sum(c.completion_tokens for c in meta.candidates),
        forced_tokens=sum(c.forced_tokens for c in meta.candidates),
        accepted_tokens=sum(c.accepted_tokens for c in meta.candidates),
        finish=meta.candidates[0].finish_reason,
    )


def _stretches(sequence: SequenceLog, own: list[Leaf], number_of: dict[int, int]) -> tuple[Stretch, ...]:
    """The tokens that the runtime reported; without a report, the text that Python has."""
    pieces = sequence.pieces[sequence.fork_at :]
    found: list[Stretch] = []
    traced = [leaf for leaf in own if _trace(leaf) is not None]
    for leaf in traced:
        trace = _trace(leaf)
        if trace.prompt:
            found.append(Stretch(trace.prompt))
        found.append(Stretch(trace.outputs[0], number_of[id(leaf)], trace.outputs[1:]))
    if traced:
        last = next((i for i in reversed(range(len(pieces))) if pieces[i] is traced[-1]), None)
        pieces = pieces[last + 1 :] if last is not None else []
    return (*found, *_plain(pieces, own, number_of))


def _plain(pieces: Sequence[Piece], own: list[Leaf], number_of: dict[int, int]) -> list[Stretch]:
    mine = {id(leaf) for leaf in own}
    found: list[Stretch] = []
    for piece in pieces:
        if isinstance(piece, Leaf) and id(piece) in mine:
            number = number_of[id(piece)]
            texts = piece.texts if piece.error is None else piece.partial
            origin = "selected" if isinstance(piece.meta, SelectMeta) else "generated"
            shown = [(TokenTrace(text, origin),) for text in texts]
            found.append(Stretch(shown[0] if shown else (), number, tuple(shown[1:])))
        else:
            found.append(Stretch((TokenTrace(_text(piece), "prompt"),)))
    return found


def _text(piece: Piece) -> str:
    """Prompt or pasted text; empty for a leaf that failed."""
    match piece:
        case str():
            return piece
        case DrawnText(leaf=leaf, index=index):
            return leaf.texts[index] if index < len(leaf.texts) else ""
        case Hole(name=name):
            return f"{{{name}}}"
        case _:
            return piece.texts[0] if piece.texts else ""
