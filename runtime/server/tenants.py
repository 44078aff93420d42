"""Tenants: who may call this server, how much, and what each has used. They are read from a key file.

    [tenants.garden]
    keys = ["sha256:9f86..."]      # of a key that `phloem keys new garden` made
    requests_per_minute = 60
    tokens_per_minute = 20000

A key has 256 random bits, so one SHA-256 of it cannot be reversed by guessing. A slow hash such as scrypt protects
short passwords; here it would only add its cost to every request.
"""

import hashlib
import hmac
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from ...protocol.errors import InvalidRequest, RateLimited, UnknownModel
from ...protocol.messages import ProgramSettings, ProgramStats
from ...protocol.ops import AnyOp, Gen, Score, Select, Special, Text
from .tracing import TraceContext

logger = logging.getLogger(__name__)

KEY_PREFIX = "phloem-"
CHARS_PER_TOKEN = 4  # of a prompt whose tokens are not counted yet, as OpenAI estimates it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the key file. A limit of None is no limit.

    ``priority`` is added to that of a request, which must be 0 or more: lower runs first, so a tenant cannot pass those
    with a lower number. ``models``: names of the model and its adapters that the tenant may use; None: all.
    ``share_cache``: tenants with the same word share cached prefixes; without one a tenant has its own.
    ``operator``: the key opens the operators' pages too, which show every tenant's data.
    """

    keys: tuple[str, ...]
    requests_per_minute: AtLeastOne | None = None
    tokens_per_minute: AtLeastOne | None = None
    max_concurrent: AtLeastOne | None = None
    priority: int = 0
    models: tuple[str, ...] | None = None
    share_cache: str | None = None
    operator: bool = False


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, Tenant]


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """``key`` as the key file holds it."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def check_name(name: str) -> None:
    """Raise InvalidRequest for a name that no tenant can have."""
    if not _NAME.fullmatch(name):
        message = f"{name!r} is no name of a tenant; use 1 to 64 letters, digits, '.', '_' or '-'"
        raise InvalidRequest(message, where="tenants")


def read_key_file(path: Path) -> dict[str, Tenant]:
    """The tenants by name. Raises InvalidRequest that names the file, the place and what to change."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_KeyFile).tenants
        for name in found:
            check_name(name)
        _check_hashes(found)
    except OSError as error:
        raise InvalidRequest(f"key file {path}: {error.strerror}", where="key_file") from None
    except (ValueError, InvalidRequest) as error:  # TOML's and msgspec's errors are ValueErrors
        raise InvalidRequest(f"key file {path}: {error}", where="key_file") from None
    if not found:
        message = f"key file {path}: no tenants; add one with 'phloem keys new NAME'"
        raise InvalidRequest(message, where="key_file")
    return found


def _check_hashes(tenants: Mapping[str, Tenant]) -> None:
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        for place, text in enumerate(tenant.keys):
            if not _HASH.fullmatch(text):  # the text itself may be a key, so the message does not show it
                message = f"tenants.{name}.keys[{place}] is no 'sha256:' and 64 hex digits; 'phloem keys new' prints it"
                raise InvalidRequest(message)
            if (other := owners.setdefault(text, name)) != name:
                raise InvalidRequest(f"tenants {other!r} and {name!r} have a key in common; give each its own")


class Bucket:
    """A token bucket: ``limit`` a minute flow in, at most ``limit`` stay. Below zero the rest is owed."""

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._seen_s = now_s

    def level(self, now_s: float) -> float:
        self._level = min(self.limit, self._level + (now_s - self._seen_s) * self.limit / 60)
        self._seen_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until ``amount`` can be taken; 0: now."""
        return max(0.0, amount - self.level(now_s)) * 60 / self.limit

    def take(self, amount: float, now_s: float) -> None:
        """A negative ``amount`` gives back."""
        self._level = min(self.limit, self.level(now_s) - amount)

    def changed(self, limit: int | None, now_s: float) -> "Bucket | None":
        """The bucket under another limit; what was taken from this one stays taken."""
        if limit is None or limit == self.limit:
            return self if limit else None
        other = Bucket(limit, now_s)
        other.take(self.limit - self.level(now_s), now_s)
        return other


@dataclass(slots=True)
class Used:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by the limit: requests, tokens, concurrent


