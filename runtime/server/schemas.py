"""The HTTP requests: one pydantic model each, with its sampling parameters and grammar.

Unknown fields, and known ones that are not served, are refused by name.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from ...constrained.spec import GrammarKind, GrammarSpec
from ...protocol import errors
from ...protocol.messages import MAX_INPUTS, Limits, ProgramSettings
from ...protocol.ops import Pooling
from ...protocol.sampling import FIELDS, SamplingParams
from ...protocol.sampling import Field as SamplingField
from .conversation import Conversation
from .image_parts import IMAGE, ImageUrl
from .tenants import tenant_of_user

MAX_ITEMS = Limits().max_ops_per_submit  # messages or prompts of a request: each makes at least one operation
MAX_IDS = 1 << 20  # token ids of one prompt that are read at all; the context is usually shorter
MAX_DEPTH = 100  # of a call's arguments, which are rendered by recursion
MAX_NAMED = 20  # tools that an error names
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
COMPLETION_MAX_TOKENS = 16  # the completions API's default


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class _Neutral(AfterValidator):
    """A validator of a field that accepts only null and the ``values``, as its JSON schema says."""

    values: tuple[Any, ...] = ()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.values]}


def unserved(*neutral: Any) -> AfterValidator:
    """A validator for a field that the server does not support: it accepts only null and the ``neutral`` values."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # JSON's false is no 0, which Python's is.
        if value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            return value
        allowed = f"; only {' or '.join(json.dumps(n) for n in neutral)} is accepted" if neutral else ""
        message = f"{info.field_name!r} is not supported by this server{allowed}"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})

    return _Neutral(check, neutral)


# A text or a list, by which it is: an error in the list names its place there, not that it is no text.
TEXT, LIST = Tag("Text"), Tag("List")
TEXT_OR_LIST = Discriminator(lambda value: "List" if isinstance(value, list) else "Text")


