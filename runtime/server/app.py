"""The HTTP application, and its life: put together by ``create_app``, run in front of an engine by ``serve``.

Never reads the environment and never prints; what a person should see goes to ``on_ready`` and to the log.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ..config import EngineConfig
from ..protocol import errors
from ..protocol.client import Client
from ..tokenizer import ChatTemplate, Tokenizer, load_chat_template, load_tokenizer
from . import faults
from .flight import Bridge
from .gate import LOOPBACK_NAMES, Gate
from .listener import is_loopback, listen, url_of
from .metrics import ServerMetrics
from .native_routes import native_routes
from .openai_routes import openai_routes
from .program_routes import program_routes
from .service import Service, fault_response

logger = logging.getLogger(__name__)

GRACE_S = 5  # what running answers get to end when the server is told to stop


def create_app(
    client: Client,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    model_name: str,
    api_key: str | None = None,
    hosts: Collection[str] = (),
    cors_origins: Collection[str] = (),
    max_body_bytes: int | None = None,
) -> FastAPI:
    """An application that answers through ``client``, which stays the caller's to close.

    Without a ``template`` (a base model) chats are refused by name. ``hosts``: host names that requests may use (empty:
    any). ``cors_origins``: web origins that may call (none). ``max_body_bytes``: the engine's limit for one submit.
    """
    metrics = ServerMetrics()
    service = Service(
        client=client,
        tokenizer=tokenizer,
        template=template,
        model_name=model_name,
        max_body_bytes=client.welcome.limits.max_submit_bytes if max_body_bytes is None else max_body_bytes,
        bridge=Bridge(client),
        metrics=metrics,
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.bridge.close()

    app = FastAPI(title="Phloem", openapi_url=None, lifespan=lifespan)
    app.include_router(openai_routes(service))
    app.include_router(native_routes(service))
    app.include_router(program_routes(service))
    app.add_exception_handler(errors.PhloemError, _on_phloem_error)
    app.add_exception_handler(faults.HttpError, _on_http_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Gate, api_key=api_key, hosts=hosts, metrics=metrics)
    if cors_origins:  # outside the gate: a browser's preflight carries no key
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    return app


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    model_name: str | None = None,
    cors_origins: Collection[str] = (),
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Start an engine process and answer HTTP until SIGINT or SIGTERM; 0 after a clean end.

    The port is taken before the model loads. ``on_ready`` is called with the address once requests are answered.
    Raises a PhloemError when the address, the model or the configuration cannot be used.
    """
    from ..llm import Runtime  # an application alone needs no engine of its own

    with listen(host, port) as listener, contextlib.suppress(KeyboardInterrupt), _stop_by_signal():
        if not is_loopback(listener) and api_key is None:
            logger.warning("%s can be reached from other machines and asks for no API key", url_of(listener))
        with Runtime(config) as runtime:
            welcome = runtime.client.welcome
            tokenizer = load_tokenizer(welcome.model_path)
            app = create_app(
                runtime.client,
                tokenizer,
                load_chat_template(welcome.model_path, tokenizer),
                model_name=model_name or _name_of(config.model),
                api_key=api_key,
                hosts=() if api_key is not None or not is_loopback(listener) else (host, *LOOPBACK_NAMES),
                cors_origins=cors_origins,
            )
            _run(app, listener, on_ready)
    return 0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def _run(app: FastAPI, listener: socket.socket, on_ready: Callable[[str], None] | None) -> None:
    """Answer requests on ``listener`` until a signal; running answers get ``GRACE_S`` to end."""
    url = url_of(listener)

    def ready() -> None:
        logger.info("serving at %s", url)
        if on_ready is not None:
            on_ready(url)

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=GRACE_S, server_header=False
    )
    asyncio.run(_Server(config, ready).serve(sockets=[listener]))


@contextlib.contextmanager
def _stop_by_signal() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, also while a model loads, so that the engine is always shut down."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's affair
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _name_of(model: str) -> str:
    """What the model is called towards clients: an alias or hub name as it is, a path by its last part."""
    return Path(model).name if os.path.exists(model) else model


async def _on_phloem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.PhloemError)
    fault = faults.of_error(error)
    if fault.status >= 500:
        logger.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error.message)
    return fault_response(fault)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, faults.HttpError)
    return fault_response(error.fault)


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return fault_response(faults.Fault(error.status_code, message, code="unknown_url"))


async def _on_bug(request: Request, error: Exception) -> Response:
    """Logged with its trace by the server that runs us."""
    return fault_response(faults.Fault(500, "internal error; the server's log has its trace", "server_error"))
