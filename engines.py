"""What users hold: a ``Runtime`` (an engine process), an ``Engine`` (a thread), or a connection, with one interface."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import msgspec
import zmq

from .cluster.limits import FleetLimits
from .cluster.prompts import first_prompt
from .cluster.restarts import RestartPolicy
from .cluster.roles import Role
from .cluster.supervisor import Replica, Supervisor
from .protocol import ops
from .protocol.address import ClientKeys, ServerKeys
from .protocol.client import Client
from .protocol.embeddings import BATCH, embed_by_program, gives_embeddings
from .protocol.engine_client import EngineClient
from .protocol.errors import DeadlineExceeded, InvalidParams, InvalidRequest, Unsupported
from .protocol.messages import Delta, Done, Embedded, GenMeta, Welcome
from .protocol.ops import Pooling
from .protocol.program_call import OpFailed, ProgramCall, ProgramEvent, SubmitRefused
from .protocol.sampling import SamplingParams
from .runtime.config import SPLITS, EngineConfig, Progress
from .runtime.encoder.config import is_encoder
from .runtime.engine_socket import EngineSocket
from .runtime.process import EngineProcess, serve_engine
from .runtime.process.launcher import ENGINE_TIMEOUT_S
from .runtime.process.loop import publish_of, publisher_of, real_engine
from .runtime.server_args import ServerArgs, from_server_options
from .runtime.weights.resolve import resolve_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .constrained.spec import GrammarSpec
    from .lang.backend.phloem_backend import PhloemBackend
    from .runtime.process.loop import EngineLike
    from .runtime.tokenizer import Tokenizer

_engine_ids = itertools.count()
Result = TypeVar("Result")


def make_config(model: str | EngineConfig | ServerArgs | None, options: dict[str, Any]) -> EngineConfig:
    """Raises InvalidParams that names an unknown option or one of a wrong type."""
    if isinstance(model, ServerArgs):
        options = {**model.engine_options(), **options}
        model = options.pop("model")
    elif "model_path" in options:
        if model is not None:
            raise InvalidParams("model and model_path are the same; give one", where="model_path")
        options = from_server_options(options)
        model = options.pop("model")
    if model is None:
        text = "no model was given; Runtime('smollm2'): an alias, a folder, a .gguf file or a name on the hub"
        raise InvalidParams(text, where="model")
    unknown = sorted(set(options) - set(EngineConfig.__struct_fields__))
    if unknown:
        known = ", ".join(EngineConfig.__struct_fields__)
        raise InvalidParams(f"unknown option {unknown[0]!r}; there are: {known}")
    given = msgspec.structs.asdict(model) if isinstance(model, EngineConfig) else {"model": str(model)}
    try:
        return msgspec.convert(given | options, EngineConfig)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"engine options: {error}") from None


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's result: ``texts`` has every candidate, ``meta`` the counts, finish reasons and logprobs."""

    texts: tuple[str, ...]
    meta: GenMeta

    @property
    def text(self) -> str:
        return self.texts[0]

    def __getitem__(self, name: str) -> Any:
        """SGLang's names: ``["text"]``, ``["output_ids"]``, ``["meta_info"]``."""
        if name == "text":
            return self.text
        from .lang.meta import meta_info

        found = meta_info(self.meta)
        if name == "meta_info":
            return found
        if name == "output_ids":
            return found["output_ids"]
        raise KeyError(f"{name!r}: there are 'text', 'output_ids', 'meta_info'")


