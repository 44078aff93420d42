"""The requests of Anthropic's Messages API: one pydantic model each, and the conversation that a request means."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ...constrained.spec import GrammarSpec
from ...protocol.messages import ProgramSettings
from ...protocol.sampling import SamplingParams
from .conversation import Conversation
from .image_parts import IMAGE, ImageUrl, joined
from .schemas import (
    LIST,
    MAX_DEPTH,
    MAX_ITEMS,
    MESSAGES_ROWS,
    TEXT,
    TEXT_OR_LIST,
    Strict,
    by_type,
    depth_of,
    fault,
    given,
    one_grammar,
    unserved,
    with_rows,
)
from .tenants import tenant_of_user

JOINT = "\n"  # between neighbouring messages of one role, which become one turn
_NAME = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")


class CacheControl(Strict):
    """Has no effect: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, unserved([])] = None


class ImageSource(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageAddress(Strict):
    type: Literal["url"]
    url: str


def _known_source(source: Any) -> Any:
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(kind, str) and kind not in ("base64", "url"):
        message = f"an image source of type {kind!r} is not supported; send type 'base64' or 'url'"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})
    return source


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[ImageSource | ImageAddress, Field(discriminator="type"), BeforeValidator(_known_source)]

    @property
    def url(self) -> str:
        if isinstance(self.source, ImageAddress):
            return self.source.url
        return f"data:{self.source.media_type};base64,{self.source.data}"


class ThinkingBlock(Strict):
    """The model's reasoning, sent back. ``signature`` has no effect: this server signs nothing."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Block):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, unserved({"type": "direct"})] = None
    toolset_name: Annotated[Any, unserved()] = None

    @model_validator(mode="after")
    def _is_not_too_deep(self) -> "ToolUseBlock":
        if depth_of(json.dumps(self.input)) > MAX_DEPTH:
            raise PydanticCustomError("input", "{message}", {"message": f"input is nested more than {MAX_DEPTH} deep"})
        return self


def _only(*known: str) -> BeforeValidator:
    """A validator that refuses blocks of other types by name."""

    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in known:
            message = f"a content block of type {kind!r} is not supported here; there are {', '.join(known)}"
            raise PydanticCustomError("unsupported", "{message}", {"message": message})
        return block

    return BeforeValidator(check)


TextOrBlocks = Annotated[
    Annotated[str, TEXT]
    | Annotated[list[Annotated[TextBlock, _only("text")]], Field(max_length=MAX_ITEMS, fail_fast=True), LIST],
    TEXT_OR_LIST,
]


class ToolResultBlock(Block):
    """``is_error``: the model reads ``Error:`` before the content."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks | None = None
    is_error: bool | None = None
    toolset_name: Annotated[Any, unserved()] = None

    @property
    def text(self) -> str:
        return ("Error: " if self.is_error else "") + text_of(self.content)


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ImageBlock, Tag("ImageBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    by_type(
        text="TextBlock",
        image="ImageBlock",
        thinking="ThinkingBlock",
        tool_use="ToolUseBlock",
        tool_result="ToolResultBlock",
    ),
    _only("text", "image", "thinking", "tool_use", "tool_result"),
]


def text_of(content: "str | list[TextBlock] | None") -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


class MessageEntry(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, TEXT] | Annotated[list[AnyBlock], Field(max_length=MAX_ITEMS, fail_fast=True), LIST],
        TEXT_OR_LIST,
    ]

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> "MessageEntry":
        allowed = {
            "assistant": ("text", "thinking", "tool_use"),
            "user": ("text", "image", "tool_result"),
            "system": ("text",),
        }
        for block in self.blocks:
            if block.type not in allowed[self.role]:
                message = f"a block of type {block.type!r} does not belong to role {self.role!r}"
                raise PydanticCustomError("block", "{message}", {"message": message})
        return self

    @property
    def blocks(self) -> "list[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]":
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def for_template(self) -> list[dict[str, Any]]:
        """The messages of a template that say the same: results of tools are messages of their own."""
        made: list[dict[str, Any]] = []
        for block in self.blocks:
            if isinstance(block, ToolResultBlock):
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
                continue
            if not made or made[-1]["role"] != self.role:
                made.append({"role": self.role, "content": ""})
            if isinstance(block, TextBlock):
                made[-1]["content"] = joined(made[-1]["content"], block.text)
            elif isinstance(block, ImageBlock):
                made[-1]["content"] = joined(made[-1]["content"], [IMAGE])
            elif isinstance(block, ThinkingBlock):
                made[-1]["reasoning_content"] = made[-1].get("reasoning_content", "") + block.thinking
            else:
                function = {"name": block.name, "arguments": block.input}
                made[-1].setdefault("tool_calls", []).append({"type": "function", "id": block.id, "function": function})
        return made or [{"role": self.role, "content": ""}]


