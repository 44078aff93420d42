"""Crusoe's managed inference as a backend: OpenAI's API at another address."""

from __future__ import annotations

from typing import Any

from ...protocol.errors import InvalidRequest
from ..chat_template import ChatTemplate
from .openai import OpenAI

BASE_URL = "https://managed-inference-api-proxy.crusoecloud.com/v1/"


class Crusoe(OpenAI):
    """``Crusoe("org/model")``; it needs ``api_key=``. Further arguments as of ``OpenAI``."""

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = True,
        chat_template: ChatTemplate | None = None,
        *,
        api_key: str | None = None,
        base_url: str = BASE_URL,
        **kwargs: Any,
    ) -> None:
        if not api_key:  # the package would send the key of another provider
            raise InvalidRequest("Crusoe needs its key: Crusoe(..., api_key=...)", where="api_key")
        super().__init__(model_name, is_chat_model, chat_template, api_key=api_key, base_url=base_url, **kwargs)
