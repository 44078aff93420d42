"""The requests of OpenAI's Responses API: the model of a body, its items, and the conversation that they mean."""

from collections import Counter
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
    MAX_ITEMS,
    RESPONSES_ROWS,
    TEXT,
    TEXT_OR_LIST,
    FunctionEntry,
    Strict,
    WrittenFunction,
    by_type,
    fault,
    given,
    one_grammar,
    unserved,
    with_rows,
)
from .tenants import tenant_of_user
from .written import Written

LOGPROBS = "message.output_text.logprobs"


def _known(what: str, *known: str, hint: str = "") -> BeforeValidator:
    """A validator that refuses objects of other types by name."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known:
            message = f"{what} of type {kind!r} is not supported here{hint}; there are {', '.join(known)}"
            raise PydanticCustomError("unsupported", "{message}", {"message": message})
        return value

    return BeforeValidator(check)


# -- items of the input -----------------------------------------------------------------------------------------------


class TextPart(Strict):
    """``annotations`` and ``logprobs`` of an answer may be sent back; the model does not see them."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, unserved([])] = None
    logprobs: Any = None


class ImagePartSent(Strict):
    type: Literal["input_image"]
    image_url: str
    detail: Annotated[Any, unserved("auto")] = None
    file_id: Annotated[Any, unserved()] = None


_PART = _known("a content part", "input_text", "output_text", hint=": this model reads text only")
TextOrParts = Annotated[
    Annotated[str, TEXT]
    | Annotated[list[Annotated[TextPart, _PART]], Field(max_length=MAX_ITEMS, fail_fast=True), LIST],
    TEXT_OR_LIST,
]


TextOrImageParts = Annotated[
    Annotated[str, TEXT]
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("TextPart")] | Annotated[ImagePartSent, Tag("ImagePartSent")],
                by_type(input_text="TextPart", output_text="TextPart", input_image="ImagePartSent"),
                _known("a content part", "input_text", "output_text", "input_image"),
            ]
        ],
        Field(max_length=MAX_ITEMS, fail_fast=True),
        LIST,
    ],
    TEXT_OR_LIST,
]


def _text(content: "str | list[TextPart]") -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _content(content: "str | list[TextPart | ImagePartSent]") -> Any:
    """For the template: a text, or parts where there are images."""
    found: Any = content if isinstance(content, str) else ""
    for part in () if isinstance(content, str) else content:
        found = joined(found, part.text if isinstance(part, TextPart) else [IMAGE])
    return found


class SentItem(Strict):
    """``id`` and ``status`` of an item of an earlier answer may be sent back; the model does not see them."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(SentItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrImageParts
    phase: Annotated[Any, unserved()] = None

    @model_validator(mode="after")
    def _images_of_the_user(self) -> "MessageItem":
        if self.images and self.role != "user":
            raise PydanticCustomError("content", "images belong to messages of role 'user'")
        return self

    @property
    def images(self) -> list[ImagePartSent]:
        return [] if isinstance(self.content, str) else [p for p in self.content if isinstance(p, ImagePartSent)]


class CallItem(SentItem, WrittenFunction):
    """A call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    caller: Annotated[Any, unserved({"type": "direct"})] = None
    namespace: Annotated[Any, unserved()] = None


class CallOutputItem(SentItem):
    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts


class ReasoningPart(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(SentItem):
    """The model's reasoning, sent back."""

    type: Literal["reasoning"]
    summary: Annotated[Any, unserved([])] = None
    content: list[ReasoningPart] | None = None
    encrypted_content: Annotated[Any, unserved()] = None


def _as_message(item: Any) -> Any:
    """A message may leave its type out."""
    return {"type": "message", **item} if isinstance(item, dict) and "type" not in item and "role" in item else item


AnyItem = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[CallOutputItem, Tag("CallOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    by_type(
        message="MessageItem",
        function_call="CallItem",
        function_call_output="CallOutputItem",
        reasoning="ReasoningItem",
    ),
    _known("an item", "message", "function_call", "function_call_output", "reasoning"),
    BeforeValidator(_as_message),
]


def turns_of(items: "list[MessageItem | CallItem | CallOutputItem | ReasoningItem]") -> list[dict[str, Any]]:
    """The messages of a template that say the same; neighbouring items of one answer become one message."""
    turns: list[dict[str, Any]] = []

    def answer() -> dict[str, Any]:
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})
        return turns[-1]

    for item in items:
        match item:
            case MessageItem(role="assistant"):
                last = answer()
                if last["content"] and "tool_calls" not in last:
                    turns.append({"role": "assistant", "content": ""})
                answer()["content"] += _content(item.content)
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                turns.append({"role": role, "content": _content(item.content)})
            case ReasoningItem():
                answer()["reasoning_content"] = "".join(part.text for part in item.content or ())
            case CallItem():
                function = {"name": item.name, "arguments": item.value}
                call = {"type": "function", "id": item.call_id, "function": function}
                answer().setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return turns


# -- the request ------------------------------------------------------------------------------------------------------


class FunctionTool(FunctionEntry):
    type: Literal["function"]
    defer_loading: Annotated[Any, unserved(False)] = None


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    """The model sees all tools and may call these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class TextFormat(Strict):
    """``strict`` has no effect: the schema is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError("schema", "a schema goes with type 'json_schema', and only with it")
        return self


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[Any, unserved("medium")] = None


