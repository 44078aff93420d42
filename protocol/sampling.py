"""The table of sampling parameters: one row per parameter, with its bounds and what each API calls it.

A field of ``SamplingParams`` is a row. ``gen()``, ``run()``, ``s.sampling()``, the HTTP endpoints and the requests to
foreign APIs are made from ``FIELDS``, so a new parameter is one new row, and the code that acts on it.
"""

import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

MAX_LOGPROBS = 100
MAX_BIAS = 10_000  # far beyond any logit, and finite, so that some token can always be drawn
MAX_SHOWN = 80  # characters of a wrong value in an error
MAX_INT = 2**31 - 1  # a sampler counts tokens in 32 bits

Api = Literal["native", "chat", "completions", "anthropic", "litellm"]


def _holds_always(value: Any) -> bool:
    return True


class Field(msgspec.Struct, frozen=True):
    """One parameter. ``name`` is its name in ``gen()``, ``run()``, ``s.sampling()`` and ``SamplingParams``.

    ``holds`` checks a value; ``must_be`` is the limit in words, ``limits`` (of a number) in JSON Schema. The names in
    other APIs: ``native`` (SGLang and ``/generate``; empty: ``name``), ``chat`` and ``completions`` (OpenAI's),
    ``anthropic``, ``litellm``. None: that API has no such parameter, and a request that sets it is refused.
    ``extension``: our own OpenAI endpoints take it under ``name``. ``is_beside``: in ``/generate`` it stands beside
    ``sampling_params``. ``needs``: the flag without which it would have no effect, so it is refused.

    ``part`` says where our protocol keeps it: in ``SamplingParams``, in the ``Gen`` op, or in its grammar.
    """

    meaning: str
    must_be: str = ""
    holds: Callable[[Any], bool] = _holds_always
    native: str | None = ""
    limits: dict[str, Any] = {}
    chat: str | None = None
    completions: str | None = None
    litellm: str | None = None
    anthropic: str | None = None
    extension: bool = False
    is_beside: bool = False
    needs: str = ""
    part: Literal["params", "gen", "grammar"] = "params"
    name: str = ""
    type: Any = None
    default: Any = None

    def in_api(self, api: Api) -> str | None:
        """Its name in ``api``; None where there is none."""
        return getattr(self, api)


def _in_openai(name: str) -> dict[str, str]:
    return {"chat": name, "completions": name, "litellm": name}


def _everywhere(name: str) -> dict[str, str]:
    return {**_in_openai(name), "anthropic": name}


