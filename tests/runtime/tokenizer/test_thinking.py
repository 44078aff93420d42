"""The tags of a model's reasoning are found in its template or its vocabulary, and its tokens are counted."""

import json
from pathlib import Path

import pytest
from phloem.protocol.messages import ThinkingStyle
from phloem.protocol.tool_format import ToolFormat
from phloem.runtime.server.conversation import AnswerReader
from phloem.runtime.tokenizer import ModelTemplate, Tokenizer, load_tokenizer
from phloem.tests.runtime.models.tiny import write_byte_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3 writes it: reasoning of earlier turns is dropped.
HYBRID = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
# As DeepSeek-R1 writes it: the prompt begins the reasoning.
FORCED = CHATML.replace("assistant\n", "assistant\n<think>\n")


def tokenizer_with(folder: Path, *tags: str, special: bool = False) -> Tokenizer:
    """A byte tokenizer with one token for each of ``tags``."""
    write_byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    shape = {**spec["added_tokens"][0], "special": special}
    spec["added_tokens"] += [{**shape, "id": 259 + i, "content": tag} for i, tag in enumerate(tags)]
    path.write_text(json.dumps(spec))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("source", "tokens", "special", "found"),
    [
        (CHATML, (), False, None),
        (HYBRID, (), False, ThinkingStyle()),
        (CHATML, ("<think>", "</think>"), False, ThinkingStyle()),
        (FORCED, ("<think>", "</think>"), False, ThinkingStyle(is_forced=True)),
        (CHATML, ("◁think▷", "◁/think▷"), False, ThinkingStyle("◁think▷", "◁/think▷")),
        (CHATML, ("[THINK]", "[/THINK]"), True, ThinkingStyle("[THINK]", "[/THINK]", is_special=True)),
        (CHATML, ("<think>",), False, None),
    ],
)
def test_tags_are_found_in_the_template_or_the_vocabulary(tmp_path, source, tokens, special, found):
    template = ModelTemplate(source, tokenizer_with(tmp_path, *tokens, special=special))
    assert template.info().thinking == found


@pytest.mark.parametrize("tags", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("special", [False, True])
def test_reasoning_tokens_count_up_to_the_end_tag(tmp_path, tags, special):
    tokenizer = tokenizer_with(tmp_path, *tags, special=special)
    reader = AnswerReader(tokenizer, ToolFormat(), (), ThinkingStyle())
    text = "<think>\nlet me see\n</think>\n\nfour"
    ids = tokenizer.encode(text, special=True)
    splitter = reader.splitter()
    events = [*splitter.push(text), *splitter.finish()]
    assert [event.text for event in events] == ["let me see", "four"]
    assert reader.num_reasoning_tokens(ids, splitter) == len(ids) - len("\n\nfour")
    unended = ids[: len(ids) - len("\n\nfour") - 1]
    assert reader.num_reasoning_tokens(unended, splitter) == len(unended)
    plain = reader.splitter()
    plain.push("four")
    assert reader.num_reasoning_tokens(ids, plain) == 0
