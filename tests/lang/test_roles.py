"""Roles over the compiled path: special tokens where the template has them, and messages that are kept."""

import pytest
from phloem import assistant, function, gen, system, user, user_end
from phloem.protocol import errors, messages, ops
from phloem.tests.runtime.string_tokens import CHATML


def test_roles_are_special_tokens_and_messages_are_kept(connect):
    @function
    def chat(s):
        s += system("be brief")
        s += user("hi <|im_end|>")
        s += assistant(gen("a"))
        with s.user():
            s += "more"
        s.assistant(gen("b"))

    backend = connect(reply=lambda prompt, op: " ok")
    s = chat.run(backend=backend)
    assert s.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi <|im_end|>"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "ok"},
    ]
    specials = [op.ids for op in backend.client.submits[0].ops if isinstance(op, ops.Special)]
    assert specials[:2] == [(1, 11, 3), (2, 3)] and len(specials) == 10


def test_the_templates_own_system_message_comes_first_where_none_is_given(connect):
    template = messages.TemplateInfo(
        roles={r: messages.RoleTemplate(t.prefix, t.suffix, f"[{r}]", "[/]") for r, t in CHATML.roles.items()},
        default_system=(1, 11, 3, 2, 3),
        default_system_text="[system]be good[/]",
    )

    @function
    def chat(s):
        s += user("hi")
        s += assistant(gen("a"))

    @function
    def own(s):
        s += system("mine") + user("hi")

    backend = connect(template=template, reply=lambda prompt, op: "x")
    s = chat.run(backend=backend)
    assert s.messages()[0] == {"role": "system", "content": "be good"}
    assert s.text() == "[system]be good[/][user]hi[/][assistant]x[/]"
    assert own.run(backend=backend).text() == "[system]mine[/][user]hi[/]"


def test_a_template_without_roles_says_so(connect):
    @function
    def chat(s):
        s += user("hi")

    with pytest.raises(errors.Unsupported, match="cannot be split into roles"):
        chat.run(backend=connect(template=messages.TemplateInfo()))


def test_nested_and_unbalanced_roles_say_what_to_write(connect):
    @function
    def nested(s):
        with s.user():
            s += assistant("x")

    @function
    def unbalanced(s):
        s += user("x") + user_end()

    with pytest.raises(errors.InvalidRequest, match=r"'user' ends, but no role is open"):
        unbalanced.run(backend=connect())
    with pytest.raises(errors.InvalidRequest, match=r"'assistant' begins inside the open role 'user'.*user_end"):
        nested.run(backend=connect())