class ReasoningConfig(Strict):
    """``effort: none`` closes the model's reasoning."""

    effort: Annotated[Any, unserved("none")] = None
    summary: Annotated[Any, unserved()] = None
    generate_summary: Annotated[Any, unserved()] = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Annotated[Any, unserved(False)] = None


class ResponsesRequest(with_rows("ResponsesFields", Strict, RESPONSES_ROWS, has_defaults=False)):  # type: ignore[misc]
    model: str | None = None
    input: Annotated[
        Annotated[str, TEXT]
        | Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), LIST],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool, _known("a tool", "function", hint=": this server runs no tools")]],
            Field(max_length=MAX_ITEMS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: str | None = None  # names the tenant
    # sent back with the answer, which they do not change
    metadata: dict[str, str] | None = None
    # accepted and ignored: they describe the request, not the answer
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # known fields of the API that the server does not support
    background: Annotated[Any, unserved(False)] = None
    context_management: Annotated[Any, unserved([])] = None
    conversation: Annotated[Any, unserved()] = None
    max_tool_calls: Annotated[Any, unserved()] = None
    moderation: Annotated[Any, unserved()] = None
    prompt: Annotated[Any, unserved()] = None
    prompt_cache_options: Annotated[Any, unserved()] = None
    service_tier: Annotated[Any, unserved("auto", "default")] = None
    truncation: Annotated[Any, unserved("disabled")] = None

    @model_validator(mode="after")
    def _served_combinations(self) -> "ResponsesRequest":
        names = [tool.name for tool in self.tools or ()]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise fault(f"tools: two functions are called {twice!r}", "tools")
        choice = self.tool_choice
        chosen = [choice] if isinstance(choice, FunctionChoice) else getattr(choice, "tools", [])
        strange = next((one.name for one in chosen if one.name not in names), None)
        if strange is not None or (choice == "required" and not names):
            raise fault(f"tool_choice asks for {strange or choice!r}, which tools does not have", "tool_choice")
        if self.images and self.store is not False:
            raise fault("images are not stored: send store=false, and the conversation with each request", "store")
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options is only allowed with stream=true", "stream_options")
        other = next((name for name in self.include or () if name != LOGPROBS), None)
        if other is not None:
            raise fault(f"include: {other!r} is not supported by this server; only {LOGPROBS!r} is", "include")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise fault(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
        return self

    @property
    def choice(self) -> str:
        """auto, required, none, or the name of a tool."""
        if isinstance(self.tool_choice, FunctionChoice):
            return self.tool_choice.name
        return self.tool_choice.mode if isinstance(self.tool_choice, AllowedFunctions) else self.tool_choice or "auto"

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def images(self) -> list[ImageUrl]:
        items = () if isinstance(self.input, str) else self.input
        return [
            ImageUrl(image.image_url, f"input.{i}.content", "input_image")
            for i, item in enumerate(items)
            if isinstance(item, MessageItem)
            for image in item.images
        ]

    def turns(self) -> list[dict[str, Any]]:
        """The input as a template takes it."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else turns_of(self.input)

    def grammar(self) -> GrammarSpec | None:
        wanted = self.text.format if self.text is not None else None
        schemas = {"text": None, "json_object": {"type": "object"}, "json_schema": wanted and wanted.schema_}
        return one_grammar({"text.format": ("json_schema", wanted and schemas[wanted.type])}, None)

    def continued(self, before: list[dict[str, Any]], written: Written | None) -> Conversation:
        """``before``: the messages of the response that this one goes on from; ``written``: its tokens."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [] if self.choice == "none" else [tool.schema_of() for tool in self.tools or ()]
        allowed = (
            {one.name for one in self.tool_choice.tools} if isinstance(self.tool_choice, AllowedFunctions) else None
        )
        return Conversation(
            [*system, *before, *self.turns()],
            tools=tools,
            callable_tools=[tool for tool in tools if allowed is None or tool["function"]["name"] in allowed],
            choice=self.choice,
            is_parallel=self.parallel_tool_calls is not False,
            grammar=self.grammar(),
            may_think=self.reasoning is None or self.reasoning.effort != "none",
            written=written,
            images=self.images,
        )

    def sampling(self, *, max_tokens: int) -> SamplingParams:
        """The parameters for the engine. ``max_tokens``: where the request has none."""
        limit = max_tokens if self.max_output_tokens is None else self.max_output_tokens
        return SamplingParams(**given(self, RESPONSES_ROWS), max_tokens=limit)

    def settings(self, name: str, *, adapter: str = "") -> ProgramSettings:
        return ProgramSettings(tenant=tenant_of_user(self.user), adapter=adapter, name=name)

    def echo(self, params: SamplingParams) -> dict[str, Any]:
        """The fields of the request that its response repeats."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "temperature": params.temperature,
            "text": {"format": self._plain(self.text and self.text.format) or {"type": "text"}},
            "tool_choice": self._plain(self.tool_choice) or "auto",
            "tools": [{"strict": None, **self._plain(tool)} for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    @staticmethod
    def _plain(value: Any) -> Any:
        return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, Strict) else value
