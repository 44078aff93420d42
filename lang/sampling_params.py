"""The sampling parameters of one generation under our names, SGLang's and those of other APIs.

The names come from the table in ``protocol/sampling.py``.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..constrained.spec import GrammarSpec
from ..protocol.errors import InvalidParams, InvalidRequest
from ..protocol.sampling import FIELDS, Api, SamplingParams, shown

NUMBER_STOPS = (" ", "\n")  # end a number of a ``dtype``; not part of its text
_NUMBERS = (int, float, "int", "float")

_OF_PARAMS = frozenset(SamplingParams.__struct_fields__)
# what a run, a region (``s.sampling``) or a gen may set, under our names and SGLang's -> our name
OUR_NAMES: dict[str, str] = {
    name: field.name for field in FIELDS if field.part != "grammar" for name in (field.name, field.native or field.name)
}
SAMPLING_NAMES = frozenset(OUR_NAMES)
_LISTS = frozenset(field.name for field in FIELDS if isinstance(field.default, tuple))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One stop or token id, or several, as a tuple."""
    return (value,) if isinstance(value, str | int) else tuple(value)


def sampling_overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not None, under our names. Names not in ``SAMPLING_NAMES`` stay as they are."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        ours = OUR_NAMES.get(name, name)
        if ours in found:
            raise InvalidRequest(f"{name} and {ours} are one parameter; give one of them", where=name)
        found[ours] = as_tuple(value) if ours in _LISTS else value
    return found


_FORK_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: multiples of it lie far apart


def sampling_of_fork(sampling: Mapping[str, Any], seq: int) -> Mapping[str, Any]:
    """A run's defaults on its sequence ``seq``: each fork derives its own seed from the run's.

    With one seed all forks of one text would generate the same. ``gen(seed=...)`` is used as it is.
    """
    if seq and "seed" in sampling:
        return {**sampling, "seed": (sampling["seed"] + seq * _FORK_SEED_STEP) % 2**63}
    return sampling


