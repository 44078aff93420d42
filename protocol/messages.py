"""The messages between a client (DEALER) and a runtime (ROUTER). MessagePack, one frame each way.

A client frame holds one ``ClientMessage``; a runtime frame holds a list of ``RuntimeMessage``.
"""

from typing import Annotated, Any

import msgspec

from .errors import ErrorInfo
from .ops import AnyOp

PROTOCOL_VERSION = 1
MAX_NAME = 256  # characters; every message about a program repeats its id

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="m"):
    pass


# -- client to runtime ------------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    version: int
    client: str = ""


class ProgramSettings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sent with a program's first ``Submit``. ``deadline_s`` counts from its acceptance; lower priority runs first.

    ``speculative``: whether the engine may draft tokens, for generations that do not say; None: the engine decides.
    ``trace``: the meta of every ``Gen``, ``Select`` and ``Score`` lists its tokens, with origins and probabilities.
    The metrics count programs by ``name``, for example a function's.
    """

    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    adapter: str = ""
    speculative: bool | None = None
    trace: bool = False
    name: str = ""


class Submit(Message, tag="submit"):
    """Ops for a program, checked whole and accepted or rejected whole.

    ``failed``: those of ``ops`` that fail with these errors before any op runs. A replay of a program names the ops
    that have failed already, so that what depends on them fails again.
    """

    program: Name
    ops: list[AnyOp]
    settings: ProgramSettings | None = None
    failed: dict[int, ErrorInfo] = {}


class Cancel(Message, tag="cancel"):
    """End a program, one sequence of it, or one op: unfinished ops fail as Cancelled and keep what was generated."""

    program: Name
    seq: int | None = None
    op: int | None = None


class Credit(Message, tag="credit"):
    """The client can take ``n`` more ``Delta`` messages; below zero they are merged and wait."""

    n: int


class Query(Message, tag="query"):
    """A question outside any program: ``what`` is one of ``QUERIES``. An ``Embed`` and a ``Query`` differ by ``id``."""

    id: int
    what: Name


QUERIES = ("info", "metrics", "batch", "cache_tree", "cache_nodes", "cache_blocks", "adapters", "flush_cache")


class LoadAdapter(Message, tag="load_adapter"):
    """Read a low-rank adapter from a folder of the engine's machine. Answered as the query ``adapters``."""

    id: int
    name: str
    path: str


class UnloadAdapter(Message, tag="unload_adapter"):
    """New programs cannot choose the adapter any more; those that run keep it. Answered as ``LoadAdapter``."""

    id: int
    name: str


class Embed(Message, tag="embed"):
    """Texts, or token ids, for an encoder. Its ``Answer`` has an ``Embedded``, or the error of the first wrong input.

    A text of more tokens than the encoder takes is cut, or refused without ``truncate``; token ids are not cut. A
    classifier, whose ``capabilities`` have ``score``, gives its scores instead of a vector. ``seconds``: the second
    text of each input, where a classifier's inputs are pairs of texts.
    """

    id: int
    inputs: list[str | list[int]]
    truncate: bool = True
    seconds: list[str] = []


class Forget(Message, tag="forget"):
    """Nobody waits for the answer to the ``Embed`` of this id: what has not run of it is dropped, without an answer."""

    id: int


class Embedded(msgspec.Struct, frozen=True):
    """Of each input the vector, little-endian float32, and the number of its tokens, special ones included."""

    vectors: list[bytes]
    num_tokens: list[int]


MAX_INPUTS = 2048  # of one ``Embed``


GRANT_TTL_S = 5.0  # how long KV is kept for a copy that nobody goes on with
MAX_GRANT_TTL_S = 60.0
MAX_FETCH_BYTES = 8 << 20  # of blocks in the answer to one ``Fetch`` of several

GrantSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=MAX_GRANT_TTL_S)]


class GrantedPrefix(msgspec.Struct, frozen=True, array_like=True):
    """``tokens``: ids from a sequence's start, little-endian int32, as many as its whole blocks have. ``names``: of
    these blocks, as in the cache's events.
    """

    tokens: bytes
    names: list[bytes]


class Grant(msgspec.Struct, frozen=True, omit_defaults=True):
    """KV that an engine lends for a copy: the whole blocks of a program's sequences, in the pool's own numbers.

    Tokens after a sequence's last whole block are computed again where the program goes on. ``format``: a digest of all
    that the blocks' bytes depend on; an engine with another one cannot use them. ``namespace``: of the blocks, see
    ``block_names``. Each fetch keeps the grant for ``ttl_s`` more seconds. ``drawn``: by op the tokens that the
    candidates of each generation under way have so far, where none of them has ended; see ``Gen.drawn``.
    """

    id: str
    namespace: str
    adapter: str
    block_len: int
    block_bytes: int
    format: bytes
    ttl_s: float
    prefixes: list[GrantedPrefix]
    drawn: dict[int, list[list[int]]] = {}

    @property
    def names(self) -> dict[bytes, None]:
        """Of all blocks, each once."""
        return {name: None for prefix in self.prefixes for name in prefix.names}


