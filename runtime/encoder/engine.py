"""The engine of an encoder: answers ``Embed``, and refuses programs by name.

Its steps serve the requests in turns, one input of each, so a long request does not keep the others waiting.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ... import kernels
from ...cpu_isa import isa
from ...protocol.errors import InvalidParams, InvalidRequest, LimitExceeded, Overloaded, PhloemError, Unsupported
from ...protocol.messages import (
    MAX_INPUTS,
    PROTOCOL_VERSION,
    Answer,
    Bye,
    ClientMessage,
    Embed,
    Embedded,
    Export,
    Fetch,
    Forget,
    Import,
    Limits,
    LoadAdapter,
    Query,
    Rejected,
    RuntimeMessage,
    Submit,
    TemplateInfo,
    UnloadAdapter,
    Welcome,
)
from ..config import EngineConfig, sized
from ..weights.resolve import resolve_model
from .config import read_encoder_config
from .model import Encoder, load_encoder
from .tokens import EncoderTokenizer, load_encoder_tokenizer

Outbox = list[tuple[bytes, RuntimeMessage]]

MAX_WAITING_SIZE = 64 << 20  # characters and token ids of all requests that wait
# The fields of EngineConfig that an encoder acts on. It has no prefix cache, so it can do without one as well.
_OPTIONS = {
    "model",
    "device",
    "precision",
    "max_seq_len",
    "max_waiting",
    "max_step_tokens",
    "prefix_cache",
    "num_threads",
    "cpu_isa",
    "client_timeout_s",
    "log_level",
}


@dataclass(slots=True, eq=False)
class _Request:
    client: bytes
    message: Embed
    size: int
    num_taken: int = 0  # inputs that are in a batch already
    is_over: bool = False
    vectors: list[bytes] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)


class EncoderEngine:
    """What ``serve_engine`` drives. A step runs up to ``max_step_tokens`` tokens, and at least one text."""

    def __init__(self, encoder: Encoder, tokenizer: EncoderTokenizer, config: EngineConfig, path: Path) -> None:
        self._encoder, self._tokenizer, self._config, self._path = encoder, tokenizer, config, path
        self._waiting: deque[_Request] = deque()
        self._counts = {"steps": 0, "forward_rows": 0, "forward_tokens": 0, "step_seconds": 0.0}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def welcome(self) -> Welcome:
        shape = self._encoder.config
        return Welcome(
            version=PROTOCOL_VERSION,
            model=self._config.model,
            model_path=str(self._path),
            context_len=shape.max_len,
            vocab_size=shape.vocab_size,
            vocab_hash=self._tokenizer.vocab_hash,
            template=TemplateInfo(),
            limits=Limits(),
            capabilities=("score",) if shape.labels else ("embed",),
            embedding_size=0 if shape.labels else shape.hidden_size,
            labels=shape.labels,
        )

    def step(self, inbox: list[tuple[bytes, ClientMessage]]) -> Outbox:
        outbox: Outbox = []
        for client, message in inbox:
            match message:
                case Embed():
                    self._receive(client, message, outbox)
                case Query():
                    outbox.append((client, self._answer(message)))
                case Submit(program=program):
                    is_classifier = bool(self._encoder.config.labels)
                    gives, call = ("scores", "rerank()") if is_classifier else ("embeddings", "embed()")
                    text = f"{self._config.model!r} is an encoder, which gives {gives} and cannot run programs"
                    error = Unsupported(f"{text}; call {call}, or load a model that generates text", where="model")
                    outbox.append((client, Rejected(program, [error.info()])))
                case LoadAdapter() | UnloadAdapter() | Export() | Fetch() | Import():
                    text = f"{self._config.model!r} is an encoder, which has no adapters and no KV to hand over"
                    error = Unsupported(f"{text}; load a model that generates text", where="model")
                    outbox.append((client, Answer(message.id, None, error.info())))
                case Forget(id=number):
                    self._waiting = deque(
                        request for request in self._waiting if (request.client, request.message.id) != (client, number)
                    )
                case Bye():
                    self.drop_client(client)
        if self._waiting:
            self._run(outbox)
        return outbox

    def drop_client(self, client_id: bytes) -> None:
        self._waiting = deque(request for request in self._waiting if request.client != client_id)

    def fail_all(self, error: PhloemError) -> Outbox:
        """End every request with ``error``."""
        outbox: Outbox = []
        for request in self._waiting:
            self._fail(request, error, outbox)
        self._waiting.clear()
        return outbox

    def close(self) -> None:
        self._waiting.clear()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _receive(self, client: bytes, message: Embed, outbox: Outbox) -> None:
        request = _Request(client, message, sum(map(len, message.inputs)) + sum(map(len, message.seconds)))
        waiting, size = len(self._waiting), sum(other.size for other in self._waiting)
        if len(message.inputs) > MAX_INPUTS:
            text = f"{len(message.inputs):,} inputs, but one request may have {MAX_INPUTS:,}; send several"
            self._fail(request, LimitExceeded(text, where="input"), outbox)
        elif waiting >= self._config.max_waiting or size + request.size > MAX_WAITING_SIZE:
            text = f"{waiting:,} requests of {size:,} characters wait, and the limits are {self._config.max_waiting:,}"
            self._fail(request, Overloaded(f"{text} and {MAX_WAITING_SIZE:,}; try again later"), outbox)
        elif message.seconds and (error := self._pairs_error(message)) is not None:
            self._fail(request, error, outbox)
        elif not message.inputs:
            self._finish(request, outbox)
        else:
            self._waiting.append(request)

    def _pairs_error(self, message: Embed) -> PhloemError | None:
        if not self._encoder.config.labels:
            return Unsupported(f"{self._config.model!r} gives embeddings, which have no second texts", where="seconds")
        if len(message.seconds) != len(message.inputs):
            text = f"{len(message.inputs):,} inputs and {len(message.seconds):,} second texts; give as many of both"
            return InvalidRequest(text, where="seconds")
        return None

    def _answer(self, query: Query) -> Answer:
        shape = self._encoder.config
        match query.what:
            case "info":
                about = msgspec.to_builtins(shape) | {"config": msgspec.to_builtins(self._config)}
                about |= {"model": self._config.model, "model_path": str(self._path), "cpu_isa": isa().name}
                return Answer(query.id, about)
            case "metrics":
                waiting = len(self._waiting)
                return Answer(query.id, {**self._counts, "programs": waiting, "running": 0, "waiting": waiting})
            case other:
                text = f"query {other!r}: an encoder keeps no cache and no sequences; it answers info and metrics"
                return Answer(query.id, None, Unsupported(text, where="what").info())

    # -- steps --------------------------------------------------------------------------------------------------------

    def _run(self, outbox: Outbox) -> None:
        begun_s = time.perf_counter()
        batch: list[tuple[_Request, list[int], int]] = []  # the tokens, and how many are of the first type
        num_tokens = 0
        while self._waiting and num_tokens < self._config.max_step_tokens:
            request = self._waiting.popleft()
            try:
                ids, num_first = self._tokens(request)
            except PhloemError as error:
                self._fail(request, error, outbox)
                continue
            if batch and num_tokens + len(ids) > self._config.max_step_tokens:
                self._waiting.appendleft(request)
                break
            batch.append((request, ids, num_first))
            num_tokens += len(ids)
            request.num_taken += 1
            if request.num_taken < len(request.message.inputs):
                self._waiting.append(request)
        batch = [row for row in batch if not row[0].is_over]
        try:
            vectors = self._encoder.run([ids for _, ids, _ in batch], [first for *_, first in batch]).numpy()
        except BaseException:
            self._waiting.extend(row[0] for row in batch if row[0] not in self._waiting)  # for fail_all
            raise
        for (request, ids, _), vector in zip(batch, vectors, strict=True):
            request.vectors.append(vector.astype("<f4").tobytes())
            request.num_tokens.append(len(ids))
            if len(request.vectors) == len(request.message.inputs):
                self._finish(request, outbox)
        self._counts["steps"] += 1
        self._counts["forward_rows"] += len(batch)
        self._counts["forward_tokens"] += sum(len(ids) for _, ids, _ in batch)
        self._counts["step_seconds"] += time.perf_counter() - begun_s

    def _tokens(self, request: _Request) -> tuple[list[int], int]:
        """The tokens of the request's next input, and how many of them are of the first type."""
        message, i = request.message, request.num_taken
        found, where = message.inputs[i], f"input.{i}"
        if message.seconds:
            if not isinstance(found, str):
                raise InvalidRequest(
                    f"{where} is a list of token ids, but pairs are of texts; give a text", where=where
                )
            return self._tokenizer.encode_pair(found, message.seconds[i], truncate=message.truncate, where=where)
        if isinstance(found, str):
            ids = self._tokenizer.encode(found, truncate=message.truncate, where=where)
        else:
            ids = self._tokenizer.checked(found, where=where)
        return ids, len(ids)

    def _finish(self, request: _Request, outbox: Outbox) -> None:
        request.is_over = True
        found = Embedded(request.vectors, request.num_tokens)
        outbox.append((request.client, Answer(request.message.id, found)))

    def _fail(self, request: _Request, error: PhloemError, outbox: Outbox) -> None:
        request.is_over = True
        outbox.append((request.client, Answer(request.message.id, None, error.info())))


def encoder_engine(config: EngineConfig) -> EncoderEngine:
    """Loads the model of ``config``. Raises InvalidParams for an option that concerns decoders alone."""
    plain = EngineConfig(model=config.model)
    for name in EngineConfig.__struct_fields__:
        if name not in _OPTIONS and getattr(config, name) != getattr(plain, name):
            text = f"{name}={getattr(config, name)!r}: {config.model!r} is an encoder, which has no such option"
            raise InvalidParams(f"{text}; leave it out", where=name)
    if config.precision not in ("auto", "float32"):
        text = f"precision {config.precision!r}: encoders run in float32; use auto or float32"
        raise Unsupported(text, where="precision")
    config = sized(config)
    if config.max_step_tokens < 1 or config.max_waiting < 1:
        raise InvalidParams("max_step_tokens and max_waiting must be at least 1")
    kernels.set_threads(config.num_threads)
    path = resolve_model(config.model)
    shape = read_encoder_config(path, max_len=config.max_seq_len)
    tokenizer = load_encoder_tokenizer(path, shape)
    return EncoderEngine(load_encoder(path, shape, device=config.device), tokenizer, config, path)
