"""A server's life: its socket, its engines' processes, its application, and how all of them end.

The first engine loads for seconds on one core; meanwhile another core imports and reads the parts that only HTTP needs:

    this process  | port taken, engine started | FastAPI, schemas, tokenizer, template |          | application, ready
    the engine's                               | torch, kernels, weights, trial steps, listening  |
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

import msgspec

from ...cluster.restarts import RestartPolicy
from ...cluster.supervisor import Supervising, Supervisor
from ...protocol.errors import InvalidRequest, PhloemError
from ...protocol.ops import AnyOp
from ..config import ConnectionLimits, EngineConfig, Progress, StoreLimits
from ..encoder.config import is_encoder
from ..weights.resolve import resolve_model
from .listener import LOOPBACK_NAMES, Tls, is_loopback, listen, url_of
from .tenants import Keys
from .tracing import Tracer

if TYPE_CHECKING:
    from ..tokenizer import ModelTemplate, Tokenizer

logger = logging.getLogger(__name__)


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    key_file: Path | None = None,
    max_concurrent: int = 0,
    tls: Tls | None = None,
    model_name: str | None = None,
    cors_origins: Collection[str] = (),
    replicas: int = 1,
    policy: RestartPolicy | None = None,
    supervise: Callable[..., Supervising] = Supervisor,
    connections: ConnectionLimits | None = None,
    stored: StoreLimits | None = None,
    has_page: bool = True,
    tracer: Tracer | None = None,
    on_ready: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> int:
    """Keep engine processes alive and answer HTTP until SIGINT or SIGTERM; 0 after a clean end.

    The server takes the port before the model loads. ``progress`` gets the progress of loading, and ``on_ready`` the
    address, once requests are answered. ``connections``: the limits of HTTP connections. ``stored``: the limits of
    stored responses. ``policy`` says when an engine is restarted and how often.
    ``supervise`` makes what keeps the engines alive, with the arguments of ``Supervisor``.
    Raises a PhloemError when the address, the model or the configuration cannot be used, and EngineLost when every
    replica has failed.
    ``key_file``: instead of ``api_key``, keys and limits of several tenants; SIGHUP lets the server read it again.
    ``max_concurrent``: requests that are answered at once, 0: any number. ``tls``: answers HTTPS alone. ``has_page``:
    whether ``/`` shows the page. ``tracer``: makes the spans of requests; the caller closes it.
    """
    if key_file is not None and api_key is not None:
        raise InvalidRequest("there are a key file and an API key; give one of them (see $PHLOEM_API_KEY)")
    keys = Keys.of_file(key_file) if key_file is not None else Keys.of_one(api_key) if api_key is not None else Keys({})
    failures: list[PhloemError] = []
    with (
        listen(host, port) as listener,
        contextlib.suppress(KeyboardInterrupt),
        _stop_by_signal(),
        _reload_by_signal(keys),
        ThreadPoolExecutor(1, thread_name_prefix="front") as beside,
    ):
        if not is_loopback(listener) and keys.is_open:
            logger.warning("%s can be reached from other machines and asks for no API key", url_of(listener, tls))
        path = resolve_model(config.model)
        loading = beside.submit(_load_front, path)
        if is_encoder(path):
            config = msgspec.structs.replace(config, prefix_cache=False)  # replicas publish no cached prefixes

        def tokens_of(ops: Sequence[AnyOp]) -> list[int]:
            from ...cluster.prompts import first_prompt  # tokenizers load beside the engine, not before it

            tokenizer = loading.result().tokenizer
            return [] if tokenizer is None else first_prompt(ops, tokenizer)

        with supervise(
            config,
            tokenize=tokens_of,
            replicas=replicas,
            policy=policy,
            progress=progress,
            on_failed=failures.append,
        ) as supervisor:
            front = loading.result()
            app = front.http.create_app(
                supervisor.fleet,
                front.tokenizer,
                front.template,
                model_name=model_name or _name_of(config.model),
                keys=keys,
                max_concurrent=max_concurrent,
                hosts=() if not keys.is_open or not is_loopback(listener) else (host, *LOOPBACK_NAMES),
                cors_origins=cors_origins,
                supervisor=supervisor,
                stored=stored,
                has_page=has_page,
                tracer=tracer,
                takes_adapters=bool(config.adapter_folder),
            )
            front.http.run_app(
                app,
                listener,
                on_ready,
                is_over=lambda: bool(failures),
                limits=connections or ConnectionLimits(),
                tls=tls,
            )
    if failures:
        raise failures[0]
    return 0


@dataclass(frozen=True, slots=True)
class _Front:
    """The parts of the server that load beside the engine. ``http`` is the module of the application.

    ``tokenizer`` is None where the model is an encoder, whose engine tokenizes its texts.
    """

    http: ModuleType
    tokenizer: Tokenizer | None
    template: ModelTemplate | None


def _load_front(path: Path) -> _Front:
    from ..tokenizer import load_chat_template, load_tokenizer
    from . import app

    if is_encoder(path):
        return _Front(app, None, None)
    tokenizer = load_tokenizer(path)
    return _Front(app, tokenizer, load_chat_template(path, tokenizer))


@contextlib.contextmanager
def _stop_by_signal() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, also while a model loads, so that the engine is always shut down."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _reload_by_signal(keys: Keys) -> Iterator[None]:
    """SIGHUP reads the key file again. Without a key file SIGHUP ends the process, as it does by default."""
    if keys.path is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda number, frame: keys.reload())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _name_of(model: str) -> str:
    """The model's name for clients: an alias or hub name as it is, of a path the last part."""
    return Path(model).name if os.path.exists(model) else model
