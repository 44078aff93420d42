"""A chat template split into roles: the tokens before and after each role's content, found by rendering probes.

    text:  [lead] prefix(user) U1 suffix(user) prefix(assistant) A1 suffix(assistant) prefix(user) U2 ...

The split is guessed from a few renderings, and used only if it rebuilds other conversations token for token.
"""

import logging
from collections.abc import Mapping

from ...protocol.errors import InvalidRequest
from ...protocol.messages import RoleTemplate, TemplateInfo
from .thinking import find_thinking
from .tokenizer import Tokenizer
from .tool_split import NotSplit, Renderer, split_tools

log = logging.getLogger(__name__)

Turn = tuple[str, str]

_PROBES = {"system": "Qsys", "user": "Quser", "assistant": "Qasst", "tool": "Qtool", "last": "Qlast"}
# Contents that may merge with the text around them: letters, digits, signs, lines, spaces inside.
_CONTENTS = ("Hello there", "2 + 2 = 4.", "Why?\nTell me\n- one\n- two", "(42)", '{"a": [1, 2]}', "Größe, ça va")


def split_template(template: Renderer, tokenizer: Tokenizer) -> TemplateInfo:
    stop_ids = set(tokenizer.eos_ids)
    thinking = find_thinking(template, tokenizer)
    try:
        found = _RoleProbe(template, tokenizer)
        try:
            roles = found.roles()
        except NotSplit:
            found = _RoleProbe(template, tokenizer, has_gaps=True)
            roles = found.roles()
        lead = found.lead
    except (NotSplit, InvalidRequest) as error:
        log.info("the chat template is rendered whole for each turn: %s", error)
        return TemplateInfo(stop_token_ids=tuple(sorted(stop_ids)), source=template.source, thinking=thinking)
    ends_turn = [i for i in roles["assistant"].suffix if i in tokenizer.special_ids]
    stop_ids.update(ends_turn[:1])
    return TemplateInfo(
        roles=roles,
        default_system=tuple(tokenizer.encode(lead, special=True, at_start=True)),
        default_system_text=lead,
        stop_token_ids=tuple(sorted(stop_ids)),
        source=template.source,
        tools=split_tools(template, tokenizer, roles),
        thinking=thinking,
    )


