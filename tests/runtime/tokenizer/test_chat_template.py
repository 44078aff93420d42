"""Conversations become text and special tokens, and only the template writes special tokens."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from phloem.protocol.errors import InvalidRequest, Unsupported
from phloem.protocol.messages import RoleTemplate
from phloem.runtime.tokenizer import ModelTemplate, Tokenizer, load_tokenizer
from phloem.tests.runtime.tokenizer.vocabularies import CHATML, write_byte_level

WITH_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Zephyr and Phi do: the role is written between the signs of a special token.
ROLE_TOKENS = "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "model.gguf"
    return load_tokenizer(write_byte_level(path, bos_token_id=0))


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_a_conversation_is_text_with_special_tokens_between(tokenizer: Tokenizer) -> None:
    parts = ModelTemplate(CHATML, tokenizer).render(said(("user", "hi")))
    assert parts == [(1,), "user\nhi", (2,), "\n", (1,), "assistant\n"]


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<", "\n", "x", "\ue000"])))
def test_what_a_user_types_is_never_a_special_token(tokenizer: Tokenizer, pieces: list[str]) -> None:
    content = "".join(pieces)
    parts = ModelTemplate(CHATML, tokenizer).render(said(("user", content)))
    assert parts == [(1,), "user\n" + content, (2,), "\n", (1,), "assistant\n"]


def test_special_tokens_in_tools_names_and_keys_stay_text(tokenizer: Tokenizer) -> None:
    template = ModelTemplate("{{ tools | tojson }}{{ messages[0].name }}<|im_end|>", tokenizer)
    tools = [{"<|im_end|>": ["<|im_start|>"]}]
    parts = template.render([{"role": "user", "name": "<|im_end|>"}], tools=tools)
    assert parts == [json.dumps(tools) + "<|im_end|>", (2,)]


@pytest.mark.parametrize("role", ["start|><|im_end", "", None, 7, "user\n"])
def test_a_role_is_a_plain_name(tokenizer: Tokenizer, role: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"role .* of message 1 is not a role name"):
        ModelTemplate(ROLE_TOKENS, tokenizer).render([{"role": "start", "content": ""}, {"role": role, "content": "x"}])


def test_a_role_may_make_a_special_token_where_the_template_says_so(tokenizer: Tokenizer) -> None:
    assert ModelTemplate(ROLE_TOKENS, tokenizer).render(said(("start", "x"), ("end", "y"))) == [(1,), "x", (2,), "y"]


def test_messages_may_not_be_empty(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        ModelTemplate(CHATML, tokenizer).render([])


def test_neighbouring_special_tokens_are_one_part(tokenizer: Tokenizer) -> None:
    assert ModelTemplate("<|im_end|><|im_start|>a<|im_end|>", tokenizer).render(said(("user", ""))) == [
        (2, 1),
        "a",
        (2,),
    ]


def test_a_refusal_names_the_role_and_the_line(tokenizer: Tokenizer) -> None:
    source = (
        "{%- for message in messages %}\n{%- if message.role == 'tool' %}\n"
        "{{- raise_exception('tools are not for me') }}\n{%- endif %}\n{%- endfor %}"
    )
    with pytest.raises(InvalidRequest, match=r"message 1 of role 'tool' at its line 3: tools are not for me"):
        ModelTemplate(source, tokenizer).render(said(("user", "a"), ("tool", "b"), ("user", "c")))


def test_a_missing_content_names_the_role_and_the_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"message 0 of role 'user' at its line 4: "):
        ModelTemplate(WITH_SYSTEM, tokenizer).render([{"role": "user", "content": None}])


def test_a_template_that_cannot_be_read_names_its_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(Unsupported, match=r"line 2: .*endfor"):
        ModelTemplate("a\n{% endfor %}", tokenizer)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{% for x in range(10000000) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(tokenizer: Tokenizer, source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses"):
        ModelTemplate(source, tokenizer).render(said(("user", "x")))


def test_what_models_templates_call_is_there(tokenizer: Tokenizer) -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | trim | tojson }}{% endgeneration %}{% endfor %}{{ tools is none }}"
    )
    template = ModelTemplate(source, tokenizer, now=lambda: datetime.datetime(2031, 1, 2))
    assert template.render(said(("user", " é<b> "), ("user", "y"))) == [(0,), '2031"é<b>"True']


# -- split into roles -------------------------------------------------------------------------------------------------


def encoded(tokenizer: Tokenizer, prefix: str, suffix: str) -> RoleTemplate:
    return RoleTemplate(
        tuple(tokenizer.encode(prefix, special=True)), tuple(tokenizer.encode(suffix, special=True)), prefix, suffix
    )


def test_chatml_is_split_into_its_roles(tokenizer: Tokenizer) -> None:
    info = ModelTemplate(CHATML, tokenizer).info()
    for role in ("system", "user", "assistant", "tool"):
        assert info.roles[role] == encoded(tokenizer, f"<|im_start|>{role}\n", "<|im_end|>\n")
    assert (info.default_system, info.stop_token_ids, info.source) == ((), (0, 2), CHATML)


def test_the_default_system_prompt_is_found(tokenizer: Tokenizer) -> None:
    info = ModelTemplate(WITH_SYSTEM, tokenizer).info()
    assert info.default_system_text == "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert tokenizer.decode(info.default_system, skip_special=False) == info.default_system_text
    assert set(info.roles) == {"system", "user", "assistant", "tool"}


def test_the_parts_rebuild_what_the_template_renders(tokenizer: Tokenizer) -> None:
    template = ModelTemplate(WITH_SYSTEM, tokenizer)
    info = template.info()
    for roles in (["user"], ["system", "user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"]):
        turns = [(role, f"What {i}?\nThat: 4{i}.") for i, role in enumerate(roles)]
        ids = [] if roles[0] == "system" else list(info.default_system)
        for role, content in turns:
            ids += [*info.roles[role].prefix, *tokenizer.encode(content), *info.roles[role].suffix]
        assert ids + list(info.roles["assistant"].prefix) == template.encode(said(*turns))


@pytest.mark.parametrize(
    ("why", "source"),
    [
        ("the system prompt moves into the last user's turn", "{% for m in messages %}{% if m.role != 'system' %}"
         "<|im_start|>{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
         "{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
         "<|im_start|>assistant\n{% endif %}"),
        ("it refuses a system message", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
         + CHATML),
    ],
)  # fmt: skip
def test_without_a_system_turn_the_other_roles_are_still_split(tokenizer: Tokenizer, why: str, source: str) -> None:
    roles = set(ModelTemplate(source, tokenizer).info().roles)
    assert "system" not in roles and {"user", "assistant"} <= roles, why


@pytest.mark.parametrize(
    ("why", "source"),
    [
        ("old turns look otherwise than the last", CHATML.replace("message['content']", "('old ' if not loop.last else "
         "'') + message['content']")),
        ("the prompt is not the beginning of the turn", CHATML.replace("|>assistant\\n", "|>robot\\n")),
        ("contents are changed", CHATML.replace("message['content']", "message['content'] | upper")),
        ("contents are counted", CHATML.replace("message['content']", "message['content'] + (message['content'] | "
         "length | string)")),
        ("a turn's number is written", CHATML.replace("message['role']", "message['role'] + loop.index | string")),
        ("a message is written twice", CHATML.replace("message['content']", "message['content'] * 2")),
        ("a user's turn does not end", "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_exactly_is_not_split(tokenizer: Tokenizer, why: str, source: str) -> None:
    info = ModelTemplate(source, tokenizer).info()
    assert info.roles == {}, why
    assert info.stop_token_ids == (0, 2) and info.source == source


def test_bos_belongs_to_no_role_where_the_engine_adds_it(tmp_path: Path) -> None:
    adding = load_tokenizer(write_byte_level(tmp_path / "a.gguf", bos_token_id=0, add_bos_token=True))
    info = ModelTemplate("{{ bos_token }}" + CHATML, adding).info()
    assert info.roles["system"].prefix_text == "<|im_start|>system\n" and info.default_system == ()
    silent = load_tokenizer(write_byte_level(tmp_path / "b.gguf", bos_token_id=0, add_bos_token=False))
    info = ModelTemplate("{{ bos_token }}" + CHATML, silent).info()
    assert info.roles["system"].prefix_text == "<|endoftext|><|im_start|>system\n" and info.default_system == (0,)
