"""The HTTP application: ``create_app`` makes it, ``run_app`` runs it on a socket."""

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import re
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.supervisor import Supervised
from ...protocol import errors
from ...protocol.engine_client import EngineClient
from ..config import ConnectionLimits, StoreLimits
from ..tokenizer import ModelTemplate, Tokenizer
from . import answers as a
from . import faults
from .adapter_routes import adapter_routes
from .anthropic_routes import anthropic_routes
from .bridge import Bridge
from .connection import connection_class
from .encoder_routes import encoder_routes
from .listener import Tls, url_of
from .logs import log_request
from .metrics import ServerMetrics
from .native_routes import info_routes, native_routes
from .openai_routes import openai_routes
from .openapi import answers, document, errors_as
from .operator_routes import operator_routes
from .page import page_routes
from .program_routes import program_routes
from .remote_images import AllowedHosts, RemoteImages
from .response_store import ResponseStore
from .responses_routes import responses_routes
from .service import Service, fault_response, json_response
from .tenants import Account, Keys, Sender, presented_key, set_sender
from .tokenizer_routes import tokenizer_routes
from .tracing import OpenSpan, Tracer, read_context

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")  # a client's own; another is replaced

OPEN_PATHS = re.compile(r"/health|/health/live|/|/page/.*")
# What every key opens. The other paths show or change what all tenants share, so they need an operator's key.
TENANT_PATHS = re.compile(
    r"/v1/(?!adapters|(un)?load_lora_adapter).*|/generate|/tokenize|/detokenize|/rerank|/classify|/usage|/get_model_info|/version|/openapi\.json"
)
GRACE_S = 5  # for running answers to end when the server stops
LAST_WORDS_S = 1  # for their errors to be sent after that
_BUG = faults.Fault(500, "internal error; the server's log has its trace", "server_error")


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    template: ModelTemplate | None,
    *,
    model_name: str,
    api_key: str | None = None,
    keys: Keys | None = None,
    max_concurrent: int = 0,
    hosts: Collection[str] = (),
    cors_origins: Collection[str] = (),
    max_body_bytes: int | None = None,
    supervisor: Supervised | None = None,
    stored: StoreLimits | None = None,
    has_page: bool = True,
    tracer: Tracer | None = None,
    takes_adapters: bool = False,
    image_hosts: AllowedHosts | None = None,
) -> FastAPI:
    """An application that answers through ``client``; the caller closes the client.

    Without a ``tokenizer`` the model is an encoder, whose routes are those of ``encoder_routes`` and of operators.
    Without a ``template`` (a base model) chat requests are refused. ``keys``: who may call; ``api_key`` is short for
    one key without limits. ``max_concurrent``: requests that may be answered at once, 0: any number. ``hosts``: host
    names that requests may use (empty: any). ``cors_origins``: web origins that may call (none). ``max_body_bytes``:
    the engine's limit for one submit.
    ``has_page``: whether ``/`` shows the page. ``tracer``: makes the spans of requests; None: there are none.
    ``takes_adapters``: whether operators can load adapters, which the engine's ``adapter_folder`` holds.
    ``image_hosts``: from which images are fetched; None: from none.
    ``supervisor``: of the client's engines, for the pages of operators. ``stored``: limits of the stored responses.
    """
    keys = keys or (Keys.of_one(api_key) if api_key else Keys({}))
    if not takes_adapters:  # else a tenant may have the name of an adapter that comes later
        keys.check_models((model_name, *client.welcome.adapters))
    metrics = ServerMetrics(keys)
    app = model_app(
        client,
        tokenizer,
        template,
        model_name=model_name,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        supervisor=supervisor,
        store=ResponseStore(stored or StoreLimits()),
        has_page=has_page,
        tracer=tracer,
        takes_adapters=takes_adapters,
        image_hosts=image_hosts,
    )
    add_document(app, app, needs_key=not keys.is_open)
    add_gate(
        app,
        keys=keys,
        metrics=metrics,
        max_concurrent=max_concurrent,
        hosts=hosts,
        cors_origins=cors_origins,
        tracer=tracer,
    )
    return app


def model_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    template: ModelTemplate | None,
    *,
    model_name: str,
    metrics: ServerMetrics,
    max_body_bytes: int | None,
    supervisor: Supervised | None,
    store: ResponseStore,
    has_page: bool,
    tracer: Tracer | None,
    takes_adapters: bool,
    image_hosts: AllowedHosts | None,
    other_names: frozenset[str] = frozenset(),
) -> FastAPI:
    """The routes of one model, without a gate. ``app.state.service`` is its service."""
    service = Service(
        client=client,
        decoder_tokenizer=tokenizer,
        template=template,
        model_name=model_name,
        version=importlib.metadata.version("phloem"),
        max_body_bytes=client.welcome.limits.max_submit_bytes if max_body_bytes is None else max_body_bytes,
        bridge=Bridge(client, model_name, tracer),
        metrics=metrics,
        supervisor=supervisor,
        takes_adapters=takes_adapters,
        remote_images=RemoteImages(image_hosts) if image_hosts else None,
        other_names=other_names,
    )
    app = app_of([service])
    app.state.service = service
    for router in _encoder_routers(service) if tokenizer is None else _decoder_routers(service, store, has_page):
        app.include_router(router, responses=errors_as(a.Error))
    if tokenizer is not None:
        app.include_router(anthropic_routes(service), responses=errors_as(a.MessagesError))
    return app