def by_type(**classes: str) -> Discriminator:
    """Tells the members of a union apart by their ``type``: its values and the members' tags."""

    def tag_of(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return classes.get(kind) if isinstance(kind, str) else None

    known = ", ".join(classes)
    message = f"must be an object with a 'type', one of {known}"
    return Discriminator(tag_of, custom_error_type="type", custom_error_message=message)


def fault(message: str, param: str) -> PydanticCustomError:
    """An error about several fields; ``param`` is the field to change."""
    return PydanticCustomError("conflict", "{message}", {"message": message, "param": param})


# -- sampling, made from the table in protocol/sampling.py ------------------------------------------------------------

_Rows = dict[str, SamplingField]  # by the endpoint's name

_OPENAI: _Rows = {
    field.name if field.extension else field.chat or field.name: field
    for field in FIELDS
    if field.part == "params" and not field.is_beside and (field.extension or field.chat)
}
_NATIVE: _Rows = {
    field.native: field for field in FIELDS if field.part == "params" and not field.is_beside and field.native
}
_BESIDE_NATIVE: _Rows = {field.native: field for field in FIELDS if field.is_beside and field.native}
RESPONSES_ROWS: _Rows = {
    name: field for name, field in _OPENAI.items() if field.extension or name in ("temperature", "top_p")
}
MESSAGES_ROWS: _Rows = {field.anthropic: field for field in FIELDS if field.part == "params" and field.anthropic}
# our names of the sampling parameters -> those of /generate
NATIVE_NAMES = {field.name: name for name, field in (_NATIVE | _BESIDE_NATIVE).items()}

_JSON_TYPES: dict[Any, Any] = {tuple[str, ...]: str | list[str], tuple[int, ...]: list[int]}


def with_rows(name: str, base: type[Strict], rows: _Rows, *, has_defaults: bool) -> Any:
    """``base`` with a field per row; lists and dicts, and all rows if not ``has_defaults``, default to null."""
    made: dict[str, Any] = {}
    for theirs, row in rows.items():
        kind = _JSON_TYPES.get(row.type, row.type)
        is_plain = has_defaults and not isinstance(row.default, tuple | dict)
        said = f"{row.meaning} ({row.must_be})" if row.must_be else row.meaning
        default = row.default if is_plain else None
        field = Field(default, description=said, json_schema_extra=row.limits)
        made[theirs] = (kind if is_plain else kind | None, field)
    return create_model(name, __base__=base, **made)


def given(request: Strict, rows: _Rows) -> dict[str, Any]:
    """The parameters that ``request`` sets, by our names."""
    values = [(row, getattr(request, theirs)) for theirs, row in rows.items() if row.part == "params"]
    return {
        row.name: as_strings(value) if row.type in _JSON_TYPES else value for row, value in values if value is not None
    }


Grammars = dict[str, tuple[GrammarKind, Any]]  # by the request's field: kind and value; None: the field is not set


class _Grammars(Strict):
    """The fields of a grammar that an answer follows; a request sets one of the first three."""

    regex: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    ebnf: str | None = None
    grammar_options: dict[str, str | int | bool] | None = None

    def grammars(self) -> Grammars:
        """The fields that name a grammar."""
        schema: tuple[GrammarKind, Any] = ("json_schema", self.json_schema)
        return {"regex": ("regex", self.regex), "json_schema": schema, "ebnf": ("ebnf", self.ebnf)}

    def grammar(self) -> GrammarSpec | None:
        return one_grammar(self.grammars(), self.grammar_options)


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class StructuredOutputs(Strict):
    """vLLM's names of our grammars; one of the first five."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # known fields of the API that the server does not support
    structural_tag: Annotated[Any, unserved()] = None
    disable_fallback: Annotated[Any, unserved(False, True)] = None  # there is one way to follow a grammar
    disable_any_whitespace: Annotated[Any, unserved(False)] = None
    disable_additional_properties: Annotated[Any, unserved(False)] = None
    whitespace_pattern: Annotated[Any, unserved()] = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> "StructuredOutputs":
        if all(value is None for _, value in self.grammars("").values()):
            message = "holds no grammar; give json, regex, choice, grammar or json_object: true"
            raise PydanticCustomError("structured_outputs", "{message}", {"message": message})
        return self

    def grammars(self, prefix: str) -> Grammars:
        """The fields that name a grammar; ``prefix``: written before their names."""
        return {
            f"{prefix}json": ("json_schema", self.json_),
            f"{prefix}regex": ("regex", self.regex),
            f"{prefix}choice": ("choices", self.choice),
            f"{prefix}grammar": (_kind_of(self.grammar), self.grammar),
            f"{prefix}json_object": ("json_schema", {"type": "object"} if self.json_object else None),
        }


def _kind_of(grammar: str | None) -> GrammarKind:
    """vLLM takes both under one name. GBNF writes a rule as ``name ::= ...``, Lark as ``name: ...``."""
    return "ebnf" if re.search(r"^\s*[\w-]+\s*::=", grammar or "", re.MULTILINE) else "lark"


class OpenAISampling(with_rows("OpenAIFields", _Grammars, _OPENAI, has_defaults=False)):  # type: ignore[misc]
    """The sampling fields of both OpenAI endpoints, with our extensions. null means the default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: "StreamOptions | None" = None
    # extensions
    priority: int | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    # vLLM's names of our grammars
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    return_tokens_as_token_ids: bool | None = None  # vLLM's too
    guided_decoding_backend: Annotated[Any, unserved("auto")] = None
    guided_whitespace_pattern: Annotated[Any, unserved()] = None
    user: str | None = None  # names the tenant if the request names none

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "OpenAISampling":
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options is only allowed with stream=true", "stream_options")
        return self

    def grammars(self) -> Grammars:
        outputs = self.structured_outputs
        return {
            **super().grammars(),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choices", self.guided_choice),
            "guided_grammar": (_kind_of(self.guided_grammar), self.guided_grammar),
            **({} if outputs is None else outputs.grammars("structured_outputs.")),
        }

    def sampling(self, *, max_tokens: int) -> SamplingParams:
        """The parameters for the engine. ``max_tokens``: the endpoint's default."""
        return SamplingParams(**{**given(self, _OPENAI), "max_tokens": max_tokens})

    def settings(self, name: str, *, adapter: str = "") -> ProgramSettings:
        """The program settings. ``name``: the label of these requests in the metrics."""
        return ProgramSettings(
            tenant=self.tenant or tenant_of_user(self.user),
            priority=self.priority or 0,
            deadline_s=self.deadline_s,
            cache_salt=self.cache_salt or "",
            adapter=adapter,
            name=name,
        )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, unserved(False)] = None


