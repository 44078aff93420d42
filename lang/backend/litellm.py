"""The providers that the ``litellm`` package speaks to, as backends. They write whole assistant turns."""

from __future__ import annotations

from typing import Any

from ...protocol.errors import InvalidRequest, Unsupported
from ..chat_template import ChatTemplate, get_chat_template, get_chat_template_by_model_path
from .chat_api import OpenAIFormat, chat_messages
from .executor import StreamExecutor
from .token_usage import TokenUsage

CRUSOE_URL = "https://managed-inference-api-proxy.crusoecloud.com/v1/"


class LiteLLM(OpenAIFormat):
    """``LiteLLM("provider/model")``; further arguments go to each ``litellm.completion`` call.

    The package refuses a parameter that the provider does not have.
    """

    is_chat_model = True
    api = "litellm"

    def __init__(self, model_name: str, chat_template: ChatTemplate | None = None, **kwargs: Any) -> None:
        try:
            import litellm
        except ImportError:
            name = type(self).__name__
            message = f"the {name} backend needs the litellm package: pip install 'phloem[litellm]'"
            raise Unsupported(message) from None
        self.model_name = model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        self.token_usage = TokenUsage()
        self._litellm: Any = litellm
        self._kwargs = kwargs

    def create(self, **request: Any) -> Any:
        return self._litellm.completion(**request, **self._kwargs)

    async def create_async(self, **request: Any) -> Any:
        return await self._litellm.acompletion(**request, **self._kwargs)

    def prompt(self, s: StreamExecutor) -> dict[str, Any]:
        return {"messages": chat_messages(s, type(self).__name__)}


class VertexAI(LiteLLM):
    """``VertexAI("gemini-2.5-flash", project=..., location=...)``: Google's models, through LiteLLM.

    A program without roles sends its text as the user's message. Further arguments as of ``LiteLLM``.
    """

    def __init__(
        self,
        model_name: str,
        safety_settings: list[dict[str, str]] | None = None,
        *,
        project: str | None = None,
        location: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"safety_settings": safety_settings, "vertex_project": project, "vertex_location": location}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        super().__init__(f"vertex_ai/{model_name}", get_chat_template("default"), **kwargs)

    def prompt(self, s: StreamExecutor) -> dict[str, Any]:
        if s.cur_role is None and not s.messages_:
            return {"messages": [{"role": "user", "content": s.text_}]}
        return super().prompt(s)


class Crusoe(LiteLLM):
    """``Crusoe("org/model", api_key=...)``: Crusoe's managed inference, through LiteLLM. Further arguments as there."""

    def __init__(
        self,
        model_name: str,
        api_key: str | None = None,
        base_url: str | None = None,
        chat_template: ChatTemplate | None = None,
        **kwargs: Any,
    ) -> None:
        if not api_key:  # the package would send the key of another provider
            raise InvalidRequest("Crusoe needs its key: Crusoe(..., api_key=...)", where="api_key")
        template = chat_template or get_chat_template("default")
        super().__init__(f"openai/{model_name}", template, api_key=api_key, api_base=base_url or CRUSOE_URL, **kwargs)