def prepare_routes() -> None:
    """Import what FastAPI imports with a process's first route: the models of an older pydantic, 25 ms."""
    APIRouter().add_api_route("/", prepare_routes, response_model=a.Error)


def app_of(services: Sequence[Service]) -> FastAPI:
    """An application without routes, which closes ``services``. ``app.state.end_answers`` ends what they answer."""

    def end_answers() -> None:
        for service in services:
            service.bridge.close()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        end_answers()
        for service in services:
            service.threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    app.state.end_answers = end_answers
    app.add_exception_handler(errors.PhloemError, _on_phloem_error)
    app.add_exception_handler(faults.HttpError, _on_http_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(RequestValidationError, _on_wrong_query)
    return app


def add_document(app: FastAPI, described_app: FastAPI, *, needs_key: bool) -> None:
    """``/openapi.json`` of the routes of ``described_app``."""

    @functools.cache
    def described() -> dict[str, Any]:
        return document(described_app, version=importlib.metadata.version("phloem"), needs_key=needs_key)

    @app.get("/openapi.json", responses=answers(dict[str, Any]) | errors_as(a.Error))
    async def openapi_json() -> Response:
        """This document."""
        return json_response(await asyncio.to_thread(described))


def add_gate(
    app: FastAPI,
    *,
    keys: Keys,
    metrics: ServerMetrics,
    max_concurrent: int,
    hosts: Collection[str],
    cors_origins: Collection[str],
    tracer: Tracer | None,
) -> None:
    app.add_middleware(Gate, keys=keys, hosts=hosts, metrics=metrics, max_concurrent=max_concurrent, tracer=tracer)
    if cors_origins:  # outside the gate: a browser's preflight carries no key
        app.add_middleware(
            Cors,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )


def _encoder_routers(service: Service) -> list[APIRouter]:
    return [encoder_routes(service), info_routes(service), operator_routes(service)]


def _decoder_routers(service: Service, store: ResponseStore, has_page: bool) -> list[APIRouter]:
    return [
        openai_routes(service),
        adapter_routes(service),
        responses_routes(service, store),
        native_routes(service),
        info_routes(service),
        operator_routes(service),
        program_routes(service),
        tokenizer_routes(service),
        *([page_routes()] if has_page else []),
    ]


def _request_id_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The request's own id, or a new one where it has none that may be returned."""
    own = headers.get(b"x-request-id", b"")
    return own if _REQUEST_ID.fullmatch(own) else uuid.uuid4().hex.encode()


class Cors(CORSMiddleware):
    """Starlette's, whose answers to preflights have a request id as all answers do."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.headers["x-request-id"] = _request_id_of(dict(request_headers.raw)).decode()
        return response


class Gate:
    """ASGI middleware. ``hosts``: the names by which requests may call this server (empty: any).

    Without a key, a server on loopback answers only to loopback names: a web page that has bound its own name to
    127.0.0.1 (DNS rebinding) gets nothing. Limits count POST requests: all that let the engine work are POSTs. These
    have spans, and other requests that come with a ``traceparent``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        hosts: Collection[str],
        metrics: ServerMetrics,
        max_concurrent: int,
        tracer: Tracer | None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = frozenset(hosts)
        self._metrics = metrics
        self._max_concurrent = max_concurrent
        self._tracer = tracer
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id_of(headers)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        status = 499  # without a response, the client has disconnected
        caller = read_context(headers)
        span = None
        if self._tracer is not None and (caller is not None or scope["method"] == "POST"):
            span = self._tracer.start(scope["method"], caller, kind="server")
        sender = Sender(self._keys.everyone, request_id.decode(), caller if span is None else span.context)
        set_sender(sender)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                limits = sender.account.headers() if is_limited else ()
                trace = () if sender.trace is None else ((b"traceparent", sender.trace.traceparent),)
                added = (*message.get("headers", ()), (b"x-request-id", request_id), *trace, *limits)
                message = {**message, "headers": list(added)}
            await send(message)

        is_limited = scope["method"] == "POST"
        is_begun = False
        begun_s = time.perf_counter()
        self._metrics.in_flight.inc()
        try:
            self._check_host(headers)
            sender.account = self._account(scope["path"], headers)
            if is_limited:
                self._begin(sender.account)
                is_begun = True
            await self._app(scope, receive, counted)
        # errors of this gate: those of the routes are answered inside
        except faults.HttpError as error:
            await fault_response(error.fault, scope)(scope, receive, counted)
        except errors.RateLimited as error:
            await fault_response(faults.of_error(error), scope)(scope, receive, counted)
        except Exception:  # a bug; uvicorn logs the trace
            if status == 499:
                await fault_response(_BUG, scope)(scope, receive, counted)
            raise
        except asyncio.CancelledError:  # by the server's end alone, which waits no longer
            logger.info("%s %s was cut off by the server's end", scope["method"], scope["path"])
        finally:
            if is_begun:
                self._num_running -= 1
                sender.account.end_request()
            self._metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.responses.labels(route, str(status)).inc()
            fault = scope["state"].get("fault") or ("disconnected" if status == 499 else None)
            if fault is not None:
                self._metrics.errors.labels(fault).inc()
            if span is not None:
                _end_span(span, scope, sender, status=status, route=route, fault=fault)
            log_request(
                scope["method"],
                scope["path"],
                status,
                seconds=round(time.perf_counter() - begun_s, 4),
                **({} if fault is None else {"error": fault}),
                **({"tenant": sender.account.name} if sender.account.name else {}),
                **_tokens_of(sender),
            )

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._hosts and name not in self._hosts:
            message = f"this server does not answer to the host name {name!r}; start it with an API key or another host"
            raise faults.HttpError(faults.Fault(403, message, "permission_error", code="host_not_allowed"))

    def _account(self, path: str, headers: Mapping[bytes, bytes]) -> Account:
        """Of the request's key."""
        if OPEN_PATHS.fullmatch(path):
            return self._keys.everyone
        account = self._keys.account(presented_key(headers))
        if account is None:
            message = "missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise faults.HttpError(faults.Fault(401, message, "authentication_error", code="invalid_api_key"))
        if not account.tenant.operator and not TENANT_PATHS.fullmatch(path):
            message = f"{path} shows what all tenants share; it needs a key with 'operator = true' in the key file"
            raise faults.HttpError(faults.Fault(403, message, "permission_error", code="operators_only"))
        return account

    def _begin(self, account: Account) -> None:
        most = self._max_concurrent
        if most and self._num_running >= most:
            message = f"{self._num_running:,} requests are being answered, which is the limit here; try again later"
            raise faults.HttpError(faults.Fault(429, message, "rate_limit_error", code="overloaded"))
        account.begin_request()
        self._num_running += 1


def _end_span(span: OpenSpan, scope: Scope, sender: Sender, *, status: int, route: str, fault: str | None) -> None:
    """A refusal by a status below 499 is the client's error, not the span's."""
    about: dict[str, str | int] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.route": route,
        "http.response.status_code": status,
        "phloem.request_id": sender.request_id,
    }
    if sender.account.name:
        about["phloem.tenant"] = sender.account.name
    if fault is not None:
        about["error.type"] = fault
    is_error = fault is not None and not 400 <= status < 499
    span.end(about, name=f"{scope['method']} {route}", error=fault if is_error and fault else "")


