"""One run of a program: ``ProgramRun``, and the texts that it grows, a ``SequenceLog`` each.

Appending is immediate and leaves nodes in the log of the run. ``ProgramRun.flush`` ships all queued nodes, of all
sequences, in one message.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ..protocol.errors import Cancelled, InvalidRequest, PhloemError
from ..protocol.messages import ProgramSettings
from ..protocol.ops import JoinMode
from . import expressions as ir
from .backend.base_backend import BaseBackend
from .backend.interpreted import InterpretedSession
from .choices import token_length_normalized
from .deciding import DecidedLeaf, PickedLeaf, is_decided_here, seed_of
from .global_config import global_config
from .images import data_url, load_frames, load_image
from .nodes import (
    CloseNode,
    DefaultSystemNode,
    ForkNode,
    GenNode,
    HoleNode,
    ImageNode,
    JoinNode,
    MarkNode,
    Node,
    PasteNode,
    PinNode,
    RoleNode,
    RollbackNode,
    SelectNode,
    SettleNode,
    TextNode,
)
from .reasoning import SplitLeaf, thinking_style
from .sampling_params import sampling_of_fork
from .session import Session, Turn
from .settling import AskingNode, Settling
from .types import ParseError
from .values import (
    CapturedText,
    Constant,
    DrawnText,
    Gathered,
    Hole,
    Leaf,
    Picked,
    Piece,
    Signal,
    TextSpan,
    Value,
    current_crew,
    wait_any,
    wait_any_async,
)

logger = logging.getLogger(__name__)

_NONE: Mapping[str, Any] = {}

_RETRY_TEMPERATURE = 0.7


class UnknownVariable(PhloemError, KeyError):
    """No variable of that name has been set."""

    __str__ = PhloemError.__str__


class ProgramRun:
    """One run: its sequences, its log of nodes, its session with the backend. All states of the run share it."""

    def __init__(
        self,
        backend: BaseBackend,
        *,
        sampling: Mapping[str, Any] = _NONE,
        stream: bool = False,
        settings: ProgramSettings | None = None,
        inline: bool = False,
        is_awaited: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        arguments: Mapping[str, Any] = _NONE,
        num_api_spec_tokens: int | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.backend = backend
        self.turn = turn  # of a run that several backends may have
        self.sampling = sampling
        self.stream = stream
        self.settings = settings
        self.inline = inline
        self.is_awaited = is_awaited  # the thread that runs the body waits for the end of the run
        self.arguments = arguments
        self.num_api_spec_tokens = num_api_spec_tokens  # for backends that are called once per gen
        self.log: list[Node] = []
        self.num_messages = 0
        self.error: BaseException | None = None  # of the Python body
        self.is_over = False  # the body has ended
        self.body_thread: int | None = threading.get_ident()
        self.loop = loop  # of an async program
        self.body_task: asyncio.Task[Any] | None = None  # of an async program that streams
        self.lock = threading.Lock()
        # notified when a sequence grew, a variable was bound or the body ended; only while streaming
        self.changed = Signal(self.lock) if stream else None
        self._num_shipped = 0
        self._ship_lock = threading.Lock()
        self._settling: Settling | None = None  # made when the run has a value that Python decides
        self.sequences: list[SequenceLog | None] = []  # None: a sequence that Python does not append to
        self.is_ending = False
        self.session: Session = backend.open_session(self) or InterpretedSession(backend, self)
        self.root = SequenceLog(self)

    def again(self, turn: Turn) -> ProgramRun:
        """A run as this one was before its body began, elsewhere."""
        return ProgramRun(
            turn.backend,
            sampling=self.sampling,
            settings=self.settings,
            inline=self.inline,
            is_awaited=self.is_awaited,
            loop=self.loop,
            arguments=self.arguments,
            num_api_spec_tokens=self.num_api_spec_tokens,
            turn=turn,
        )

    def new_seq(self, sequence: SequenceLog) -> int:
        self.sequences.append(sequence)
        return len(self.sequences) - 1

    def reserve_seq(self) -> int:
        """The number of a sequence that Python does not append to."""
        self.sequences.append(None)
        return len(self.sequences) - 1

    def flush(self, *, is_awaited: bool = False) -> list[Leaf]:
        """Ship the nodes that can be shipped. Returns the values that the held nodes wait for.

        ``is_awaited``: this thread will only wait for the result.
        """
        with self._ship_lock:
            end = len(self.log)
            if end == self._num_shipped and (self._settling is None or not self._settling.held):
                return []
            nodes = self.log[self._num_shipped : end]
            self._num_shipped = end
            missing: list[Leaf] = []
            if self._settling is None and any(type(node) is SettleNode for node in nodes):
                self._settling = Settling()
            if self._settling is not None:
                nodes, missing = self._settling.settle(nodes, is_ending=self.is_ending)
            if nodes:
                self.num_messages += 1
                self.session.ship(nodes, is_awaited=is_awaited and not missing)
            return missing

    def ship(self, *, is_awaited: bool = False) -> None:
        """Ship every queued node, waiting for the values that held nodes need."""
        while missing := self.flush(is_awaited=is_awaited):
            if self.loop is not None:
                self._refuse_to_block_for(missing[0])
            wait_any(missing)

    async def ship_async(self) -> None:
        """``ship`` for an event loop, which it does not block."""
        while missing := self.flush():
            await wait_any_async(missing)

    def end(self) -> None:
        """The body has returned: close every sequence and ship the rest."""
        self._close_all()
        self.ship(is_awaited=self.is_awaited)
        self._finish_well()

    async def end_async(self) -> None:
        """``end`` for a run in an event loop."""
        self._close_all()
        await self.ship_async()
        self._finish_well()

    def _close_all(self) -> None:
        for sequence in self.sequences:
            if sequence is not None:
                sequence.close()
        self.is_ending = True

    def _finish_well(self) -> None:
        if global_config.verbosity >= 2:
            self._log_when_closed()
        self._finish()

    def _log_when_closed(self) -> None:
        closed = self.session.closed

        def log() -> None:
            pieces = [piece if isinstance(piece, str) else piece.partial_text() for piece in self.root.pieces]
            logger.info("program ended: %s", "".join(pieces))

        if closed.subscribe(closed.done, log):
            log()

    def abort(self, error: BaseException) -> None:
        """The body raised ``error``: cancel what was shipped, fail the leaves of what was not."""
        self.error = error
        with self._ship_lock:
            unsent = self.log[self._num_shipped :]
            if self._settling is not None:
                unsent = self._settling.held + unsent
                self._settling.held = []
            self._num_shipped = len(self.log)
        gone = Cancelled(f"the program's body raised {type(error).__name__}: {error}")
        gone.__cause__ = error
        for node in unsent:
            if isinstance(node, AskingNode | SettleNode):
                node.leaf.fail(gone)
        for sequence in self.sequences:
            if sequence is not None:
                sequence.is_closed = True
        if self.num_messages:
            self.session.cancel()
        else:
            self.session.closed.resolve((), {})
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        self.wake_readers()

    def wake_readers(self) -> None:
        """Wake streaming readers: a sequence, a variable or the end of the body has changed."""
        if self.changed is not None:
            self.changed.notify()

    @property
    def is_inside(self) -> bool:
        """Whether the caller is the thread (or task) that runs the body."""
        if self.is_over or self.body_thread != threading.get_ident():
            return False
        return self.body_task is None or asyncio.current_task() is self.body_task

    def wait_body(self) -> None:
        """Wait until the body has ended, unless the body calls this."""
        if self.changed is not None and not self.is_inside:
            self.wait_change(lambda: self.is_over)

    def wait_change(self, holds: Callable[[], bool]) -> None:
        """Of a streaming run: block the thread until ``holds()``."""
        assert self.changed is not None
        if self.loop is not None and not holds():
            self._refuse_to_block(
                "the text of this run", "await s.text_async() or async for ... in s.text_async_iter()"
            )
        self.changed.wait_for(holds)

    def wait_leaves(self, leaves: Iterable[Leaf], timeout_s: float | None = None) -> None:
        """Wait until each leaf is resolved or has failed."""
        waiting = [leaf for leaf in leaves if not leaf.is_done]
        if not waiting:
            return
        if self.loop is not None:
            self._refuse_to_block_for(waiting[0])
        is_awaited = timeout_s is None and current_crew.get() is None
        while missing := self.flush(is_awaited=is_awaited):
            if not (waiting := [leaf for leaf in waiting if not leaf.is_done]):
                return
            wait_any([*missing, *waiting], timeout_s)
        for leaf in reversed(waiting):  # the last one first: most others are then resolved, so this thread wakes once
            leaf.wait_for(leaf.done, timeout_s)

    def run_steps(self, steps: ir.WaitingSteps) -> None:
        """Run a generator of ``SglWaiting.steps``, waiting for each value that it yields."""
        result: Any = None
        try:
            while True:
                wanted = steps.send(result)
                if inspect.isawaitable(wanted):
                    if inspect.iscoroutine(wanted):
                        wanted.close()
                    raise InvalidRequest(
                        "an async function was given to a program that is not async; make the program async def and "
                        "write await s.append_async(...), or give a plain function"
                    )
                self.wait_leaves(wanted)
                result = None
        except StopIteration:
            pass

    async def run_steps_async(self, steps: ir.WaitingSteps) -> None:
        """``run_steps`` for an event loop."""
        result: Any = None
        try:
            while True:
                wanted = steps.send(result)
                result = None
                if inspect.isawaitable(wanted):
                    result = await wanted
                else:
                    await self.wait_leaves_async(wanted)
        except StopIteration:
            pass

    async def wait_leaves_async(self, leaves: Iterable[Leaf]) -> None:
        """``wait_leaves`` for an event loop, which it does not block."""
        waiting = [leaf for leaf in leaves if not leaf.is_done]
        if not waiting:
            return
        while missing := self.flush():
            if not (waiting := [leaf for leaf in waiting if not leaf.is_done]):
                return
            await wait_any_async([*missing, *waiting])
        for leaf in reversed(waiting):
            await leaf.wait_for_async(leaf.done)

    async def wait_body_async(self) -> None:
        if self.changed is not None and not self.is_inside:
            await self.changed.wait_for_async(lambda: self.is_over)

    def allow_waiting(self, expr: object) -> None:
        """Raises if ``expr``, which waits for values while it is appended, would block the event loop."""
        if self.loop is not None and self._is_in_own_loop():
            raise InvalidRequest(
                f"{expr!r} waits for what it generates, which here would block the event loop of this async "
                "program; write await s.append_async(...) instead of s += ..."
            )

    def _is_in_own_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def _refuse_to_block_for(self, leaf: Leaf) -> None:
        name = "..." if leaf.name is None else repr(leaf.name)
        self._refuse_to_block(
            f"the value of {name}", f"await s.get({name}) (or await s.text_async(), await s.sync_async())"
        )

    def _refuse_to_block(self, unknown: str, instead: str) -> None:
        if self._is_in_own_loop():
            raise InvalidRequest(
                f"{unknown} is not known yet, and waiting for it here would block the event loop of this async "
                f"program; write {instead}"
            )

    def read(self, value: Value) -> Any:
        self.wait_leaves(value.leaves())
        return value.read()

    def read_chunks(self, value: Value | Piece) -> Iterator[str]:
        """The text of ``value`` as it is generated, blocking; one chunk where it is not streamed."""
        assert not isinstance(value, str)
        if not isinstance(value, Leaf):
            self.wait_leaves(value.leaves())
            yield value.text()
            return
        if self.loop is not None and not value.is_done:
            self._refuse_to_block_for(value)
        if self.is_inside:
            self.ship()
        yield from value.read_chunks()


@dataclass(frozen=True, slots=True)
class RoleTurn:
    """A role that has ended. ``content``: its text; ``read`` strips leading blanks."""

    role: str
    content: TextSpan
    images: tuple[str, ...] = ()

    def read(self) -> dict[str, Any]:
        text = self.content.read().lstrip()
        if not self.images:
            return {"role": self.role, "content": text}
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": self.role, "content": parts}


class SequenceLog:
    """One growing text: its pieces, variables, finished roles and open role."""

    def __init__(self, program: ProgramRun, parent: SequenceLog | None = None) -> None:
        self._program = weakref.ref(program)  # weak: the program holds its sequences
        self.log = program.log
        self.seq = program.new_seq(self)
        self.is_closed = False
        self.fresh: dict[str | None, None] = {}  # names bound on this sequence and not inherited from its parent
        self.leaves: list[Leaf] = []  # of this sequence alone, for error()
        self.pieces: list[Piece] = [] if parent is None else parent.pieces.copy()
        self.variables: dict[str | None, Value] = {} if parent is None else parent.variables.copy()
        self.messages: tuple[RoleTurn, ...] = () if parent is None else parent.messages
        self.images: tuple[str, ...] = () if parent is None else parent.images
        self.scopes: dict[str, int] | None = None if parent is None or not parent.scopes else parent.scopes.copy()
        self.sampling: Mapping[str, Any] = program.sampling if parent is None else parent.sampling
        self.role: str | None = None if parent is None else parent.role
        self.role_start: int = 0 if parent is None else parent.role_start
        self.fork_at = len(self.pieces)

    @property
    def program(self) -> ProgramRun:
        program = self._program()
        assert program is not None, "the program of this sequence was collected"
        return program

    def has_news(self, taken: int) -> bool:
        """Whether there are more than ``taken`` pieces, or the body has ended."""
        return self.program.is_over or len(self.pieces) > taken

    def read_as_generated(self) -> Iterator[tuple[str, bool]]:
        """(New text, whether the program gave it) of a streaming run, blocking, until the body ends.

        Called by the body itself, it ends with the text so far.
        """
        program = self.program
        is_inside = program.is_inside
        taken = 0
        while True:
            if not is_inside:
                program.wait_change(partial(self.has_news, taken))
            if taken >= len(self.pieces):
                return
            piece = self.pieces[taken]
            taken += 1
            if isinstance(piece, str):
                yield piece, True
            else:
                is_given = not isinstance(piece, Leaf)
                for chunk in program.read_chunks(piece):
                    yield chunk, is_given

    # -- appending ----------------------------------------------------------------------------------------------------

    def append(self, expr: ir.SglExpr | str) -> None:
        if self.is_closed:
            raise InvalidRequest(
                "nothing more can be appended here: "
                + ("the program has ended" if self.program.is_over else "this fork was joined; append before join()")
            )
        append = _appender(expr)
        if append is None:
            raise InvalidRequest(
                f"cannot append {expr!r} of type {type(expr).__name__} to a program; "
                "append a str, gen(...), select(...), a role, or a sum of these"
            )
        append(self, expr)
        self.program.wake_readers()

    def _append_str(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.log.append(TextNode(self.seq, text))

    def _append_constant(self, expr: ir.SglConstantText) -> None:
        self._append_str(expr.value)

    def _append_list(self, expr: ir.SglExprList) -> None:
        for part in expr.expr_list:
            append = _appender(part)
            assert append is not None, part
            append(self, part)

    def _append_gen(self, expr: ir.SglGen) -> None:
        program = self.program
        if expr.retries:
            program.allow_waiting(expr)
            program.run_steps(self._gen_checked(expr))
            return
        defaults, overrides = sampling_of_fork(self.sampling, self.seq), expr.overrides
        n = overrides.get("n") or defaults.get("n", 1)
        leaf = Leaf(program.lock, expr.name, n=n, parse=expr.parse)
        self.pieces.append(leaf)
        self.leaves.append(leaf)
        self.bind(expr.name, leaf)
        self.log.append(GenNode(self.seq, leaf, expr, defaults, n, program.stream))
        if expr.captures is not None:
            for name in expr.captures.names:
                self.bind(name, CapturedText(leaf, expr.captures, name))

    def steps_of(self, expr: object) -> ir.WaitingSteps | None:
        """The steps of an expression that waits for values while it is appended; None for any other."""
        if isinstance(expr, ir.SglWaiting):
            return expr.steps(self)
        return self._gen_checked(expr) if isinstance(expr, ir.SglGen) and expr.retries else None

    def _gen_checked(self, expr: ir.SglGen) -> ir.WaitingSteps:
        """Generate, parse, and generate again while the value is wrong and retries are left.

        A retry is warmer and has another seed, because a greedy generation would repeat itself.
        """
        program = self.program
        once = msgspec.structs.replace(expr, retries=0)
        for attempt in range(expr.retries + 1):
            mark = Leaf(program.lock, None)
            self.log.append(MarkNode(self.seq, mark))
            num_pieces = len(self.pieces)
            self._append_gen(once)
            if attempt == expr.retries:
                return
            leaf = self.leaves[-1]
            yield [leaf]
            try:
                leaf.read()
                return
            except ParseError:
                pass
            self.leaves.pop()
            del self.pieces[num_pieces:]
            self.log.append(RollbackNode(self.seq, mark))
            given = {**self.sampling, **expr.overrides}
            warmer = {
                "temperature": max(given.get("temperature", 1.0), _RETRY_TEMPERATURE),
                "seed": given.get("seed", 0) + attempt + 1,
            }
            once = msgspec.structs.replace(once, overrides={**expr.overrides, **warmer})

    def _append_select(self, expr: ir.SglSelect) -> None:
        program = self.program
        if is_decided_here(expr) and not program.session.decides_custom_choices:
            self._append_decided(expr)
            return
        leaf = Leaf(program.lock, expr.name)
        self.leaves.append(leaf)
        self.bind(expr.name, leaf)
        self.pieces.append(leaf)
        self.log.append(SelectNode(self.seq, leaf, expr.choices, expr.choices_method, expr.temperature))

    def _append_decided(self, expr: ir.SglSelect) -> None:
        """Have the runtime score the choices; Python picks one."""
        program = self.program
        leaf = DecidedLeaf(program.lock, expr, seed_of(program.sampling, self.seq, len(self.log)))
        method = expr.choices_method if expr.choices_method.wire_name else token_length_normalized
        self.log.append(SelectNode(self.seq, leaf, expr.choices, method, expr.temperature, append=False))
        self.log.append(SettleNode(self.seq, leaf.answer))
        self.leaves.append(leaf.answer)
        self.bind(expr.name, leaf.answer)
        self.pieces.append(leaf.answer)

    def _append_argument(self, expr: ir.SglArgument) -> None:
        self.pieces.append(Hole(expr.name))
        self.log.append(HoleNode(self.seq, expr.name))

    def _append_variable(self, expr: ir.SglVariable) -> None:
        source = expr.source
        self.paste(source() if callable(source) else source, sep=expr.sep)

    def _append_variables(self, expr: ir.SglVariables) -> None:
        for item in expr.items:
            self._append_variable(item)

    def paste(self, value: Value, *, sep: str = "") -> None:
        """Append the text of ``value``, which need not be known yet."""
        match value:
            case Leaf() | DrawnText():
                leaf = value if isinstance(value, Leaf) else value.leaf
                if not leaf.belongs_to(self.program.lock):
                    self.program.read(value)  # a leaf of another run: wait for its text
                    self._append_str(value.text())
                    return
                self.pieces.append(value)
                index = 0 if isinstance(value, Leaf) else value.index
                self.log.append(PasteNode(self.seq, leaf, index))
            case TextSpan():
                for piece in value.pieces:
                    if isinstance(piece, str):
                        self._append_str(piece)
                    else:
                        self.paste(piece)
            case Gathered():
                for i, item in enumerate(value.values):
                    if i and sep:
                        self._append_str(sep)
                    self.paste(item)
            case Hole():
                self.pieces.append(value)
                self.log.append(HoleNode(self.seq, value.name))
            case Picked():
                text = PickedLeaf(self.program.lock, value)
                self.pieces.append(text)
                self.log.append(SettleNode(self.seq, text))
            case CapturedText():
                self.program.read(value)  # a capture is known once its whole text is
                self._append_str(value.text())
            case _:
                self._append_str(value.text())

    def _append_role_begin(self, expr: ir.SglRoleBegin) -> None:
        if self.role is not None:
            raise InvalidRequest(
                f"role {expr.role!r} begins inside the open role {self.role!r}; roles do not nest; "
                f"end it first (s += {self.role}_end(), or leave its with block)"
            )
        session = self.program.session
        if not self.messages and expr.role != "system":
            default = session.default_system()
            if default is not None:
                content, text = default
                self.messages += (RoleTurn("system", TextSpan((content,))),)
                self.pieces.append(text)
                self.log.append(DefaultSystemNode(self.seq, content, text))
        text = session.role_text(expr.role, is_begin=True, messages=self._history())
        self.role = expr.role
        if text:
            self.pieces.append(text)
        self.log.append(RoleNode(self.seq, expr.role, True, text))
        self.role_start = len(self.pieces)
        self.images = ()

    def _append_role_end(self, expr: ir.SglRoleEnd) -> None:
        if self.role != expr.role:
            open_role = "no role is open" if self.role is None else f"the open role is {self.role!r}"
            raise InvalidRequest(f"role {expr.role!r} ends, but {open_role}; begin it first")
        session = self.program.session
        text = session.role_text(expr.role, is_begin=False, messages=self._history())
        self.messages += (RoleTurn(expr.role, TextSpan(self.pieces[self.role_start :]), self.images),)
        self.role = None
        self.images = ()
        if text:
            self.pieces.append(text)
        self.log.append(RoleNode(self.seq, expr.role, False, text))

    def _history(self) -> list[dict[str, Any]]:
        """The roles of the finished messages, which is all that a template's role text depends on."""
        return [{"role": message.role, "content": ""} for message in self.messages]

    def _append_scope_begin(self, expr: ir.SglVarScopeBegin) -> None:
        if self.scopes is None:
            self.scopes = {}
        self.scopes[expr.name] = len(self.pieces)

    def _append_scope_end(self, expr: ir.SglVarScopeEnd) -> None:
        start = self.scopes.pop(expr.name, None) if self.scopes else None
        if start is None:
            raise InvalidRequest(f"var_scope {expr.name!r} ends, but it was not begun")
        self.bind(expr.name, TextSpan(self.pieces[start:]))

    def _append_image(self, expr: ir.SglImage) -> None:
        self._append_frame(load_image(expr.path))

    def _append_video(self, expr: ir.SglVideo) -> None:
        for frame in load_frames(expr.path, expr.num_frames):
            self._append_frame(frame)

    def _append_frame(self, data: bytes) -> None:
        self.images += (data_url(data),)
        self.log.append(ImageNode(self.seq, hashlib.sha256(data).hexdigest(), data))

    def _append_reasoning(self, expr: ir.SglSeparateReasoning) -> None:
        """The model generates reasoning and answer on a fork; the answer is appended here."""
        style, gen, program = thinking_style(expr.model_type), expr.expr, self.program
        if not isinstance(gen, ir.SglGen):
            raise InvalidRequest(f"separate_reasoning takes one gen(...), not {gen!r}")
        n = gen.overrides.get("n") or program.sampling.get("n", 1)
        if n != 1 or gen.parse is not None or gen.captures is not None:
            raise InvalidRequest("separate_reasoning takes a plain gen(...): no n, no type, no captures")
        raw = SplitLeaf(program.lock, gen.name, style)
        child = program.reserve_seq()
        self.log.append(ForkNode(self.seq, (child,)))
        plain = msgspec.structs.replace(gen, retries=0)
        self.log.append(GenNode(child, raw, plain, program.sampling, 1, program.stream))
        self.log.append(CloseNode(child))
        self.log.append(SettleNode(self.seq, raw.answer))
        self.leaves.append(raw.answer)
        self.bind(gen.name, raw.answer)
        if gen.name is not None:
            self.bind(expr.process_name_for_reasoning(gen.name), raw.reasoning)
        self.pieces.append(raw.answer)

    def _append_macro(self, expr: ir.SglMacro) -> None:
        expr.append_to(self)

    def _append_commit(self, expr: ir.SglCommitLazy) -> None:
        self.program.flush()

    # -- variables ----------------------------------------------------------------------------------------------------

    def bind(self, name: str | None, value: Value) -> None:
        self.variables[name] = value
        self.fresh[name] = None

    def value(self, name: str | None) -> Value:
        """The value of ``name``, known or not. Waits only if a body on another thread may still bind it."""
        program = self.program
        if name not in self.variables and program.changed is not None and not program.is_inside:
            program.changed.wait_for(lambda: name in self.variables or program.is_over)
        found = self.variables.get(name)
        if found is None:
            if program.error is not None:
                raise program.error
            known = ", ".join(sorted(repr(n) for n in self.variables if n is not None)) or "none"
            raise UnknownVariable(f"no variable {name!r} in this program; it has: {known}")
        return found

    def set(self, name: str, value: Any) -> None:
        self.bind(name, Constant(value))
        self.program.wake_readers()

    def pin(self, ttl_s: float) -> Leaf:
        leaf = Leaf(self.program.lock, None)
        self.log.append(PinNode(self.seq, leaf, ttl_s))
        return leaf

    # -- branching ----------------------------------------------------------------------------------------------------

    def fork(self, size: int) -> list[SequenceLog]:
        if self.is_closed:
            raise InvalidRequest("this sequence has ended and cannot be forked")
        children = [SequenceLog(self.program, self) for _ in range(size)]
        self.log.append(ForkNode(self.seq, tuple([child.seq for child in children])))
        return children

    def join(self, children: list[SequenceLog], mode: JoinMode) -> None:
        """Take over the variables or the texts of ``children``, and close them."""
        ids = tuple([child.seq for child in children])
        if mode == "gather_variable":
            names = dict.fromkeys(name for child in children for name in child.fresh)
            for name in names:
                self.bind(name, Gathered([child.variables[name] for child in children if name in child.fresh]))
        else:
            for child in children:
                self.pieces += child.pieces[child.fork_at :]
        for child in children:
            self.leaves += child.leaves
        self.log.append(JoinNode(self.seq, ids, mode))
        for child in children:
            child.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.log.append(CloseNode(self.seq))


_APPENDERS: dict[type, Any] = {
    str: SequenceLog._append_str,
    ir.SglConstantText: SequenceLog._append_constant,
    ir.SglExprList: SequenceLog._append_list,
    ir.SglGen: SequenceLog._append_gen,
    ir.SglSelect: SequenceLog._append_select,
    ir.SglArgument: SequenceLog._append_argument,
    ir.SglVariable: SequenceLog._append_variable,
    ir.SglVariables: SequenceLog._append_variables,
    ir.SglRoleBegin: SequenceLog._append_role_begin,
    ir.SglRoleEnd: SequenceLog._append_role_end,
    ir.SglVarScopeBegin: SequenceLog._append_scope_begin,
    ir.SglVarScopeEnd: SequenceLog._append_scope_end,
    ir.SglImage: SequenceLog._append_image,
    ir.SglVideo: SequenceLog._append_video,
    ir.SglSeparateReasoning: SequenceLog._append_reasoning,
    ir.SglCommitLazy: SequenceLog._append_commit,
}


def _appender(expr: object) -> Any:
    found = _APPENDERS.get(type(expr))
    return SequenceLog._append_macro if found is None and isinstance(expr, ir.SglMacro) else found