def _between(low: float, high: float) -> dict[str, Any]:
    limits = {"minimum": low, "maximum": high}
    return {"must_be": f"between {low} and {high}", "holds": lambda v: low <= v <= high, "limits": limits}


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sampling of one generation. Each field is a row of the table; the docs list them in docs/api.md.

    The engine applies them in this order: grammar mask, logit_bias, penalties, temperature, top_k, top_p, min_p, one
    draw. ``msgspec.structs.replace`` merges.
    """

    max_tokens: Annotated[
        int,
        Field(
            "generate at most so many tokens",
            ">= 0",
            lambda v: v >= 0,
            "max_new_tokens",
            limits={"minimum": 0},
            **_everywhere("max_tokens"),
        ),
    ] = 128
    min_tokens: Annotated[
        int,
        Field(
            "do not end before so many tokens",
            "between 0 and max_tokens",
            lambda v: v >= 0,
            "min_new_tokens",
            limits={"minimum": 0},
            extension=True,
        ),
    ] = 0
    stop: Annotated[
        tuple[str, ...],
        Field(
            "end before any of these texts", "non-empty strings", all, **_in_openai("stop"), anthropic="stop_sequences"
        ),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field("end at any of these tokens", extension=True)] = ()
    stop_regex: Annotated[
        tuple[str, ...], Field("end where one of these patterns has matched", "non-empty patterns", all)
    ] = ()
    temperature: Annotated[
        float, Field("divide the logits by it; 0 is greedy", **_between(0, 100), **_everywhere("temperature"))
    ] = 1.0
    top_p: Annotated[
        float,
        Field(
            "draw among the likeliest tokens that have this probability together",
            "in (0, 1]",
            lambda v: 0.0 < v <= 1.0,
            limits={"exclusiveMinimum": 0, "maximum": 1},
            **_everywhere("top_p"),
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(
            "draw among so many of the likeliest tokens; -1 is off",
            f"-1 (off) or between 1 and {MAX_INT}",
            lambda v: v == -1 or 1 <= v <= MAX_INT,
            limits={"minimum": -1, "not": {"const": 0}, "maximum": MAX_INT},
            litellm="top_k",
            anthropic="top_k",
            extension=True,
        ),
    ] = -1
    min_p: Annotated[
        float,
        Field(
            "leave out tokens less likely than this share of the likeliest one's probability",
            "in [0, 1]",
            lambda v: 0.0 <= v <= 1.0,
            limits={"minimum": 0, "maximum": 1},
            extension=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Field(
            "lower a token's logit by this for each time it was generated",
            **_between(-2, 2),
            **_in_openai("frequency_penalty"),
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Field(
            "lower a token's logit by this once it was generated", **_between(-2, 2), **_in_openai("presence_penalty")
        ),
    ] = 0.0
    ignore_eos: Annotated[bool, Field("go on past the token that ends a text", extension=True)] = False
    return_logprob: Annotated[
        bool, Field("return the log-probability of each token", is_beside=True, **_in_openai("logprobs"))
    ] = False
    logprob_start_len: Annotated[
        int,
        Field(
            "return those of the prompt too, from this token on; -1: of generated tokens only",
            "-1 (generated tokens only) or >= 0",
            lambda v: v >= -1,
            limits={"minimum": -1},
            is_beside=True,
            needs="return_logprob",
        ),
    ] = -1
    top_logprobs_num: Annotated[
        int,
        Field(
            "return so many of the likeliest tokens in each place",
            **_between(0, MAX_LOGPROBS),
            is_beside=True,
            needs="return_logprob",
            **{**_in_openai("top_logprobs"), "completions": "logprobs"},
        ),
    ] = 0
    repetition_penalty: Annotated[
        float,
        Field(
            "divide the logit of a token of the text so far by it (multiply a negative one)",
            **_between(0.01, 10),
            extension=True,
        ),
    ] = 1.0
    seed: Annotated[
        int | None,
        Field(
            "fixes the draw at each position, whatever else is in the batch; None: the engine's own seed",
            "a signed 64-bit integer",
            lambda v: v is None or -(2**63) <= v < 2**63,
            "sampling_seed",
            limits={"minimum": -(2**63), "maximum": 2**63 - 1},
            **_in_openai("seed"),
        ),
    ] = None
    logit_bias: Annotated[
        dict[int, float],
        Field(
            "add to the logits of these token ids",
            f"numbers between -{MAX_BIAS} and {MAX_BIAS}",
            lambda v: all(-MAX_BIAS <= bias <= MAX_BIAS for bias in v.values()),
            **_in_openai("logit_bias"),
        ),
    ] = {}
    skip_special_tokens: Annotated[bool, Field("leave special tokens out of the text", extension=True)] = True
    heal: Annotated[
        bool,
        Field(
            "generate the last tokens of a prompt that ends in text anew (token healing); programs on our engines "
            "default to True",
            native=None,
        ),
    ] = False
    finish: Annotated[
        Literal["closed", "cut"],
        Field(
            "closed: a text under a grammar is complete within max_tokens; cut: it is cut there",
            "closed or cut",
            lambda v: v in ("closed", "cut"),
            extension=True,
        ),
    ] = "closed"
    speculative: Annotated[
        bool | None,
        Field("let the engine guess tokens ahead, which changes no answer; None: as the run does", native=None),
    ] = None

    def faults(self, *, vocab_size: int | None = None) -> list[str]:
        """Every reason why these parameters cannot be served; empty when they can."""
        found = [
            f"{field.name}={shown(value)}: must be {field.must_be}"
            for field in _BOUNDED
            if (value := getattr(self, field.name)) is not field.default and not field.holds(value)
        ]
        if 0 <= self.max_tokens < self.min_tokens:
            found.append(f"min_tokens={self.min_tokens}: must be between 0 and max_tokens")
        found += [
            f"{name}={value!r}: needs {flag}=True"
            for name, flag, default in _NEEDY
            if (value := getattr(self, name)) != default and not getattr(self, flag)
        ]
        if vocab_size is not None and not all(0 <= t < vocab_size for t in (*self.stop_token_ids, *self.logit_bias)):
            limit = f"token ids below {vocab_size} (logit_bias too)"
            found.append(f"stop_token_ids={self.stop_token_ids!r}: must be {limit}")
        return found


def shown(value: Any) -> str:
    """The value in an error."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _rows() -> tuple[Field, ...]:
    hints = typing.get_type_hints(SamplingParams, include_extras=True)
    found = []
    for field in msgspec.structs.fields(SamplingParams):
        kind, row = typing.get_args(hints[field.name])
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        native = field.name if row.native == "" else row.native
        found.append(msgspec.structs.replace(row, name=field.name, type=kind, default=default, native=native))
    return (*found, *_OTHERS)


# what a generation is asked for besides ``SamplingParams``
_OTHERS = (
    Field(
        "generate so many candidates; the text goes on with the first",
        ">= 1",
        lambda v: v >= 1,
        native="n",
        chat="n",
        completions="n",
        litellm="n",
        name="n",
        type=int,
        default=1,
        part="gen",
    ),
    Field(
        "return each token's text beside its log-probability; always so but in /generate",
        native="return_text_in_logprobs",
        chat="logprobs",
        completions="logprobs",
        litellm="logprobs",
        is_beside=True,
        needs="return_logprob",
        name="return_text_in_logprobs",
        type=bool,
        default=False,
        part="gen",
    ),
    Field("the text matches this regex", native="regex", name="regex", type=str, part="grammar"),
    Field(
        "the text is JSON of this schema",
        native="json_schema",
        chat="response_format",
        litellm="response_format",
        name="json_schema",
        type=str,
        part="grammar",
    ),
    Field("the text follows this EBNF grammar", native="ebnf", name="ebnf", type=str, part="grammar"),
)

FIELDS = _rows()
_BOUNDED = tuple(field for field in FIELDS if field.part == "params" and field.must_be)
_NEEDY = tuple((field.name, field.needs, field.default) for field in FIELDS if field.part == "params" and field.needs)
