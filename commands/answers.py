"""Where a terminal's answers come from: an engine of this process, a running one, or another project's chat server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..lang.api import assistant, function, system, user
from ..lang.backend.base_backend import BaseBackend
from ..lang.backend.chat_server import ChatServer
from ..lang.backend.http_client import HttpClient, NotOurs
from ..lang.backend.phloem_backend import PhloemBackend
from ..lang.backend.runtime_endpoint import RuntimeEndpoint
from ..lang.gen import gen
from ..protocol.errors import EngineLost, InvalidRequest, UnknownModel, Unsupported
from .sampling_flags import MAX_TOKENS

Message = Mapping[str, str]  # "role" and "content"
ROLES = {"system": system, "user": user, "assistant": assistant}
DEFAULT = "default"  # as a model's name: the first that a server has


@dataclass(frozen=True, slots=True)
class Wanted:
    """How an answer is sampled, and what it must match: at most one of ``json_schema``, ``regex`` and ``choices``."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()

    def gen_arguments(self) -> dict[str, Any]:
        if self.choices:
            return {**self.sampling, "choices": list(self.choices)}
        return {"max_tokens": MAX_TOKENS, **self.sampling, "json_schema": self.json_schema, "regex": self.regex}


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. ``first_s``: seconds until its first text, ``total_s`` until its end."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_s: float
    total_s: float


@function
def converse(s: Any, messages: Sequence[Message], wanted: Wanted) -> None:
    for message in messages:
        s += ROLES[message["role"]](message["content"])
    s += assistant(gen("answer", **wanted.gen_arguments()))


@function
def complete(s: Any, prompt: str, wanted: Wanted) -> None:
    s += prompt
    s += gen("answer", **wanted.gen_arguments())


class Asking:
    """One answer that is being generated: iterate over its text, then read ``reply()``.

    Leaving the iteration early cancels the generation.
    """

    def __init__(self, state: Any) -> None:
        self.text = ""
        self._state = state
        self._began_s = time.perf_counter()
        self._first_s = self._total_s = 0.0

    def __iter__(self) -> Iterator[str]:
        try:
            for piece in self._state.text_iter("answer"):
                if piece and not self.text:
                    self._first_s = time.perf_counter() - self._began_s
                self.text += piece
                yield piece
        except BaseException:
            self._state.cancel()
            raise
        self._total_s = time.perf_counter() - self._began_s

    def reply(self) -> Reply:
        meta = self._state.get_meta_info("answer") or {}
        reason = meta.get("finish_reason") or {}
        return Reply(
            self.text,
            reason.get("type") or "stop",
            prompt_tokens=meta.get("prompt_tokens") or 0,
            cached_tokens=meta.get("cached_tokens") or 0,
            completion_tokens=meta.get("completion_tokens") or 0,
            first_s=self._first_s,
            total_s=self._total_s,
        )


class Source:
    """A model that answers. ``name`` is shown to the user; ``adapter``: the low-rank adapter that answers."""

    def __init__(self, backend: BaseBackend, name: str, *, adapter: str = "") -> None:
        self.backend = backend
        self.name = name
        self._options: dict[str, Any] = {"backend": backend, "stream": True}
        if adapter:
            self._options["adapter"] = adapter

    def converse(self, messages: Sequence[Message], wanted: Wanted) -> Asking:
        """Generate the assistant's next turn."""
        self._check(wanted)
        return Asking(converse.run(messages, wanted, **self._options))

    def complete(self, prompt: str, wanted: Wanted) -> Asking:
        """Continue plain text."""
        self._check(wanted, is_raw=True)
        return Asking(complete.run(prompt, wanted, **self._options))

    def _check(self, wanted: Wanted, *, is_raw: bool = False) -> None:
        if isinstance(self.backend, PhloemBackend):
            return
        for is_asked, what in ((bool(wanted.choices), "choices are scored"), (is_raw, "plain text is continued")):
            if is_asked:
                raise Unsupported(f"{self.name}: {what} by Phloem's engines only; this server takes chats")


def source_at(url: str, *, api_key: str | None, model: str | None) -> Source:
    """The model at ``url``; ``model``: one of those that are served there, None: the first.

    Raises UnknownModel for another name, EngineLost where no server answers.
    """
    wanted = None if model == DEFAULT else model
    scheme = url.partition("://")[0]
    if scheme not in ("http", "https"):
        backend = RuntimeEndpoint(url)
        assert isinstance(backend, PhloemBackend)
        welcome = backend.client.welcome
        return _chosen(backend, (welcome.model, *welcome.adapters), wanted, url)
    base_url = url.rstrip("/").removesuffix("/v1")
    try:
        ours = PhloemBackend(HttpClient(base_url, api_key=api_key))
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{url!r} is not an address: {error}; give http://HOST:PORT") from None
    except NotOurs:
        names = _served(base_url, api_key)
        name = wanted or (names[0] if names else "")
        if names and name not in names:
            raise _unknown(name, names, url) from None
        return Source(ChatServer(base_url, model_name=name, api_key=api_key), name or url)
    names = _served(base_url, api_key)
    if wanted in names[1:] and wanted not in ours.client.welcome.adapters:  # another one of the server's models
        ours.shutdown()
        ours = PhloemBackend(HttpClient(base_url, api_key=api_key, model=wanted))
    return _chosen(ours, names, wanted, url)


def _chosen(backend: PhloemBackend, names: Sequence[str], wanted: str | None, url: str) -> Source:
    name = wanted or names[0]
    if name not in names:
        backend.shutdown()
        raise _unknown(name, names, url)
    return Source(backend, name, adapter=name if name in backend.client.welcome.adapters else "")


def _unknown(name: str, names: Sequence[str], url: str) -> UnknownModel:
    return UnknownModel(f"{url} does not serve {name!r}; it has: {', '.join(names)}")


def _served(base_url: str, api_key: str | None) -> tuple[str, ...]:
    """The names that ``GET /v1/models`` lists; empty where the server has no such page."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=10.0)
    except httpx.TransportError as error:
        raise EngineLost(f"{base_url}: {error or type(error).__name__}; is a server running there?") from None
    if answer.status_code == 404:
        return ()
    if answer.is_error:
        raise InvalidRequest(f"{base_url}/v1/models answers {answer.status_code}: {answer.text[:300]}")
    try:
        return tuple(str(model["id"]) for model in answer.json()["data"])
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{base_url}/v1/models: not the list of models of an OpenAI-like server") from None