class Connection:
    """A client connected to an engine. A context manager; ``shutdown`` may be called twice."""

    client: EngineClient

    @property
    def url(self) -> str:
        """Where other processes may connect. Raises Unsupported for replicas, which have no address of their own."""
        if not isinstance(self.client, Client):
            raise Unsupported("replicas have no common address; `phloem serve MODEL --replicas N` gives them one")
        return self.client.url

    @property
    def welcome(self) -> Welcome:
        return self.client.welcome

    @property
    def endpoint(self) -> PhloemBackend:
        """The backend for programs; ``prog.run(backend=runtime)`` takes the connection itself too."""
        from .lang.backend.phloem_backend import PhloemBackend

        return PhloemBackend(self.client)

    @overload
    def generate(self, prompt: str, sampling_params: Mapping[str, Any] | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[str], sampling_params: Mapping[str, Any] | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: str | Sequence[str],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        grammar: GrammarSpec | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """Continue plain text; several prompts run as one batch. ``sampling``: the fields of ``SamplingParams``.

        ``sampling_params`` has SGLang's names (``max_new_tokens``, ``regex``, ...), ``sampling`` overrides them.
        Raises what the first failing prompt raises, and then cancels the others; DeadlineExceeded after ``timeout_s``.
        """
        if sampling_params is not None:
            given, grammar_given, n_given = _read_sampling(sampling_params)
            sampling, grammar, n = {**given, **sampling}, grammar or grammar_given, n if n != 1 else n_given
        params = _sampling(sampling)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        calls: list[ProgramCall] = []
        answers: list[Future[Completion]] = []
        try:
            for text in prompts:
                answer: Future[Completion] = Future()
                call = ProgramCall(self.client, partial(_settle, answer))
                call.submit(_continuation(text, params, grammar, n=n))
                calls.append(call)
                answers.append(answer)
            deadline = _Deadline(timeout_s)
            completions = [deadline.wait(answer) for answer in answers]
        except BaseException:  # Ctrl-C too
            for call in calls:
                call.cancel()
            raise
        return completions[0] if isinstance(prompt, str) else completions

    def info(self) -> dict[str, Any]:
        """Model, sizes and configuration of the engine."""
        return self.client.query("info")

    def metrics(self) -> dict[str, Any]:
        return self.client.query("metrics")

    def cache_tree(self) -> list[dict[str, Any]]:
        """The cached prefixes as nested dicts: text, tokens, hits, locks, children."""
        return self.client.query("cache_tree")

    def load_adapter(self, name: str, path: str) -> None:
        """Load a low-rank adapter from a folder as PEFT saves it; programs can then name it, with ``adapter=name``.

        With replicas every engine loads it, and so does each that starts later. Raises InvalidParams, UnknownModel,
        LimitExceeded or Unsupported, and then nothing has changed.
        """
        self.client.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """New programs cannot name the adapter; running ones keep it. Raises UnknownModel where it is not loaded."""
        self.client.unload_adapter(name)

    def adapters(self) -> list[dict[str, Any]]:
        """``name``, ``path``, ``programs`` (that use it now) and ``unloading`` of each adapter that is loaded."""
        return self.client.list_adapters()

    def flush_cache(self) -> int:
        """Evict every unused prefix; the number of tokens."""
        return self.client.query("flush_cache")

    def cache_prefix(self, prefix: str) -> None:
        """Compute a text's keys and values ahead of the programs that begin with it."""
        self.endpoint.cache_prefix(prefix)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded in this process; needs the model's files on this machine."""
        from .runtime.tokenizer import load_tokenizer

        return load_tokenizer(self.welcome.model_path)

    def embed(
        self,
        inputs: str | Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        truncate: bool | None = None,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """Vectors: [E] of one text, [N, E] of N texts or lists of token ids.

        Of an encoder, which pools as its folder says and cuts a text of more tokens than it takes; with
        ``truncate=False`` such a text raises PromptTooLong. Of a decoder its last hidden states after the final norm,
        by ``pooling``: of the last token, which is the default, or the mean of all tokens, scaled to length 1. A
        decoder cuts no text. Raises Unsupported where the model cannot do what was asked, DeadlineExceeded after
        ``timeout_s``.
        """
        texts = [inputs] if isinstance(inputs, str) else [x if isinstance(x, str) else list(x) for x in inputs]
        is_decoder, name = gives_embeddings(self.welcome), self.welcome.model
        if is_decoder and truncate:
            raise Unsupported(f"truncate=True: {name!r} is a decoder, which cuts no text", where="truncate")
        if not is_decoder and pooling is not None:
            text = f"pooling={pooling!r}: {name!r} is no decoder; an encoder pools as its folder says"
            raise Unsupported(f"{text}; leave it out", where="pooling")

        def ask(part: slice) -> Future[Embedded]:
            if is_decoder:
                return embed_by_program(self.client, texts[part], pooling or "last", first=part.start)
            return self.client.embed(texts[part], truncate=truncate is not False)

        found = _vectors(len(texts), ask, _Deadline(timeout_s))
        return found[0] if isinstance(inputs, str) else found

    def classify(
        self,
        inputs: str | Sequence[str | tuple[str, str]],
        *,
        truncate: bool = True,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """A classifier's scores: [labels] of one text, [N, labels] of N texts or pairs. ``welcome.labels`` names them.

        A text or pair of more tokens than the model takes is cut; without ``truncate`` it raises PromptTooLong. Raises
        Unsupported where the model is no classifier, DeadlineExceeded after ``timeout_s``.
        """
        given = [inputs] if isinstance(inputs, str) else list(inputs)
        firsts: list[str | list[int]] = [x if isinstance(x, str) else x[0] for x in given]
        seconds = [x[1] for x in given if not isinstance(x, str)]
        if seconds and len(seconds) != len(given):
            raise InvalidRequest("inputs holds both texts and pairs of texts; give one kind", where="inputs")
        found = _vectors(
            len(firsts),
            lambda part: self.client.score(firsts[part], seconds[part], truncate=truncate),
            _Deadline(timeout_s),
        )
        return found[0] if isinstance(inputs, str) else found

    def rerank(
        self, query: str, documents: Sequence[str], *, truncate: bool = True, timeout_s: float | None = None
    ) -> NDArray[np.float32]:
        """How relevant each document is to ``query``, by a reranker: [N], in the order of ``documents``.

        Raises as ``classify``, and Unsupported where the classifier has several labels.
        """
        if len(self.welcome.labels) > 1:
            count = f"{len(self.welcome.labels)} labels"
            text = f"{self.welcome.model!r} is a classifier of {count}, but a reranker has one; use classify()"
            raise Unsupported(text, where="model")
        pairs = [(query, document) for document in documents]
        return self.classify(pairs, truncate=truncate, timeout_s=timeout_s)[:, 0]

    def encode(self, prompt: str | Sequence[str]) -> Any:
        """SGLang's form of ``embed``: ``{"embedding": [...]}`` of one text, a list of them of several."""
        found = self.embed(prompt).tolist()
        return {"embedding": found} if isinstance(prompt, str) else [{"embedding": one} for one in found]

    def start_profile(self) -> None:
        raise Unsupported("start_profile(): the engine has no profiler; metrics() and a run's stats() say what it did")

    def stop_profile(self) -> None:
        raise Unsupported("stop_profile(): the engine has no profiler; metrics() and a run's stats() say what it did")

    async def _stream(self, prompt: str, sampling_params: Mapping[str, Any] | None) -> AsyncIterator[str]:
        """New text as it is generated; leaving the loop early cancels the program."""
        given, grammar, n = _read_sampling(sampling_params or {})
        if n != 1:
            raise InvalidParams(f"n={n}: a stream has one candidate", where="n")
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[ProgramEvent] = asyncio.Queue()

        def deliver(event: ProgramEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its reader with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        call = ProgramCall(self.client, deliver)
        call.submit(_continuation(prompt, _sampling(given), grammar, is_stream=True))
        sent = 0
        try:
            while True:
                match await events.get():
                    case Delta(text=text):
                        sent += len(text)
                        yield text
                    case Done(value=texts, meta=GenMeta()):
                        if len(texts[0]) > sent:
                            yield texts[0][sent:]
                        return
                    case OpFailed(error=error) | SubmitRefused(error=error):
                        raise error
        finally:
            call.cancel()

    def shutdown(self) -> None:
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


class Runtime(Connection):
    """An engine in a process of its own, or ``replicas`` of them that are kept alive.

    ``model`` and options are the fields of ``EngineConfig``. Without ``replicas`` there is one engine: if its process
    dies, every waiting op fails with EngineLost and says why. ``url`` is where others may connect; a tcp address that
    others can reach needs ``keys``, the engine's, and ``client_keys``, this process's own.

    With ``replicas`` (one is enough) an engine that dies, or is silent for ``engine_timeout_s``, is started again, and
    its programs go on elsewhere: they notice a pause. Ops fail with EngineLost once every replica has failed. ``roles``
    are those of the first replicas ("prefill", "decode", "both"), the others have "both"; ``max_rebalanced``: running
    programs that may be on their way to a replica with less to do at once, 0 to 8 (default 4).
    """

    def __init__(
        self,
        model: str | EngineConfig | ServerArgs | None = None,
        *,
        url: str = "",
        keys: ServerKeys | None = None,
        client_keys: ClientKeys | None = None,
        start_timeout_s: float = 600.0,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        engine_factory: str = "",
        replicas: int | None = None,
        roles: Sequence[Role] = (),
        max_rebalanced: int | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """``progress`` is called while loading takes long. ``engine_factory`` ("module:callable") makes
        another engine, from the ``EngineConfig`` and ``progress``.

        With ``model_path=`` instead of ``model`` the options may have SGLang's names (see ``ServerArgs``).
        """
        start_timeout_s = options.pop("launch_timeout", start_timeout_s)
        self.config = make_config(model, options)
        if (keys is None) != (client_keys is None):
            raise InvalidParams("keys and client_keys go together: the engine's and this client's", where="keys")
        self._process: EngineProcess | None = None
        self._supervisor: Supervisor | None = None
        for name, value in (("roles", roles or None), ("max_rebalanced", max_rebalanced)):
            if replicas is None and value is not None:
                text = f"{name}={value!r}: it is of replicas, and this is one engine; give replicas too"
                raise InvalidParams(text, where=name)
        if replicas is not None:
            if url or keys is not None:
                text = f"replicas={replicas}: replicas have no address; leave out url, keys and client_keys"
                raise InvalidParams(text, where="replicas")
            self._supervisor = _supervise(
                self.config,
                replicas=replicas,
                roles=roles,
                limits=None if max_rebalanced is None else FleetLimits(max_rebalanced=max_rebalanced),
                policy=RestartPolicy(step_timeout_s=engine_timeout_s),
                start_timeout_s=start_timeout_s,
                factory=engine_factory,
                progress=progress,
            )
            self.client = self._supervisor.fleet
        else:
            self._process = EngineProcess(
                self.config,
                url=url,
                keys=keys,
                start_timeout_s=start_timeout_s,
                factory=engine_factory,
                progress=progress,
            )
            try:
                self.client = self._process.connect(keys=client_keys, engine_timeout_s=engine_timeout_s)
            except BaseException:
                self._process.stop()
                raise
        atexit.register(self.shutdown)

    @property
    def process(self) -> EngineProcess:
        """The engine's process. Raises Unsupported with ``replicas``: see ``fleet``."""
        if self._process is None:
            raise Unsupported("process: replicas have several, which come and go; fleet() lists them")
        return self._process

    def fleet(self) -> list[Replica]:
        """The replicas: their states, processes and restarts. Raises Unsupported without ``replicas``."""
        if self._supervisor is None:
            raise Unsupported("fleet(): this runtime has one engine, which is not kept alive; give replicas=N")
        return self._supervisor.replicas()

    def async_generate(self, prompt: str, sampling_params: Mapping[str, Any] | None = None) -> AsyncIterator[str]:
        """``async for text in runtime.async_generate(...)``: new text as it is generated."""
        return self._stream(prompt, sampling_params)

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        if self._supervisor is not None:
            self._supervisor.close()
        self.client.close()
        if self._process is not None:
            self._process.stop()


class Engine(Connection):
    """An engine on a thread of this process, behind the same messages.

    While it runs, ``sys.setswitchinterval`` is 0.1 ms instead of Python's 5 ms: an engine's step asks for the global
    interpreter lock (GIL) many times, and each time it would wait so long for a thread that computes. A full garbage
    collection of Python stops the engine too, for tenths of a second in a process with many objects. Call
    ``gc.freeze()`` once everything is loaded, or use ``Runtime``: the engine's own process freezes its objects.
    """

    def __init__(self, model: str | EngineConfig | ServerArgs | None = None, **options: Any) -> None:
        self.config = make_config(model, options)
        for name in SPLITS:
            if (count := getattr(self.config, name)) > 1:
                text = f"{name}={count}: an engine on a thread has one process"
                raise Unsupported(f"{text}; use phloem.Runtime", where=name)
        self._start(real_engine(self.config), cache_events_url=self.config.cache_events_url)

    @classmethod
    def over(cls, engine: EngineLike) -> Self:
        """The same interface over a given engine, which ``shutdown`` closes."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: EngineLike, *, cache_events_url: str = "") -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._publisher = publisher_of(engine, cache_events_url, self._context)
        self._stopping = threading.Event()
        self._failure: str | None = None
        url = f"inproc://phloem-engine-{next(_engine_ids)}"
        # both sides are in this process: silence is a long step, not a lost peer
        engine_socket = EngineSocket(url, engine.welcome(), context=self._context, client_timeout_s=float("inf"))
        self._thread = threading.Thread(
            target=self._loop, args=(engine, engine_socket), name="phloem-engine", daemon=True
        )
        self._thread.start()
        try:
            self.client = Client(
                url, context=self._context, engine_timeout_s=float("inf"), engine_alive=lambda: self._failure
            )
        except BaseException:
            self._stop()
            raise
        atexit.register(self.shutdown)

    async def async_generate(
        self, prompt: str, sampling_params: Mapping[str, Any] | None = None, *, stream: bool = False
    ) -> Any:
        """``await engine.async_generate(...)``: a ``Completion``; with ``stream`` an async iterator of new text."""
        if stream:
            return self._stream(prompt, sampling_params)
        return await asyncio.to_thread(self.generate, prompt, sampling_params)

    def _loop(self, engine: EngineLike, engine_socket: EngineSocket) -> None:
        try:
            serve_engine(engine, engine_socket, self._stopping.is_set, publish=publish_of(engine, self._publisher))
        except Exception as error:
            self._failure = f"the engine's thread failed: {type(error).__name__}: {error}"
        finally:
            engine_socket.close()
            if self._publisher is not None:
                self._publisher.close()
            engine.close()

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        self.client.close()
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
            if not self._thread.is_alive():  # a hanging step still uses its socket
                self._context.destroy(linger=0)


def connect(
    url: str,
    *,
    keys: ClientKeys | None = None,
    timeout_s: float = 30.0,
    engine_timeout_s: float = ENGINE_TIMEOUT_S,
) -> Connection:
    """A connection to a running engine, at ``ipc://...`` or ``tcp://...``."""
    scheme = url.partition("://")[0]
    if scheme not in ("ipc", "tcp"):
        raise InvalidParams(f"{url!r}: connect takes ipc://PATH or tcp://HOST:PORT")
    connection = Connection()
    connection.client = Client(url, keys=keys, connect_timeout_s=timeout_s, engine_timeout_s=engine_timeout_s)
    return connection


def _supervise(config: EngineConfig, *, replicas: int, factory: str, **options: Any) -> Supervisor:
    """The tokenizer, by which programs are placed, is read while the first engine loads."""
    if not factory and is_encoder(resolve_model(config.model)):  # it caches no prefixes, so none decides the engine
        if roles := options["roles"]:
            text = f"roles={roles!r}: {config.model!r} is an encoder, which generates nothing; leave it out"
            raise InvalidParams(text, where="roles")
        config = msgspec.structs.replace(config, prefix_cache=False)
        return Supervisor(config, tokenize=lambda ops: [], replicas=replicas, **options)
    if factory or replicas == 1:  # another engine's tokens are not known here; one engine needs no placement
        return Supervisor(config, tokenize=lambda ops: [], replicas=replicas, factory=factory, **options)
    from .runtime.tokenizer import load_tokenizer

    with ThreadPoolExecutor(1) as beside:
        tokenizer = beside.submit(lambda: load_tokenizer(resolve_model(config.model)))
        return Supervisor(
            config, tokenize=lambda ops: first_prompt(ops, tokenizer.result()), replicas=replicas, **options
        )


def _continuation(
    text: str, params: SamplingParams, grammar: GrammarSpec | None, *, n: int = 1, is_stream: bool = False
) -> list[ops.AnyOp]:
    return [
        ops.Text(op=0, seq=0, text=text),
        ops.Gen(op=1, seq=0, params=params, grammar=grammar, n=n, stream=is_stream),
        ops.Close(op=2, seq=0),
    ]


def _settle(answer: Future[Completion], event: ProgramEvent) -> None:
    """Give ``answer`` the completion, or the program's first error."""
    match event:
        case Done(value=texts, meta=GenMeta() as meta):
            answer.set_result(Completion(tuple(texts), meta))
        case OpFailed(error=error) | SubmitRefused(error=error) if not answer.done():
            answer.set_exception(error)


class _Deadline:
    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    def wait(self, completion: Future[Result]) -> Result:
        left_s = None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
        with contextlib.suppress(FutureTimeout):
            return completion.result(left_s)
        raise DeadlineExceeded(f"no answer within {self._timeout_s:g} s")


def _read_sampling(given: Mapping[str, Any]) -> tuple[dict[str, Any], GrammarSpec | None, int]:
    """SGLang's ``sampling_params`` as our options, the grammar and ``n``."""
    from .lang.expressions import SglGen
    from .lang.gen import gen
    from .lang.sampling_params import SAMPLING_NAMES, sampling_overrides

    if not isinstance(given, Mapping):
        raise InvalidParams(
            f"sampling_params is a {type(given).__name__}, not a dict; write generate(prompt, temperature=0.0, ...)",
            where="sampling_params",
        )
    grammars = {name: given[name] for name in ("regex", "json_schema", "ebnf") if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in ("regex", "json_schema", "ebnf")}
    unknown = sorted(set(rest) - SAMPLING_NAMES)
    if unknown:
        raise InvalidParams(
            f"unknown sampling parameter {unknown[0]!r}; there are: {', '.join(sorted(SAMPLING_NAMES))}"
        )
    found = sampling_overrides(rest)
    found.pop("return_text_in_logprobs", None)
    expr = gen(None, **grammars)
    return found, expr.grammar if isinstance(expr, SglGen) else None, found.pop("n", 1)


def _sampling(given: dict[str, Any]) -> SamplingParams:
    unknown = sorted(set(given) - set(SamplingParams.__struct_fields__))
    if unknown:
        raise InvalidParams(f"unknown option {unknown[0]!r}; there are: {', '.join(SamplingParams.__struct_fields__)}")
    try:
        return msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"sampling options: {error}") from None


def _vectors(count: int, ask: Callable[[slice], Future[Embedded]], deadline: _Deadline) -> NDArray[np.float32]:
    """The rows that ``ask`` gets for slices of ``count`` inputs, one request after another."""
    import numpy as np

    rows: list[bytes] = []
    for start in range(0, max(1, count), BATCH):  # without inputs the client says so
        answer = ask(slice(start, start + BATCH))
        try:
            rows += deadline.wait(answer).vectors
        except BaseException:  # Ctrl-C too
            answer.cancel()
            raise
    return np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), -1).astype(np.float32)
