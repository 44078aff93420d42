"""The HTTP server as a deployment of Ray Serve: it holds the programs and places them on the engines."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
from ray import serve

from ...protocol.errors import EngineLost
from ...runtime.server.app import create_app
from ...runtime.server.listener import LOOPBACK_NAMES
from ...runtime.server.remote_images import AllowedHosts
from ...runtime.server.tenants import Keys
from ...runtime.tokenizer import load_chat_template, load_tokenizer
from ...runtime.weights.resolve import resolve_model
from ..limits import FleetLimits
from ..prompts import first_prompt
from .fleet import ServeFleet


class FrontConfig(msgspec.Struct, frozen=True):
    """``model`` is loaded for its tokenizer; ``model_name``: for clients. ``hosts``: names that requests may use."""

    model: str
    model_name: str
    key_file: str
    hosts: list[str]
    allow_image_hosts: list[str]
    max_concurrent: int
    max_rebalanced: int
    step_timeout_s: float
    start_timeout_s: float


@serve.ingress()
class Front:
    """The constructor returns when an engine is ready. ``engines``: the handle of their deployment."""

    def __init__(self, engines: Any, config: bytes, *, client_secret: str) -> None:
        front = msgspec.json.decode(config, type=FrontConfig)
        path = resolve_model(front.model)
        tokenizer = load_tokenizer(path)
        keys = Keys.of_file(Path(front.key_file)) if front.key_file else Keys({})
        self._fleet = ServeFleet(
            engines,
            client_secret=client_secret,
            tokenize=lambda ops: first_prompt(ops, tokenizer),
            limits=FleetLimits(max_rebalanced=front.max_rebalanced),
            step_timeout_s=front.step_timeout_s,
        )
        try:
            if not self._fleet.wait(front.start_timeout_s):
                raise EngineLost(f"Ray Serve has started no engine within {front.start_timeout_s:g} s")
            self._app = create_app(
                self._fleet.client,
                tokenizer,
                load_chat_template(path, tokenizer),
                model_name=front.model_name,
                keys=keys,
                max_concurrent=front.max_concurrent,
                hosts=front.hosts or (LOOPBACK_NAMES if keys.is_open else ()),
                supervisor=self._fleet,
                image_hosts=AllowedHosts(front.allow_image_hosts),
            )
        except BaseException:
            self._fleet.close()
            raise

    def __serve_build_asgi_app__(self) -> Any:
        """Asked by Serve once."""
        return self._app

    def check_health(self) -> None:
        """Called by Serve again and again, which starts another replica where this raises."""
        if self._fleet.failure is not None:
            raise RuntimeError(self._fleet.failure.message)

    def __del__(self) -> None:
        """Called by Serve once no request is open, or their time is over."""
        with contextlib.suppress(AttributeError):  # the constructor has not made it
            self._fleet.close()