def _tokens_of(sender: Sender) -> dict[str, int]:
    """For the log; empty where the request has generated nothing."""
    found = {"prompt_tokens": sender.prompt_tokens, "completion_tokens": sender.completion_tokens}
    return found if any(found.values()) else {}


class _Server(uvicorn.Server):
    """``end_answers`` is called ``GRACE_S`` after the server was told to stop, if answers still run then."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None],
        is_over: Callable[[], bool],
        end_answers: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._is_over = is_over
        self._end_answers = end_answers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        return self._is_over() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_all())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_all(self) -> None:
        """End the answers in an orderly way, then cut the connections whose clients do not read or send."""
        await asyncio.sleep(GRACE_S)
        self._end_answers()
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def run_app(
    app: FastAPI,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None,
    *,
    is_over: Callable[[], bool],
    limits: ConnectionLimits,
    tls: Tls | None = None,
) -> None:
    """Answer requests on ``listener`` until a signal or ``is_over()``; running answers get ``GRACE_S`` to end.

    Answers that have not ended by then end with an error.
    """
    url = url_of(listener, tls)

    def ready() -> None:
        logger.info("serving at %s", url)
        if on_ready is not None:
            on_ready(url)

    config = uvicorn.Config(
        app,
        http=connection_class(limits),
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]  # declared int, given to call_later
        timeout_graceful_shutdown=GRACE_S + 2 * LAST_WORDS_S,
        server_header=False,
        **_tls_options(tls),
    )
    asyncio.run(_Server(config, ready, is_over, app.state.end_answers).serve(sockets=[listener]))


def _tls_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    asks_clients = {} if tls.ca is None else {"ssl_ca_certs": str(tls.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key), **asks_clients}


async def _on_phloem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.PhloemError)
    fault = faults.of_error(error)
    if fault.status >= 500:
        logger.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error.message)
    return fault_response(fault, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, faults.HttpError)
    return fault_response(error.fault, request.scope)


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = fault_response(faults.Fault(error.status_code, message, code="unknown_url"), request.scope)
    response.headers.update(error.headers or {})  # a 405 says which methods are allowed
    return response


async def _on_wrong_query(request: Request, error: Exception) -> Response:
    """A wrong value in the path or the query; bodies are read by ``Service``."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    message = f"{name}={str(first['input'])[:60]!r}: {first['msg'].replace('Input should be', 'must be')}"
    return fault_response(faults.Fault(400, message, param=name, code="invalid_value"), request.scope)
