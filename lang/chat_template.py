"""Chat templates as text, for backends that take one prompt string and have no template of their own.

A runtime of Phloem does not use these: it writes the model's own role markers, as token ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ..protocol.errors import InvalidRequest
from ..protocol.messages import TemplateInfo


class ChatTemplateStyle(Enum):
    PLAIN = auto()
    LLAMA2 = auto()  # the system message is written inside the first user turn


@dataclass(frozen=True)
class ChatTemplate:
    """The text around each role. ``stop_str`` ends an assistant's turn: every generation stops there as well."""

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: dict[str, tuple[str, str]]
    stop_str: tuple[str, ...] = ()
    style: ChatTemplateStyle = ChatTemplateStyle.PLAIN

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """The text around a message of ``role`` that follows ``hist_messages``."""
        if role not in self.role_prefix_and_suffix:
            known = ", ".join(sorted(self.role_prefix_and_suffix))
            raise InvalidRequest(f"role {role!r}: chat template {self.name!r} has {known}")
        prefix, suffix = self.role_prefix_and_suffix[role]
        if self.style is ChatTemplateStyle.LLAMA2:
            user_prefix = self.role_prefix_and_suffix.get("user", ("", ""))[0]
            if role == "system" and not hist_messages:
                return user_prefix + prefix, suffix
            if role == "user" and len(hist_messages) == 1 and hist_messages[0]["role"] == "system":
                return "", suffix  # the user's prefix already stands before the system message
        return prefix, suffix

    def get_prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """All messages as one text; a system message without content becomes the default one."""
        prompt = ""
        for i, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "system" and content is None:
                content = self.default_system_prompt
                if content is None:
                    continue
            prefix, suffix = self.get_prefix_and_suffix(message["role"], messages[:i])
            prompt += prefix + content + suffix
        return prompt


def _lines(system: str, user: str, assistant: str) -> dict[str, tuple[str, str]]:
    return {"system": (system, "\n"), "user": (user, "\n"), "assistant": (assistant, "\n")}


def _around(begin: str, end: str, **names: str) -> dict[str, tuple[str, str]]:
    return {role: (begin.format(names.get(role, role)), end) for role in ("system", "user", "assistant")}


_CHATML = _around("<|im_start|>{}\n", "<|im_end|>\n")
_ASSISTANT = "You are a helpful assistant."
_TEMPLATES: dict[str, ChatTemplate] = {}


def register_chat_template(template: ChatTemplate) -> None:
    """Make ``get_chat_template(template.name)`` return ``template``."""
    _TEMPLATES[template.name] = template


_MATCHERS: list[Callable[[str], str | None]] = []


def register_chat_template_matching_function(match: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Register ``match(model_path)``, which returns a template's name or None. The latest one is called first."""
    _MATCHERS.append(match)
    return match


def get_chat_template(name: str) -> ChatTemplate:
    if name not in _TEMPLATES:
        raise InvalidRequest(
            f"chat template {name!r} is unknown; there are {', '.join(sorted(_TEMPLATES))}, "
            "and register_chat_template(ChatTemplate(...)) adds another"
        )
    return _TEMPLATES[name]


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template of the family that ``model_path`` names; otherwise the default one."""
    for match in reversed(_MATCHERS):
        name = match(model_path)
        if name is not None:
            return get_chat_template(name)
    return get_chat_template("default")


def from_info(info: TemplateInfo) -> ChatTemplate:
    """The template that a runtime reports, as text."""
    around = {role: (t.prefix_text, t.suffix_text) for role, t in info.roles.items()}
    return ChatTemplate(name=info.source or "model", default_system_prompt=None, role_prefix_and_suffix=around)


for _template in (
    ChatTemplate("default", None, _lines("SYSTEM:", "USER:", "ASSISTANT:")),
    ChatTemplate(
        "claude", None, {"system": ("", ""), "user": ("\n\nHuman: ", ""), "assistant": ("\n\nAssistant:", "")}
    ),
    ChatTemplate("chatml", None, _CHATML, ("<|im_end|>",)),
    ChatTemplate("qwen", _ASSISTANT, _CHATML, ("<|im_end|>",)),
    ChatTemplate(
        "llama-2-chat",
        None,
        {"system": ("<<SYS>>\n", "\n<</SYS>>\n\n"), "user": ("[INST] ", " [/INST]"), "assistant": ("", " </s><s>")},
        style=ChatTemplateStyle.LLAMA2,
    ),
    ChatTemplate(
        "llama-3-instruct",
        None,
        _around("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|eot_id|>",),
    ),
    ChatTemplate(
        "mistral",
        None,
        {
            "system": ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", " </s><s>"),
        },
        ("</s>",),
    ),
    ChatTemplate(
        "vicuna_v1.1",
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        {"system": ("", " "), "user": ("USER:", " "), "assistant": ("ASSISTANT:", "</s>")},
    ),
    ChatTemplate(
        "gemma-it",
        None,
        {
            "system": ("", ""),
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        },
    ),
    ChatTemplate(
        "deepseek-v3",
        None,
        {
            "system": ("", ""),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
        ("<｜end▁of▁sentence｜>",),
    ),
):
    register_chat_template(_template)

_FAMILIES = (  # first that matches; lower case
    (("llama-2", "llama2"), "llama-2-chat"),
    (("llama-3", "llama3"), "llama-3-instruct"),
    (("vicuna",), "vicuna_v1.1"),
    (("deepseek-v3", "deepseek-r1"), "deepseek-v3"),
    (("mistral", "mixtral", "pixtral"), "mistral"),
    (("gemma",), "gemma-it"),
    (("qwen",), "qwen"),
    (("smollm", "chatml", "yi-"), "chatml"),
    (("claude",), "claude"),
)


@register_chat_template_matching_function
def _match_family(model_path: str) -> str | None:
    lowered = model_path.lower()
    for words, name in _FAMILIES:
        if any(word in lowered for word in words) and (name != "llama-2-chat" or "chat" in lowered):
            return name
    return None
