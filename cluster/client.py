"""A client of several engines with the face of ``protocol.client.Client``: programs survive the loss of an engine.

Each program has a journal and, while an engine runs it, an attempt: the receiver of that engine's messages.

    ProgramCall ──submit──► FleetClient ──► Attempt ──► Client ──► engine
         ▲                      │ journal    │
         └──────take────────────┴────────────┘        the engine is lost: the fleet's thread replays the journal
                                                      on another engine, under a new attempt

Locks, in the order in which a thread may take them: ``deliver`` of a program (it orders the messages to its call),
the call's own, ``lock`` of the program (journal and attempt), the fleet's. A call receives messages only under its
``deliver``, and a thread that holds the call's own lock does not wait for ``deliver``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import zmq

from ..protocol.client import Client, check_embed, encode_submit
from ..protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineLost,
    InternalError,
    InvalidParams,
    InvalidRequest,
    Overloaded,
    PhloemError,
    from_info,
)
from ..protocol.journal import NONE_DRAWN, Journal, size_of, with_seeds
from ..protocol.messages import (
    Accepted,
    Cancel,
    Closed,
    Done,
    Embedded,
    Failed,
    GenMeta,
    Grant,
    ProgramSettings,
    Rejected,
    RuntimeMessage,
    Submit,
    Welcome,
)
from ..protocol.ops import AnyOp, Pin
from ..protocol.program_call import ProgramCall
from .attempt import Attempt, AttemptWatch, Member, Run
from .cache_watch import CacheWatch
from .limits import FleetLimits
from .loads import Booking
from .migrate import Copying, Migrated, Migrations, Move
from .pins import KeptPin, KeptPins, ops_of_pin
from .placer import Placed, Placer
from .rebalance import Work
from .report import FleetReport, ReplicaReport, ask_all, rows_of, sum_of
from .roles import Role

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks at the engines' metrics
TICK_S = 0.5  # how late a limit of time or bytes may be noticed
BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0  # between attempts of a program that every engine is too busy for
TRIAL_S = 30.0  # a suspect that has run alone for so long did not end its engine
CLOSE_S = 5.0
MAX_NAMED = 16  # poisoned programs that a report names


class FleetClient:
    """Hands whole programs to engines and keeps their journals. Methods may be called on any thread.

    ``tokenize(ops)``: the token ids of a program's first prompt as the engine makes them, for placement; not called
    while there is one engine. Engines come and go with ``add`` and ``remove`` (the supervisor calls them).
    ``on_lost(engine, error)`` is called once for each engine whose connection ends by itself, on the fleet's thread.
    ``seed`` makes the seeds of generations without one; None: they are random. ``watch`` is told what runs where.

    A program that has lost two engines without progress between, each of which it had for itself, is failed with
    ``InternalError`` that names it. One that has lost two with others on them is replayed alone before it is blamed.
    """

    def __init__(
        self,
        *,
        tokenize: Callable[[Sequence[AnyOp]], Sequence[int]],
        limits: FleetLimits | None = None,
        on_lost: Callable[[str, PhloemError], None] | None = None,
        seed: int | None = None,
        watch: AttemptWatch | None = None,
    ) -> None:
        self._placer = Placer(tokenize)
        self._attempts = watch
        self._limits = limits or FleetLimits()
        self.on_lost = on_lost
        self._rng = random.Random(os.urandom(16) if seed is None else seed)
        self._lock = threading.Lock()
        self._has_moved = threading.Condition(self._lock)  # a program or an embedding has left its engine
        self._engines: dict[str, Member] = {}
        self._runs: dict[str, Run] = {}
        self._suspects: set[Run] = set()  # those that wait
        self._pins = KeptPins(max_bytes=self._limits.max_pins_bytes)
        self._welcome: Welcome | None = None
        self._changing = threading.Lock()  # held while adapters change, and while an engine is added
        self._adapter_changes: dict[str, str | None] = {}  # since the start: name -> folder; None: unloaded
        self._end: PhloemError | None = None
        self._placements: Counter[str] = Counter()
        self._num_replays = self._num_poisoned = self._num_lost = self._num_migrations = self._num_rebalanced = 0
        self._poisoned: deque[str] = deque(maxlen=MAX_NAMED)
        # the thread's own
        self._waiting: dict[Run, None] = {}  # without an engine, in the order of their coming
        self._next_tick_s = self._next_look_s = 0.0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._is_closing = False
        self._watch = CacheWatch(self._placer, self._post)
        self._migrations = Migrations(self._post, choose=self._choose_target, switch=self._switch)
        self._thread = threading.Thread(target=self._serve, name="phloem-fleet", daemon=True)
        self._thread.start()

    # -- engines ------------------------------------------------------------------------------------------------------

    def add(self, engine: str, client: Client, *, role: Role = "both") -> None:
        """An engine is ready; programs that wait are placed. The fleet closes ``client``. ``role``: see ``roles``.

        Raises InvalidParams where its model, vocabulary or context differs from the others', or the name is taken.
        """
        with self._changing:
            self._change_as_others(engine, client)
            self._add(engine, client, role)

    def _add(self, engine: str, client: Client, role: Role) -> None:
        with self._lock:
            if self._end is not None:
                raise self._end
            if engine in self._engines:
                raise InvalidParams(f"engine {engine!r} is there already; remove it first", where="engine")
            if self._welcome is None:
                self._welcome = client.welcome
            for name in ("model", "vocab_hash", "context_len"):
                ours, theirs = getattr(self._welcome, name), getattr(client.welcome, name)
                if ours != theirs:
                    text = (
                        f"engine {engine!r} has {name} {theirs!r}, but the fleet has {ours!r}; start it with the same"
                    )
                    raise InvalidParams(text, where=name)
            added = self._engines[engine] = Member(engine, client, role=role)
            self._placer.add(engine, role)
        client.when_ended(lambda error: self._post(partial(self._engine_ended, added, error)))
        self._post(self._follow)
        self._post(self._restore_pins)

    def drain(self, engine: str, *, migrate: bool = True, timeout_s: float = 0.0) -> bool:
        """Place nothing more there; True once nothing runs there. ``migrate``: move what runs there to other engines.

        They go on there while their KV is copied. Programs stay where no other engine is ready, and where they have no
        journal any more.
        """
        with self._lock:
            found = self._engines.get(engine)
            if found is None:
                return True
            found.is_draining = True
            self._placer.remove(engine)
            if migrate:
                self._post(partial(self._move_all, found))
            return self._has_moved.wait_for(lambda: not found.runs and not found.num_embeds, timeout_s)

    def migrate(self, program: str, engine: str) -> Future[Migrated]:
        """Move a program to ``engine`` while it runs. It stays where it is if its KV cannot be copied.

        Raises InvalidRequest where no engine runs the program, or ``engine`` takes none.
        """
        run = self._runs.get(program)
        attempt = None if run is None else run.attempt
        if run is None or attempt is None:
            text = f"program {program!r} is on no engine: it has ended, or waits for one"
            raise InvalidRequest(text, where="program")
        with self._lock:
            ready = {e.name: e for e in self._ready()}
        if engine not in ready:
            text = f"engine {engine!r} is not one of those that take programs: {', '.join(ready) or 'none'}"
            raise InvalidRequest(text, where="engine")
        move = Move(run, attempt, ready[engine], is_optional=True)
        self._post(partial(self._migrations.begin, move))
        return move.ended

    def remove(self, engine: str, error: PhloemError) -> None:
        """The engine is lost or to be stopped: its programs are replayed elsewhere. Nothing happens if it is gone."""
        with self._lock:
            found = self._engines.pop(engine, None)
            if found is None:
                return
            found.removal = error
            self._placer.remove(engine)
        found.client.close()

    def give_up(self, error: PhloemError) -> None:
        """No engine will come again: every program fails once, with ``error``, and so does each later submit."""
        with self._lock:
            self._end = self._end or error
        self._post(self._fail_all)

    # -- the face of Client -------------------------------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome:
        """Of the first engine. Its limits hold for all. Raises EngineLost before there was one."""
        if self._welcome is None:
            raise EngineLost("no engine has been ready yet")
        return self._welcome

    @property
    def lost(self) -> str | None:
        """Why nothing can be submitted any more; None while engines are there or may come."""
        return None if self._end is None else self._end.message

    @property
    def num_ready(self) -> int:
        """Engines that take programs."""
        with self._lock:
            return len(self._ready())

    def submit(self, submit: Submit, call: ProgramCall) -> None:
        """As ``Client.submit``. Without a ready engine a program waits; ``Overloaded`` where too many do."""
        submit = with_seeds(submit, self._rng)
        with self._lock:
            if self._end is not None:
                raise EngineLost(f"no engine: {self._end.message}")
            run = self._runs.get(submit.program)
            is_new = run is None or run.call is not call
            if is_new:
                if run is not None and not run.call.is_over:
                    text = f"program {submit.program!r} is running already; choose another id"
                    raise InvalidRequest(text, where="program")
                if not self._ready() and len(self._waiting) >= self._limits.max_waiting:
                    text = f"no engine is ready, and {len(self._waiting):,} programs wait for one (max_waiting)"
                    raise Overloaded(f"{text}; try again later", retry_after_s=1.0)
                journal = Journal(submit.program, max_bytes=self._limits.max_journal_bytes, limits=self.welcome.limits)
                run = self._runs[submit.program] = Run(call, journal)
        assert run is not None
        try:
            with run.lock:
                attempt = run.attempt
                if (
                    attempt is not None
                    and self._placer.is_needed
                    and not run.journal.num_open
                    and not attempt.is_replay
                ):
                    self._go_on(run, attempt, submit)
                    return
                if is_new:
                    self._begin(run, submit)
                elif attempt is None:
                    encode_submit(submit, self.welcome.limits)
                else:
                    attempt.send(submit)
                run.journal.sent(submit)
        except BaseException:
            if is_new:
                self._forget(run)
            raise
        if is_new and run.attempt is None:
            self._post(partial(self._wait, run))

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        """As ``Client.cancel``. A program that waits for an engine ends at once."""
        run = self._runs.get(program)
        if run is None:
            return
        with run.lock:
            attempt = run.attempt
            if seq is not None or op is not None:
                message = Cancel(program, seq, op)
                run.journal.sent(message)
                if attempt is not None:
                    attempt.send(message)
                return
            run.is_cancelled = True
            if attempt is not None and not attempt.is_replay:
                attempt.send(Cancel(program))
                return
            self._leave(run, cancel=True)
        self._post(partial(self._end_run, run, Cancelled(f"program {program!r} was cancelled")))

    @property
    def adapters(self) -> tuple[str, ...]:
        """As ``Client.adapters``."""
        names = dict.fromkeys(self.welcome.adapters)
        for name, path in self._adapter_changes.items():
            names.pop(name, None)
            if path is not None:
                names[name] = None
        return tuple(names)

    def load_adapter(self, name: str, path: str, *, timeout_s: float = 60.0) -> None:
        """As ``Client.load_adapter``, on every engine, now and later; where one refuses it, none keeps it."""
        with self._changing:
            engines = self._all_ready()
            done: list[Member] = []
            try:
                for engine in engines:
                    engine.client.load_adapter(name, path, timeout_s=timeout_s)
                    done.append(engine)
            except InvalidRequest:
                for engine in done:
                    engine.client.unload_adapter(name, timeout_s=timeout_s)
                raise
            self._adapter_changes[name] = path

    def unload_adapter(self, name: str, *, timeout_s: float = 60.0) -> None:
        """As ``Client.unload_adapter``, on every engine. A program that must be replayed after that fails."""
        with self._changing:
            for engine in self._all_ready():
                engine.client.unload_adapter(name, timeout_s=timeout_s)
            self._adapter_changes[name] = None

    def list_adapters(self, *, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """As ``Client.list_adapters``, with the programs of all engines."""
        found: dict[tuple[str, bool], dict[str, Any]] = {}
        for engine in self._all_ready():
            for one in engine.client.list_adapters(timeout_s=timeout_s):
                same = found.setdefault((one["name"], one["unloading"]), {**one, "programs": 0})
                same["programs"] += one["programs"]
        return list(found.values())

    def _all_ready(self) -> list[Member]:
        with self._lock:
            engines = self._ready()
        if not engines:
            raise EngineLost("no engine is ready")
        return engines

    def _change_as_others(self, engine: str, client: Client) -> None:
        """Give a new engine the adapters that the others have been given, before it gets programs."""
        for name, path in self._adapter_changes.items():
            try:
                if name in client.adapters:
                    client.unload_adapter(name)
                if path is not None:
                    client.load_adapter(name, path)
            except InvalidRequest as error:  # its folder has gone: programs that name it are refused by name there
                logger.error("engine %s has no adapter %r: %s", engine, name, error.message)

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        """``Client.query``'s answers of one engine; of several, ``metrics`` are summed and ``flush_cache`` goes to all.

        ``cache_tree``: of all engines, one after another. ``fleet``: a ``FleetReport`` as a dict. Raises ``EngineLost``
        where no engine is ready.
        """
        if what == "fleet":
            return msgspec.to_builtins(self._report(timeout_s))
        with self._lock:
            engines = self._ready() or list(self._engines.values())
        if not engines:
            raise EngineLost("no engine is ready")
        if what == "info" or len(engines) == 1:
            return engines[0].client.query(what, timeout_s)
        answers = [answer for answer in ask_all(engines, what, timeout_s).values() if answer is not None]
        if not answers:
            raise Overloaded(f"no engine has answered query {what!r} within {timeout_s:g} s")
        if what == "cache_tree":
            return [node for answer in answers for node in answer]
        return sum_of(answers)

    def embed(self, inputs: Sequence[str | list[int]], *, truncate: bool = True) -> Future[Embedded]:
        """As ``Client.embed``, by the engine with the fewest open calls; by another one if that engine is lost."""
        check_embed(inputs, self.welcome)
        found, given = Future[Embedded](), list(inputs)
        self._embed_on_next(found, lambda client: client.embed(given, truncate=truncate), frozenset())
        return found

    def score(
        self, inputs: Sequence[str | list[int]], seconds: Sequence[str] = (), *, truncate: bool = True
    ) -> Future[Embedded]:
        """As ``Client.score``, by the engine that ``embed`` would choose."""
        check_embed(inputs, self.welcome, seconds=seconds)
        found, given, others = Future[Embedded](), list(inputs), list(seconds)
        self._embed_on_next(found, lambda client: client.score(given, others, truncate=truncate), frozenset())
        return found

    def _embed_on_next(
        self, found: Future[Embedded], ask: Callable[[Client], Future[Embedded]], tried: frozenset[str]
    ) -> None:
        """Raises EngineLost where no engine is left that was not tried."""
        with self._lock:
            ready = [engine for engine in self._ready() if engine.name not in tried]
            if not ready:
                raise EngineLost("no engine is ready; try again later")
            engine = min(ready, key=lambda e: e.num_embeds)
            engine.num_embeds += 1

        def ended(answer: Future[Embedded]) -> None:
            with self._lock:
                engine.num_embeds -= 1
                self._has_moved.notify_all()
            if answer.cancelled():
                return
            error = answer.exception()
            if isinstance(error, EngineLost):
                with contextlib.suppress(EngineLost):
                    self._embed_on_next(found, ask, tried | {engine.name})
                    return
            if not found.set_running_or_notify_cancel():
                return
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(answer.result())

        try:
            answer = ask(engine.client)
        except BaseException:
            with self._lock:
                engine.num_embeds -= 1
            raise
        answer.add_done_callback(ended)
        found.add_done_callback(lambda _: answer.cancel())

    def close(self) -> None:
        """Disconnect from all engines; open ops fail as ``Cancelled``. A second call does nothing."""
        self.give_up(Cancelled("the client was closed"))
        with self._lock:
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.client.close()
        self._is_closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)  # it may wait for the very callback that closes the fleet

    # -- placing ------------------------------------------------------------------------------------------------------

    def _ready(self) -> list[Member]:
        """Engines that take programs. The caller holds the fleet's lock."""
        return [e for e in self._engines.values() if not e.is_draining and e.client.lost is None]

    def _choose(self, run: Run, place: Callable[[Collection[str]], Placed]) -> Member | None:
        """The engine for ``run``, which is on it from now on; None if it has to wait.

        ``place(engines)`` decides where there are several. The caller holds the program's lock.
        """
        found = self._find(run, place)
        if found is None:
            return None
        engine, placed = found
        run.booking, run.hands_off = placed.booking, placed.reason == "prefill"
        with self._lock:
            engine.runs.add(run)
            if run.is_suspect:
                self._suspects.discard(run)
                engine.trial = run
                run.trial_s = time.monotonic()
        return engine

    def _find(self, run: Run, place: Callable[[Collection[str]], Placed]) -> tuple[Member, Placed] | None:
        """The engine for ``run``, and what was decided; as ``_choose``, but ``run`` is not on it yet."""
        with self._lock:
            ready = [e for e in self._ready() if e.trial is None]
            if run.is_suspect:
                ready = [e for e in ready if not e.runs][:1]
            elif self._suspects:  # they wait for an engine without programs
                ready = [e for e in ready if e.runs]
            ready = [e for e in ready if e.name != run.avoided] or ready
            if not ready or self._end is not None:
                return None
        placed = Placed(ready[0].name, "only", None)
        if len(ready) > 1 and self._placer.is_needed:
            try:
                placed = place([e.name for e in ready])
            except Exception:
                logger.exception("program %s could not be placed by its prompt", run.program)
                placed = Placed(min(ready, key=lambda e: len(e.runs)).name, "load", None)
        with self._lock:
            engine = self._engines.get(placed.engine)
            if engine is None:  # it has ended just now
                return None
            self._placements[placed.reason] += 1
            return engine, placed

    def _go_on(self, run: Run, attempt: Attempt, submit: Submit) -> None:
        """Send more ops of a program, whose earlier ones have all ended; to another engine if that is worth the move.

        The caller holds the program's lock.
        """
        with self._lock:
            ready = [e.name for e in self._ready() if e.trial is None]
        home = attempt.engine.name
        placed = self._placer.replace(
            submit.ops, run.journal.name, run.history_tokens, home, ready or [home], time.monotonic()
        )
        with self._lock:
            engine = self._engines.get(placed.engine)
            self._placements[placed.reason] += 1
        if engine is attempt.engine or engine is None or not run.journal.is_whole:
            run.booking = placed.booking if engine is attempt.engine else None
            attempt.send(submit)
            run.journal.sent(submit)
            return
        encode_submit(submit, self.welcome.limits)
        run.journal.sent(submit)
        self._leave(run, cancel=True)
        with self._lock:
            engine.runs.add(run)
        run.booking = placed.booking
        try:
            self._replay(run, engine)
        except EngineLost:  # it has ended just now
            self._leave(run)
            self._post(partial(self._wait, run))

    def _begin(self, run: Run, submit: Submit) -> None:
        """Send a program's first submit to an engine, if one is ready. The caller holds the program's lock."""
        engine = self._choose(
            run, lambda engines: self._placer.place(submit.ops, submit.settings, engines, time.monotonic())
        )
        if engine is None:
            encode_submit(submit, self.welcome.limits)
            return
        run.attempt = self._attempt(run, engine)
        try:
            run.attempt.start([submit])
            self._hand_off(run, run.attempt)
        except EngineLost:  # it has ended just now
            self._leave(run)
        except BaseException:
            self._leave(run)
            raise

    def _hand_off(self, run: Run, attempt: Attempt) -> None:
        """Move a program that is to generate elsewhere as soon as it has its first token."""
        if not run.hands_off:
            return

        def drawing(answer: Future[Grant]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                move = Move(run, attempt, is_optional=True, copying=Copying(answer.result().id))
                self._post(partial(self._migrations.begin, move))

        attempt.engine.client.export(attempt.program, when_drawing=True).add_done_callback(drawing)

    def _place_again(self, run: Run, engines: Collection[str]) -> Placed:
        """Where a program that has no engine any more, or had none yet, is computed soonest."""
        journal, now_s = run.journal, time.monotonic()
        if not journal.is_accepted:
            return self._placer.place(journal.unanswered_ops, journal.settings, engines, now_s)
        return self._placer.replace(journal.open_ops, journal.name, run.history_tokens, "", engines, now_s)

    def _replay(self, run: Run, engine: Member, *, drawn: Mapping[int, list[list[int]]] = NONE_DRAWN) -> None:
        """Send the journal of ``run`` to ``engine``, as a new attempt. The caller holds the program's lock.

        ``drawn``: as in ``Journal.replay``.
        """
        elapsed_s = 0.0 if run.accepted_s is None else time.monotonic() - run.accepted_s
        messages = run.journal.replay(elapsed_s=elapsed_s, drawn=drawn)
        run.attempt = self._attempt(run, engine)
        self._num_replays += run.journal.is_accepted
        run.attempt.start(messages, is_replay=True)

    def _attempt(self, run: Run, engine: Member) -> Attempt:
        attempt = Attempt(self, run, engine)
        if self._attempts is not None:
            self._attempts.began(attempt)
        return attempt

    def _leave(self, run: Run, *, cancel: bool = False) -> None:
        """Take ``run`` off its engine and ignore later messages of the attempt. The caller holds the program's lock."""
        attempt, run.attempt = run.attempt, None
        if attempt is None:
            return
        attempt.is_over = True
        attempt.unsent.clear()
        if self._attempts is not None:
            self._attempts.left(attempt)
        self._finish_booking(run)
        with self._lock:
            attempt.engine.runs.discard(run)
            if attempt.engine.trial is run:
                attempt.engine.trial = None
            self._has_moved.notify_all()
        if cancel:
            attempt.engine.client.cancel(attempt.program)

    def _finish_booking(self, run: Run, *, made: int = 0) -> None:
        booking, run.booking = run.booking, None
        run.num_made = 0
        if booking is not None:
            self._placer.finish(booking, time.monotonic(), made=max(made, 0))

    def _forget(self, run: Run) -> None:
        """``run`` is over."""
        with run.lock:
            self._leave(run)
        with self._lock:
            if self._runs.get(run.program) is run:  # a new call may have its id already
                del self._runs[run.program]

    # -- on the engines' threads --------------------------------------------------------------------------------------

    def take_from(self, attempt: Attempt, message: RuntimeMessage) -> None:
        """A message of ``attempt``'s engine about its program."""
        run = attempt.run
        with run.deliver:
            with run.lock:
                if run.attempt is not attempt:
                    return
                if attempt.program != run.program:
                    message = msgspec.structs.replace(message, program=run.program)
                if isinstance(message, Failed | Rejected) and self._is_put_off(run, attempt, message):
                    return
                fault: PhloemError | None = None
                found: RuntimeMessage | None = None
                try:
                    found = self._came(run, attempt, message)
                except PhloemError as error:
                    fault = error
                    self._leave(run, cancel=True)
            if found is not None:
                run.call.take(found)
            if fault is not None:
                run.call.lose(fault)
            if run.call.is_over:
                self._forget(run)

    def _came(self, run: Run, attempt: Attempt, message: RuntimeMessage) -> RuntimeMessage | None:
        """What of ``message`` is new to the caller. Raises where the replay cannot go on."""
        journal = run.journal
        if type(message) is Rejected and journal.is_repeating:
            raise from_info(message.errors[0])
        found = journal.came(message)
        if type(message) is Accepted or type(message) is Rejected:
            if run.accepted_s is None and type(message) is Accepted:
                run.accepted_s = time.monotonic()
            run.backoff_s = 0.0
            attempt.answered()
        if isinstance(message, Done) and (pin := journal.pin(message.op)) is not None:
            self._note_pin(run, attempt.engine, pin, message, is_new=found is not None)
        if isinstance(found, Done) and isinstance(found.meta, GenMeta) and self._placer.is_needed:
            num_tokens = found.meta.candidates[0].completion_tokens
            run.num_made += num_tokens
            run.history_tokens = max(run.history_tokens, found.meta.prompt_tokens + num_tokens)
            self._placer.note_output(journal.name, num_tokens)
        if run.booking is not None and not journal.num_open:
            self._finish_booking(run, made=run.num_made)
        if run.is_suspect and journal.progress > run.mark:
            run.is_suspect = False
            with self._lock:
                attempt.engine.trial = None
            self._wake()
        return found

    def _note_pin(self, run: Run, engine: Member, pin: Pin, done: Done, *, is_new: bool) -> None:
        """``engine`` has carried out ``pin``; not ``is_new``: as a repetition."""
        ops = ops_of_pin(pin, run.journal.before(pin.op))
        with self._lock:
            if self._pins.is_restoring(run.program):
                self._pins.restored(run.program, engine)
            elif is_new:
                self._pins.note(
                    run.program,
                    ops,
                    run.journal.settings or ProgramSettings(),
                    num_tokens=done.value if isinstance(done.value, int) else 0,
                    size_bytes=size_of(ops),
                    engine=engine,
                    now_s=time.monotonic(),
                )

    def _is_put_off(self, run: Run, attempt: Attempt, message: Failed | Rejected) -> bool:
        """Whether the engine ends or is too busy, so that the program is tried again elsewhere or later."""
        errors = [message.error] if isinstance(message, Failed) else message.errors
        kinds = {error.kind for error in errors}
        if "EngineLost" in kinds:  # it was told to stop
            is_elsewhere = False
            run.lost = from_info(errors[0])
        elif isinstance(message, Rejected) and kinds == {"Overloaded"}:
            with self._lock:
                is_elsewhere = any(e is not attempt.engine for e in self._ready())
            is_first = run.lost is None and not run.journal.is_accepted
            if not (is_elsewhere and not run.avoided if is_first else attempt.is_replay):
                return False  # the caller has to try again later
        else:
            return False
        if not run.journal.is_whole:
            return False
        if not is_elsewhere:
            run.backoff_s = min(max(2 * run.backoff_s, BACKOFF_S), MAX_BACKOFF_S)
            run.not_before_s = time.monotonic() + run.backoff_s
        run.avoided = attempt.engine.name
        self._leave(run, cancel=True)
        self._post(partial(self._wait, run))
        return True

    def lose(self, attempt: Attempt) -> None:
        """The connection to ``attempt``'s engine has ended; ``_engine_ended`` follows for all of its programs."""
        run = attempt.run
        with run.deliver, run.lock:
            if run.attempt is attempt:
                self._leave(run)
                attempt.engine.orphans.append(run)

    # -- on the fleet's thread ----------------------------------------------------------------------------------------

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def _serve(self) -> None:
        poller = self._watch.poller
        poller.register(self._wake_out, zmq.POLLIN)
        while True:
            poller.poll(1 + int(1000 * self._wait_s()))
            with contextlib.suppress(OSError):
                while self._wake_out.recv(4096):
                    pass
            is_closing = self._is_closing
            try:
                self._watch.read()
                while self._inbox:
                    self._inbox.popleft()()
                self._keep_time()
                self._place_waiting()
            except Exception:
                logger.exception("the fleet's thread failed; it goes on")
            if is_closing and not self._inbox:
                self._watch.close()
                self._wake_in.close()
                self._wake_out.close()
                return

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        return max(0.0, min([TICK_S, *(run.not_before_s - now_s for run in self._waiting if run.not_before_s > now_s)]))

    def _wait(self, run: Run) -> None:
        """``run`` has no engine: it waits for one."""
        if run.call.is_over or run.attempt is not None:
            return
        if run not in self._waiting:
            run.waiting_s = time.monotonic()
            self._waiting[run] = None

    def _keep_time(self) -> None:
        """End what has waited too long, shorten what takes too much memory, and end trials."""
        now_s = time.monotonic()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_S
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._follow()
            self._restore_pins()
        self._rebalance()
        with self._lock:
            has_ready = bool(self._ready())
            is_trying = bool(self._suspects) or any(engine.trial is not None for engine in self._engines.values())
        for run in list(self._waiting):
            if is_trying and has_ready and not run.is_suspect:
                run.waiting_s += TICK_S  # the wait for an engine is not counted while suspects have it for themselves
            deadline_s = run.journal.deadline_s
            if deadline_s is not None and run.accepted_s is not None and now_s - run.accepted_s >= deadline_s:
                self._end_run(run, DeadlineExceeded(f"program {run.program!r} passed its deadline of {deadline_s} s"))
            elif now_s - run.waiting_s > self._limits.max_wait_s:
                text = f"program {run.program!r} has waited {self._limits.max_wait_s:g} s for an engine"
                is_lost = run.lost is not None or not has_ready
                self._end_run(run, run.lost_error(text) if is_lost else Overloaded(text, retry_after_s=1.0))
        with self._lock:
            runs = list(self._runs.values())
            for engine in self._engines.values():
                if engine.trial is not None and now_s - engine.trial.trial_s > TRIAL_S:
                    engine.trial.is_suspect, engine.trial = False, None
        total = sum(run.journal.num_bytes for run in runs)
        if total > self._limits.max_journals_bytes:
            for run in sorted(runs, key=lambda run: -run.journal.num_bytes):
                if total <= self._limits.max_journals_bytes:
                    break
                with run.lock:
                    total -= run.journal.num_bytes
                    run.journal.give_up()

    def _place_waiting(self) -> None:
        """Give engines to programs that wait; suspects first, because they need one alone."""
        with self._lock:
            if not self._ready():
                return
        now_s = time.monotonic()
        for run in sorted(self._waiting, key=lambda run: not run.is_suspect):
            if run.call.is_over or run.attempt is not None:
                del self._waiting[run]
                continue
            if run.not_before_s > now_s:
                continue
            fault: PhloemError | None = None
            with run.deliver:
                with run.lock:
                    engine = self._choose(run, partial(self._place_again, run))
                    if engine is None:
                        continue
                    try:
                        self._replay(run, engine)
                        if run.attempt is not None:
                            self._hand_off(run, run.attempt)
                    except EngineLost:
                        self._leave(run)  # it ended just now; the program waits on
                        continue
                    except PhloemError as error:
                        fault = error
                        self._leave(run, cancel=True)
                del self._waiting[run]
                if fault is not None:
                    run.call.lose(fault)
                    self._forget(run)

    def _engine_ended(self, engine: Member, error: PhloemError) -> None:
        """The connection to ``engine`` has ended, and every program on it has left its attempt."""
        with self._lock:
            is_ours = self._engines.get(engine.name) is engine
            if is_ours:
                del self._engines[engine.name]
                self._placer.remove(engine.name)
            self._num_lost += is_ours and not (engine.is_draining and not engine.orphans)  # else its work was done
            is_gone = engine.name not in self._engines
            self._pins.lose(engine)
        if is_gone:
            self._watch.leave(engine.name)
            self._post(self._restore_pins)
        cause = engine.removal or error
        orphans = [run for run in engine.orphans if not run.call.is_over]
        for run in orphans:
            run.lost = cause
            if not engine.is_draining:
                progress = run.journal.progress
                if progress != run.mark:
                    run.strikes = run.strikes_alone = 0
                run.strikes += 1
                run.strikes_alone += len(orphans) == 1
                run.mark = progress
        for run in orphans:
            if run.is_cancelled:
                self._end_run(run, Cancelled(f"program {run.program!r} was cancelled"))
            elif not run.journal.is_whole:
                reason = f"program {run.program!r} had more than {self._limits.max_journal_bytes:,} bytes to replay"
                self._end_run(run, run.lost_error(f"{reason}, or the fleet's journals had grown too large together"))
            elif run.strikes_alone >= 2:
                self._poison(run)
            else:
                run.is_suspect = run.strikes >= 2
                if run.is_suspect:
                    with self._lock:
                        self._suspects.add(run)
                self._wait(run)
        if is_ours and self._end is None and self.on_lost is not None:
            level = logging.WARNING if orphans or not engine.is_draining else logging.INFO
            logger.log(level, "engine %s has ended with %d programs: %s", engine.name, len(orphans), cause)
            self.on_lost(engine.name, cause)

    def _restore_pins(self) -> None:
        """Make the pins again that lost engines had, if an engine is ready: each by a program of its own."""
        now_s = time.monotonic()
        with self._lock:
            can_restore = bool(self._ready()) and self._end is None
            pins = self._pins.to_restore(now_s) if can_restore else []
        for pin in pins:
            self._restore_pin(pin, now_s)

    def _restore_pin(self, pin: KeptPin, now_s: float) -> None:
        def end(error: PhloemError | None) -> None:
            with self._lock:
                self._pins.end(call.program, error)

        call = ProgramCall(self, lambda event: end(call.error) if isinstance(event, Closed) else None)
        with self._lock:
            self._pins.begin(call.program, pin)
        try:
            call.submit(pin.program(now_s=now_s), pin.settings)
        except PhloemError as error:
            end(error)

    def _follow(self) -> None:
        """Learn what the engines have cached, how many rows they have and how fast they are, if there are several."""
        if not self._placer.is_needed:
            return
        with self._lock:
            engines = self._ready()
        for engine in engines:
            self._watch.follow(engine.name, engine.client)
            self._learn(engine, "metrics", partial(self._placer.note_metrics, engine.name))
            if not engine.is_known:
                engine.is_known = True
                self._learn(engine, "info", partial(self._take_info, engine.name))

    def _learn(self, engine: Member, what: str, take: Callable[[Any], None]) -> None:
        """Hand an engine's answer to ``take``, on its client's thread."""

        def done(answer: Future[Any]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                take(answer.result())

        with contextlib.suppress(EngineLost):
            engine.client.ask(what).add_done_callback(done)

    def _take_info(self, engine: str, info: dict[str, Any]) -> None:
        max_rows = info.get("config", {}).get("max_running")
        if max_rows:
            self._placer.set_max_rows(engine, max_rows)

    def _poison(self, run: Run) -> None:
        self._num_poisoned += 1
        self._poisoned.append(run.program)
        logger.error("program %s has ended %d engines in a row and is not tried again", run.program, run.strikes)
        text = f"program {run.program!r} was on {run.strikes} engines in a row that ended before it made progress"
        why = "" if run.lost is None else f": {run.lost.message}"
        self._end_run(run, InternalError(f"{text}, {run.strikes_alone} times alone; it is not tried again{why}"))

    def _move_all(self, engine: Member) -> None:
        """Take programs off an engine that is drained, if there is another one for them."""
        with self._lock:
            if not self._ready():
                return
            runs = list(engine.runs)
        for run in runs:
            with run.deliver, run.lock:
                attempt = run.attempt
                if attempt is None or attempt.engine is not engine or run.is_cancelled or not run.journal.is_whole:
                    continue
                if not run.is_suspect:
                    self._migrations.begin(Move(run, attempt))
                    continue
                self._leave(run, cancel=True)  # it is to be alone where it goes on
            self._wait(run)

    def _rebalance(self) -> None:
        """Begin to move programs off engines that have more to do than others, where that pays."""
        if not self._placer.is_needed:
            return
        now_s = time.monotonic()
        with self._lock:
            runs = list(self._runs.values())
            ready = {engine.name: engine for engine in self._ready() if engine.trial is None}
        for run in runs:
            self._book_late(run, now_s)
        most = self._limits.max_rebalanced - self._migrations.num_evening_out
        if most <= 0 or not self._placer.is_uneven():
            return
        works: list[Work] = []
        attempts: dict[str, Attempt] = {}
        for run in runs:
            with run.lock:
                if run.attempt is not None and run.booking is not None:
                    works.append(self._work_of(run, run.attempt, run.booking, now_s))
                    attempts[run.program] = run.attempt
        for shift in self._placer.rebalance(works, most=most, now_s=now_s):
            attempt, target = attempts[shift.program], ready.get(shift.target)
            if target is not None:
                self._migrations.begin(Move(attempt.run, attempt, target, is_optional=True, evens_out=True))

    def _book_late(self, run: Run, now_s: float) -> None:
        """Count what is left of a program that was begun while there was one engine as work of that engine."""
        with run.lock:
            attempt, journal = run.attempt, run.journal
            if attempt is None or run.booking is not None or not journal.num_open or not journal.is_accepted:
                return
            made, ops = journal.num_streamed, journal.open_ops
            run.booking = self._placer.take_over(ops, journal.name, [attempt.engine.name], now_s, made=made).booking
            if run.booking is not None:
                run.booking.prompt_tokens = run.history_tokens or journal.num_prompt_tokens
                run.num_made = -made

    def _work_of(self, run: Run, attempt: Attempt, booking: Booking, now_s: float) -> Work:
        """What is left of a running program. The caller holds its lock."""
        journal, made = run.journal, run.journal.num_streamed
        estimate = made
        if not made:  # it may not stream
            estimate = int(max(now_s - booking.booked_s - booking.queued_s - booking.prefill_s, 0.0) / booking.step_s)
        may_move = journal.is_accepted and journal.is_whole and journal.goes_on and not attempt.is_replay
        is_free = not run.is_suspect and not run.is_cancelled and not run.hands_off and run not in self._migrations
        return Work(
            run.program,
            attempt.engine.name,
            booking.rows,
            self._placer.left(journal.open_ops, journal.name, made=estimate),
            max(booking.prompt_tokens, run.history_tokens) + made,
            booking.booked_s,
            is_running=made > 0,
            may_move=may_move and is_free and attempt.engine.trial is None,
        )

    def _choose_target(self, move: Move) -> bool:
        """Decide where the program goes, as late as that can be; False where there is no other engine now."""
        run, journal, now_s = move.run, move.run.journal, time.monotonic()
        move.begun_s = now_s
        with run.lock:
            ops, name, made = journal.open_ops, journal.name, journal.num_streamed

            def take_over(engines: Collection[str]) -> Placed:
                return self._placer.take_over(ops, name, engines, now_s, made=made)

            if move.target is None:
                found = self._find(run, take_over)
                if found is None:
                    return False
                move.target, move.booking = found[0], found[1].booking
            elif self._placer.is_needed:
                move.booking = take_over([move.target.name]).booking
            if move.booking is not None and run.booking is not None:
                move.booking.prompt_tokens = run.booking.prompt_tokens
        if move.target is not move.attempt.engine:
            return True
        if move.booking is not None:
            self._placer.finish(move.booking, now_s)
        return False

    def _switch(self, move: Move) -> None:
        """Take the program off its engine, and replay its journal at the target or where else an engine is ready."""
        run, target, now_s = move.run, move.target, time.monotonic()
        assert target is not None
        if move.copying.num_tokens and not move.why:
            self._placer.note_copy(move.copying.num_tokens, now_s - move.begun_s, now_s)
        fault: PhloemError | None = None
        with run.deliver:
            with run.lock:
                with self._lock:
                    is_there = target in self._ready() and target.trial is None
                if not is_there:
                    move.why = move.why or f"engine {target.name} takes no programs any more"
                stays = self._why_it_stays(move)
                if (stays or not is_there) and move.booking is not None:
                    self._placer.finish(move.booking, now_s)
                if stays:
                    move.why = stays
                    return
                self._leave(run, cancel=True)
                if is_there:
                    run.num_made = -run.journal.num_streamed  # of the generation under way: made before its new booking
                    with self._lock:
                        target.runs.add(run)
                        self._num_migrations += not move.why
                        self._num_rebalanced += move.evens_out and not move.why
                    run.booking = move.booking
                    try:
                        self._replay(run, target, drawn=move.copying.drawn)
                    except EngineLost:  # it has ended just now
                        self._leave(run)
                    except PhloemError as error:
                        fault = error
                        self._leave(run, cancel=True)
            if fault is not None:
                run.call.lose(fault)
                self._forget(run)
        self._wait(run)  # where no engine has it

    def _why_it_stays(self, move: Move) -> str:
        """Why the program is not to be moved after all, or "". The caller holds the program's lock."""
        run = move.run
        if run.attempt is not move.attempt or run.is_cancelled:
            return "it has ended or left its engine"
        if not run.journal.is_whole:
            return "its journal has grown too large for a replay"
        return move.why if move.is_optional else ""

    def _fail_all(self) -> None:
        assert self._end is not None
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            self._end_run(run, self._end)

    def _end_run(self, run: Run, error: PhloemError) -> None:
        """Fail every open op of ``run``."""
        self._waiting.pop(run, None)
        with self._lock:
            self._suspects.discard(run)
        with run.deliver:
            with run.lock:
                self._leave(run, cancel=True)
            run.call.lose(error)
            self._forget(run)

    # -- reports ------------------------------------------------------------------------------------------------------

    def _report(self, timeout_s: float) -> FleetReport:
        with self._lock:
            engines = list(self._engines.values())
            runs = list(self._runs.values())
        metrics = ask_all(engines, "metrics", timeout_s)
        replicas = tuple(ReplicaReport(e.name, e.is_draining, len(e.runs), *rows_of(metrics[e.name])) for e in engines)
        return FleetReport(
            replicas=replicas,
            programs=len(runs),
            waiting=len(self._waiting),
            placements=dict(self._placements),
            replays=self._num_replays,
            migrations=self._num_migrations,
            rebalanced=self._num_rebalanced,
            poisoned=self._num_poisoned,
            poisoned_programs=tuple(self._poisoned),
            engines_lost=self._num_lost,
            journals_bytes=sum(run.journal.num_bytes for run in runs),
            known_blocks=self._placer.num_known_blocks,
        )
