"""How a chat template writes tools, calls and results, found by rendering probes.

The result is used only if other lists of tools, rebuilt from it, are equal to what the template writes.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ...protocol.errors import InvalidRequest
from ...protocol.messages import RoleTemplate, ToolTemplate
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

_SYSTEM, _USER = "Qsys", "Quser"
_CALLS: list[tuple[str, dict[str, Any]]] = [("Qname", {"Qkey": "Qvalue"}), ("Qother", {"Qn": 1})]
_FORMS = ((False, 0), (True, 0), (False, 4), (True, 4), (False, 2), (True, 2))


class Renderer(Protocol):
    """What the splitters need of a ``ModelTemplate``."""

    @property
    def source(self) -> str: ...

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> str: ...

    def encode(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]: ...


class NotSplit(Exception):
    """The template cannot be split exactly; the message says why."""


def split_tools(template: Renderer, tokenizer: Tokenizer, roles: Mapping[str, RoleTemplate]) -> ToolTemplate | None:
    """None where the template has no tools, or writes them in a way that is not fixed text around JSON."""
    if "tools" not in template.source or "system" not in roles:
        return None
    try:
        found = _ToolProbe(template, roles).found()
        texts = [getattr(found, name) for name in found.__struct_fields__]
        special = [text for text in texts if isinstance(text, str) and _has_special(text, tokenizer)]
        if special:
            raise NotSplit(f"it writes the special token in {special[0]!r}")
    except (NotSplit, InvalidRequest) as error:
        log.info("the chat template's way with tools is not used: %s", error)
        return None
    return found


def _has_special(text: str, tokenizer: Tokenizer) -> bool:
    return any(not isinstance(part, str) for part in tokenizer.split_special(text))


class _ToolProbe:
    def __init__(self, template: Renderer, roles: Mapping[str, RoleTemplate]) -> None:
        self.template = template
        self.roles = roles

    def found(self) -> ToolTemplate:
        begin, between, end, form = self._tools()
        call_begin, middle, call_end, calls_between = self._calls()
        found = ToolTemplate(
            tools_begin=begin,
            tools_between=between,
            tools_end=end,
            call_begin=call_begin,
            call_middle=middle,
            call_end=call_end,
            calls_between=calls_between,
            is_bare=form[0],
            indent=form[1],
        )
        return self._with_results(found)

    # -- descriptions of tools ----------------------------------------------------------------------------------------

    def _tools(self) -> tuple[str, str, str, tuple[bool, int]]:
        one, two, three = _tool("Qone"), _tool("Qtwo"), _tool("Qthree")
        single = self._system([one])
        for form in _FORMS:
            before, found, after = single.partition(_shown(one, form))
            if found:
                break
        else:
            raise NotSplit("a tool is not written as its JSON")
        head, tail = before + _shown(one, form), _shown(two, form) + after
        between = _between(head, self._system([one, two]), tail)
        if between is None:
            raise NotSplit("two tools are not written as one after the other")
        rebuilt = before + between.join(_shown(tool, form) for tool in (one, two, three)) + after
        if rebuilt != self._system([one, two, three]):
            raise NotSplit("three tools are not written like two")
        if not before.startswith(_SYSTEM):
            raise NotSplit("tools stand before the system message's own text")
        return before.removeprefix(_SYSTEM), between, after, form

    def _system(self, tools: list[dict[str, Any]]) -> str:
        """The content of a system message that describes ``tools``; nothing else in the text may change."""
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        text = self.template.render_text(messages, tools=tools, add_generation_prompt=False)
        system, user = self.roles["system"], self.roles["user"]
        start = text.find(system.prefix_text + _SYSTEM)
        tail = system.suffix_text + user.prefix_text + _USER + user.suffix_text
        if start < 0 or not text.endswith(tail):
            raise NotSplit("the template describes tools outside the system message")
        return text[start + len(system.prefix_text) : len(text) - len(tail)]

    # -- calls --------------------------------------------------------------------------------------------------------

    def _calls(self) -> tuple[str, str, str, str]:
        first, second = _CALLS
        single = self._assistant([first])
        shown = json.dumps(first[1])
        begin, found, rest = single.partition(first[0])
        middle, also_found, end = rest.partition(shown)
        if not found or not also_found or first[0] in rest or shown in end or "Qcall" in single:
            raise NotSplit("a call is not written as its name and its arguments' JSON")
        tail = begin + second[0] + middle + json.dumps(second[1]) + end
        between = _between(single, self._assistant([first, second]), tail)
        if between is None:
            raise NotSplit("two calls are not written as one after the other")
        return begin, middle, end, between

    def _assistant(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        messages = [{"role": "user", "content": _USER}, _calling(calls)]
        text = self.template.render_text(messages, add_generation_prompt=False)
        around = self.roles["assistant"]
        head = self.roles["user"].prefix_text + _USER + self.roles["user"].suffix_text + around.prefix_text
        _, found, content = text.partition(head)
        if not found or not content.endswith(around.suffix_text):
            raise NotSplit("calls are not written inside the assistant's turn")
        return content.removesuffix(around.suffix_text)

    # -- results ------------------------------------------------------------------------------------------------------

    def _with_results(self, found: ToolTemplate) -> ToolTemplate:
        """``found`` with the text between two results in one turn, where neighbouring results share a turn."""
        around = self.roles.get("tool")
        if around is None:
            raise NotSplit("the template has no turn for a tool's result")
        results = [{"role": "tool", "content": f"Qresult{i}", "tool_call_id": f"Qcall{i}"} for i in range(2)]
        messages = [{"role": "user", "content": _USER}, _calling(_CALLS), *results]
        text = self.template.render_text(messages, add_generation_prompt=False)
        rest = text.partition("Qresult0")[2]
        between, is_found, _ = rest.partition("Qresult1")
        if not is_found:
            raise NotSplit("a tool's result is not written as it is")
        if between == around.suffix_text + around.prefix_text:
            return found
        return msgspec.structs.replace(found, results_between=between)


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": f"{name}: d", "parameters": parameters}}


def _shown(tool: Mapping[str, Any], form: tuple[bool, int]) -> str:
    is_bare, indent = form
    return json.dumps(tool["function"] if is_bare else tool, ensure_ascii=False, indent=indent or None)


def _between(head: str, text: str, tail: str) -> str | None:
    """The text between ``head`` and ``tail``; None where ``text`` does not begin and end with them."""
    if len(text) < len(head) + len(tail) or not (text.startswith(head) and text.endswith(tail)):
        return None
    return text[len(head) : len(text) - len(tail)]


def _calling(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    entries = [
        {"type": "function", "id": f"Qcall{i}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": entries}