class _RoleProbe:
    def __init__(self, template: Renderer, tokenizer: Tokenizer, *, has_gaps: bool = False) -> None:
        """``has_gaps``: a space at the end of a prefix belongs to the text after it, and is not written before a
        generation, which begins with it, nor before an image.
        """
        self.has_gaps = has_gaps
        self.template = template
        self.tokenizer = tokenizer
        self.texts: dict[str, tuple[str, str]] = {}
        self.lead = ""
        self.bos = "" if tokenizer.bos_id is None else tokenizer.special_text(tokenizer.bos_id)

    def roles(self) -> dict[str, RoleTemplate]:
        self._find_user_and_assistant()
        self._check(["user"], ["user", "assistant", "user"], ["user", "assistant"] * 3)
        self._find_system()
        self._find_tool()
        return {role: self._role(*texts) for role, texts in self.texts.items()}

    def _find_user_and_assistant(self) -> None:
        user, assistant, last = _PROBES["user"], _PROBES["assistant"], _PROBES["last"]
        first_user, user_suffix = self._between([("user", user)])
        _, prompt = self._between([("user", user)], add_generation_prompt=True)
        before, user_to_assistant, tail = self._between([("user", user), ("assistant", assistant)])
        _, _, assistant_to_user, _ = self._between([("user", user), ("assistant", assistant), ("user", last)])
        is_prompt = prompt == (user_to_assistant.rstrip(" ") if self.has_gaps else user_to_assistant)
        if not (before == first_user and is_prompt and prompt.startswith(user_suffix)):
            raise NotSplit("what stands between a user's and an assistant's turn depends on what follows")
        if not assistant_to_user.startswith(tail):
            raise NotSplit("the end of an assistant's turn depends on what follows")
        user_prefix = assistant_to_user[len(tail) :]
        if not first_user.endswith(user_prefix):
            raise NotSplit("the first user's turn begins otherwise than later ones")
        self.texts["user"] = (user_prefix, user_suffix)
        self.texts["assistant"] = (user_to_assistant[len(user_suffix) :], tail)
        self.lead = self._without_bos(first_user[: len(first_user) - len(user_prefix)])

    def _find_system(self) -> None:
        user_prefix = self.texts["user"][0]
        try:
            prefix, middle, _ = self._between([("system", _PROBES["system"]), ("user", _PROBES["user"])])
            if not middle.endswith(user_prefix):
                raise NotSplit("a system message changes the user's turn")
            self.texts["system"] = (self._without_bos(prefix), middle[: len(middle) - len(user_prefix)])
            self._check(["system", "user"], ["system", "user", "assistant", "user"])
        except (NotSplit, InvalidRequest) as error:
            log.info("the chat template has no system turn of its own: %s", error)
            self.texts.pop("system", None)

    def _find_tool(self) -> None:
        try:
            turns = [("user", _PROBES["user"]), ("assistant", _PROBES["assistant"]), ("tool", _PROBES["tool"])]
            _, _, middle, tail = self._between(turns)
            assistant_suffix = self.texts["assistant"][1]
            if not middle.startswith(assistant_suffix):
                raise NotSplit("a tool's turn changes the assistant's")
            self.texts["tool"] = (middle[len(assistant_suffix) :], tail)
            self._check(["user", "assistant", "tool"], ["user", "assistant", "tool", "assistant", "user"])
        except (NotSplit, InvalidRequest) as error:
            log.info("the chat template has no tool turn of its own: %s", error)
            self.texts.pop("tool", None)

    def _between(self, turns: list[Turn], *, add_generation_prompt: bool = False) -> list[str]:
        """The text that the template writes before, between and after the contents of ``turns``."""
        rest = self.template.render_text(_messages(turns), add_generation_prompt=add_generation_prompt)
        pieces = []
        for _, content in turns:
            before, found, rest = rest.partition(content)
            if not found or content in rest:
                raise NotSplit(f"a message's content is written {'not at all' if not found else 'more than once'}")
            pieces.append(before)
        return [*pieces, rest]

    def _check(self, *conversations: list[str]) -> None:
        """Rebuilds conversations from the parts; raises NotSplit unless each equals the template's, token for token."""
        for roles in conversations:
            for shift in range(len(_CONTENTS)):
                turns = [(role, _CONTENTS[(i + shift) % len(_CONTENTS)]) for i, role in enumerate(roles)]
                prompted = roles[-1] != "assistant"
                wanted = self.template.encode(_messages(turns), add_generation_prompt=prompted)
                if self._rebuilt(turns, prompted) != wanted:
                    raise NotSplit(f"its parts do not rebuild a conversation of roles {roles}")

    def _rebuilt(self, turns: list[Turn], prompted: bool) -> list[int]:
        encode, bos = self.tokenizer.encode, self.tokenizer.bos_id
        ids: list[int] = []
        if turns[0][0] != "system":
            ids += encode(self.lead, special=True, at_start=True)
        for role, content in turns:
            (prefix, gap), suffix = self._cut(self.texts[role][0]), self.texts[role][1]
            ids += encode(prefix, special=True, at_start=not ids) + encode(gap + content) + encode(suffix, special=True)
        if prompted:
            ids += encode(self._cut(self.texts["assistant"][0])[0], special=True)
        if self.tokenizer.add_bos and self._writes_bos and ids[:1] != [bos]:
            assert bos is not None
            ids.insert(0, bos)
        return ids

    @property
    def _writes_bos(self) -> bool:
        text = self.template.render_text(_messages([("user", _PROBES["user"])]), add_generation_prompt=False)
        return bool(self.bos) and text.startswith(self.bos)

    def _without_bos(self, text: str) -> str:
        """``text`` without BOS where the engine adds it: it belongs to no role."""
        return text.removeprefix(self.bos) if self.tokenizer.add_bos and self.bos else text

    def _role(self, prefix: str, suffix: str) -> RoleTemplate:
        encode = self.tokenizer.encode
        prefix, gap = self._cut(prefix)
        ids = tuple(encode(prefix, special=True)), tuple(encode(suffix, special=True))
        return RoleTemplate(*ids, prefix, suffix, gap)

    def _cut(self, prefix: str) -> tuple[str, str]:
        """A role's prefix and the gap after it."""
        kept = prefix.rstrip(" ") if self.has_gaps else prefix
        return kept, prefix[len(kept) :]


def _messages(turns: list[Turn]) -> list[Mapping[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]