def as_strings(value: str | list[Any]) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def one_grammar(given: Grammars, options: dict[str, str | int | bool] | None) -> GrammarSpec | None:
    """The grammar among those ``given``. Raises InvalidRequest for two, or options without one."""
    found = {name: grammar for name, grammar in given.items() if grammar[1] is not None}
    if len(found) > 1:
        names = ", ".join(found)
        raise errors.InvalidRequest(f"{names} exclude each other: give one grammar", where=next(iter(found)))
    for kind, value in found.values():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return GrammarSpec(kind, text, options or {})
    if options:
        raise errors.InvalidRequest("grammar_options need a grammar", where="grammar_options")
    return None


def check_sampling(params: SamplingParams, *, vocab_size: int, names: dict[str, str]) -> None:
    """Raise the first fault of ``params``; ``names`` maps our names to those of the endpoint."""
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise errors.InvalidParams(f"logit_bias: token id {token} must be below {vocab_size}", where="logit_bias")
    for text in params.faults(vocab_size=vocab_size):
        ours = text.partition("=")[0]
        theirs = names.get(ours, ours)
        raise errors.InvalidParams(theirs + text.removeprefix(ours), where=theirs)


# -- tools ------------------------------------------------------------------------------------------------------------


class FunctionEntry(Strict):
    """``strict`` has no effect: the schema is always enforced for arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "FunctionEntry":
        if (self.parameters or {}).get("type", "object") != "object":
            raise PydanticCustomError("parameters", "a function's parameters are a JSON schema of type 'object'")
        return self

    def schema_of(self) -> dict[str, Any]:
        """The tool as the OpenAI API writes it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = {"type": "object", **(self.parameters or {"properties": {}})}
        return {"type": "function", "function": function}


class ToolEntry(Strict):
    type: Literal["function"]
    function: FunctionEntry


class ChosenFunction(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: ChosenFunction


def depth_of(text: str) -> int:
    """The deepest nesting of a JSON text; brackets inside its strings count too."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class AllowedChoice(Strict):
    """The model sees all tools and may call those of ``allowed_tools``."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class WrittenFunction(Strict):
    name: str
    arguments: str

    @property
    def value(self) -> dict[str, Any]:
        """The arguments."""
        return json.loads(self.arguments)

    @model_validator(mode="after")
    def _arguments_are_json(self) -> "WrittenFunction":
        try:
            is_object = isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object or depth_of(self.arguments) > MAX_DEPTH:
            message = f"arguments must be a JSON object, as text, nested at most {MAX_DEPTH} deep"
            raise PydanticCustomError("arguments", "{message}", {"message": message})
        return self


class WrittenCall(Strict):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: WrittenFunction
    index: int | None = None  # some clients send the index of the stream back

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.value}
        return {"type": "function", "id": self.id, "function": function}


# -- /v1/chat/completions ---------------------------------------------------------------------------------------------


def _text_of_part(part: dict[str, Any]) -> "str | ImageUrl":
    if part.get("type") == "image_url":
        return _image_of_part(part)
    if part.get("type") != "text":
        message = f"a content part of type {part.get('type')!r} is not supported: this model reads text only"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})
    if set(part) - {"type", "text"} or not isinstance(part.get("text"), str):
        raise PydanticCustomError("part", "a text part is {{'type': 'text', 'text': '...'}} and nothing else")
    return part["text"]


