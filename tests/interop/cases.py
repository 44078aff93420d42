"""Clients of the HTTP API and what each of them does against a running server: the table in docs/interop.md."""

import contextlib
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import phloem
import pytest
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import live_server

MODEL = "smollm2"
RECORDED = Path(__file__).parent / "recorded.json"  # what each client sent when it was last tried, by client and case
MODULES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm",
    "langchain-openai": "langchain_openai",
    "instructor": "instructor",
    "dspy": "dspy",
    "outlines": "outlines",
    "guidance": "guidance",
    "llm": "llm",
}
CASES: dict[str, dict[str, None]] = {client: {} for client in MODULES}  # a set in order: pytest imports files twice
_ID = re.compile(r"\b(call|toolu|resp|msg|fc|rs|chatcmpl)_?-?[0-9a-f]{24,}[_0-9]*")


@dataclass
class Trial:
    """A server on trial: what it was asked since the last case, and what each case has asked."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    ran: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)

    def take(self, method: str, path: str, body: bytes) -> None:
        shown = _ID.sub(r"\1_ID", body.decode())
        self.asked.append({"method": method, "path": path, "body": json.loads(shown) if shown else None})


def case(client: str, what: str) -> Callable[[Callable[[Trial], None]], Any]:
    """A test of ``what`` of ``client``; skipped by name where the client is not installed."""
    CASES[client][what] = None
    is_missing = importlib.util.find_spec(MODULES[client]) is None

    def made(function: Callable[[Trial], None]) -> Any:
        @functools.wraps(function)
        def run(trial: Trial) -> None:
            trial.asked.clear()
            function(trial)
            trial.ran.setdefault(client, {})[what] = list(trial.asked)

        reason = f"{client} is not installed (make test-interop)"
        return pytest.mark.interop(pytest.mark.model(pytest.mark.skipif(is_missing, reason=reason)(run)))

    return made


@contextlib.contextmanager
def serving(model_path: Path, middleware: Callable[[Any], Any] | None = None) -> Iterator[str]:
    """A server of ``model_path`` under the name ``MODEL``; yields its address. ``middleware`` wraps the application."""
    tokenizer = load_tokenizer(model_path)
    with phloem.Engine(model=str(model_path)) as engine:
        app = create_app(engine.client, tokenizer, load_chat_template(model_path, tokenizer), model_name=MODEL)
        with live_server(app if middleware is None else middleware(app)) as url:
            yield url
