"""A program inside the engine: its ops and their state, and its sequences' text and tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...protocol.errors import PhloemError
from ...protocol.messages import ProgramSettings, ProgramStats
from ...protocol.ops import AnyOp
from ..scheduler import Sequence

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer
    from ..vision.images import Picture

SegmentKind = Literal["text", "special", "generated"]


@dataclass(slots=True)
class Segment:
    """A part of a sequence's text that begins and ends at a token boundary."""

    kind: SegmentKind
    token_start: int
    text_start: int
    text: str


@dataclass(slots=True)
class OpState:
    """One accepted op. ``order`` is its place among all ops of the program; a ``Ref`` can paste its ``texts``."""

    op: AnyOp
    order: int
    status: Literal["queued", "done", "failed"] = "queued"
    texts: tuple[str, ...] = ()
    error: PhloemError | None = None
    waiters: list[SequenceState] = field(default_factory=list)


class SequenceState:
    """A program's sequence: its ops in order, its text as segments, and the scheduler's sequence with its tokens.

    An ``unborn`` sequence is a child of a fork that has not run yet. ``stop_op`` is set while the model
    computes the first op: it takes that op off the schedule and returns the texts so far.

        segments:  | special | text | generated | text |  pending_text (not yet tokenized)
    """

    __slots__ = (
        "_pending",
        "closed",
        "error",
        "error_order",
        "fork_text",
        "fork_tokens",
        "id",
        "marks",
        "num_traced",
        "pending_len",
        "program",
        "queue",
        "segments",
        "seq",
        "stop_op",
        "text_len",
        "unborn",
    )

    def __init__(self, program: Program, id: int, seq: Sequence, *, unborn: bool = False) -> None:
        self.program = program
        self.id = id
        self.seq = seq
        self.unborn = unborn
        self.queue: deque[OpState] = deque()
        self.stop_op: Callable[[], tuple[str, ...]] | None = None
        self.segments: list[Segment] = []
        self._pending: list[str] = []
        self.pending_len = 0
        self.text_len = 0
        self.marks: dict[int, int] = {}
        self.fork_tokens = 0
        self.num_traced = 0  # tokens that traces of earlier ops have reported
        self.fork_text = 0
        self.error: PhloemError | None = None
        self.error_order = -1  # of the op that failed: earlier ops still run, later ops fail
        self.closed = False

    @property
    def pending_text(self) -> str:
        """Text that is not tokenized yet; ``pending_len`` characters."""
        if len(self._pending) > 1:
            self._pending = ["".join(self._pending)]
        return self._pending[0] if self._pending else ""

    @pending_text.setter
    def pending_text(self, text: str) -> None:
        self._pending, self.pending_len = [text], len(text)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments) + self.pending_text

    def text_since(self, start: int) -> str:
        """The text from character ``start`` on, without joining the text before it."""
        pieces = [self.pending_text]
        for segment in reversed(self.segments):
            if segment.text_start + len(segment.text) <= start:
                break
            pieces.append(segment.text[max(0, start - segment.text_start) :])
        cut = max(0, start - self.text_len)
        pieces[0] = self.pending_text[cut:]
        return "".join(reversed(pieces))

    @property
    def text_end(self) -> int:
        return self.text_len + self.pending_len

    # -- growing ------------------------------------------------------------------------------------------------------

    def append_text(self, text: str) -> None:
        self._pending.append(text)  # joined once: thousands of texts may follow each other
        self.pending_len += len(text)

    def flush_text(self, tokenizer: Tokenizer) -> None:
        """Tokenize the pending text; text that is appended later cannot change its tokens.

        An answer of the program that is appended where the model wrote it keeps the model's own tokens, which the cache
        holds; the tokenizer may spell its text otherwise.
        """
        if self.pending_len:
            ids = self._written(self.pending_text, tokenizer)
            if ids is None:
                ids = tokenizer.encode(self.pending_text, at_start=self.is_at_start)
            self.take_encoded(ids, tokenizer)

    def _written(self, text: str, tokenizer: Tokenizer) -> list[int] | None:
        """The tokens in which the model wrote ``text`` after just these tokens, in a sequence of this program."""
        start = len(self.seq.tokens)
        other = self.program.answers.get((start, text))
        if other is None:
            return None
        end = len(other.seq.tokens)
        for segment in reversed(other.segments):
            if segment.token_start < start:
                break
            if segment.token_start == start and segment.kind == "generated" and segment.text == text:
                ids = other.seq.tokens.ids[start:end].tolist()
                is_same = np.array_equal(other.seq.tokens.ids[:start], self.seq.tokens.ids)
                return ids if is_same and tokenizer.decode(ids) == text else None
            end = segment.token_start
        return None

    def take_encoded(self, ids: list[int], tokenizer: Tokenizer) -> None:
        """The pending text has been tokenized to ``ids``."""
        text, self.pending_text = self.pending_text, ""
        self._append("text", ids, text, tokenizer)

    @property
    def is_at_start(self) -> bool:
        """Whether no token comes before the pending text."""
        return not len(self.seq.tokens)

    def append_special(self, ids: tuple[int, ...], tokenizer: Tokenizer) -> None:
        self.flush_text(tokenizer)
        self._append("special", ids, tokenizer.decode(list(ids), skip_special=False), tokenizer)

    def append_tokens(self, ids: list[int], text: str, kind: SegmentKind, tokenizer: Tokenizer) -> None:
        """Append tokens whose text is known, without tokenizing the text again."""
        self.flush_text(tokenizer)
        self._append(kind, ids, text, tokenizer)

    def note_generated(self, token_start: int, text: str) -> None:
        """Record that the sequence's tokens from ``token_start`` on were generated and decode to ``text``."""
        self.segments.append(Segment("generated", token_start, self.text_len, text))
        self.text_len += len(text)
        self.program.answers[token_start, text] = self

    def _append(self, kind: SegmentKind, ids: list[int] | tuple[int, ...], text: str, tokenizer: Tokenizer) -> None:
        bos = tokenizer.bos_id if tokenizer.add_bos and not len(self.seq.tokens) else None
        if bos is not None and not (ids and ids[0] == bos):
            self.seq.tokens.append(bos)
        self.segments.append(Segment(kind, len(self.seq.tokens), self.text_len, text))
        self.text_len += len(text)
        self.seq.tokens.extend(ids)

    # -- fork and rollback -------------------------------------------------------------------------------------

    def start_as(self, parent: SequenceState) -> None:
        """Copy the tokens and text of ``parent``; the scheduler finds their KV in the cache."""
        self.seq.tokens = parent.seq.tokens.copy()
        self.segments = list(parent.segments)
        self.text_len = parent.text_len
        self.marks = dict(parent.marks)
        self.fork_tokens = self.num_traced = len(self.seq.tokens)
        self.fork_text = self.text_len
        self.unborn = False

    def rollback_point(self, text_pos: int) -> tuple[int, int, str]:
        """(segments kept, tokens kept, text that becomes pending again) for a rollback to character ``text_pos``."""
        if text_pos >= self.text_len:
            return len(self.segments), len(self.seq.tokens), self.pending_text[: text_pos - self.text_len]
        for i, segment in enumerate(self.segments):
            if text_pos < segment.text_start + len(segment.text):
                return i, segment.token_start, segment.text[: text_pos - segment.text_start]
        raise AssertionError((text_pos, self.text_len))