def _image_of_part(part: dict[str, Any]) -> ImageUrl:
    image = part.get("image_url")
    if (
        set(part) != {"type", "image_url"}
        or not isinstance(image, dict)
        or not isinstance(image.get("url"), str)
        or set(image) - {"url", "detail"}
    ):
        raise PydanticCustomError(
            "part", "an image part is {{'type': 'image_url', 'image_url': {{'url': '...'}}}} and nothing else"
        )
    if image.get("detail", "auto") != "auto":
        message = f"detail {image['detail']!r} of an image is not supported: images have the size that the model wants"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})
    return ImageUrl(image["url"])


_TEXT_PART = WithJsonSchema(
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {
                    "type": {"const": "image_url"},
                    "image_url": {
                        "type": "object",
                        "properties": {"url": {"type": "string"}, "detail": {"const": "auto"}},
                        "required": ["url"],
                        "additionalProperties": False,
                    },
                },
                "required": ["type", "image_url"],
                "additionalProperties": False,
            },
        ]
    }
)


def _known_role(role: str) -> str:
    if role == "function":
        message = "role 'function' is not supported: send a tool's result as role 'tool'"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})
    if role not in CHAT_ROLES:
        message = f"must be one of {', '.join(CHAT_ROLES)}"
        raise PydanticCustomError("role", "{message}", {"message": message})
    return role


class ChatMessage(Strict):
    """One message. The fields of an assistant's answer may be sent back unchanged."""

    role: Annotated[str, AfterValidator(_known_role), WithJsonSchema({"enum": CHAT_ROLES})]
    content: str | list[Annotated[dict[str, Any], AfterValidator(_text_of_part), _TEXT_PART]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: Annotated[Any, unserved()] = None
    annotations: Annotated[Any, unserved([])] = None
    audio: Annotated[Any, unserved()] = None
    function_call: Annotated[Any, unserved()] = None
    tool_calls: list[WrittenCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _only_an_assistant_may_be_silent(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "a message needs content")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls belong to the assistant")
        if self.images and self.role != "user":
            raise PydanticCustomError("content", "images belong to messages of role 'user'")
        if self.reasoning_content and self.role != "assistant":
            raise PydanticCustomError("reasoning_content", "reasoning_content belongs to the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError("tool_call_id", "tool_call_id goes with role 'tool', and only with it")
        return self

    @property
    def images(self) -> list[ImageUrl]:
        parts: Any = self.content  # each part was validated to a text or an image
        return [] if isinstance(parts, str) else [part for part in parts or () if isinstance(part, ImageUrl)]

    def for_template(self) -> dict[str, Any]:
        content: Any = self.content
        if self.images:
            texts = [{"type": "text", "text": part} if isinstance(part, str) else IMAGE for part in self.content or ()]
            content = texts
        elif not isinstance(content, str):
            content = "".join(map(str, self.content or ()))
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name:
            message["name"] = self.name
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class JsonSchemaFormat(Strict):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """``strict`` has no effect: the schema is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise fault("response_format.json_schema goes with type 'json_schema', and only with it", "response_format")
        return self

    def wanted(self) -> dict[str, Any] | bool | None:
        """The schema an answer must follow; None for any text."""
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return {"type": "object"}
        return self.json_schema.schema_


class ChatRequest(OpenAISampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolEntry], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[Any, unserved("none")] = None  # "none" closes the model's reasoning
    # accepted and ignored: they describe the request, not the answer
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # known fields of the API that the server does not support
    audio: Annotated[Any, unserved()] = None
    function_call: Annotated[Any, unserved("none", "auto")] = None
    functions: Annotated[Any, unserved([])] = None
    modalities: Annotated[Any, unserved(["text"])] = None
    moderation: Annotated[Any, unserved()] = None
    prediction: Annotated[Any, unserved()] = None
    prompt_cache_options: Annotated[Any, unserved()] = None
    service_tier: Annotated[Any, unserved("auto", "default")] = None
    store: Annotated[Any, unserved(False)] = None
    verbosity: Annotated[Any, unserved("medium")] = None
    web_search_options: Annotated[Any, unserved()] = None

    @model_validator(mode="after")
    def _one_of_each(self) -> "ChatRequest":
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise fault("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise fault("top_logprobs needs logprobs=true", "top_logprobs")
        if self.return_tokens_as_token_ids and not self.logprobs:
            raise fault("return_tokens_as_token_ids needs logprobs=true", "return_tokens_as_token_ids")
        choice = self.choice
        names = [tool.function.name for tool in self.tools or ()]
        if choice not in ("none", "auto") and choice not in (*names, *(["required"] if names else [])):
            there = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED:,} more" * (len(names) > MAX_NAMED))
            raise fault(f"tool_choice asks for {choice!r}, but tools has {there or 'none'}", "tool_choice")
        if isinstance(self.tool_choice, AllowedChoice):
            allowed = [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
            strange = next(iter(set(allowed) - set(names)), None)
            if strange is not None:
                raise fault(f"tool_choice allows {strange!r}, which tools does not have", "tool_choice")
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise fault(f"tools: two functions are called {twice!r}", "tools")
        return self

    @property
    def choice(self) -> str:
        """auto, required, none, or the name of a tool."""
        if isinstance(self.tool_choice, NamedChoice):
            return self.tool_choice.function.name
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        return [] if self.choice == "none" else [tool.function.schema_of() for tool in self.tools or ()]

    def callable_schemas(self) -> list[dict[str, Any]]:
        """Those of ``tool_schemas`` that ``tool_choice`` allows to be called."""
        if not isinstance(self.tool_choice, AllowedChoice):
            return self.tool_schemas()
        allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return [tool for tool in self.tool_schemas() if tool["function"]["name"] in allowed]

    def conversation(self) -> Conversation:
        return Conversation(
            [message.for_template() for message in self.messages],
            tools=self.tool_schemas(),
            callable_tools=self.callable_schemas(),
            choice=self.choice,
            is_parallel=self.parallel_tool_calls is not False,
            grammar=self.grammar(),
            may_think=self.reasoning_effort != "none",
            images=self.images,
        )

    @property
    def images(self) -> list[ImageUrl]:
        return [
            ImageUrl(image.url, f"messages.{i}.content")
            for i, message in enumerate(self.messages)
            for image in message.images
        ]

    @property
    def names(self) -> dict[str, str]:
        """Our parameter names -> this endpoint's, where they differ."""
        return {"max_tokens": "max_completion_tokens"} if self.max_completion_tokens is not None else {}

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def grammars(self) -> Grammars:
        schema = self.response_format.wanted() if self.response_format else None
        return {"response_format": ("json_schema", schema), **super().grammars()}


# -- /v1/completions --------------------------------------------------------------------------------------------------


# A wrong item ends the reading of a list: a long list of them would cost seconds and memory.
Texts = Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)]
TokenIds = Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)]
IdLists = Annotated[list[TokenIds], Field(max_length=MAX_ITEMS, fail_fast=True)]