def merge_sampling(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> SamplingParams:
    """The parameters of one gen: the run's, overridden by its own. A prompt that ends in text is healed by default."""
    merged = {"heal": True, **defaults, **overrides}
    merged.pop("n", None)
    merged.pop("return_text_in_logprobs", None)  # our log-probabilities always carry their text
    if merged.pop("dtype", None) in _NUMBERS:
        merged["stop"] = (*merged.get("stop", ()), *NUMBER_STOPS)
    try:
        # Keys may be strings of numbers, as in OpenAI's logit_bias.
        return msgspec.convert(merged, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        unknown = sorted(set(merged) - _OF_PARAMS)
        if unknown:
            raise InvalidRequest(f"unknown sampling parameter {', '.join(unknown)}") from None
        raise _wrong_type(merged, str(error)) from None


def _wrong_type(given: Mapping[str, Any], reason: str) -> InvalidParams:
    """``reason``: msgspec's, which ends with the path of the value."""
    expected, _, path = reason.partition(" - at ")
    name = re.findall(r"\$\.(\w+)", path)[0]
    return InvalidParams(f"{name}={shown(given[name])}: {expected[:1].lower()}{expected[1:]}", where=name)


# -- foreign APIs -----------------------------------------------------------------------------------------------------

_IN_SGLANG = tuple(field for field in FIELDS if field.native is not None)
_SGLANG_NAMES = {field.name: field.native or "" for field in _IN_SGLANG}
_NEEDY = tuple(field for field in FIELDS if field.needs)
_OURS_ALONE = tuple(field for field in FIELDS if field.native is None)
_TITLES: dict[Api, str] = {
    "native": "/generate",
    "chat": "OpenAI",
    "completions": "OpenAI completions",
    "litellm": "LiteLLM",
    "anthropic": "Anthropic",
}
# sent even at their default, because the default of a provider may be another
_ALWAYS_SENT: dict[Api, frozenset[str]] = {
    "chat": frozenset(("max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty")),
    "litellm": frozenset(("max_tokens", "temperature")),
    "anthropic": frozenset(("max_tokens", "temperature")),
}
_ALWAYS_SENT["completions"] = _ALWAYS_SENT["chat"]
MAX_ANTHROPIC_TEMPERATURE = 1.0


class _Sampling:
    """The sampling of one generation as a ``BaseBackend`` receives it: the fields of the table that SGLang has, under
    its names, and ``dtype``. ``stop`` and the lists are tuples.
    """

    if TYPE_CHECKING:

        def __init__(self, **given: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def clone(self) -> "SglSamplingParams":
        return dataclasses.replace(self)  # type: ignore[type-var]

    def without_ends(self) -> "SglSamplingParams":
        """Without stop and length. Gens that are equal then sample their tokens in the same way."""
        return dataclasses.replace(self, stop=(), max_new_tokens=0)  # type: ignore[type-var]

    def to_openai_kwargs(self) -> dict[str, Any]:
        """Of a chat completions call."""
        return self.kwargs_of("chat")

    def to_anthropic_kwargs(self) -> dict[str, Any]:
        return self.kwargs_of("anthropic")

    def to_litellm_kwargs(self) -> dict[str, Any]:
        return self.kwargs_of("litellm")

    def to_srt_kwargs(self) -> dict[str, Any]:
        """Of ``POST /generate``: field ``sampling_params``."""
        return self._native(is_beside=False)

    def beside_srt_kwargs(self) -> dict[str, Any]:
        """Of ``POST /generate``: the fields that stand beside ``sampling_params``."""
        return self._native(is_beside=True)

    def kwargs_of(self, api: Api) -> dict[str, Any]:
        """The arguments of a call to ``api``. Raises InvalidRequest for a parameter that ``api`` does not have."""
        kwargs: dict[str, Any] = {}
        for field in _IN_SGLANG:
            value = getattr(self, field.native)  # type: ignore[arg-type]
            name = field.in_api(api)
            is_set = value is not None and value != field.default
            if name is None:
                if is_set:
                    raise InvalidRequest(
                        f"{field.name}={value!r}: the {_TITLES[api]} API has no such parameter; leave it out",
                        where=field.name,
                    )
            elif is_set or field.name in _ALWAYS_SENT[api]:
                kwargs[name] = _as_json(value)
        if self.return_logprob:  # OpenAI's logprobs are a flag in one API and a number in the other
            if api == "completions":
                kwargs["logprobs"] = self.top_logprobs_num
            elif api in ("chat", "litellm"):
                kwargs["logprobs"] = True
        if self.json_schema is not None and api != "native":
            schema = {"name": "answer", "schema": json.loads(self.json_schema), "strict": True}
            kwargs["response_format"] = {"type": "json_schema", "json_schema": schema}
        if api == "anthropic" and self.temperature > MAX_ANTHROPIC_TEMPERATURE:
            raise InvalidRequest(
                f"temperature={self.temperature}: the Anthropic API takes 0 to {MAX_ANTHROPIC_TEMPERATURE:g}",
                where="temperature",
            )
        return kwargs

    def _native(self, *, is_beside: bool) -> dict[str, Any]:
        fields = [field for field in _IN_SGLANG if field.is_beside == is_beside]
        found = {field.native: _as_json(getattr(self, field.native or "")) for field in fields}
        return {name: value for name, value in found.items() if name is not None and value is not None}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


if TYPE_CHECKING:
    SglSamplingParams = _Sampling
else:
    SglSamplingParams = dataclasses.make_dataclass(
        "SglSamplingParams",
        [
            *[(field.native, field.type, None if field.default == {} else field.default) for field in _IN_SGLANG],
            ("dtype", Any, None),
        ],
        bases=(_Sampling,),
    )
    SglSamplingParams.__doc__ = _Sampling.__doc__
    SglSamplingParams.__module__ = __name__


def to_sgl_params(
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
    grammar: GrammarSpec | None = None,
    *,
    extra_stop: Sequence[str] = (),
) -> SglSamplingParams:
    """The merge of a run's sampling and a gen's under SGLang's names, for a ``BaseBackend``.

    Raises InvalidRequest for a parameter or a grammar that a ``BaseBackend`` does not serve.
    """
    merged = {**defaults, **overrides}
    for field in _OURS_ALONE:
        if (value := merged.pop(field.name, field.default)) != field.default:
            raise InvalidRequest(
                f"{field.name}={value!r}: only Phloem's own engines have this parameter; leave it out", where=field.name
            )
    for field in _NEEDY:
        if (value := merged.get(field.name, field.default)) != field.default and not merged.get(field.needs):
            raise InvalidRequest(f"{field.name}={value!r}: needs {field.needs}=True", where=field.name)
    params = SglSamplingParams(**{_SGLANG_NAMES.get(name, name): value for name, value in merged.items()})
    if extra_stop:
        params.stop = (*params.stop, *extra_stop)
    if grammar is None:
        return params
    if grammar.options:
        named = ", ".join(grammar.options)
        raise InvalidRequest(f"grammar_options ({named}) are not served by this backend; leave them out")
    if grammar.kind not in ("regex", "json_schema", "ebnf"):
        raise InvalidRequest(f"{grammar.kind} grammars are not served by this backend; use regex, json_schema or ebnf")
    if params.dtype is None:  # with a dtype the grammar is its regex, and the backend reads the dtype
        setattr(params, grammar.kind, grammar.text)
    return params
