"""A model's chat template: messages in, text and special tokens out.

The template is the model's own jinja2 source, run in a sandbox. Before it runs, a mark is put into every special token
that a message's text spells; the mark is removed afterwards. So only what the template itself writes becomes a special
token.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ...protocol.errors import InvalidRequest, Unsupported
from ...protocol.messages import TemplateInfo
from .template_split import split_template
from .tokenizer import Tokenizer

Part = str | tuple[int, ...]

_TEMPLATE_FILE = "<template>"  # jinja2's name for a template made from a string
MAX_ROLES = 20  # that an error names
_ROLE = re.compile(r"[A-Za-z0-9_.-]+")
_BREAKS = "\ue000\ue001\ue002\ue003\ue004\ue005\ue006\ue007"


class ModelTemplate:
    """``source`` is jinja2 as Hugging Face models carry it; Unsupported if it cannot be read."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, now: Callable[[], datetime.datetime] = datetime.datetime.now
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise Unsupported(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error
        names = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unk": tokenizer.unk_id, "pad": tokenizer.pad_id}
        self._names = {
            f"{name}_token": "" if token_id is None else tokenizer.special_text(token_id)
            for name, token_id in names.items()
        }
        specials = sorted({tokenizer.special_text(i) for i in tokenizer.special_ids}, key=len, reverse=True)
        # Matches the first character of every special token's spelling, overlapping ones too.
        self._first = re.compile(f"(?=(?:{'|'.join(map(re.escape, specials))}))(.)", re.DOTALL) if specials else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Part]:
        """The conversation as parts: plain text, which holds no special tokens, and the special tokens between.

        ``messages``: dicts with ``role`` and the fields that the template reads, mostly ``content``. Where the template
        refuses, raises InvalidRequest with the role and the template's line.
        """
        check_roles(messages)
        given = json.dumps([messages, tools], ensure_ascii=False, default=str)
        mark = next((char for char in _BREAKS if char not in given), None)
        if mark is None:
            raise InvalidRequest(f"the messages hold every private-use character of {_BREAKS!a}; leave one out")
        text = self._run(
            [self._break(message, mark) for message in messages],
            None if tools is None else [self._break(tool, mark) for tool in tools],
            add_generation_prompt,
        )
        parts: list[Part] = []
        for part in self._tokenizer.split_special(text):
            if isinstance(part, str):
                parts.append(part.replace(mark, ""))
            elif parts and isinstance(parts[-1], tuple):
                parts[-1] = (*parts[-1], part)
            else:
                parts.append((part,))
        return parts

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The conversation as token ids, as ``render`` gives it."""
        ids: list[int] = []
        for part in self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt):
            if isinstance(part, str):
                at_start = not ids or ids == [self._tokenizer.bos_id]
                ids.extend(self._tokenizer.encode(part, at_start=at_start))
            else:
                ids.extend(part)
        return ids

    def info(self) -> TemplateInfo:
        """The template split once into tokens per role; ``roles`` is empty where that cannot be done exactly."""
        return self._info

    @cached_property
    def _info(self) -> TemplateInfo:
        return split_template(self, self._tokenizer)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as one text with special tokens spelled out, to analyse a template; not for ``encode``."""
        return self._run(messages, tools, add_generation_prompt)

    def _break(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return value if self._first is None else self._first.sub(lambda match: match[1] + mark, value)
        if isinstance(value, Mapping):
            return {self._break(key, mark): self._break(inner, mark) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._break(inner, mark) for inner in value]
        return value

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template reads a content that is a list of parts and ignores one that is a text."""
        probe, texts = "Qprobe", []
        for content in (probe, [{"type": "text", "text": probe}]):
            try:
                texts.append(self._call([{"role": "user", "content": content}], None, False))
            except InvalidRequest:
                texts.append("")
        return probe not in texts[0] and probe in texts[1]

    def _run(self, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        return self._call(
            [_in_parts(m) for m in messages] if self._wants_parts else messages, tools, add_generation_prompt
        )

    def _call(self, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except Exception as error:
            raise InvalidRequest(f"the chat template refuses {_place(error, messages)}: {error}") from error


def check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequest unless each role is a plain name: some templates make a special token of it."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message with a role and a content")
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InvalidRequest(
                f"role {role!r} of message {index} is not a role name; use letters, digits, '_', '.' and '-'",
                where=f"messages[{index}].role",
            )


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _place(error: Exception, messages: Sequence[Mapping[str, Any]]) -> str:
    """The message and the template's line that an error is about, as far as its traceback tells."""
    line, current = None, None
    step: TracebackType | None = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = step.tb_lineno
            current = next((v for v in step.tb_frame.f_locals.values() if any(v is m for m in messages)), current)
        step = step.tb_next
    if current is not None:
        index = next(i for i, message in enumerate(messages) if message is current)
        what = f"message {index} of role {current['role']!r}"
    else:
        roles = ", ".join(repr(message["role"]) for message in messages[:MAX_ROLES])
        more = f" and {len(messages) - MAX_ROLES:,} more" if len(messages) > MAX_ROLES else ""
        what = f"a conversation of roles [{roles}{more}]"
    return what if line is None else f"{what} at its line {line}"


# -- the sandbox ------------------------------------------------------------------------------------------------------


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks an assistant's part for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 wants a set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime.datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which escapes for HTML: models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
