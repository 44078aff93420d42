"""Live migration: a program goes on at another engine, and its KV is there before it is.

    source decodes on                                                    source stopped
    export ──► import at the target ──► export ──► ... nothing is new ──► journal replayed at the target
               (whole blocks so far)    (blocks since)                     which computes what is no whole block

``Copying`` decides the steps; ``Migrations`` asks the engines for them, and tells its owner when to switch. A step that
fails ends the copy: the switch comes at once, and the target computes what it does not have. So a copy decides how long
a program pauses, never what it writes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..protocol.errors import PhloemError
from ..protocol.messages import Grant, Imported
from .attempt import Attempt, Member, Run
from .limits import MAX_AT_ONCE
from .loads import Booking

logger = logging.getLogger(__name__)

MAX_ROUNDS = 8  # copies of one program: a source that outruns the copying would go on for ever


@dataclass(frozen=True, slots=True)
class Lend:
    """Ask the source for the program's whole blocks; ``grant``: the earlier one that this renews, or ""."""

    grant: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Ask the target to import ``grant``."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Switch:
    """Stop at the source and go on at the target. ``why``: what ended the copy early, or ""."""

    why: str


Step = Lend | Copy | Switch


class Copying:
    """The steps of one program's copy. Pure: it is told each answer and says what is next; ``begin`` is the first.

    ``grant``: one that the source has made already; "": none.
    """

    def __init__(self, grant: str = "") -> None:
        self.grant = grant
        self.num_rounds = 0
        self.num_fetched = 0  # blocks
        self.num_tokens = 0  # of these blocks
        self.drawn: dict[int, list[list[int]]] = {}  # by op, as the source has last said
        self._block_len = 0
        self._asked: set[bytes] = set()  # names of blocks

    def begin(self) -> Step:
        return Lend(self.grant)

    def lent(self, grant: Grant) -> Step:
        self.grant, self.drawn = grant.id, grant.drawn
        if self._asked.issuperset(grant.names) or self.num_rounds == MAX_ROUNDS:
            return Switch("")
        self._block_len = grant.block_len
        self.num_rounds += 1
        self._asked.update(grant.names)
        return Copy(grant)

    def copied(self, imported: Imported) -> Step:
        self.num_fetched += imported.fetched
        self.num_tokens += imported.fetched * self._block_len
        return Switch(imported.why) if imported.why else Lend(self.grant)

    def failed(self, error: BaseException) -> Step:
        return Switch(getattr(error, "message", "") or type(error).__name__)


@dataclass(frozen=True, slots=True)
class Migrated:
    """``engine``: where the program is now. ``blocks`` were copied, in ``rounds``. ``why`` it did not move, or moved
    without (all of) its KV; "": it moved with it.
    """

    engine: str
    blocks: int
    rounds: int
    why: str


@dataclass(slots=True, eq=False)
class Move:
    """A program on its way from the engine of ``attempt``. ``target``: None until it is chosen. ``is_optional``: the
    program stays where it is if its KV cannot be copied. ``evens_out``: it moves for the sake of the loads.
    ``booking``: its work at the target. ``begun_s``: when its copy began.
    """

    run: Run
    attempt: Attempt
    target: Member | None = None
    is_optional: bool = False
    evens_out: bool = False
    booking: Booking | None = None
    begun_s: float = 0.0
    copying: Copying = field(default_factory=Copying)
    why: str = ""  # what ended its copy early, or the move
    ended: Future[Migrated] = field(default_factory=Future)


class Migrations:
    """The moves under way of a fleet; all methods on the fleet's thread, on which ``post`` runs what it is given.

    ``choose(move)`` sets the target of a move that begins; False where there is none. ``switch(move)`` ends it.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        *,
        choose: Callable[[Move], bool],
        switch: Callable[[Move], None],
    ) -> None:
        self._post = post
        self._choose = choose
        self._switch = switch
        self._waiting: deque[Move] = deque()
        self._moves: dict[Run, Move] = {}

    def begin(self, move: Move) -> None:
        """Where the program is on its way already, ``move`` ends with that."""
        if (other := self._moves.get(move.run)) is not None:
            other.ended.add_done_callback(lambda ended: move.ended.set_result(ended.result()))
            return
        self._moves[move.run] = move
        self._waiting.append(move)
        self._fill()

    def __contains__(self, run: Run) -> bool:
        return run in self._moves

    @property
    def num_evening_out(self) -> int:
        """Programs on their way for the sake of the loads."""
        return sum(move.evens_out for move in self._moves.values())

    def _fill(self) -> None:
        while self._waiting and len(self._moves) - len(self._waiting) < MAX_AT_ONCE:
            move = self._waiting.popleft()
            if move.run.attempt is not move.attempt:
                self._finish(move, "it had ended or left its engine before")
            elif not self._choose(move):
                self._finish(move, "no other engine is ready for it")
            else:
                self._go(move, _first_step(move))

    def _go(self, move: Move, step: Step) -> None:
        assert move.target is not None
        source, target = move.attempt.engine.client, move.target.client
        try:
            match step:
                case Switch(why):
                    self._end(move, why)
                case _ if move.run.attempt is not move.attempt:
                    self._end(move, "it has ended or left its engine")
                case Lend(grant):
                    self._then(source.export(move.attempt.program, grant=grant), move, move.copying.lent)
                case Copy(grant):
                    self._then(target.import_from(source, grant), move, move.copying.copied)
        except PhloemError as error:
            self._end(move, error.message)

    def _then(self, answer: Future[Any], move: Move, take: Callable[[Any], Step]) -> None:
        def answered(answer: Future[Any]) -> None:
            try:
                step = take(answer.result())
            except (PhloemError, CancelledError) as error:
                step = move.copying.failed(error)
            self._go(move, step)

        answer.add_done_callback(lambda answer: self._post(partial(answered, answer)))

    def _end(self, move: Move, why: str) -> None:
        move.why = why
        self._switch(move)
        if move.copying.grant:
            move.attempt.engine.client.end_grant(move.copying.grant)
        self._finish(move, move.why)
        self._fill()

    def _finish(self, move: Move, why: str) -> None:
        del self._moves[move.run]
        attempt, copying = move.run.attempt, move.copying
        where = "" if attempt is None else attempt.engine.name
        if why:
            logger.info("program %s was not moved with its KV: %s", move.run.program, why)
        move.ended.set_result(Migrated(where, copying.num_fetched, copying.num_rounds, why))


def _first_step(move: Move) -> Step:
    assert move.target is not None
    for engine in (move.attempt.engine, move.target):
        if "handoff" not in engine.client.welcome.capabilities:
            return Switch(f"engine {engine.name} hands over no KV")
    return move.copying.begin()
