"""The HTTP application of several models: one gate, one application per model behind it, and rules between them.

    gate (keys, limits) ─► /health, /fleet, /metrics, /v1/models ...       of all models
                        └► Dispatcher ─► the application of the model that the request names, or that its rule chooses

A request names its model in its body's ``model`` or the query's; one that names none goes to the first model.
"""

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import Message, Receive, Scope, Send

from ...cluster.supervisor import Replica, Supervised
from ...constrained.spec import GrammarError
from ...protocol import errors
from ...protocol.engine_client import EngineClient
from ...protocol.messages import Done, ProgramSettings, SelectMeta
from ...protocol.model_rules import AnswerCheck, ModelRule, Probe, Reason, Savings, check_rules
from ...protocol.ops import Close, Select, Text
from ...protocol.program_call import OpFailed, SubmitRefused
from ..config import StoreLimits
from ..tokenizer import ModelTemplate, Tokenizer
from . import answers as a
from . import faults
from .app import add_document, add_gate, app_of, model_app
from .metrics import ServerMetrics, split_name
from .openai_routes import model_card
from .openapi import answers, errors_as
from .operator_routes import fleet_routes
from .remote_images import AllowedHosts
from .response import running
from .response_store import ResponseStore
from .routed_bodies import ANSWERS, AnswerText, prompt_of
from .service import LONG_BODY_BYTES, Service, content_type_of, json_response, read_bytes
from .tenants import Keys, NamedModel, Sender, sender_of_request, tenant_of_user
from .tracing import Tracer

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model and its engines. The fields are the arguments of ``create_app``."""

    name: str
    client: EngineClient
    tokenizer: Tokenizer | None
    template: ModelTemplate | None
    supervisor: Supervised


def create_models_app(
    models: Sequence[ServedModel],
    rules: Mapping[str, ModelRule],
    *,
    keys: Keys | None = None,
    max_concurrent: int = 0,
    hosts: Collection[str] = (),
    cors_origins: Collection[str] = (),
    stored: StoreLimits | None = None,
    has_page: bool = True,
    tracer: Tracer | None = None,
    takes_adapters: bool = False,
    image_hosts: AllowedHosts | None = None,
) -> FastAPI:
    """As ``create_app``, for several models. A rule's models may be adapters that are loaded now.

    Raises InvalidRequest for two models, adapters or rules of one name, and for a rule that cannot work.
    """
    keys = keys or Keys({})
    names = [name for model in models for name in (model.name, *model.client.welcome.adapters)]
    for name in names:
        if names.count(name) > 1:
            raise errors.InvalidRequest(f"{name!r} is the name of two models or adapters; give each its own")
    check_rules(rules, names)
    if not takes_adapters:  # else a tenant may have the name of an adapter that comes later
        keys.check_models(names)
    savings = Savings(rules)
    metrics = ServerMetrics(keys, savings)
    store = ResponseStore(stored or StoreLimits())
    apps = {
        model.name: model_app(
            model.client,
            model.tokenizer,
            model.template,
            model_name=model.name,
            metrics=metrics,
            max_body_bytes=None,
            supervisor=model.supervisor,
            store=store,
            has_page=has_page,
            tracer=tracer,
            takes_adapters=takes_adapters,
            image_hosts=image_hosts,
            other_names=frozenset((*names, *rules)),
        )
        for model in models
    }
    services = [app.state.service for app in apps.values()]
    checks = {name: _check_of(name, rule.when.check) for name, rule in rules.items() if rule.when.check is not None}
    dispatcher = Dispatcher(apps, rules, checks, savings)
    app = app_of(services)
    app.include_router(fleet_routes(AllModels(services, metrics)), responses=errors_as(a.Error))
    app.include_router(_model_routes(dispatcher), responses=errors_as(a.Error))
    described = next((apps[model.name] for model in models if model.tokenizer is not None), apps[models[0].name])
    add_document(app, described, needs_key=not keys.is_open)
    app.router.default = dispatcher
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


def _model_routes(dispatcher: "Dispatcher") -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", responses=answers(a.ModelList))
    async def models() -> Response:
        """The models, their adapters and the rules, as far as the caller may use them."""
        return json_response({"object": "list", "data": [dispatcher.card(name) for name in dispatcher.names()]})

    @router.get("/v1/models/{name:path}", responses=answers(a.ModelCard))
    async def model(name: str) -> Response:
        """A model, an adapter or a rule."""
        return json_response(dispatcher.card(dispatcher.known(name)))

    return router


class AllModels:
    """The engines of all models as one fleet, for operators: replica 0 of ``small`` is ``small/0``."""

    def __init__(self, services: Sequence[Service], metrics: ServerMetrics) -> None:
        self._services = {service.model_name: service for service in services}
        self.model_name = ", ".join(self._services)
        self.metrics = metrics

    @property
    def supervisor(self) -> Supervised:
        return _Supervisors({name: _supervisor_of(service) for name, service in self._services.items()})

    @property
    def num_in_flight(self) -> int:
        return sum(service.num_in_flight for service in self._services.values())

    def ask_client(self, what: str, *, timeout_s: float = 10.0) -> Any:
        """The models' answers, numbers added."""
        return _sum([service.ask_client(what, timeout_s=timeout_s) for service in self._services.values()])