class Export(Message, tag="export"):
    """Lend the KV of one of this client's programs to other engines. The ``Answer`` has a ``Grant``.

    ``grant``: the id of an earlier one of this program, to renew it with what was computed since; "": a new one.
    ``when_drawing``: answer once the prompts of its generations are computed, and each has a token.
    """

    id: int
    program: Name
    ttl_s: GrantSeconds = GRANT_TTL_S
    grant: Name = ""
    when_drawing: bool = False


class EndGrant(Message, tag="end_grant"):
    """The blocks of a grant need not be kept any more. Without an answer."""

    grant: Name


class Fetch(Message, tag="fetch"):
    """Ask for blocks of a grant. The ``Answer`` has a list of sealed blocks, an empty one for each that is gone."""

    id: int
    grant: Name
    names: list[bytes]


class Import(Message, tag="import"):
    """Copy the KV of ``grant`` from the engine at ``url``, and keep it for ``ttl_s`` seconds after the last block.

    The ``Answer`` has an ``Imported``, and comes when all blocks are there or no more come. ``server_key`` and
    ``secret_key``: of the connection to ``url``, both empty where it needs none.
    """

    id: int
    grant: Grant
    url: str
    server_key: str = ""
    secret_key: str = ""
    ttl_s: GrantSeconds = GRANT_TTL_S


class Imported(msgspec.Struct, frozen=True, omit_defaults=True):
    """``held``: blocks of the grant that this engine has now, ``fetched`` of them copied. ``why``: what ended the copy
    before all were there; empty: nothing did.
    """

    held: int
    fetched: int
    why: str = ""


class Ping(Message, tag="ping"):
    pass


class Bye(Message, tag="bye"):
    pass


ClientMessage = (
    Hello
    | Submit
    | Cancel
    | Credit
    | Query
    | LoadAdapter
    | UnloadAdapter
    | Embed
    | Forget
    | Export
    | EndGrant
    | Fetch
    | Import
    | Ping
    | Bye
)
Question = Query | LoadAdapter | UnloadAdapter | Embed | Export | Fetch | Import  # each has one ``Answer``


# -- runtime to client ------------------------------------------------------------------------------------------------