class CustomTool(Strict):
    """``strict`` has no effect: the schema is always enforced for a call's input."""

    name: Annotated[str, _NAME]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Annotated[Any, unserved(True)] = None  # input is always streamed as it is written
    allowed_callers: Annotated[Any, unserved(["direct"])] = None
    defer_loading: Annotated[Any, unserved(False)] = None
    input_examples: Annotated[Any, unserved([])] = None

    @model_validator(mode="after")
    def _input_is_an_object(self) -> "CustomTool":
        if self.input_schema.get("type", "object") != "object":
            raise PydanticCustomError("input_schema", "a tool's input_schema is a JSON schema of type 'object'")
        return self

    def schema_of(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = {"type": "object", **self.input_schema}
        return {"type": "function", "function": function}


def _custom(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        message = (
            f"a tool of type {kind!r} is not supported: this server runs no tools; describe yours as type 'custom'"
        )
        raise PydanticCustomError("unsupported", "{message}", {"message": message})
    return tool


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_where_it_belongs(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "a name goes with type 'tool', and only with it")
        return self


class Thinking(Strict):
    """``adaptive``: the model reasons as it does by itself. ``disabled``: its reasoning ends before it begins."""

    type: Literal["adaptive", "disabled"]
    display: Annotated[Any, unserved("summarized")] = None


def _no_budget(thinking: Any) -> Any:
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if isinstance(kind, str) and kind not in ("adaptive", "disabled"):
        message = f"thinking of type {kind!r} is not supported (no budget is kept); send type 'adaptive' or 'disabled'"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})
    return thinking


class Metadata(Strict):
    user_id: str | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Annotated[Any, unserved()] = None


class CountRequest(Strict):
    """The fields of a prompt, which ``/v1/messages/count_tokens`` takes alone."""

    model: str | None = None
    messages: Annotated[list[MessageEntry], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    system: TextOrBlocks | None = None
    tools: Annotated[list[Annotated[CustomTool, BeforeValidator(_custom)]], Field(max_length=MAX_ITEMS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking, BeforeValidator(_no_budget)] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> "CountRequest":
        names = [tool.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise fault(f"tools: two tools are called {twice!r}", "tools")
        choice = self.choice
        if choice not in ("auto", "none") and (choice not in names if self._is_named else not names):
            raise fault(f"tool_choice asks for {choice!r}, which tools does not have", "tool_choice")
        last = self.messages[-1]
        if last.role == "assistant":
            if any(not isinstance(block, TextBlock) for block in last.blocks):
                message = "the last message is the beginning of the answer, which is text; it holds other blocks"
                raise fault(message, "messages")
            if self.prefill != self.prefill.rstrip():
                raise fault("the last message is the beginning of the answer and must not end in a blank", "messages")
        return self

    @property
    def _is_named(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.type == "tool"

    @property
    def choice(self) -> str:
        """auto, required, none, or the name of a tool."""
        if self.tool_choice is None:
            return "auto"
        return self.tool_choice.name or {"any": "required"}.get(self.tool_choice.type, self.tool_choice.type)

    @property
    def prefill(self) -> str:
        """The beginning of the answer."""
        last = self.messages[-1]
        return "".join(b.text for b in last.blocks if isinstance(b, TextBlock)) if last.role == "assistant" else ""

    def grammar(self) -> GrammarSpec | None:
        wanted = self.output_config.format if self.output_config is not None else None
        return one_grammar({"json_schema": ("json_schema", wanted and wanted.schema_)}, None)

    def conversation(self) -> Conversation:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": text_of(self.system)})
        for message in self.messages[:-1] if self.messages[-1].role == "assistant" else self.messages:
            for turn in message.for_template():
                if messages and set(turn) | set(messages[-1]) == {"role", "content"} and _is_same(messages[-1], turn):
                    messages[-1]["content"] = joined(joined(messages[-1]["content"], JOINT), turn["content"])
                else:
                    messages.append(turn)
        tools = [] if self.choice == "none" else [tool.schema_of() for tool in self.tools or ()]
        return Conversation(
            messages,
            tools=tools,
            callable_tools=tools,
            choice=self.choice,
            is_parallel=not (self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use),
            grammar=self.grammar(),
            may_think=self.thinking is None or self.thinking.type != "disabled",
            prefill=self.prefill,
            images=self.images,
        )

    @property
    def images(self) -> list[ImageUrl]:
        return [
            ImageUrl(block.url, f"messages.{i}.content", "image")
            for i, message in enumerate(self.messages)
            for block in message.blocks
            if isinstance(block, ImageBlock)
        ]


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["role"] == other["role"] != "tool"


class MessagesRequest(with_rows("MessagesFields", CountRequest, MESSAGES_ROWS, has_defaults=False)):  # type: ignore[misc]
    max_tokens: int
    metadata: Metadata | None = None
    stream: bool | None = None
    # known fields of the API that the server does not support
    container: Annotated[Any, unserved()] = None
    context_management: Annotated[Any, unserved()] = None
    diagnostics: Annotated[Any, unserved()] = None
    inference_geo: Annotated[Any, unserved()] = None
    mcp_servers: Annotated[Any, unserved([])] = None
    service_tier: Annotated[Any, unserved("auto", "standard_only")] = None
    speed: Annotated[Any, unserved("standard")] = None

    def sampling(self) -> SamplingParams:
        return SamplingParams(**given(self, MESSAGES_ROWS))

    def settings(self, name: str, *, adapter: str = "") -> ProgramSettings:
        return ProgramSettings(
            tenant=tenant_of_user(self.metadata.user_id if self.metadata is not None else None),
            adapter=adapter,
            name=name,
        )