class _Supervisors:
    def __init__(self, supervisors: Mapping[str, Supervised]) -> None:
        self._supervisors = supervisors

    def replicas(self) -> list[Replica]:
        return [
            replace(replica, name=f"{name}/{replica.name}")
            for name, supervisor in self._supervisors.items()
            for replica in supervisor.replicas()
        ]

    def metrics(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return self.ask("metrics", timeout_s)

    def ask(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        return {
            f"{name}/{replica}": answer
            for name, supervisor in self._supervisors.items()
            for replica, answer in supervisor.ask(what, timeout_s).items()
        }

    def drain(self, replica: str, *, migrate: bool = False) -> Replica:
        model, number = split_name(replica)
        if model not in self._supervisors:
            known = ", ".join(found.name for found in self.replicas())
            raise errors.InvalidRequest(f"replica={replica!r} is not one of: {known}", where="replica")
        return replace(self._supervisors[model].drain(number, migrate=migrate), name=replica)


def _supervisor_of(service: Service) -> Supervised:
    assert service.supervisor is not None
    return service.supervisor


def _sum(values: Sequence[Any]) -> Any:
    """Mappings with the sums of their numbers; of other values the first."""
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    if isinstance(values[0], int | float) and not isinstance(values[0], bool):
        return sum(values)
    return values[0]


class _Named(msgspec.Struct):
    model: Any = None


_named = msgspec.json.Decoder(_Named)
_AnswerCheck = Callable[[Sequence[AnswerText]], bool]


class Dispatcher:
    """An ASGI application: hands each request to the application of its model.

    The bodies, their faults and the answers are those applications' own. ``checks``: of the rules that have one.
    """

    def __init__(
        self,
        apps: Mapping[str, FastAPI],
        rules: Mapping[str, ModelRule],
        checks: Mapping[str, _AnswerCheck],
        savings: Savings,
    ) -> None:
        self._apps = apps
        self._services: dict[str, Service] = {name: app.state.service for name, app in apps.items()}
        self._rules = rules
        self._checks = checks
        self._savings = savings
        self._default = next(iter(apps))
        self._max_body_bytes = max(service.max_body_bytes for service in self._services.values())

    def names(self) -> list[str]:
        """What the caller may name. A rule: where both of its models may be named."""
        found = [name for service in self._services.values() for name in service.model_names()]
        return found + [name for name, rule in self._rules.items() if rule.cheap in found and rule.strong in found]

    def known(self, name: str) -> str:
        """``name``, where it is one of ``names()``. Raises UnknownModel."""
        names = self.names()
        if name not in names:
            served = ", ".join(map(repr, names))
            raise errors.UnknownModel(f"the model {name!r} is not served here; this server has {served}", where="model")
        return name

    def card(self, name: str) -> dict[str, Any]:
        """What ``/v1/models`` says of it. A rule takes a prompt of the length that both of its models take."""
        rule = self._rules.get(name)
        if rule is None:
            return model_card(self._services[self._base_of(name)], name)
        cards = [self.card(rule.cheap), self.card(rule.strong)]
        return {**cards[0], "id": name, "max_model_len": min(card["max_model_len"] for card in cards)}

    def _base_of(self, name: str) -> str:
        """The model of ``name``, which is that or an adapter of it."""
        if name in self._apps:
            return name
        return next(base for base, service in self._services.items() if name in service.client.adapters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body, is_read, named = b"", False, request.query_params.get("model")
        if scope["method"] == "POST" and content_type_of(request) == "application/json":
            body = await read_bytes(request, self._max_body_bytes)
            in_body = await _beside(body, lambda: _model_in(body))
            if named and in_body and named != in_body:
                message = f"the query names the model {named!r}, the body {in_body!r}; give one"
                raise errors.InvalidRequest(message, where="model")
            named = in_body or named
            is_read = True

        def replay() -> Receive:
            """What an application reads the request from."""
            return _replayed(body, receive) if is_read else receive

        sender = sender_of_request()
        assert sender is not None  # the gate has named it
        if not named:
            await self._answer(self._default, sender, scope, replay(), send)
            return
        self.known(named)
        if (rule := self._rules.get(named)) is None:
            await self._answer_as(named, named, sender, scope, replay(), send)
        elif scope["method"] == "POST" and not is_read:  # the application says what it takes
            await self._answer_as(rule.cheap, named, sender, scope, replay(), send)
        else:
            await self._answer_by_rule(named, rule, body, sender, scope, replay, receive, send)

    async def _answer_by_rule(
        self,
        name: str,
        rule: ModelRule,
        body: bytes,
        sender: Sender,
        scope: Scope,
        replay: Callable[[], Receive],
        receive: Receive,
        send: Send,
    ) -> None:
        asked = await _beside(body, lambda: _read_asked(name, body, scope["path"]))
        check = self._checks.get(name)
        if check is not None and asked.get("stream"):
            text = f"stream=true: rule {name!r} has a check, which needs the whole answer"
            raise errors.Unsupported(f"{text}; leave out stream, or name a model", where="stream")
        reason = await self._met(rule, asked, sender, receive)
        if reason is None and check is not None:
            before = sender.completion_tokens
            kept = _KeptAnswer()
            await self._answer_as(rule.cheap, name, sender, scope, replay(), kept.send)
            if not kept.messages:  # the client has left
                return
            if await asyncio.to_thread(kept.holds, check, scope["path"]):
                self._count(name, rule.cheap, "cheap", kept.status, sender.completion_tokens - before)
                for message in kept.messages:
                    await send(_told(message, name, "cheap"))
                return
            scope["state"].pop("fault", None)  # of an answer that nobody gets
            self._savings.add_dropped(name, tokens=sender.completion_tokens - before)
            reason = "check"
        chosen, told = (rule.cheap, "cheap") if reason is None else (rule.strong, reason)
        before, status = sender.completion_tokens, 499

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(_told(message, name, told))

        await self._answer_as(chosen, name, sender, scope, replay(), sent)
        self._count(name, chosen, reason or "cheap", status, sender.completion_tokens - before)

    def _count(self, rule: str, model: str, reason: Reason, status: int, tokens: int) -> None:
        if status < 400:
            self._savings.add_answer(rule, model, reason, tokens=tokens)

    async def _met(self, rule: ModelRule, asked: Mapping[str, Any], sender: Sender, receive: Receive) -> Reason | None:
        """The condition that is met before the answer."""
        user = asked.get("user")
        tenant = sender.account.name or tenant_of_user(user if isinstance(user, str) else None)
        prompt = prompt_of(asked)
        reason = rule.when.met(tenant=tenant, prompt_chars=len(prompt))
        if reason is None and rule.when.probe is not None:
            base = self._base_of(rule.cheap)
            adapter = "" if base == rule.cheap else rule.cheap
            settings = ProgramSettings(tenant="" if sender.account.name else tenant, adapter=adapter, name="probe")
            if await _is_hard(rule.when.probe, prompt, self._services[base], settings, receive):
                reason = "probe"
        return reason

    async def _answer_as(
        self, model: str, named: str, sender: Sender, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """By ``model``, or an adapter, where the request says ``named``."""
        sender.alias = NamedModel(named, model)
        await self._answer(self._base_of(model), sender, scope, receive, send)

    async def _answer(self, base: str, sender: Sender, scope: Scope, receive: Receive, send: Send) -> None:
        """By the application of the model ``base``."""
        sender.model = base
        inner = {name: value for name, value in scope.items() if name not in _OF_AN_APP}
        try:
            await self._apps[base](inner, receive, send)
        finally:
            if "route" in inner:
                scope["route"] = inner["route"]  # the gate counts by it


# What the outer application has put into the scope for itself.
_OF_AN_APP = frozenset(("app", "router", "route", "endpoint", "path_params", "starlette.exception_handlers"))


async def _beside(body: bytes, read: Callable[[], Read]) -> Read:
    """``read()``, of a long body on a thread."""
    return read() if len(body) <= LONG_BODY_BYTES else await asyncio.to_thread(read)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The request again, whose ``body`` was read from ``receive``."""
    is_sent = False

    async def again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _model_in(body: bytes) -> str | None:
    """The body's model; None where it has none, or is not valid, as its application then says."""
    try:
        found = _named.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _read_asked(rule: str, body: bytes, path: str) -> dict[str, Any]:
    if path not in ANSWERS:
        text = f"rule {rule!r} chooses who writes a text, but {path} writes none that it could judge"
        raise errors.Unsupported(f"{text}; name a model", where="model")
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault = faults.Fault(400, f"the body is not valid JSON: {error}", code="invalid_json")
        raise faults.HttpError(fault) from None
    if not isinstance(found, dict):
        raise faults.HttpError(faults.Fault(400, "the body must be a JSON object", code="invalid_json"))
    return found


def _told(message: Message, rule: str, reason: str) -> Message:
    """``message`` with the headers that name the rule and its reason."""
    if message["type"] != "http.response.start":
        return message
    told = ((b"x-phloem-rule", rule.encode()), (b"x-phloem-reason", reason.encode()))
    return {**message, "headers": [*message.get("headers", ()), *told]}


class _KeptAnswer:
    """An answer that is looked at before the client gets it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.status = 499

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.messages.append(message)

    def holds(self, check: _AnswerCheck, path: str) -> bool:
        """Errors are answers too, except for that of a prompt which is too long for the cheap model."""
        body = json.loads(b"".join(message.get("body", b"") for message in self.messages))
        if self.status == 200:
            return check(list(ANSWERS[path](body)))
        return not (self.status == 400 and body.get("error", {}).get("code") == "context_length_exceeded")


def _check_of(name: str, check: AnswerCheck) -> _AnswerCheck:
    """Whether all answers of a response are good. Raises InvalidRequest for a schema that does not compile."""
    if check.holds is not None:
        text = f"rule {name!r}, when.check.holds: it is of programs; over HTTP give whole, regex or json_schema"
        raise errors.Unsupported(text, where="rules")
    pattern = None if check.regex is None else re.compile(check.regex, re.DOTALL)
    conforms = None if check.json_schema is None else _schema_check(name, check.json_schema)

    def is_good(answer: AnswerText) -> bool:
        if check.whole and answer.is_cut:
            return False
        if answer.text is None:
            return True
        if pattern is not None and not pattern.fullmatch(answer.text):
            return False
        return conforms is None or conforms(answer.text)

    return lambda found: all(map(is_good, found))


def _schema_check(name: str, schema: Mapping[str, Any]) -> Callable[[str], bool]:
    from ...constrained import compile
    from ...constrained.checker import byte_vocabulary

    vocabulary = byte_vocabulary()
    try:
        options = {"property_order": "any", "whitespace": "flexible"}
        grammar = compile("json_schema", json.dumps(schema), vocabulary, **options)
    except GrammarError as error:
        raise errors.InvalidRequest(f"rule {name!r}, when.check.json_schema: {error}", where="rules") from None

    def conforms(text: str) -> bool:
        matcher = grammar.matcher()
        return all(map(matcher.accept, text.strip().encode())) and matcher.accept(vocabulary.eos)

    return conforms


async def _is_hard(probe: Probe, prompt: str, service: Service, settings: ProgramSettings, receive: Receive) -> bool:
    """Asks the cheap model, whose service this is, as a program of the request's tenant."""
    ops = (
        Text(op=0, seq=0, text=probe.text(prompt)),
        Select(op=1, seq=0, choices=probe.choices, append=False),
        Close(op=2, seq=0),
    )
    async with running(service.bridge, ops, settings, receive) as bridged:
        while True:
            for event in await bridged.events():
                match event:
                    case Done(meta=SelectMeta() as meta):
                        return probe.is_hard(meta.scores)
                    case OpFailed(error=errors.PromptTooLong()) | SubmitRefused(error=errors.PromptTooLong()):
                        return True
                    case OpFailed(error=error) | SubmitRefused(error=error):
                        raise error