class Account:
    """What one tenant may still use and what it has used. ``clock`` counts seconds. Lives on the event loop."""

    def __init__(self, name: str, tenant: Tenant, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.used = Used()
        self.num_running = 0
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.update(tenant)

    def update(self, tenant: Tenant) -> None:
        """Take another version of the tenant's table."""
        self.tenant = tenant
        now_s = self._clock()
        self._requests = _updated(self._requests, tenant.requests_per_minute, now_s)
        self._tokens = _updated(self._tokens, tenant.tokens_per_minute, now_s)

    def begin_request(self) -> None:
        """Count a request, which ends with ``end_request``. Raises RateLimited where a limit is reached."""
        most = self.tenant.max_concurrent
        if most is not None and self.num_running >= most:
            raise self._refusal("concurrent", f"{self.num_running:,} requests are running, the limit is {most:,}", 1.0)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1, self._clock()):
                raise self._refusal("requests", f"the limit is {self._requests.limit:,} requests a minute", wait_s)
            self._requests.take(1, self._clock())
        self.num_running += 1
        self.used.requests += 1

    def end_request(self) -> None:
        self.num_running -= 1

    def admit(self, settings: ProgramSettings | None, model_name: str) -> ProgramSettings:
        """The settings that a program of this tenant runs with: its name, its part of the cache, its priority.

        Raises InvalidRequest where the request asks for another tenant's.
        """
        settings = settings or ProgramSettings()
        if not self.name:
            return settings
        if settings.tenant not in ("", self.name):
            message = f"tenant={settings.tenant!r}: the key belongs to {self.name!r}; leave the field out"
            raise InvalidRequest(message, where="tenant")
        if settings.priority < 0:
            message = f"priority={settings.priority}: must be 0 or more, to add to the key's {self.tenant.priority}"
            raise InvalidRequest(message, where="priority")
        self.check_model(settings.adapter or model_name)
        return msgspec.structs.replace(
            settings,
            tenant=self.name,
            priority=self.tenant.priority + settings.priority,
            cache_salt=f"{self._cache_name}/{settings.cache_salt}",
        )

    @property
    def _cache_name(self) -> str:
        """Before the first '/' of every salt, so no salt of a client reaches another tenant's prefixes."""
        shared = self.tenant.share_cache
        return f"tenant:{self.name}" if shared is None else f"shared:{shared}"

    def may_use(self, model: str) -> bool:
        return self.tenant.models is None or model in self.tenant.models

    def check_model(self, model: str) -> None:
        if not self.may_use(model):
            served = ", ".join(map(repr, self.tenant.models or ()))
            message = f"the model {model!r} is not served to {self.name!r}; this key may use {served}"
            raise UnknownModel(message, where="model")

    def reserve(self, ops: Sequence[AnyOp], context_len: int) -> float:
        """Take the tokens that ``ops`` may use, until ``settle``. Raises RateLimited where there are too few.

        A request that may use more than a minute's tokens waits for the whole of them.
        """
        if self._tokens is None:
            return 0.0
        amount = min(estimate(ops, context_len), self._tokens.limit)
        if wait_s := self._tokens.wait_s(amount, self._clock()):
            message = f"the limit is {self._tokens.limit:,} tokens a minute, and the request may use {amount:,}"
            raise self._refusal("tokens", message, wait_s)
        self._tokens.take(amount, self._clock())
        return amount

    def settle(self, reserved: float, stats: ProgramStats) -> None:
        """The program is over: what it did not use is given back, what it used beyond is owed."""
        self.used.prompt_tokens += stats.prompt_tokens
        self.used.cached_tokens += stats.cached_tokens
        self.used.completion_tokens += stats.generated_tokens
        if self._tokens is not None:
            self._tokens.take(stats.prompt_tokens + stats.generated_tokens - reserved, self._clock())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's ``x-ratelimit-*``, of the limits that there are."""
        found = []
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.level(self._clock())))
                reset = duration(bucket.wait_s(bucket.limit, self._clock()))
                for what, value in (("limit", bucket.limit), ("remaining", left), ("reset", reset)):
                    found.append((f"x-ratelimit-{what}-{name}".encode(), str(value).encode()))
        return found

    def report(self) -> dict[str, Any]:
        """For ``GET /usage``."""
        limits = {
            name: getattr(self.tenant, name) for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent")
        }
        left = {
            name: max(0, math.floor(bucket.level(self._clock())))
            for name, bucket in (("requests", self._requests), ("tokens", self._tokens))
            if bucket is not None
        }
        used = {name: getattr(self.used, name) for name in Used.__dataclass_fields__}
        return {"tenant": self.name, "running": self.num_running, "limits": limits, "remaining": left, "used": used}

    def _refusal(self, limit: str, message: str, wait_s: float) -> RateLimited:
        self.used.refused[limit] = self.used.refused.get(limit, 0) + 1
        text = f"{self.name}: {message}; try again in {duration(wait_s)}"
        return RateLimited(text, retry_after_s=wait_s)


