"""A server with OpenAI's chat completions as a backend, over httpx alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx

from ...protocol.errors import EngineLost, InvalidRequest, PhloemError
from .chat_api import OpenAIFormat, chat_messages
from .drivers import loop_of
from .executor import StreamExecutor
from .token_usage import TokenUsage

_PATH = "/v1/chat/completions"
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class ChatServer(OpenAIFormat):
    """The model ``model_name`` of the server at ``base_url``, the address without ``/v1``."""

    is_chat_model = True
    has_own_loop = True  # the async client's connections belong to one event loop

    def __init__(self, base_url: str, *, model_name: str, api_key: str | None = None) -> None:
        self.base_url = base_url
        self.model_name = model_name
        self.token_usage = TokenUsage()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT)
        self._async_http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_TIMEOUT)

    def create(self, **request: Any) -> Any:
        if request.get("stream"):
            return self._events(request)
        try:
            answer = self._http.post(_PATH, json=request)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        self._check(answer)
        return _read(answer.text)

    async def create_async(self, **request: Any) -> Any:
        if request.get("stream"):
            return self._events_async(request)
        try:
            answer = await self._async_http.post(_PATH, json=request)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        self._check(answer)
        return _read(answer.text)

    def prompt(self, s: StreamExecutor) -> dict[str, Any]:
        return {"messages": chat_messages(s, "OpenAI")}

    def shutdown(self) -> None:
        """Close the connections, which ends what runs."""
        self._http.close()
        loop_of(self).stop(self._async_http.aclose)

    def _events(self, request: dict[str, Any]) -> Iterator[Any]:
        try:
            with self._http.stream("POST", _PATH, json=request) as answer:
                if answer.is_error:
                    answer.read()
                self._check(answer)
                for line in answer.iter_lines():
                    if (event := self._event(line)) is not None:
                        yield event
        except httpx.TransportError as error:
            raise self._lost(error) from error

    async def _events_async(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        try:
            async with self._async_http.stream("POST", _PATH, json=request) as answer:
                if answer.is_error:
                    await answer.aread()
                self._check(answer)
                async for line in answer.aiter_lines():
                    if (event := self._event(line)) is not None:
                        yield event
        except httpx.TransportError as error:
            raise self._lost(error) from error

    def _event(self, line: str) -> Any:
        """The event of a line of the stream; None where it has none."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return None
        event = _read(data)
        if event.error is not None:
            raise PhloemError(f"{self.base_url}: {event.error.message or data}")
        return event

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_error:
            try:
                said = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                said = answer.text[:300]
            kind = InvalidRequest if answer.status_code < 500 else PhloemError
            raise kind(f"{self.base_url}: {answer.status_code} {said}")

    def _lost(self, error: Exception) -> EngineLost:
        return EngineLost(f"{self.base_url}: {error or type(error).__name__}; is a server running there?")


class _Fields(SimpleNamespace):
    """A JSON object; a field that it does not have is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _read(text: str) -> Any:
    try:
        return json.loads(text, object_hook=lambda found: _Fields(**found))
    except ValueError as error:
        raise PhloemError(f"the server's answer is not JSON: {error}: {text[:100]!r}") from None
