"""A conversation to go on with: from the request of any chat API to a job, and from the model's text to its answer.

Tools are written in the model's own format where its template has one, else in a plain one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...constrained.spec import GrammarSpec
from ...protocol import errors
from ...protocol.answer_splitter import AnswerSplitter
from ...protocol.messages import ProgramSettings, ThinkingStyle
from ...protocol.ops import Gen
from ...protocol.sampling import SamplingParams
from ...protocol.thinking_splitter import ThinkingSplitter
from ...protocol.tool_format import ToolFormat
from ..tokenizer import Tokenizer
from ..tokenizer.tokenizer import LONG_TEXT
from .image_parts import ImageUrl, with_images
from .jobs import Job, Part, Result, make_job
from .remote_images import NONE_FETCHED
from .service import Service
from .tenants import sender_of_request
from .written import Written

SEAM_CHARS = 64  # of the prompt before an answer that are tokenized with it: a token seldom reaches further back


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages`` as a template takes them; ``tools``, in the form of the OpenAI API, are those that the model sees.

    ``choice``: auto, required, none, or the name of a tool. ``callable_tools``: those of ``tools`` that may be called.
    ``grammar``: of the answer; it excludes tools. ``may_think``: False ends the model's reasoning before it begins.
    ``prefill``: the text with which the answer begins, which ends the reasoning too. ``written``: the earlier part of
    the conversation as the model wrote it. ``images``: those of the messages' parts of type image, in order.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    callable_tools: Sequence[dict[str, Any]] = ()
    choice: str = "auto"
    is_parallel: bool = True
    grammar: GrammarSpec | None = None
    may_think: bool = True
    prefill: str = ""
    written: Written | None = None
    images: Sequence[ImageUrl] = ()

    @property
    def num_chars(self) -> int:
        """Of all messages and tools, without what the template adds."""
        tools = sum(len(json.dumps(tool, ensure_ascii=False)) for tool in self.tools)
        return sum(map(_num_chars, self.messages)) + tools


def _num_chars(message: dict[str, Any]) -> int:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = sum(len(one["name"]) + len(json.dumps(one["arguments"], ensure_ascii=False)) for one in functions)
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return calls + len(content) + sum(len(message.get(field) or "") for field in ("name", "reasoning_content"))


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """How one answer's text is read. ``names``: the tools that it may call."""

    tokenizer: Tokenizer
    tool_format: ToolFormat
    names: Sequence[str]
    thinking: ThinkingStyle | None

    @property
    def is_plain(self) -> bool:
        """Whether all of it is text."""
        return not self.names and self.thinking is None

    def splitter(self) -> AnswerSplitter:
        thinking = None if self.thinking is None else ThinkingSplitter(self.thinking)
        return AnswerSplitter(thinking, self.tool_format.splitter(self.names) if self.names else None)

    def num_reasoning_tokens(self, token_ids: Sequence[int], splitter: AnswerSplitter) -> int:
        """The tokens up to the end of the reasoning that ``splitter`` has found, its tags included."""
        if self.thinking is None or not splitter.has_reasoning:
            return 0
        tokenizer, end = self.tokenizer, self.thinking.end.encode()
        seen = b""
        for count, token in enumerate(token_ids, 1):
            is_special = token in tokenizer.special_ids
            shown = tokenizer.special_text(token).encode() if is_special else tokenizer.token_bytes[token]
            seen = seen[1 - len(end) :] + shown
            if end in seen:
                return count
        return len(token_ids)


@dataclass(frozen=True, slots=True)
class Asked:
    """The job of a conversation, its prompt with the earlier answers, and how its answer is read.

    ``space``: the conversations among which the answers in it were looked for.
    """

    job: Job
    written: Written
    reader: AnswerReader
    space: str


