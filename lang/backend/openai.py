"""OpenAI's API (and compatible ones) as a backend, through the ``openai`` package.

Chat models write whole assistant turns; completion models continue any text. The package retries failed calls.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...protocol.errors import Unsupported
from ..chat_template import ChatTemplate, get_chat_template
from .chat_api import OpenAIFormat, chat_messages
from .drivers import loop_of
from .executor import StreamExecutor
from .token_usage import TokenUsage

_COMPLETION_MODELS = ("instruct", "davinci-002", "babbage-002")


class OpenAI(OpenAIFormat):
    """``OpenAI("gpt-4o-mini")``; further arguments go to ``openai.OpenAI`` (``base_url=``, ``api_key=``, ...)."""

    has_own_loop = True  # the async client's connections belong to one event loop

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        try:
            import openai
        except ImportError:
            raise Unsupported("the OpenAI backend needs the openai package: pip install 'phloem[openai]'") from None
        self.model_name = model_name
        self.is_chat_model = (
            not any(word in model_name for word in _COMPLETION_MODELS) if is_chat_model is None else is_chat_model
        )
        self.api = "chat" if self.is_chat_model else "completions"
        self.chat_template = chat_template or get_chat_template("default")
        self.token_usage = TokenUsage()
        self.client = (openai.AzureOpenAI if is_azure else openai.OpenAI)(*args, **kwargs)
        self.async_client = (openai.AsyncAzureOpenAI if is_azure else openai.AsyncOpenAI)(*args, **kwargs)

    def create(self, **request: Any) -> Any:
        return self._endpoint(self.client).create(**request)

    async def create_async(self, **request: Any) -> Any:
        return await self._endpoint(self.async_client).create(**request)

    def prompt(self, s: StreamExecutor) -> dict[str, Any]:
        return {"messages": chat_messages(s, "OpenAI")} if self.is_chat_model else {"prompt": s.text_}

    def shutdown(self) -> None:
        """Close the connections."""
        self.client.close()
        asyncio.run_coroutine_threadsafe(self.async_client.close(), loop_of(self).loop).result(10.0)

    def _endpoint(self, client: Any) -> Any:
        return client.chat.completions if self.is_chat_model else client.completions
