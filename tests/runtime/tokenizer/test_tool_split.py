"""A template's way with tools is found exactly, or not used."""

import json

import pytest
from phloem.protocol.tool_format import ToolFormat
from phloem.runtime.tokenizer import ModelTemplate, Tokenizer, load_tokenizer
from phloem.tests.runtime.tokenizer.vocabularies import CHATML, write_byte_level

# tools at the end of the system message, calls in tags, and results that share a user's turn
TAGGED = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Functions:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\nCall them in tags.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<out>\\n' + m.content + '\\n</out>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if m.content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<call>{"tool": "' + call.function.name + '", "with": ' }}
            {{- (call.function.arguments | tojson) + '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_byte_level(tmp_path_factory.mktemp("bpe") / "model.gguf"))


def weather(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": "é", "parameters": {"type": "object"}}}


def test_the_template_s_own_way_is_found(tokenizer):
    tools = ModelTemplate(TAGGED, tokenizer).info().tools
    assert tools is not None
    assert (tools.tools_begin, tools.tools_between) == ("\n\nFunctions:\n", "\n")
    assert tools.tools_end == "\nCall them in tags."
    assert (tools.call_begin, tools.call_middle, tools.call_end) == ('<call>{"tool": "', '", "with": ', "}</call>")
    assert (tools.result_role, tools.results_between, tools.calls_between) == ("tool", "\n</out>\n<out>\n", "\n")
    assert not tools.is_bare and tools.indent == 0


def test_a_conversation_put_together_from_it_is_the_template_s_own(tokenizer):
    template = ModelTemplate(TAGGED, tokenizer)
    info = template.info()
    format, entries = ToolFormat(info.tools), [weather("a"), weather("b")]
    call = {"type": "function", "function": {"name": "a", "arguments": {"x": [1, "é"]}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    written = format.call("a", json.dumps(call["function"]["arguments"], ensure_ascii=False))
    turns = [
        ("system", "Be kind." + format.prompt(entries)),
        ("user", "Go."),
        ("assistant", written + info.tools.calls_between + written),
        *[("tool", text) for text in format.result_turns(["one", "two"])],
    ]
    ids: list[int] = []
    for role, content in turns:
        ids += [*info.roles[role].prefix, *tokenizer.encode(content), *info.roles[role].suffix]
    ids += info.roles["assistant"].prefix
    assert ids == template.encode(messages, tools=entries)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(tool | tojson)", "tool.function.name"),
        ("call.function.name", "call.id + call.function.name"),
        ("'Functions:'", "'<|im_start|>Functions:'"),
    ],
)
def test_what_texts_around_json_cannot_tell_is_left_alone(tokenizer, old, new):
    info = ModelTemplate(TAGGED.replace(old, new), tokenizer).info()
    assert info.tools is None and "user" in info.roles


def test_a_template_without_tools_has_none(tokenizer):
    assert ModelTemplate(CHATML, tokenizer).info().tools is None


def test_bare_and_indented_descriptions_are_told_apart(tokenizer):
    source = TAGGED.replace("(tool | tojson)", "(tool.function | tojson(indent=4))")
    tools = ModelTemplate(source, tokenizer).info().tools
    assert tools.is_bare and tools.indent == 4
    shown = ToolFormat(tools).prompt([weather("a")])
    assert shown == "\n\nFunctions:\n" + json.dumps(weather("a")["function"], ensure_ascii=False, indent=4) + (
        "\nCall them in tags."
    )