class Chat:
    """The served model in conversation: its template, its tools and its reasoning."""

    def __init__(self, service: Service) -> None:
        info = service.template.info() if service.template is not None else None
        self._service = service
        self._turn_ends = info.stop_token_ids if info is not None else ()
        self._thinking = info.thinking if info is not None else None
        self._tool_format = ToolFormat(info.tools if info is not None else None)

    @property
    def can_think(self) -> bool:
        """Whether the model writes its reasoning between tags."""
        return self._thinking is not None

    def ask(
        self,
        conversation: Conversation,
        params: SamplingParams,
        *,
        settings: ProgramSettings,
        n: int = 1,
        stream: bool = False,
        fetched: Mapping[str, bytes] = NONE_FETCHED,
    ) -> Asked:
        """``fetched``: the remote images of ``conversation``, by URL.

        Raises an InvalidRequest where the model cannot go on with ``conversation``."""
        welcome = self._service.client.welcome
        for image in conversation.images:
            image.check(welcome)
        space = _space_of(settings)
        parts, written, grammar, reader = self._prompt(conversation, space)
        if not params.ignore_eos:
            params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *self._turn_ends))
        if reader.thinking is not None and reader.thinking.is_special:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        gen = Gen(op=0, seq=0, params=params, grammar=grammar, n=n, stream=stream)
        images = [image.read(welcome, fetched) for image in conversation.images]
        whole = with_images(parts, images, token_id=welcome.image_token_id) if images else parts
        return Asked(make_job([whole], [gen], settings=settings, limits=welcome.limits), written, reader, space)

    def keep(self, asked: Asked, result: Result) -> None:
        """Remember the answers to ``asked`` that the model spelled otherwise than the tokenizer does."""
        tokenizer, prompt = self._service.tokenizer, asked.written.prompt
        last = prompt[-1][-SEAM_CHARS:] if prompt and isinstance(prompt[-1], str) else ""
        for text, candidate in zip(result.texts, result.meta.candidates, strict=True):
            ids = list(candidate.token_ids)
            if not text or len(text) > LONG_TEXT or tokenizer.decode(ids) != text:
                continue  # a stop string or the end of a turn was cut off
            if tokenizer.encode(last + text) != [*tokenizer.encode(last), *ids]:
                self._service.written.keep(asked.space, prompt, text, candidate.token_ids)

    def _prompt(
        self, conversation: Conversation, space: str
    ) -> tuple[list[Part], Written, GrammarSpec | None, AnswerReader]:
        """The prompt, as tokenized and as rendered, the grammar of the answer, and how the answer is read."""
        service, tools = self._service, conversation.tools
        parts = prompt_of(conversation, service)
        written = conversation.written
        answers = service.written.found_in(space, parts)
        if written is not None and written.is_in(parts):
            known = {(one.part, one.at) for one in written.answers}
            answers = (*written.answers, *[one for one in answers if (one.part, one.at) not in known])
        rendered = Written(list(parts), tuple(sorted(answers, key=lambda one: (one.part, one.at))))
        parts = rendered.kept_in(parts)
        grammar = conversation.grammar
        if tools:
            if grammar is not None:
                message = (
                    "tools and a grammar (response_format, regex, ...) exclude each other; tool_choice 'none' helps"
                )
                raise errors.InvalidRequest(message, where="tools")
            grammar = self._tool_format.grammar(
                conversation.callable_tools, conversation.choice, parallel=conversation.is_parallel
            )
        thinking = self._thinking
        # A grammar that begins with the answer leaves no room for reasoning that the prompt has begun.
        is_cut_off = grammar is not None and not (tools and conversation.choice == "auto")
        is_unwanted = not conversation.may_think or bool(conversation.prefill)
        if thinking is not None and (is_unwanted or (thinking.is_forced and is_cut_off)):
            closing = service.tokenizer.split_special(thinking.closing)
            parts += [part if isinstance(part, str) else (part,) for part in closing]
            thinking = msgspec.structs.replace(thinking, is_forced=False)
        if conversation.prefill:
            parts.append(conversation.prefill)
        names = [tool["function"]["name"] for tool in tools]
        return parts, rendered, grammar, AnswerReader(service.tokenizer, self._tool_format, names, thinking)


def _space_of(settings: ProgramSettings) -> str:
    """Tells apart conversations that share nothing: of other tenants, cache salts and adapters."""
    sender = sender_of_request()
    tenant = sender.account.name if sender is not None else ""
    return "\n".join((tenant, settings.tenant, settings.cache_salt, settings.adapter or ""))


def prompt_of(conversation: Conversation, service: Service, *, add_generation_prompt: bool = True) -> list[Part]:
    """The messages and tools as the model's template renders them.

    Raises an InvalidRequest where there is no template, and PromptTooLong, before it renders, where they cannot fit.
    """
    template, messages, tools = service.template, conversation.messages, conversation.tools
    if template is None:
        message = f"{service.model_name!r} has no chat template; send a prompt of its own (/v1/completions)"
        raise errors.Unsupported(message, where="messages")
    service.tokenizer.check_length(conversation.num_chars, service.client.welcome.context_len)
    if template.info().tools is not None:
        return template.render(messages, tools=list(tools) or None, add_generation_prompt=add_generation_prompt)
    plain = in_plain_words(messages, tools, ToolFormat())
    return template.render(plain, add_generation_prompt=add_generation_prompt)


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
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**kept, "content": format.template.calls_between.join(content)}
        turns.append(message)
    settle()
    if tools:
        if turns and turns[0]["role"] == "system":
            prompt = format.prompt(tools, is_first=not turns[0]["content"])
            turns[0] = {**turns[0], "content": turns[0]["content"] + prompt}
        else:
            turns.insert(0, {"role": "system", "content": format.prompt(tools, is_first=True)})
    return turns
