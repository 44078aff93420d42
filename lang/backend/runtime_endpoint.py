"""The backend of a running server, by its address: whole programs for ours, ``/generate`` calls for another one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx

from ...protocol.client import Client
from ...protocol.errors import EngineLost, InvalidRequest, PhloemError
from ..chat_template import get_chat_template, get_chat_template_by_model_path
from ..choices import ChoicesDecision, ChoicesSamplingMethod, draw, mean_logprob, token_length_normalized
from ..expressions import REGEX_OF_DTYPE
from ..sampling_params import SglSamplingParams
from .base_backend import BaseBackend
from .executor import StreamExecutor
from .http_client import RECONNECT_S, HttpClient, NotOurs
from .phloem_backend import PhloemBackend


def RuntimeEndpoint(
    base_url: str,
    api_key: str | None = None,
    verify: str | bool | None = None,
    chat_template_name: str | None = None,
    model: str | None = None,
    reconnect_s: float | None = None,
) -> BaseBackend:
    """The backend at ``base_url``. The other arguments are for ``http://`` and ``https://``.

    Our server receives whole programs, also over ``http://``. Another server, or ours with ``chat_template_name`` (role
    markers as text), receives one ``/generate`` call per generation. ``model``: one of the models of our server.
    ``reconnect_s``: how long a program waits for our server to come back when its connection breaks, 30 s by default;
    it goes on where it was.
    """
    scheme = base_url.partition("://")[0]
    if scheme in ("tcp", "ipc"):
        refused: dict[str, object] = {
            "api_key": api_key,
            "verify": verify,
            "chat_template_name": chat_template_name,
            "model": model,
            "reconnect_s": reconnect_s,
        }
        for name, value in refused.items():
            if value is not None:
                raise InvalidRequest(f"{name}: a {scheme}:// runtime takes none; its model brings its own template")
        return PhloemBackend(Client(base_url))
    if scheme in ("http", "https"):
        if chat_template_name is None:
            with contextlib.suppress(NotOurs):
                wait_s = RECONNECT_S if reconnect_s is None else reconnect_s
                client = HttpClient(base_url, api_key=api_key, verify=verify, model=model, reconnect_s=wait_s)
                return PhloemBackend(client)
        if reconnect_s is not None:
            text = (
                f"reconnect_s={reconnect_s:g}: only a program sent whole to a server of Phloem can go on; leave it out"
            )
            raise InvalidRequest(text)
        if model is not None:
            raise InvalidRequest(
                f"model={model!r}: only a server of Phloem that gets whole programs has several models"
            )
        return HttpBackend(base_url, api_key, verify, chat_template_name)
    raise InvalidRequest(f"{base_url!r}: must begin with http://, https://, tcp:// or ipc://")


class HttpBackend(BaseBackend):
    """A server with SGLang's ``/generate``, ours included; one kept-alive connection per waiting generation."""

    served_settings = BaseBackend.served_settings | {"adapter"}

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            verify=True if verify is None else verify,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=self.max_threads),
        )
        self.model_info: dict[str, Any] = self._call("GET", "/get_model_info")
        self.model_name = self.model_info["model_path"]
        self.chat_template = (
            get_chat_template(chat_template_name)
            if chat_template_name
            else get_chat_template_by_model_path(self.model_info["model_path"])
        )

    def flush_cache(self) -> bool:
        self._call("POST", "/flush_cache")
        return True

    def get_server_info(self) -> dict[str, Any]:
        return self._call("GET", "/server_info")

    def shutdown(self) -> None:
        self._http.close()

    def cache_prefix(self, prefix_str: str) -> None:
        self._prefill(prefix_str, "")

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        if s.text_:
            self._prefill(s.text_, s.settings.adapter)

    def _prefill(self, text: str, adapter: str) -> None:
        request = {"text": text, "sampling_params": {"max_new_tokens": 0}}
        self._call("POST", "/generate", {**request, **_adapted(adapter)})

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        answer = self._call("POST", "/generate", self._request(s, sampling_params))
        if isinstance(answer, list):
            return [one["text"] for one in answer], answer[0]["meta_info"]
        return answer["text"], answer["meta_info"]

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        request = {**self._request(s, sampling_params), "stream": True}
        sent = 0
        try:
            with self._http.stream("POST", "/generate", json=request) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise PhloemError(f"{self.base_url}/generate: {event['error']}")
                    text = event["text"]  # the whole text so far
                    yield text[sent:], event["meta_info"]
                    sent = len(text)
        except httpx.TransportError as error:
            raise EngineLost(f"{self.base_url}: {error or type(error).__name__}") from error

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        """Two requests: the prompt's length, then all choices scored in one batch."""
        method = choices_method or token_length_normalized
        prompt_len = self._score(s, [s.text_], 0)[0]["prompt_tokens"] if s.text_ else 0
        metas = self._score(s, [s.text_ + choice for choice in choices], max(prompt_len - 2, 0))
        scored = [meta["input_token_logprobs"] for meta in metas]
        common = _shared(scored)
        scored = [row[common:] for row in scored]  # prompt tokens, which all choices share
        alone = None
        if method.requires_unconditional_logprobs:
            rows = [meta["input_token_logprobs"] for meta in self._score(s, choices, 0)]
            alone = [
                row[len(row) - len(own) :] if len(row) >= len(own) else [None] * (len(own) - len(row)) + row
                for row, own in zip(rows, scored, strict=True)
            ]
        decision = method(
            choices=choices,
            normalized_prompt_logprobs=[mean_logprob(row) for row in scored],
            input_token_logprobs=scored,
            output_token_logprobs=[meta.get("output_token_logprobs", []) for meta in metas],
            unconditional_token_logprobs=alone,
        )
        if temperature == 0:
            return decision
        info = decision.meta_info
        scores = info.get("normalized_unconditional_prompt_logprobs", info["normalized_prompt_logprobs"])
        at, probabilities = draw(scores, temperature, Random())
        return ChoicesDecision(choices[at], {**info, "index": at, "probabilities": probabilities})

    def _score(self, s: StreamExecutor, texts: list[str], start: int) -> list[dict[str, Any]]:
        request = {
            "text": texts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": start,
            "return_text_in_logprobs": True,
            **_adapted(s.settings.adapter),
        }
        return [answer["meta_info"] for answer in self._call("POST", "/generate", request)]

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        sampling = params.to_srt_kwargs()
        if params.dtype is not None:
            sampling["regex"] = REGEX_OF_DTYPE[params.dtype]
        beside = params.beside_srt_kwargs()
        return {"text": s.text_, "sampling_params": sampling, **beside, **_adapted(s.settings.adapter)}

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise EngineLost(f"{self.base_url}: {error or type(error).__name__}; is a server running there?") from error
        self._check(response)
        return response.json() if response.content[:1] in (b"{", b"[") else response.text

    def _check(self, response: httpx.Response) -> None:
        if response.is_error:
            message = f"{response.request.method} {response.url}: {response.status_code} {response.text[:500]}"
            raise InvalidRequest(message) if response.status_code < 500 else PhloemError(message)


def _adapted(adapter: str) -> dict[str, str]:
    """The request's field that names an adapter."""
    return {"lora_path": adapter} if adapter else {}


def _shared(rows: list[list[Any]]) -> int:
    """The number of leading tokens that all rows share; each row keeps one token or more."""
    shared = 0
    while all(len(row) > shared + 1 for row in rows) and len({row[shared][1] for row in rows}) == 1 and len(rows) > 1:
        shared += 1
    return shared