class CompletionRequest(OpenAISampling):
    """``parse_special`` (extension): special tokens written in the prompt's text count as such."""

    prompt: str | Texts | TokenIds | IdLists
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    parse_special: bool | None = None
    # known fields of the API that the server does not support
    suffix: Annotated[Any, unserved("")] = None

    @model_validator(mode="after")
    def _served_combinations(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise fault(f"best_of={self.best_of} is not supported unless it equals n", "best_of")
        if self.echo and self.stream and self.logprobs is not None:
            raise fault("echo with logprobs cannot be streamed; drop stream, echo or logprobs", "stream")
        if self.return_tokens_as_token_ids and self.logprobs is None:
            raise fault(
                "return_tokens_as_token_ids needs logprobs, a number from 0 to 20", "return_tokens_as_token_ids"
            )
        return self

    def prompts(self) -> list[str | list[int]]:
        return as_prompts(self.prompt, "prompt")


def as_prompts(value: str | list[str] | list[int] | list[list[int]], name: str) -> list[str | list[int]]:
    """One entry per prompt, text or token ids."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise errors.InvalidRequest(f"{name} is an empty list; give at least one prompt", where=name)
    if isinstance(value[0], int):
        return [value]
    if not all(isinstance(v, str) or v for v in value):
        raise errors.InvalidRequest(f"{name} holds an empty list of token ids", where=name)
    return list(value)


# -- /generate --------------------------------------------------------------------------------------------------------


class NativeSampling(with_rows("NativeFields", _Grammars, _NATIVE, has_defaults=True)):  # type: ignore[misc]
    n: Annotated[int, Field(ge=1)] = 1
    # known fields of the API that the server does not support
    structural_tag: Annotated[Any, unserved()] = None
    custom_params: Annotated[Any, unserved({})] = None
    no_stop_trim: Annotated[Any, unserved(False)] = None
    spaces_between_special_tokens: Annotated[Any, unserved(True)] = None
    stream_interval: Annotated[Any, unserved(1)] = None

    def sampling(self, request: "GenerateRequest") -> SamplingParams:
        """The parameters for the engine, including those at the top level of ``request``."""
        return SamplingParams(**given(self, _NATIVE), **given(request, _BESIDE_NATIVE))


class GenerateRequest(with_rows("BesideSampling", Strict, _BESIDE_NATIVE, has_defaults=True)):  # type: ignore[misc]
    text: str | Texts | None = None
    input_ids: TokenIds | IdLists | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool = False
    rid: str | None = None
    # extensions
    parse_special: bool = False
    priority: int = 0
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    cache_salt: str = ""
    tenant: str = ""
    lora_path: str | None = None
    # known fields of the API that the server does not support
    image_data: Annotated[Any, unserved()] = None
    video_data: Annotated[Any, unserved()] = None
    audio_data: Annotated[Any, unserved()] = None
    input_embeds: Annotated[Any, unserved()] = None
    token_ids_logprob: Annotated[Any, unserved()] = None
    session_params: Annotated[Any, unserved()] = None
    custom_logit_processor: Annotated[Any, unserved()] = None
    return_hidden_states: Annotated[Any, unserved(False)] = None

    @model_validator(mode="after")
    def _one_prompt_field(self) -> "GenerateRequest":
        if (self.text is None) == (self.input_ids is None):
            raise fault("give either text or input_ids", "text")
        return self

    @property
    def is_batch(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, list)
        return self.input_ids is not None and len(self.input_ids) > 0 and isinstance(self.input_ids[0], list)

    def prompts(self) -> list[str | list[int]]:
        if self.text is not None:
            return as_prompts(self.text, "text")
        return as_prompts(self.input_ids or [], "input_ids")

    def sampling_of_each(self, count: int) -> list[NativeSampling]:
        """The sampling parameters of every prompt."""
        given = self.sampling_params or NativeSampling()
        if isinstance(given, NativeSampling):
            return [given] * count
        if len(given) != count:
            raise errors.InvalidRequest(
                f"sampling_params holds {len(given)} entries for {count} prompts; give one each, or one for all",
                where="sampling_params",
            )
        return given

    def settings(self, name: str, *, adapter: str = "") -> ProgramSettings:
        return ProgramSettings(
            tenant=self.tenant,
            priority=self.priority,
            deadline_s=self.deadline_s,
            cache_salt=self.cache_salt,
            adapter=adapter,
            name=name,
        )


class RefusedRequest(BaseModel):
    """The body at an endpoint that the served model has no layer for; nothing reads its fields."""

    model_config = ConfigDict(extra="allow")


# -- /v1/embeddings ---------------------------------------------------------------------------------------------------


EmbeddedTexts = Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)]
EmbeddedIds = Annotated[list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True)]


class EmbeddingsRequest(Strict):
    """``input``: a text, a list of texts, token ids, or a list of lists. Extensions: ``truncate``, whether a text of
    more tokens than an encoder takes is cut; otherwise it is refused. ``pooling``: of a decoder's hidden states.
    """

    model: str | None = None
    input: str | EmbeddedTexts | TokenIds | EmbeddedIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None
    pooling: Pooling | None = None
    # known fields of the API that the server does not support
    user: Annotated[Any, unserved("")] = None

    def inputs(self) -> list[str | list[int]]:
        return as_prompts(self.input, "input")


# -- /v1/rerank and /v1/score -----------------------------------------------------------------------------------------


class RerankDocument(Strict):
    text: str


RerankedDocuments = Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
ScoredTexts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class RerankRequest(Strict):
    """``top_n``: how many results, 0 for all. ``truncate`` (extension): whether a pair of more tokens than the model
    takes is cut; otherwise it is refused.
    """

    model: str | None = None
    query: str
    documents: RerankedDocuments
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    # known fields of the APIs that the server does not support
    rank_fields: Annotated[Any, unserved()] = None
    max_chunks_per_doc: Annotated[Any, unserved()] = None
    max_tokens_per_doc: Annotated[Any, unserved()] = None
    truncate_prompt_tokens: Annotated[Any, unserved()] = None
    priority: Annotated[Any, unserved(0)] = None

    def texts(self) -> list[str]:
        return [found if isinstance(found, str) else found.text for found in self.documents]


class ClassifyRequest(Strict):
    """``input``: a text or a list of texts. ``truncate``: as of ``RerankRequest``."""

    model: str | None = None
    input: str | ScoredTexts
    truncate: bool | None = None
    # known fields of the API that the server does not support
    truncate_prompt_tokens: Annotated[Any, unserved()] = None
    priority: Annotated[Any, unserved(0)] = None

    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class ScoreRequest(Strict):
    """``text_1`` and ``text_2``: texts or lists of as many texts; one text goes with each of the other's.
    ``truncate``: as of ``RerankRequest``.
    """

    model: str | None = None
    text_1: str | ScoredTexts
    text_2: str | ScoredTexts
    truncate: bool | None = None
    # known fields of the API that the server does not support
    encoding_format: Annotated[Any, unserved("float")] = None
    truncate_prompt_tokens: Annotated[Any, unserved()] = None
    priority: Annotated[Any, unserved(0)] = None

    def pairs(self) -> list[tuple[str, str]]:
        """Raises InvalidRequest for lists of different lengths."""
        first, second = ([given] if isinstance(given, str) else given for given in (self.text_1, self.text_2))
        count = max(len(first), len(second))
        if len(first) != len(second) and 1 not in (len(first), len(second)):
            raise errors.InvalidRequest(
                f"text_1 holds {len(first):,} texts and text_2 {len(second):,}; give as many of both, or one of either",
                where="text_2",
            )
        first, second = (given * count if len(given) == 1 else given for given in (first, second))
        return list(zip(first, second, strict=True))


# -- /tokenize and /detokenize ----------------------------------------------------------------------------------------


class TokenizeRequest(Strict):
    """A ``prompt`` as /v1/completions takes it, or ``messages`` and ``tools`` as /v1/chat/completions takes them."""

    model: str | None = None
    prompt: str | None = None
    parse_special: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tools: Annotated[list[ToolEntry], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # known fields of the API that the server does not support
    continue_final_message: Annotated[Any, unserved(False)] = None
    chat_template: Annotated[Any, unserved()] = None
    chat_template_kwargs: Annotated[Any, unserved({})] = None
    mm_processor_kwargs: Annotated[Any, unserved({})] = None

    @model_validator(mode="after")
    def _one_kind_of_prompt(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise fault("give either prompt or messages", "prompt")
        other = ("parse_special",) if self.prompt is None else ("tools", "add_generation_prompt")
        strange = next((name for name in other if getattr(self, name) is not None), None)
        if strange is not None:
            raise fault(f"{strange} goes with {'messages' if self.messages is None else 'prompt'}", strange)
        return self

    def conversation(self) -> Conversation:
        tools = [tool.function.schema_of() for tool in self.tools or ()]
        images = [image for message in self.messages or () for image in message.images]
        return Conversation([message.for_template() for message in self.messages or ()], tools=tools, images=images)


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds


def with_logprobs(params: SamplingParams, top: int | None, *, start: int = -1) -> SamplingParams:
    """``params`` with log-probabilities of ``top`` alternatives per token; unchanged if ``top`` is None."""
    if top is None:
        return params
    return msgspec.structs.replace(params, return_logprob=True, top_logprobs_num=top, logprob_start_len=start)
