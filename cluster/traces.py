"""Traces: the calls that programs make to models, and when; as made by a generator or read from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..protocol.errors import InvalidRequest

MOONCAKE_BLOCK = 512  # tokens of one of its hash ids


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a prompt, at one place in the tree of all prompts. Its token ids are [first, first + length)."""

    index: int
    first: int
    length: int


class Paths:
    """The tree of all prompts of a trace: equal labels below equal parents have equal tokens."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._next = 0
        self._known: dict[tuple[int, str], Span] = {}

    def add(self, path: tuple[Span, ...], label: str, length: int) -> tuple[Span, ...]:
        key = (path[-1].index if path else -1, label)
        if key not in self._known:
            self._known[key] = Span(len(self.spans), self._next, length)
            self.spans.append(self._known[key])
            self._next += length
        return (*path, self._known[key])

    def names(self) -> list[tuple[str, ...]]:
        """For each span the labels on the path to it, which are equal in every draw of a trace."""
        names: list[tuple[str, ...]] = [()] * len(self.spans)
        for (parent, label), span in self._known.items():  # parents come before their children
            names[span.index] = (*(names[parent] if parent >= 0 else ()), label)
        return names


@dataclass(slots=True)
class TimedCall:
    """One generation: it starts ``delay_s`` after the last of ``after`` ended; ``line`` is its sequence."""

    program: TimedProgram
    line: int
    prompt: tuple[Span, ...]
    output: tuple[Span, ...]
    delay_s: float = 0.0
    after: tuple[TimedCall, ...] = ()
    # set by the simulation
    arrival_s: float = 0.0
    first_s: float = 0.0
    end_s: float = -1.0
    computed: int = 0
    before: list[TimedCall] = field(default_factory=list)
    num_open: int = 0

    @property
    def prompt_len(self) -> int:
        return sum(span.length for span in self.prompt)

    @property
    def num_new(self) -> int:
        return self.output[-1].length


@dataclass(slots=True)
class TimedProgram:
    name: str
    start_s: float
    tenant: str = ""
    kind: str = ""  # programs of one name
    calls: list[TimedCall] = field(default_factory=list)

    def call(
        self,
        paths: Paths,
        line: int,
        prompt: tuple[Span, ...],
        num_new: int,
        *,
        delay_s: float = 0.0,
        after: tuple[TimedCall, ...] = (),
    ) -> TimedCall:
        output = paths.add(prompt, f"out {self.name} {len(self.calls)}", max(1, num_new))
        call = TimedCall(self, line, prompt, output, delay_s, after)
        self.calls.append(call)
        return call


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    paths: Paths
    programs: list[TimedProgram]

    @property
    def num_distinct(self) -> int:
        return sum(span.length for span in self.paths.spans)


def tokens_of(path: tuple[Span, ...]) -> np.ndarray:
    """The token ids of a prompt, int32."""
    return np.concatenate([np.arange(span.first, span.first + span.length, dtype=np.int32) for span in path])


def read_mooncake(path: Path, *, copies: int = 1) -> Trace:
    """A trace in Mooncake's public format (Qin et al., 2024): one JSON object a line, each a program of one call.

    ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``: a number for each
    block of 512 tokens of the prompt, equal where the whole prefix up to the block's end is equal. With ``copies`` each
    line is sent so many times, by users who share nothing. Raises InvalidRequest, naming the line that is wrong.
    """
    paths, programs = Paths(), []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            at_s, num_in, num_out = row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"])
            ids = [int(value) for value in row["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}: line {number} is no line of a Mooncake trace: {error!r}") from None
        if num_in < 1 or num_out < 1 or not 0 <= num_in - MOONCAKE_BLOCK * (len(ids) - 1) <= MOONCAKE_BLOCK:
            raise InvalidRequest(
                f"{path}: line {number}: {num_in} prompt tokens and {num_out} output tokens with {len(ids)} blocks of "
                f"{MOONCAKE_BLOCK}; all must be positive, and the blocks must cover the prompt"
            )
        rows.append((at_s, num_in, num_out, ids))
    for copy in range(copies):
        for i, (at_s, num_in, num_out, ids) in enumerate(rows):
            prompt: tuple[Span, ...] = ()
            for k, name in enumerate(ids):
                left = num_in - MOONCAKE_BLOCK * k
                if left >= MOONCAKE_BLOCK:
                    prompt = paths.add(prompt, f"{copy} {name}", MOONCAKE_BLOCK)
                elif left:  # the last block: its tokens are this prompt's own
                    prompt = paths.add(prompt, f"{copy} end of {i}", left)
            # Copies are a little apart, so that they do not arrive at the same moment.
            program = TimedProgram(f"{path.stem} {copy} {i}", at_s + 0.1 * copy / copies, kind=path.stem)
            program.call(paths, 0, prompt, num_out)
            programs.append(program)
    return Trace(path.stem, paths, programs)