class Program:
    """One program of one client: sequences, ops, counts, and its end."""

    __slots__ = (
        "_adapter_space",
        "adapter",
        "answers",
        "deadline_s",
        "id",
        "joining",
        "key",
        "next_order",
        "ops",
        "pictures",
        "returned_chars",
        "sequences",
        "settings",
        "start_s",
        "stats",
        "usage_rows",
    )

    def __init__(
        self,
        key: tuple[bytes, str],
        settings: ProgramSettings,
        *,
        now_s: float,
        usage_rows: tuple[str, str],
        adapter: tuple[int, str] = (-1, ""),
    ) -> None:
        """``adapter``: as ``Adapters.begin`` returns it."""
        self.key = key
        self.id = key[1]
        self.settings = settings
        self.adapter, self._adapter_space = adapter
        self.start_s = now_s
        self.deadline_s = None if settings.deadline_s is None else now_s + settings.deadline_s
        self.sequences: dict[int, SequenceState] = {}
        self.ops: dict[int, OpState] = {}
        self.answers: dict[tuple[int, str], SequenceState] = {}  # by first token and text: the last that wrote it
        self.pictures: dict[str, Picture] = {}  # by hash
        self.stats = ProgramStats()
        self.usage_rows = usage_rows  # (tenant, name): see ``Usage.begin``
        self.joining: list[SequenceState] = []
        self.next_order = 0
        self.returned_chars = 0  # of the values of marks, pastes and closes, which repeat the program's own text

    @property
    def namespace(self) -> str:
        salt, space = self.settings.cache_salt, self._adapter_space
        return f"{salt}\n{space}" if salt or space else ""

    @property
    def cache_key(self) -> str:
        """The program's name in the cache, where programs of several clients may have the same id."""
        return f"{self.key[0].hex()}/{self.id}"

    @property
    def is_over(self) -> bool:
        return all(state.closed for state in self.sequences.values())

    def count_row(self, seq: Sequence) -> None:
        """Count the tokens of a row that was computed and generates nothing."""
        self.stats.prompt_tokens += len(seq.tokens)
        self.stats.cached_tokens += seq.num_cached
        self.stats.prefilled_tokens += seq.num_run
        self.stats.preemptions += seq.num_preempted

    def unlink(self) -> None:
        """Break the reference cycles of an ended program: it is then freed without a garbage collection."""
        self.sequences.clear()
        self.ops.clear()
        self.answers.clear()
        self.pictures.clear()
        self.joining.clear()
