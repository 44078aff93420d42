"""A program of a fleet, the engines of the fleet, and a program's attempt to run at one of them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ..protocol.client import Client, encode_submit
from ..protocol.errors import EngineLost, PhloemError
from ..protocol.journal import Journal
from ..protocol.messages import Cancel, Closed, RuntimeMessage, Submit
from ..protocol.program_call import ProgramCall
from .loads import Booking
from .roles import Role


class AttemptOwner(Protocol):
    """Takes an attempt's messages from its engine, and the loss of the engine, on the thread of the engine's client."""

    def take_from(self, attempt: Attempt, message: RuntimeMessage) -> None: ...
    def lose(self, attempt: Attempt) -> None: ...


class AttemptWatch(Protocol):
    """Told of each attempt when it begins and when it has left its engine. Called under locks: it returns at once."""

    def began(self, attempt: Attempt) -> None: ...
    def left(self, attempt: Attempt) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """An engine; ``role``: what it does for new programs, see ``roles``. ``trial``: the suspect that runs there alone.
    ``orphans``: programs that its end has left.
    """

    name: str
    client: Client
    runs: set[Run] = field(default_factory=set)
    role: Role = "both"
    is_draining: bool = False
    is_known: bool = False  # it was asked for its configuration
    trial: Run | None = None
    num_embeds: int = 0  # calls of ``embed`` that it has not answered
    removal: PhloemError | None = None
    orphans: list[Run] = field(default_factory=list)


class Run:
    """A program of the fleet.

    ``mark``: its progress when it last lost an engine. ``strikes``: engines lost without progress since,
    ``strikes_alone`` of which ran nothing else.
    """

    __slots__ = (
        "accepted_s",
        "attempt",
        "avoided",
        "backoff_s",
        "booking",
        "call",
        "deliver",
        "hands_off",
        "history_tokens",
        "is_cancelled",
        "is_suspect",
        "journal",
        "lock",
        "lost",
        "mark",
        "not_before_s",
        "num_attempts",
        "num_made",
        "program",
        "strikes",
        "strikes_alone",
        "trial_s",
        "waiting_s",
    )

    def __init__(self, call: ProgramCall, journal: Journal) -> None:
        self.call = call
        self.program = call.program
        self.journal = journal
        self.deliver = threading.RLock()
        self.lock = threading.RLock()
        self.attempt: Attempt | None = None
        self.booking: Booking | None = None  # the work that its engine was given; None while nothing runs
        self.history_tokens = 0  # of the longest prompt so far, with its output
        self.num_attempts = 0
        self.num_made = 0  # tokens of output since its work was booked
        self.accepted_s: float | None = None
        self.is_cancelled = self.is_suspect = False
        self.hands_off = False  # its engine computes its prompt only
        self.avoided = ""
        self.backoff_s = self.not_before_s = self.waiting_s = self.trial_s = 0.0
        self.lost: PhloemError | None = None
        self.mark = -1
        self.strikes = self.strikes_alone = 0

    def lost_error(self, text: str) -> EngineLost:
        return EngineLost(f"{text}: {self.lost.message}" if self.lost is not None else text)


class Attempt:
    """A program at one engine; a ``Receiver``. The first one has the program's id there, later ones a new id each.

    Submits of a replay are sent one after another, each after the engine has accepted the one before.
    """

    __slots__ = ("_owner", "engine", "is_over", "is_replay", "is_unanswered", "program", "run", "unsent")

    def __init__(self, owner: AttemptOwner, run: Run, engine: Member) -> None:
        self._owner = owner
        self.run = run
        self.engine = engine
        self.program = run.program if not run.num_attempts else f"{run.program}~{run.num_attempts + 1}"
        run.num_attempts += 1
        self.is_over = False
        self.is_replay = False  # until all of it is accepted
        self.is_unanswered = False
        self.unsent: deque[Submit | Cancel] = deque()

    def send(self, message: Submit | Cancel) -> None:
        """Raises what ``Client.submit`` raises, except for an engine that has ended: the journal is replayed then."""
        if self.is_replay:
            if isinstance(message, Submit):
                encode_submit(message, self.engine.client.welcome.limits)
            self.unsent.append(message)
            return
        with contextlib.suppress(EngineLost):
            self._send(message)

    def start(self, messages: Sequence[Submit | Cancel], *, is_replay: bool = False) -> None:
        """The first messages. Raises what ``Client.submit`` raises for the first of them."""
        self.is_replay = is_replay
        if is_replay:
            self.unsent.extend(messages)
            self._go_on()
        else:
            for message in messages:
                self._send(message)

    def answered(self) -> None:
        """The engine has answered a submit."""
        if self.is_replay:
            self.is_unanswered = False
            with contextlib.suppress(EngineLost):
                self._go_on()

    def _go_on(self) -> None:
        while self.unsent and not self.is_unanswered:
            message = self.unsent.popleft()
            self.is_unanswered = isinstance(message, Submit)
            self._send(message)
        self.is_replay = bool(self.unsent) or self.is_unanswered

    def _send(self, message: Submit | Cancel) -> None:
        client = self.engine.client
        if isinstance(message, Cancel):
            client.cancel(self.program, message.seq, message.op)
        else:
            client.submit(msgspec.structs.replace(message, program=self.program), self)

    # -- Receiver -----------------------------------------------------------------------------------------------------

    def take(self, message: RuntimeMessage) -> None:
        self.is_over = self.is_over or type(message) is Closed
        self._owner.take_from(self, message)

    def lose(self, error: PhloemError) -> None:
        self.is_over = True
        self._owner.lose(self)
