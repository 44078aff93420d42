"""What users hold: a ``Runtime`` (an engine process), an ``Engine`` (a thread), or a connection. One face for all."""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zmq

from .config import EngineConfig
from .process import EngineProcess, serve_engine
from .protocol.client import Client
from .protocol.errors import EngineLost, InvalidParams
from .protocol.messages import Welcome
from .transport import Router

if TYPE_CHECKING:
    from ..lang.backend.phloem_backend import PhloemBackend

_engine_ids = itertools.count()


def make_config(model: str | EngineConfig, options: dict[str, Any]) -> EngineConfig:
    """Raises InvalidParams that names an unknown option or one of a wrong type."""
    if isinstance(model, EngineConfig):
        return msgspec.structs.replace(model, **options) if options else model
    unknown = sorted(set(options) - set(EngineConfig.__struct_fields__))
    if unknown:
        known = ", ".join(EngineConfig.__struct_fields__)
        raise InvalidParams(f"unknown option {unknown[0]!r}; there are: {known}")
    try:
        return msgspec.convert({"model": str(model), **options}, EngineConfig)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"engine options: {error}") from None


class Connection:
    """A client with an engine at its other end. A context manager; ``shutdown`` may be called twice."""

    client: Client

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def welcome(self) -> Welcome:
        return self.client.welcome

    @property
    def endpoint(self) -> PhloemBackend:
        """The backend for programs: ``prog.run(backend=runtime)`` takes the connection itself as well."""
        from ..lang.backend.phloem_backend import PhloemBackend

        return PhloemBackend(self.client)

    def info(self) -> dict[str, Any]:
        """Model, sizes and configuration of the engine."""
        return self.client.query("info")

    def metrics(self) -> dict[str, Any]:
        return self.client.query("metrics")

    def cache_tree(self) -> list[dict[str, Any]]:
        """The cached prefixes as nested dicts: text, tokens, hits, locks, children."""
        return self.client.query("cache_tree")

    def flush_cache(self) -> int:
        """Evict every prefix that nobody uses; the number of tokens."""
        return self.client.query("flush_cache")

    def shutdown(self) -> None:
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


class Runtime(Connection):
    """An engine in a process of its own. ``model`` and options are the fields of ``EngineConfig``.

    If the process dies, every waiting op fails with EngineLost and says why.
    """

    def __init__(
        self, model: str | EngineConfig, *, url: str = "", start_timeout_s: float = 600.0, **options: Any
    ) -> None:
        self.config = make_config(model, options)
        self.process = EngineProcess(self.config, url=url, start_timeout_s=start_timeout_s)
        try:
            self.client = Client(self.process.url, engine_alive=self.process.death)
        except BaseException:
            self.process.stop()
            raise
        _shut_down_at_exit(self)

    def shutdown(self) -> None:
        self.client.close()
        self.process.stop()


class Engine(Connection):
    """The same engine on a thread of this process, behind the same messages."""

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        from .engine import Engine as EngineLoop

        self.config = make_config(model, options)
        self._engine = EngineLoop(self.config)
        self._context: zmq.Context[Any] = zmq.Context()
        self._stopping = threading.Event()
        self._failure: str | None = None
        url = f"inproc://phloem-engine-{next(_engine_ids)}"
        router = Router(url, self._engine.welcome(), context=self._context, client_timeout_s=float("inf"))
        self._thread = threading.Thread(target=self._loop, args=(router,), name="phloem-engine", daemon=True)
        self._thread.start()
        self.client = Client(url, context=self._context, engine_alive=lambda: self._failure)
        _shut_down_at_exit(self)

    def _loop(self, router: Router) -> None:
        try:
            serve_engine(self._engine, router, self._stopping.is_set)
        except Exception as error:
            self._failure = f"the engine's thread failed: {type(error).__name__}: {error}"
        finally:
            router.close()
            self._engine.close()

    def shutdown(self) -> None:
        self.client.close()
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)
            self._context.destroy(linger=0)


def connect(url: str, *, timeout_s: float = 30.0) -> Connection:
    """A connection to an engine that runs elsewhere, at ``ipc://...`` or ``tcp://...``."""
    scheme = url.partition("://")[0]
    if scheme not in ("ipc", "tcp"):
        raise InvalidParams(f"{url!r}: connect takes ipc://PATH or tcp://HOST:PORT")
    connection = Connection()
    try:
        connection.client = Client(url, connect_timeout_s=timeout_s)
    except zmq.ZMQError as error:
        raise EngineLost(f"cannot connect to {url}: {error}") from None
    return connection


def _shut_down_at_exit(connection: Connection) -> None:
    reference = weakref.ref(connection)

    def shut_down() -> None:
        alive = reference()
        if alive is not None:
            alive.shutdown()

    atexit.register(shut_down)