def _updated(bucket: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if bucket is not None:
        return bucket.changed(limit, now_s)
    return None if limit is None else Bucket(limit, now_s)


def estimate(ops: Sequence[AnyOp], context_len: int) -> int:
    """Tokens that ``ops`` may use: of prompts about one for 4 characters, of answers all of ``max_tokens``."""
    total = 0
    for op in ops:
        match op:
            case Text() | Score():
                total += math.ceil(len(op.text) / CHARS_PER_TOKEN)
            case Special():
                total += len(op.ids)
            case Select():
                total += math.ceil(sum(map(len, op.choices)) / CHARS_PER_TOKEN)
            case Gen():
                total += op.n * min(op.params.max_tokens, context_len)
    return total


def duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds / 1000, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{round(rest, 3):g}s"


class Keys:
    """The keys that open this server, each with its account.

    Without any, every caller has the account ``everyone``, which has no name and no limits.
    """

    def __init__(
        self, tenants: Mapping[str, Tenant], *, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self.everyone = Account("", Tenant(keys=(), operator=True), clock=clock)
        self._clock = clock
        self._served: frozenset[str] | None = None
        self._accounts: dict[str, Account] = {}
        self._hashes: list[tuple[bytes, Account]] = []
        self._take(tenants)

    @classmethod
    def of_file(cls, path: Path) -> "Keys":
        return cls(read_key_file(path), path=path)

    @classmethod
    def of_one(cls, api_key: str) -> "Keys":
        """One key without a name or limits."""
        return cls({"": Tenant(keys=(hash_of(api_key),), operator=True)})

    @property
    def is_open(self) -> bool:
        """No key is asked for."""
        return not self._hashes and self.path is None

    @property
    def accounts(self) -> Collection[Account]:
        return self._accounts.values()

    def account(self, key: bytes) -> Account | None:
        """Whose ``key`` it is. Every hash is compared, each in constant time."""
        if self.is_open:
            return self.everyone
        presented = hashlib.sha256(key).digest()
        found = None
        for known, account in self._hashes:
            if hmac.compare_digest(known, presented):
                found = account
        return found

    def check_models(self, served: Collection[str]) -> None:
        """Raise InvalidRequest for a tenant's model that is not ``served``, now and whenever the file is read again."""
        self._served = frozenset(served)
        self._check({account.name: account.tenant for account in self.accounts})

    def reload(self) -> None:
        """Read the file again. One that is not valid changes nothing, and the log says why."""
        if self.path is None:
            return
        try:
            tenants = read_key_file(self.path)
            self._check(tenants)
        except InvalidRequest as error:
            logger.error("%s; the keys stay as they were", error.message)
            return
        self._take(tenants)
        logger.warning("key file %s was read again: %d tenants", self.path, len(tenants))

    def _check(self, tenants: Mapping[str, Tenant]) -> None:
        for name, tenant in tenants.items():
            unknown = [] if self._served is None else sorted({*(tenant.models or ())} - self._served)
            if unknown:
                served = ", ".join(map(repr, sorted(self._served or ())))
                message = (
                    f"key file {self.path}: tenants.{name}.models: {unknown[0]!r} is not served here, only {served}"
                )
                raise InvalidRequest(message, where="key_file")

    def _take(self, tenants: Mapping[str, Tenant]) -> None:
        accounts = {}
        for name, tenant in tenants.items():
            known = self._accounts.get(name)
            if known is not None:
                known.update(tenant)
            accounts[name] = known or Account(name, tenant, clock=self._clock)
        self._accounts = accounts
        self._hashes = [
            (bytes.fromhex(text.removeprefix("sha256:")), account)
            for account in accounts.values()
            for text in account.tenant.keys
        ]


def presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key of a request: ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's clients send it."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


class NamedModel(NamedTuple):
    """``named``: what a request says, and ``model`` what it means by that: a model of this server, or an adapter."""

    named: str
    model: str


@dataclass(slots=True)
class Sender:
    """Of one HTTP request. The tokens are those of its generations that have ended.

    ``trace``: the request's span, or, where the server makes none, the caller's. ``model``: whose engines answer, where
    the server has several; ``alias``: what the request names, there.
    """

    account: Account
    request_id: str
    trace: TraceContext | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    alias: NamedModel | None = None


_sender: ContextVar[Sender | None] = ContextVar("sender", default=None)


def set_sender(sender: Sender) -> None:
    """For the task of one request, and the tasks and threads that it starts."""
    _sender.set(sender)


def sender_of_request() -> Sender | None:
    """Who sent the request that this task answers; None outside of requests."""
    return _sender.get()


def tenant_of_user(user: str | None) -> str:
    """The tenant of a request that names an end user. Where keys have tenants, the key alone says which it is."""
    sender = sender_of_request()
    return (user or "") if sender is None or not sender.account.name else ""
