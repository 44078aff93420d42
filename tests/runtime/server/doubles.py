"""Doubles for the HTTP tests: a small tokenizer and template for the string engine, scripted clients, a live server.

Import it as ``phloem.tests.runtime.server.doubles``. Binds loopback only, on ports the system picks.
"""

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from phloem.protocol import errors, messages, ops
from phloem.protocol.client import Client
from phloem.protocol.program_call import ProgramCall
from phloem.runtime.engine_socket import EngineSocket
from phloem.runtime.server.listener import listen
from phloem.runtime.tokenizer import Tokenizer
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.string_tokens import CHATML, ROLE_IDS, SPECIAL_TEXT, piece_id, pieces_of
from phloem.tests.runtime.wire import wait_until

MODEL = "string"
_engine_ids = itertools.count()


class WordTokenizer:
    """The string engine's words as tokens. It decodes what it has encoded, and special tokens; others are U+FFFD."""

    vocab_size = 30100
    add_bos = False
    bos_id = None
    text_end_id = None
    max_token_bytes = 100
    check_length = Tokenizer.check_length
    special_ids = frozenset(SPECIAL_TEXT)
    special_text = staticmethod(SPECIAL_TEXT.__getitem__)

    def __init__(self) -> None:
        self.token_bytes = [b""] * self.vocab_size
        self._texts = dict(SPECIAL_TEXT)

    def encode(self, text: str, *, special: bool = False, at_start: bool = False) -> list[int]:
        if special:
            names = {name: id_ for id_, name in SPECIAL_TEXT.items()}
            return [names[part] for part in text.split(" ")]
        for piece in pieces_of(text):
            self._texts[piece_id(piece)] = piece
        return [piece_id(piece) for piece in pieces_of(text)]

    def split_special(self, text: str) -> list[str | int]:
        return [text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(self._texts.get(i, "\ufffd") for i in ids)


class ChatML:
    """The string engine's chat template; ``thinking``: the tags of a model that reasons."""

    def __init__(self, thinking: messages.ThinkingStyle | None = None) -> None:
        self._info = msgspec.structs.replace(CHATML, thinking=thinking)

    def render(
        self, messages: list[dict[str, Any]], *, tools: None = None, add_generation_prompt: bool = True
    ) -> list[str | tuple[int, ...]]:
        parts: list[str | tuple[int, ...]] = []
        for message in messages:
            role = CHATML.roles[message["role"]]
            parts += [role.prefix, message["content"], role.suffix]
        if add_generation_prompt:
            parts.append((1, ROLE_IDS["assistant"], 3))
        return parts

    def info(self) -> messages.TemplateInfo:
        return self._info


class ScriptedClient:
    """A client whose answers to a ``Submit`` are ``script(submit)``; records what is submitted and cancelled."""

    def __init__(self, script: Callable[[messages.Submit], list[messages.RuntimeMessage]]) -> None:
        self.welcome = messages.Welcome(
            version=messages.PROTOCOL_VERSION,
            model=MODEL,
            model_path="",
            context_len=4096,
            vocab_size=30100,
            vocab_hash="",
            template=CHATML,
            limits=messages.Limits(),
        )
        self.script = script
        self.submits: list[messages.Submit] = []
        self.cancelled: list[str] = []
        self.calls: dict[str, ProgramCall] = {}

    def submit(self, submit: messages.Submit, call: ProgramCall) -> None:
        self.submits.append(submit)
        self.calls[submit.program] = call
        for message in self.script(submit):
            call.take(message)

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        self.cancelled.append(program)

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        raise errors.EngineLost("the engine process ended")

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.welcome.adapters

    @property
    def gen(self) -> ops.Gen:
        """The one Gen of the last submit."""
        (gen,) = [op for op in self.submits[-1].ops if isinstance(op, ops.Gen)]
        return gen


def rejecting(error: errors.PhloemError) -> Callable[[messages.Submit], list[messages.RuntimeMessage]]:
    return lambda submit: [messages.Rejected(program=submit.program, errors=[error.info()])]


def failing(
    error: errors.PhloemError, *, after: str = ""
) -> Callable[[messages.Submit], list[messages.RuntimeMessage]]:
    """A script: the program is accepted, ``after`` is streamed, and then the Gen fails."""

    def script(submit: messages.Submit) -> list[messages.RuntimeMessage]:
        (gen,) = [op.op for op in submit.ops if isinstance(op, ops.Gen)]
        deltas = [messages.Delta(program=submit.program, op=gen, text=after)] if after else []
        return [
            messages.Accepted(program=submit.program),
            *deltas,
            messages.Failed(program=submit.program, op=gen, error=error.info(), partial=(after,)),
            messages.Closed(program=submit.program, stats=messages.ProgramStats()),
        ]

    return script


class _Server(uvicorn.Server):
    """Ends when it is told to: uvicorn's own looks for that every tenth of a second, and then waits for another."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, log_level="critical", ws="none"))
        self._is_over = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._is_over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Running answers have a second."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        end_s = self._loop.time() + 1.0
        while (self.server_state.connections or self.server_state.tasks) and self._loop.time() < end_s:
            await asyncio.sleep(0.005)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()

    def end(self) -> None:
        """For another thread."""
        self._loop.call_soon_threadsafe(self._is_over.set)


@contextlib.contextmanager
def live_server(app: Any) -> Iterator[str]:
    """Run ``app`` with uvicorn on a thread; yields its address."""
    listener = listen("127.0.0.1", 0)
    server = _Server(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end()
        thread.join(timeout=300)
        listener.close()


@contextlib.contextmanager
def connected(engine: StringEngine) -> Iterator[Client]:
    """A client of ``engine``, which runs on a thread behind the real transport."""
    engine_socket = EngineSocket(f"inproc://string-engine-{next(_engine_ids)}", engine.welcome())
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            engine_socket.send(engine.step(engine_socket.receive(0.0 if engine.has_work else 0.02)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = Client(engine_socket.url)
    try:
        yield client
    finally:
        client.close()
        is_over.set()
        thread.join()
        engine_socket.close()
