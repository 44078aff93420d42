"""A chat request as parts of a prompt: the model's own tool format where its template has one, else a plain one."""

import json
from collections.abc import Sequence
from typing import Any

from ...protocol.tool_format import ToolFormat
from ..tokenizer import ModelTemplate
from .jobs import Part


def conversation_parts(
    template: ModelTemplate, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[Part]:
    """``messages`` as a template takes them; ``tools`` in the form of the OpenAI API."""
    own = template.info().tools
    if own is not None:
        return template.render(messages, tools=list(tools) or None)
    return template.render(in_plain_words(messages, tools, ToolFormat()))


def in_plain_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], format: ToolFormat
) -> list[dict[str, Any]]:
    """The same conversation in messages without calls, results and tools."""
    turns: list[dict[str, Any]] = []
    results: list[str] = []

    def settle() -> None:
        turns.extend({"role": format.template.result_role, "content": text} for text in format.result_turns(results))
        results.clear()

    for message in messages:
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        settle()
        if "tool_calls" in message:
            calls = [
                format.call(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
                for call in message["tool_calls"]
            ]
            content = [message["content"], *calls] if message["content"] else calls
            message = {"role": message["role"], "content": format.template.calls_between.join(content)}
        turns.append(message)
    settle()
    if tools:
        if turns and turns[0]["role"] == "system":
            prompt = format.prompt(tools, is_first=not turns[0]["content"])
            turns[0] = {**turns[0], "content": turns[0]["content"] + prompt}
        else:
            turns.insert(0, {"role": "system", "content": format.prompt(tools, is_first=True)})
    return turns
