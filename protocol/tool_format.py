"""How a prompt lists tools and a model writes calls: in the model's own format, or a plain one where it has none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..constrained.spec import GrammarSpec
from .errors import InvalidRequest
from .messages import ToolTemplate
from .tool_splitter import CallSplitter

PLAIN = ToolTemplate(
    tools_begin="\n\nYou can use these tools, each described as JSON:\n<tools>\n",
    tools_between="\n",
    tools_end=(
        "\n</tools>\nTo use one, write the call between tags, and its result will follow:\n"
        '<tool_call>\n{"name": "name of the tool", "arguments": {"name of an argument": "its value"}}\n</tool_call>'
    ),
    call_begin='<tool_call>\n{"name": "',
    call_middle='", "arguments": ',
    call_end="}\n</tool_call>",
    result_role="user",
    result_begin="<tool_response>\n",
    result_end="\n</tool_response>",
    results_between="\n",
)
_SIGN = re.compile(r"\s*(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])")


class ToolFormat:
    """One way of writing tools. ``choice`` is auto, required, none, or the name of a tool."""

    def __init__(self, template: ToolTemplate | None = None) -> None:
        self.template = PLAIN if template is None else template
        begin = self.template.call_begin
        sign = _SIGN.match(begin)
        self.trigger = begin if sign is None else sign[0]  # where free text ends and a call begins

    def prompt(self, schemas: Sequence[Mapping[str, Any]], *, is_first: bool = False) -> str:
        """The end of a system message that lists tools (OpenAI schema); ``is_first``: the message has no other text."""
        form = self.template
        shown = [schema["function"] if form.is_bare else schema for schema in schemas]
        texts = [json.dumps(one, ensure_ascii=False, indent=form.indent or None) for one in shown]
        text = form.tools_begin + form.tools_between.join(texts) + form.tools_end
        return text.lstrip("\n") if is_first else text

    def grammar(self, schemas: Sequence[Mapping[str, Any]], choice: str, *, parallel: bool) -> GrammarSpec | None:
        """The grammar of the answer; None where it may hold no calls."""
        if choice == "none" or not schemas:
            return None
        called = [schema["function"] for schema in schemas]
        is_named = choice not in ("auto", "required")
        if is_named:
            called = [function for function in called if function["name"] == choice]
            if not called:
                names = ", ".join(schema["function"]["name"] for schema in schemas)
                raise InvalidRequest(
                    f"tool_choice={choice!r}: must be auto, required, none, or the name of a tool ({names})",
                    where="tool_choice",
                )
        form = self.template
        tags = [
            {
                "begin": form.call_begin + function["name"] + form.call_middle,
                "schema": _bounded(closed_schema(function.get("parameters") or {"type": "object", "properties": {}})),
                "end": form.call_end,
            }
            for function in called
        ]
        must = choice != "auto"
        text = {
            "tags": tags,
            "triggers": [self.trigger],
            "at_least_one": must,
            "begin_at_once": must,
            "stop_after_first": is_named or not parallel,
        }
        return GrammarSpec("structural_tags", json.dumps(text))

    def splitter(self, names: Sequence[str]) -> CallSplitter:
        return CallSplitter(self.template, self.trigger, names)

    def call(self, name: str, arguments: str) -> str:
        """A call as the model would have written it; ``arguments`` is the JSON of an object."""
        form = self.template
        return form.call_begin + name + form.call_middle + arguments + form.call_end

    def result_turns(self, results: Sequence[str]) -> list[str]:
        """The contents of the turns of ``template.result_role`` that hold ``results``."""
        form = self.template
        texts = [form.result_begin + text + form.result_end for text in results]
        return [form.results_between.join(texts)] if form.results_between and texts else texts


def closed_schema(schema: Any) -> Any:
    """``schema`` closed: no properties beyond those it lists, and no titles, descriptions or examples.

    What is no schema stays as it is; the compiler of grammars names it.
    """
    if isinstance(schema, list):
        return [closed_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "patternProperties") and isinstance(value, dict):
            closed[key] = {name: closed_schema(inner) for name, inner in value.items()}
        elif key in ("title", "description", "default", "examples", "discriminator"):
            continue
        elif key in ("enum", "const"):
            closed[key] = value
        else:
            closed[key] = closed_schema(value)
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _bounded(schema: Any) -> Any:
    """Integers without bounds get those of 64 bits: without bounds a model may write 2e48."""
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {key: value if key in ("enum", "const") else _bounded(value) for key, value in schema.items()}
    if bounded.get("type") == "integer" and not {"enum", "const"} & set(bounded):
        if not {"minimum", "exclusiveMinimum"} & set(bounded):
            bounded["minimum"] = -(2**63)
        if not {"maximum", "exclusiveMaximum"} & set(bounded):
            bounded["maximum"] = 2**63 - 1
    return bounded
