"""A program on its way over HTTP: its journal, its present attempt at a server, and what is to be sent of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from ...protocol import errors
from ...protocol.journal import Journal
from ...protocol.messages import Accepted, Rejected, RuntimeMessage, Submit
from ...protocol.program_call import ProgramCall


class HttpProgram:
    """Lives on the client's loop. ``mark``: its progress when its stream broke last; ``strikes``: how often in a row an
    attempt that a server had taken brought nothing new.
    """

    def __init__(self, call: ProgramCall, journal: Journal) -> None:
        self.call = call
        self.journal = journal
        self.later: deque[Submit | dict[str, int]] = deque()  # what follows the first submit: submits, cancels
        self.is_sending = False  # a task works through ``later``
        self.is_known = asyncio.Event()  # the server has it, or never will
        self.is_taken = False  # the server of the present or the last attempt had it
        self.is_cancelled = asyncio.Event()
        self.num_attempts = 0
        self.reading: asyncio.Task[errors.PhloemError | None] | None = None  # the stream of the attempt
        self.broken: errors.PhloemError | None = None  # why that is over, where another request has found out
        self.accepted_s: float | None = None
        self.lost_s = 0.0
        self.mark, self.strikes = -1, 0

    @property
    def id(self) -> str:
        """At the server, in the present attempt."""
        return self.call.program if self.num_attempts < 2 else f"{self.call.program}~{self.num_attempts}"

    def replay(self) -> Submit:
        """The first submit of another attempt; the others are ``later``."""
        elapsed_s = 0.0 if self.accepted_s is None else time.monotonic() - self.accepted_s
        first, *rest = self.journal.replay(elapsed_s=elapsed_s)
        assert isinstance(first, Submit)
        self.later = deque(one if isinstance(one, Submit) else {"seq": one.seq or 0} for one in rest)
        return first

    def take(self, message: RuntimeMessage) -> None:
        """Hand on what of ``message`` is new."""
        if type(message) is Accepted and self.accepted_s is None:
            self.accepted_s = time.monotonic()
        try:
            if type(message) is Rejected and self.journal.is_repeating:
                raise errors.from_info(message.errors[0])
            found = self.journal.came(msgspec.structs.replace(message, program=self.call.program))
        except errors.PhloemError as error:
            self.call.lose(error)
            return
        if found is not None:
            self.call.take(found)

    def reject(self, submit: Submit, error: errors.PhloemError) -> None:
        self.journal.refused(submit)
        self.call.refuse(submit, Rejected(self.call.program, [error.info()]))

    def note_loss(self) -> None:
        """An attempt has ended before the program did."""
        progress = self.journal.progress
        if progress != self.mark:
            self.mark, self.strikes, self.lost_s = progress, 0, time.monotonic()
        self.strikes += self.is_taken