class RoleTemplate(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens around one role's content, and their text for display. A text that the content begins with follows
    ``gap``; an image or a generation does not.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    prefix_text: str = ""
    suffix_text: str = ""
    gap: str = ""


class ToolTemplate(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fixed texts around tools, calls and results. They hold no special token.

    A system message ends with ``tools_begin``, each tool as JSON (``tools_between`` them), ``tools_end``: the object of
    the OpenAI API, or (``is_bare``) its ``function`` alone, indented by ``indent`` spaces a level (0: one line).
    A call is ``call_begin`` name ``call_middle`` arguments as a JSON object ``call_end``; ``calls_between`` two calls.
    A result is a turn of ``result_role`` around ``result_begin`` text ``result_end``; several results share one turn,
    ``results_between`` them, or (empty) have a turn each.
    """

    tools_begin: str
    tools_between: str
    tools_end: str
    call_begin: str
    call_middle: str
    call_end: str
    calls_between: str = "\n"
    is_bare: bool = False
    indent: int = 0
    result_role: str = "tool"
    result_begin: str = ""
    result_end: str = ""
    results_between: str = ""


class ThinkingStyle(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tags around a model's reasoning. ``is_forced``: text without ``begin`` is reasoning from its first character.

    ``is_special``: the tags are special tokens, which a text shows only without ``skip_special_tokens``.
    """

    begin: str = "<think>"
    end: str = "</think>"
    is_forced: bool = False
    is_special: bool = False

    @property
    def closing(self) -> str:
        """The text that ends the reasoning where an answer would begin with it."""
        return f"\n{self.end}\n\n" if self.is_forced else f"{self.begin}\n\n{self.end}\n\n"


class TemplateInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat template split into per-role tokens.

    ``default_system`` is what the template inserts when the first role is not ``system`` (empty: nothing).
    ``stop_token_ids`` end an assistant's turn. ``roles`` is empty where the template could not be split.
    ``tools`` is how the template writes tools, None where it has no tools or its format could not be derived.
    ``thinking``: the tags of the model's reasoning; None where it has none.
    """

    roles: dict[str, RoleTemplate] = {}
    default_system: tuple[int, ...] = ()
    default_system_text: str = ""
    stop_token_ids: tuple[int, ...] = ()
    source: str = ""
    tools: ToolTemplate | None = None
    thinking: ThinkingStyle | None = None


class Limits(msgspec.Struct, frozen=True):
    max_ops_per_submit: int = 4096
    max_submit_bytes: int = 16 << 20
    max_sequences_per_program: int = 4096
    max_candidates: int = 128
    max_grammar_bytes: int = 1 << 20
    max_image_bytes: int = 8 << 20


class Welcome(Message, tag="welcome"):
    """``model_path`` lets a client on the same machine load the tokenizer. ``capabilities`` names what is served.

    ``cache_events_url``: a PUB socket that publishes cached blocks (see ``cache_events``); empty: none.
    ``cache_events_keys``: its subscribers need keys, those of the engine's clients. ``eos_ids``: the tokens that end a
    text. ``adapters``: the names that ``ProgramSettings.adapter`` may have at the start.
    ``embedding_size``: dimensions of an encoder's vectors, and of those of a decoder's ``Embedding``; 0: it gives none.
    The scores of a classifier are of ``labels``. ``image_token_id``: what a chat template writes for an image; -1: the
    model takes none.
    """

    version: int
    model: str
    model_path: str
    context_len: int
    vocab_size: int
    vocab_hash: str
    template: TemplateInfo
    limits: Limits
    capabilities: tuple[str, ...] = ()
    heartbeat_s: float = 1.0
    cache_events_url: str = ""
    eos_ids: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    embedding_size: int = 0
    labels: tuple[str, ...] = ()
    image_token_id: int = -1
    cache_events_keys: bool = False


class Accepted(Message, tag="accepted"):
    program: str


class Rejected(Message, tag="rejected"):
    """The engine took nothing of the ``Submit``. A program without an accepted submit does not exist afterwards.

    ``ops`` are those with an error.
    """

    program: str
    errors: list[ErrorInfo]
    ops: list[int] = []


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float | None
    text: str
    top: tuple[tuple[int, float, str], ...] = ()


class Delta(Message, tag="delta"):
    """A new piece of candidate ``index`` of op ``op``. ``origin``: ``generated`` or ``forced``."""

    program: str
    op: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    origin: str = "generated"


class CandidateMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """``finish_reason``: stop | length | abort | error. ``matched_stop``: the string or token id that ended it.

    ``drafted_tokens`` were drafted and verified, and ``accepted_tokens`` of them accepted. ``closed_by_budget``: what
    was left of ``max_tokens``, or of the context, took tokens out of a mask, so that the text ends in time.
    """

    finish_reason: str
    completion_tokens: int
    token_ids: tuple[int, ...] = ()
    matched_stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    closed_by_budget: bool = False


class TokenTrace(msgspec.Struct, frozen=True, array_like=True):
    """``origin``: prompt (computed), cached (prefix hit), generated, drafted (and accepted), forced, selected.

    ``top``: the likeliest tokens at its position. A token that was not sampled has no ``logprob``.
    """

    text: str
    origin: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


class OpTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """An op's tokens: ``prompt`` are those of its sequence from position ``start`` on that no earlier trace has."""

    start: int
    prompt: tuple[TokenTrace, ...]
    outputs: tuple[tuple[TokenTrace, ...], ...]


class GenMeta(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="m", tag="gen"):
    """Of a ``Gen``. Seconds are measured in the engine. ``prompt_logprobs`` cover tokens from ``logprob_start_len``.

    The op began to wait ``start_s`` after its program did. ``trace`` is set where the program asked for it.
    ``healed``: the text at the prompt's end whose tokens were generated again (token healing). ``prompt_tokens`` does
    not count it; the candidates' ``token_ids`` and log-probabilities begin with it, their texts do not.
    """

    prompt_tokens: int
    cached_tokens: int
    candidates: tuple[CandidateMeta, ...]
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    start_s: float = 0.0
    trace: OpTrace | None = None
    healed: str = ""


class SelectMeta(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="m", tag="select"):
    """Of a ``Select`` or ``Score``: per choice its token ids, their log-probabilities and the score compared."""

    index: int
    scores: tuple[float, ...]
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float | None, ...], ...]
    unconditional: tuple[tuple[float | None, ...], ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    start_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    trace: OpTrace | None = None


class EmbeddingMeta(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="m", tag="embedding"):
    """Of an ``Embedding``. Its tokens are in the trace of the sequence's next op that has one."""

    prompt_tokens: int
    cached_tokens: int = 0
    start_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0


OpMeta = GenMeta | SelectMeta | EmbeddingMeta


class Done(Message, tag="done"):
    program: str
    op: int
    value: Any = None
    meta: OpMeta | None = None


class Failed(Message, tag="failed"):
    """``partial`` keeps what was generated before the failure (one text per candidate)."""

    program: str
    op: int
    error: ErrorInfo
    partial: tuple[str, ...] = ()


class ProgramStats(msgspec.Struct, omit_defaults=True):
    """A program's counts, or the sum of several programs'. The engine counts in it until the program ends.

    ``prompt_tokens`` = ``cached_tokens`` (prefix hits) + ``prefilled_tokens`` (computed). ``drawn_draft_tokens`` are
    the draft tokens that were also drawn; ``accepted_tokens`` are these and the draft tokens that the grammar forced
    after them.
    """

    submits: int = 0
    ops: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drawn_draft_tokens: int = 0
    forwards: int = 0
    preemptions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Closed(Message, tag="closed"):
    program: str
    stats: ProgramStats


class Answer(Message, tag="answer"):
    id: int
    value: Any = None
    error: ErrorInfo | None = None


class Pong(Message, tag="pong"):
    pass


class ProtocolFault(Message, tag="fault"):
    """Answer to a frame that could not be understood; the connection goes on."""

    error: ErrorInfo


RuntimeMessage = Welcome | Accepted | Rejected | Delta | Done | Failed | Closed | Answer | Pong | ProtocolFault
