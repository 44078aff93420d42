"""Replaying a trace: its nodes with the leaves of a new run, and with the holes filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from .deciding import Branch, DecidedLeaf, DecodedLeaf, PickedLeaf, seed_of
from .distribution import DistributionLeaf
from .expressions import SglArgument, SglExpr, TraceError
from .nodes import GenNode, HoleNode, Node, PasteNode, PinNode, SelectNode, SettleNode, TextNode
from .program import ProgramRun, SequenceLog
from .reasoning import SplitLeaf
from .sampling_params import sampling_of_fork
from .state import ProgramState
from .tracer import TracerProgramState
from .values import CapturedText, Constant, DrawnText, Gathered, Hole, Leaf, Picked, Piece, TextSpan, Value


def replay(trace: TracerProgramState, state: ProgramState, arguments: Mapping[str, Any]) -> None:
    """Append the nodes of ``trace`` to the run of ``state``, its holes filled with ``arguments``."""
    copy = _Replay(trace, state.program, arguments)
    copy.run()
    ret = trace.ret_value
    state.ret_value = None if isinstance(ret, SglExpr) else ret


class _Replay:
    """Copies a trace into one run: each leaf and value of the trace becomes one of the run."""

    def __init__(self, trace: TracerProgramState, program: ProgramRun, arguments: Mapping[str, Any]) -> None:
        self._trace = trace
        self._program = program
        self._arguments = arguments
        self._leaves: dict[int, Leaf] = {}

    def run(self) -> None:
        program, log = self._program, self._program.log
        traced = self._trace.program
        for source in traced.sequences[1:]:
            if source is None:
                program.reserve_seq()
            else:
                SequenceLog(program)
        for node in traced.log:
            log.append(self._node(node))
        for source, target in zip(traced.sequences, program.sequences, strict=True):
            if source is None or target is None:
                continue
            target.pieces = [self._piece(piece) for piece in source.pieces]
            target.variables = {name: self._value(value) for name, value in source.variables.items()}
            target.leaves = [self._leaves[id(leaf)] for leaf in source.leaves]
            target.messages = tuple(
                [
                    replace(turn, content=TextSpan([self._piece(p) for p in turn.content.pieces]))
                    for turn in source.messages
                ]
            )
            target.role = source.role
            target.is_closed = True  # its CloseNode is in the trace
        program.wake_readers()

    def _node(self, node: Node) -> Node:
        match node:
            case HoleNode():
                return TextNode(node.seq, self._text(node.name))
            case GenNode():
                program, gen = self._program, node.gen
                overrides = gen.overrides
                if any(isinstance(value, SglArgument) for value in overrides.values()):
                    overrides = {name: self._filled(value) for name, value in overrides.items()}
                    gen = msgspec.structs.replace(gen, overrides=overrides)
                n = overrides.get("n") or self._filled(node.defaults.get("n")) or program.sampling.get("n", 1)
                if isinstance(node.leaf, SplitLeaf):
                    leaf: Leaf = node.leaf.again(program.lock)
                    assert isinstance(leaf, SplitLeaf)
                    self._leaves[id(node.leaf.answer)] = leaf.answer
                    self._leaves[id(node.leaf.reasoning)] = leaf.reasoning
                else:
                    leaf = Leaf(program.lock, gen.name, n=n, parse=gen.parse)
                self._leaves[id(node.leaf)] = leaf
                return GenNode(node.seq, leaf, gen, self._sampling(node), n, program.stream)
            case SelectNode():
                program = self._program
                choices = tuple([self._filled(choice) for choice in node.choices])
                if isinstance(node.leaf, DistributionLeaf):
                    leaf = node.leaf.again(program.lock, choices)
                elif isinstance(node.leaf, DecidedLeaf):
                    seed = seed_of(program.sampling, node.seq, len(program.log))
                    leaf = decided = node.leaf.again(program.lock, choices, seed)
                    self._leaves[id(node.leaf.answer)] = decided.answer
                else:
                    leaf = Leaf(program.lock, node.leaf.name)
                self._leaves[id(node.leaf)] = leaf
                return msgspec.structs.replace(node, leaf=leaf, choices=choices)
            case PinNode():
                leaf = Leaf(self._program.lock, None)
                self._leaves[id(node.leaf)] = leaf
                return PinNode(node.seq, leaf, node.ttl_s)
            case SettleNode():
                source = node.leaf
                if isinstance(source, DecodedLeaf):
                    self._leaves[id(source)] = source.again(self._program.lock, self._branch)
                elif isinstance(source, PickedLeaf):
                    self._leaves[id(source)] = source.again(self._program.lock, self._value)
                return SettleNode(node.seq, self._leaves[id(source)], node.children)
            case PasteNode():
                return PasteNode(node.seq, self._leaves[id(node.source)], node.index)
            case _:
                return node

    def _sampling(self, node: GenNode) -> Mapping[str, Any]:
        """The run's defaults, overridden by those of the ``s.sampling`` blocks in the trace."""
        sampling = self._program.sampling
        if node.defaults:
            region = {name: self._filled(value) for name, value in node.defaults.items()}
            sampling = {**sampling, **region}
        return sampling_of_fork(sampling, node.seq)

    def _filled(self, value: Any) -> Any:
        return self._arguments[value.name] if isinstance(value, SglArgument) else value

    def _text(self, name: str) -> str:
        value = self._arguments[name]
        if isinstance(value, SglExpr):
            raise TraceError(f"argument {name!r} of a compiled program is {value!r}; give it a str")
        return value if isinstance(value, str) else str(value)

    def _branch(self, branch: Branch) -> Branch:
        values = {name: self._value(value) for name, value in branch.values.items()}
        pieces = [self._piece(piece) for piece in branch.span.pieces]
        return Branch(TextSpan(pieces), values, tuple([self._leaves[id(leaf)] for leaf in branch.asked]))

    def _piece(self, piece: Piece) -> Piece:
        if isinstance(piece, str):
            return piece
        if isinstance(piece, Hole):
            return self._text(piece.name)
        leaf = self._leaves[id(piece if isinstance(piece, Leaf) else piece.leaf)]
        return leaf if isinstance(piece, Leaf) else DrawnText(leaf, piece.index)

    def _value(self, value: Value) -> Value:
        match value:
            case Leaf():
                return self._leaves[id(value)]
            case DrawnText():
                return DrawnText(self._leaves[id(value.leaf)], value.index)
            case CapturedText():
                return CapturedText(self._leaves[id(value.leaf)], value.grammar, value.name)
            case TextSpan():
                return TextSpan([self._piece(piece) for piece in value.pieces])
            case Picked():
                values = [None if item is None else self._value(item) for item in value.values]
                return Picked(self._leaves[id(value.decision)], value.name, values)
            case Gathered():
                return Gathered([self._value(item) for item in value.values])
            case Constant(value=SglArgument(name=name)):
                return Constant(self._arguments[name])
            case _:
                return value
