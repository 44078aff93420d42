"""The JSON answers of the routes, as the OpenAPI document describes them. ``forms`` and the routes write them.

A field with a default may be absent; the tests compare real answers with these models.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class JsonAnswer(BaseModel):
    model_config = ConfigDict(extra="forbid")


# -- errors -----------------------------------------------------------------------------------------------------------


class ErrorDetail(JsonAnswer):
    """``type`` groups, ``code`` is for programs, ``param`` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(JsonAnswer):
    error: ErrorDetail
    rejected: Annotated[dict[str, Any] | None, Field(description="programs only: the engine's message")] = None


class MessagesErrorDetail(JsonAnswer):
    type: str
    message: str


class MessagesError(JsonAnswer):
    """An error in the shape of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


# -- OpenAI's chat and completions ------------------------------------------------------------------------------------


class ShownLogprob(JsonAnswer):
    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(ShownLogprob):
    top_logprobs: list[ShownLogprob]


class ChatLogprobs(JsonAnswer):
    content: list[ChatTokenLogprob]
    refusal: None


class WrittenCallFunction(JsonAnswer):
    name: str
    arguments: str


class AnsweredCall(JsonAnswer):
    id: str
    type: Literal["function"]
    function: WrittenCallFunction


class AssistantMessage(JsonAnswer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(JsonAnswer):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class PromptDetails(JsonAnswer):
    cached_tokens: Count


class CompletionDetails(JsonAnswer):
    forced_tokens: Count | None = None
    closed_by_budget: bool | None = None
    reasoning_tokens: Count | None = None


class CompletionUsage(JsonAnswer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class ChatCompletion(JsonAnswer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class CompletionLogprobs(JsonAnswer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[Count]


class CompletionChoice(JsonAnswer):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class TextCompletion(JsonAnswer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class ModelCard(JsonAnswer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Annotated[int, Field(description="tokens of the context")]


class ModelList(JsonAnswer):
    object: Literal["list"]
    data: list[ModelCard]


class AdapterEntry(JsonAnswer):
    """``programs``: those that use it now. ``unloading``: it goes when the last of them has ended."""

    id: str
    object: Literal["adapter"]
    name: str
    path: str
    programs: Count
    unloading: bool


class AdapterList(JsonAnswer):
    object: Literal["list"]
    data: list[AdapterEntry]


class EmbeddingEntry(JsonAnswer):
    """``embedding``: numbers, or with ``base64`` their little-endian float32 bytes."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingUsage(JsonAnswer):
    prompt_tokens: Count
    total_tokens: Count


class Embeddings(JsonAnswer):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    pooling: Literal["last", "mean"] | None = None


class RankedDocument(JsonAnswer):
    text: str


class RankedResult(JsonAnswer):
    """``index``: the document's place in the request."""

    index: Count
    relevance_score: float
    document: RankedDocument | None = None


class Reranked(JsonAnswer):
    """``results``: most relevant first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedResult]


class ClassifiedEntry(JsonAnswer):
    """``label``: the one with the highest score. ``probs``: the scores of all labels, in the model's order."""

    index: Count
    label: str
    probs: list[float]
    num_classes: Count


class Classified(JsonAnswer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedEntry]
    usage: EmbeddingUsage


class ScoreEntry(JsonAnswer):
    index: Count
    object: Literal["score"]
    score: float


class Scores(JsonAnswer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: EmbeddingUsage


# -- OpenAI's Responses -----------------------------------------------------------------------------------------------


class OutputPart(JsonAnswer):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[ChatTokenLogprob] | None = None


class OutputItem(JsonAnswer):
    """A message, the model's reasoning, or a call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: str
    role: Literal["assistant"] | None = None
    content: list[OutputPart] | None = None
    summary: list[str] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputDetails(JsonAnswer):
    cached_tokens: Count
    cache_write_tokens: Count


class ResponseUsage(JsonAnswer):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: CompletionDetails
    total_tokens: Count


class ResponseAnswer(JsonAnswer):
    """From ``instructions`` on, the fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    background: bool
    status: Literal["completed", "incomplete"]
    output: list[OutputItem]
    error: None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage
    store: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(JsonAnswer):
    id: str
    object: Literal["response"]
    deleted: bool


# -- Anthropic's Messages ---------------------------------------------------------------------------------------------


class ContentBlock(JsonAnswer):
    """Text, the model's reasoning, or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class ThinkingDetails(JsonAnswer):
    thinking_tokens: Count


class MessageUsage(JsonAnswer):
    """``input_tokens``: those that the cache did not hold."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingDetails | None = None


class AnsweredMessage(JsonAnswer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(JsonAnswer):
    input_tokens: Count


# -- the native endpoints ---------------------------------------------------------------------------------------------


class FinishReason(JsonAnswer):
    type: str
    matched: str | int | None = None
    length: Count | None = None


Pair = Annotated[list[float | int | str | None], Field(min_length=3, max_length=3)]


class GeneratedMeta(JsonAnswer):
    """Pairs are [log-probability, token id, text or null]."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    forced_tokens: Count
    closed_by_budget: bool | None = None
    queue_s: float
    prefill_s: float
    decode_s: float
    e2e_latency: float
    input_token_logprobs: list[Pair] | None = None
    output_token_logprobs: list[Pair] | None = None
    input_top_logprobs: list[list[Pair] | None] | None = None
    output_top_logprobs: list[list[Pair] | None] | None = None


class Generated(JsonAnswer):
    text: str
    output_ids: list[Count]
    meta_info: GeneratedMeta


class ModelInfo(JsonAnswer):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_context_length: int
    vocab_size: int
    preferred_sampling_params: None


class ServerFacts(JsonAnswer):
    model: str
    pid: int
    uptime_s: float
    requests_in_flight: Count
    max_body_bytes: int
    capabilities: list[str]


class ServerInfo(JsonAnswer):
    """``engine``: the configuration of the engine; of several replicas that of the first."""

    server: ServerFacts
    engine: dict[str, Any]


class Flushed(JsonAnswer):
    flushed: Any


class Tokenized(JsonAnswer):
    """``token_strs``: each token's text, where the request asks for it."""

    count: Count
    max_model_len: Annotated[int, Field(description="tokens of the context")]
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(JsonAnswer):
    prompt: str


class Version(JsonAnswer):
    version: str


# -- programs ---------------------------------------------------------------------------------------------------------


class ProgramName(JsonAnswer):
    program: str


# -- for operators ----------------------------------------------------------------------------------------------------


class ReplicaCount(JsonAnswer):
    ready: Count
    total: Count


class Health(JsonAnswer):
    status: Literal["ok", "unavailable"]
    live: bool
    ready: bool
    replicas: ReplicaCount


class Live(JsonAnswer):
    live: bool


class Engines(JsonAnswer):
    """``engines``: by name the metrics and the last steps of each, null where one does not answer in time."""

    engines: dict[str, dict[str, Any] | None]
    replicas: list[dict[str, Any]]
    requests_in_flight: Count
    now_s: float


class KeyUsage(JsonAnswer):
    tenant: str
    running: Count
    limits: dict[str, int | None]
    remaining: dict[str, Count]
    used: dict[str, Any]
