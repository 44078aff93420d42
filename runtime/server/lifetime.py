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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from ... import processor
from ...cluster.restarts import RestartPolicy
from ...cluster.supervisor import Supervising, Supervisor
from ...protocol.errors import InvalidRequest, PhloemError
from ...protocol.model_rules import ModelRule, check_rules
from ...protocol.ops import AnyOp
from ..config import ConnectionLimits, EngineConfig, Progress, StoreLimits
from ..encoder.config import is_encoder
from ..weights.resolve import resolve_model
from .listener import LOOPBACK_NAMES, Tls, is_loopback, listen, url_of
from .tenants import Keys
from .tracing import Tracer

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..tokenizer import ModelTemplate, Tokenizer
    from .remote_images import AllowedHosts

logger = logging.getLogger(__name__)

KEY_FILE_LOOK_S = 1.0


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
    others: Mapping[str, EngineConfig] | None = None,
    rules: Mapping[str, ModelRule] | None = None,
    cors_origins: Collection[str] = (),
    replicas: int = 1,
    policy: RestartPolicy | None = None,
    supervise: Callable[..., Supervising] = Supervisor,
    connections: ConnectionLimits | None = None,
    stored: StoreLimits | None = None,
    has_page: bool = True,
    tracer: Tracer | None = None,
    image_hosts: AllowedHosts | None = None,
    on_ready: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> int:
    """Keep engine processes alive and answer HTTP until SIGINT or SIGTERM; 0 after a clean end.

    The server takes the port before the model loads. ``progress`` gets the progress of loading, and ``on_ready`` the
    address, once requests are answered. ``connections``: the limits of HTTP connections. ``stored``: the limits of
    stored responses. ``policy`` says when an engine is restarted and how often.
    ``supervise`` makes what keeps the engines alive, with the arguments of ``Supervisor``.
    Raises a PhloemError when the address, the model or the configuration cannot be used, and EngineLost when every
    replica of a model has failed.
    ``key_file``: instead of ``api_key``, keys and limits of several tenants; SIGHUP lets the server read it again, and
    on a system without SIGHUP the server sees that the file has changed.
    ``others``: more models to serve, by name, after the one of ``config``; each has its own engines, and the engines of
    one model start after those of another. ``rules``: between the models; they may name adapters.
    ``max_concurrent``: requests that are answered at once, 0: any number. ``tls``: answers HTTPS alone. ``has_page``:
    whether ``/`` shows the page. ``tracer``: makes the spans of requests; the caller closes it. ``image_hosts``: from
    which images are fetched; None: from none.
    """
    if key_file is not None and api_key is not None:
        raise InvalidRequest("there are a key file and an API key; give one of them (see $PHLOEM_API_KEY)")
    keys = Keys.of_file(key_file) if key_file is not None else Keys.of_one(api_key) if api_key is not None else Keys({})
    failures: list[PhloemError] = []
    own_name = model_name or name_of(config.model)
    if own_name in (others or {}):
        raise InvalidRequest(f"{own_name!r} is the name of two models; give each its own, as NAME=MODEL")
    configs = shared_out({own_name: config, **(others or {})}, replicas=replicas)
    rules = rules or {}
    check_rules(rules, [name for own, one in configs.items() for name in (own, *one.adapters)])
    with (
        listen(host, port) as listener,
        contextlib.suppress(KeyboardInterrupt),
        _stop_by_signal(),
        _reload_by_signal(keys),
        ThreadPoolExecutor(1, thread_name_prefix="front") as beside,
    ):
        if not is_loopback(listener) and keys.is_open:
            logger.warning("%s can be reached from other machines and asks for no API key", url_of(listener, tls))
        paths = {name: resolve_model(one.model) for name, one in configs.items()}
        loading = {name: beside.submit(_load_front, path) for name, path in paths.items()}
        with contextlib.ExitStack() as stack:
            has_decoder = not all(map(is_encoder, paths.values()))
            supervisors: dict[str, Supervising] = {}
            for name, one in configs.items():
                supervisor = supervise(
                    _as_encoder(one, beside_decoders=has_decoder) if is_encoder(paths[name]) else one,
                    tokenize=partial(_tokens_of, loading[name]),
                    replicas=replicas,
                    policy=policy,
                    progress=progress,
                    on_failed=failures.append,
                )
                supervisors[name] = stack.enter_context(supervisor)
            from .app import run_app

            app = _make_app(
                supervisors,
                {name: coming.result() for name, coming in loading.items()},
                rules,
                keys=keys,
                max_concurrent=max_concurrent,
                hosts=() if not keys.is_open or not is_loopback(listener) else (host, *LOOPBACK_NAMES),
                cors_origins=cors_origins,
                stored=stored,
                has_page=has_page,
                tracer=tracer,
                takes_adapters=bool(config.adapter_folder),
                image_hosts=image_hosts,
            )
            run_app(
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


def shared_out(configs: Mapping[str, EngineConfig], *, replicas: int) -> dict[str, EngineConfig]:
    """The configurations of several models on one machine: on a CPU each engine has its part of the cores.

    Raises InvalidRequest for what only one of them could have.
    """
    if len(configs) == 1:
        return dict(configs)
    found = {}
    for name, config in configs.items():
        if config.adapters:
            text = f"adapter {next(iter(config.adapters))!r}: it fits one of {len(configs)} models"
            raise InvalidRequest(f"{text}; load it with POST /v1/adapters?model=NAME, below --adapter-folder")
        if config.cache_events_url:
            text = f"cache_events_url={config.cache_events_url!r}: {len(configs)} models cannot publish at one address"
            raise InvalidRequest(f"{text}; leave it out", where="cache_events_url")
        if not config.num_threads and config.device.startswith("cpu"):
            engines = len(configs) * replicas * max(1, config.num_ranks)
            config = msgspec.structs.replace(config, num_threads=max(1, processor.num_cores() // engines))
        found[name] = config
    return found


# The engine's options that an encoder shares with the decoders beside it; the others are meant for those.
_OF_ENCODERS_TOO = ("model", "device", "max_waiting", "num_threads", "cpu_isa", "client_timeout_s", "log_level")


def _as_encoder(config: EngineConfig, *, beside_decoders: bool) -> EngineConfig:
    """It publishes no cached prefixes."""
    if beside_decoders:
        config = EngineConfig(**{name: getattr(config, name) for name in _OF_ENCODERS_TOO})
    return msgspec.structs.replace(config, prefix_cache=False)


@dataclass(frozen=True, slots=True)
class _Front:
    """The parts of the server that load beside the engine. Both are None where the model is an encoder, whose engine
    tokenizes its texts.
    """

    tokenizer: Tokenizer | None
    template: ModelTemplate | None


def _load_front(path: Path) -> _Front:
    from ..tokenizer import load_chat_template, load_tokenizer
    from .app import prepare_routes  # which takes as long as all the rest

    prepare_routes()
    if is_encoder(path):
        return _Front(None, None)
    tokenizer = load_tokenizer(path)
    template = load_chat_template(path, tokenizer)
    if template is not None:
        template.info()  # kept: the application asks for it
    return _Front(tokenizer, template)


def _tokens_of(loading: Future[_Front], ops: Sequence[AnyOp]) -> list[int]:
    from ...cluster.prompts import first_prompt  # tokenizers load beside the engine, not before it

    tokenizer = loading.result().tokenizer
    return [] if tokenizer is None else first_prompt(ops, tokenizer)


def _make_app(
    supervisors: Mapping[str, Supervising],
    fronts: Mapping[str, _Front],
    rules: Mapping[str, ModelRule],
    **options: Any,
) -> FastAPI:
    from .app import create_app

    if len(supervisors) == 1 and not rules:
        [(name, supervisor)] = supervisors.items()
        front = fronts[name]
        return create_app(
            supervisor.fleet, front.tokenizer, front.template, model_name=name, supervisor=supervisor, **options
        )
    from .models_app import ServedModel, create_models_app

    models = [
        ServedModel(name, supervisor.fleet, fronts[name].tokenizer, fronts[name].template, supervisor)
        for name, supervisor in supervisors.items()
    ]
    return create_models_app(models, rules, **options)


@contextlib.contextmanager
def _stop_by_signal() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, also while a model loads, so that the engine is always shut down. SIGBREAK
    is Ctrl-Break or a closed console, on Windows.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGBREAK") if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _reload_by_signal(keys: Keys) -> Iterator[None]:
    """SIGHUP reads the key file again. Without a key file SIGHUP ends the process, as it does by default. On a system
    without SIGHUP a thread looks whether the file has changed.
    """
    if keys.path is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    if not hasattr(signal, "SIGHUP"):
        is_over = threading.Event()
        watch = threading.Thread(target=_reload_by_time, args=(keys, keys.path, is_over), name="key-file", daemon=True)
        watch.start()
        try:
            yield
        finally:
            is_over.set()
            watch.join()
        return
    before = signal.signal(signal.SIGHUP, lambda number, frame: keys.reload())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _reload_by_time(keys: Keys, path: Path, is_over: threading.Event) -> None:
    seen = _changed_at(path)
    while not is_over.wait(KEY_FILE_LOOK_S):
        if (now := _changed_at(path)) != seen:
            seen = now
            keys.reload()


def _changed_at(path: Path) -> tuple[int, int] | None:
    """Differs once the file has been written again; None while it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def name_of(model: str) -> str:
    """The model's name for clients: an alias or hub name as it is, of a path the last part."""
    return Path(model).name if os.path.exists(model) else model
