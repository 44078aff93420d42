"""The word ``gen`` and its typed forms. They check what was asked and build expressions; nothing runs."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..constrained.spec import GrammarSpec
from ..protocol.errors import InvalidRequest
from . import expressions as ir
from .choices import ChoicesSamplingMethod
from .grammar import Grammar
from .select import select
from .types import is_type, typed_text

Strings = str | Sequence[str]

# the order in which SGLang's gen() takes them; a type may stand before them all
_GEN_ORDER = (
    "max_tokens",
    "min_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "dtype",
    "choices",
    "choices_method",
    "regex",
    "json_schema",
)


def gen(name: str | None = None, *args: Any, **kwargs: Any) -> ir.SglExpr:
    """Generate text here; ``s[name]`` will be it. What is None comes from ``run()``.

    One of ``regex``, ``json_schema``, ``ebnf``, ``lark``, ``structural_tags``, ``dtype`` or ``type`` restricts what can
    be written; ``grammar_options`` are its grammar's (``{"whitespace": "compact"}``, see ``constrained.compile``).
    ``choices`` makes it a ``select``. ``n > 1`` gives a list; the text goes on with its first.

    ``type``, also as second argument (``gen("age", int)``), makes ``s[name]`` a value of that type: see
    ``types.typed_text``; a ``grammar.Grammar`` stands there too. ``retries``: how often to generate again where the
    text passes the grammar but not the type's own checks (the program then waits for it right here).

    ``tools`` (functions) may be called in the text: ``s[name]`` is a ``ToolCalls``. ``tool_choice``: auto, required,
    none, or a tool's name; ``parallel_tool_calls=False``: one call at most.
    """
    if not args:
        try:
            return _gen(name, **kwargs)
        except TypeError:
            _check_names(name, kwargs)
            raise
    _check_names(name, kwargs)
    first = args[0]
    if is_type(first) or isinstance(first, Grammar):
        if "type" in kwargs:
            raise TypeError(f"gen({name!r}) was given two types")
        kwargs["type"] = first
        args = args[1:]
    elif first is not None and not isinstance(first, int | ir.SglArgument):
        raise InvalidRequest(f"gen({name!r}, {first!r}): the second argument is max_tokens (an int) or a type")
    if len(args) > len(_GEN_ORDER):
        raise TypeError(f"gen() takes at most {len(_GEN_ORDER) + 2} positional arguments")
    for argument, value in zip(_GEN_ORDER, args, strict=False):
        if argument in kwargs:
            raise TypeError(f"gen() got multiple values for argument {argument!r}")
        kwargs[argument] = value
    return _gen(name, **kwargs)


def _gen(
    name: str | None = None,
    *,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Strings | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    ebnf: str | None = None,
    lark: str | None = None,
    structural_tags: Any = None,
    grammar_options: Mapping[str, str | int | bool] | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    logit_bias: dict[int, float] | None = None,
    heal: bool | None = None,
    speculative: bool | None = None,
    type: Any = None,
    retries: int = 0,
    tools: Sequence[Any] | None = None,
    tool_choice: str | None = None,
    parallel_tool_calls: bool | None = None,
) -> ir.SglExpr:
    if tools is not None:
        given = (dtype, choices, regex, json_schema, ebnf, lark, structural_tags, type)
        if any(value is not None for value in (*given, grammar_options)) or retries:
            raise InvalidRequest(
                f"gen({name!r}, tools=...) says itself what can be written; give no type, grammar or choices"
            )
    elif tool_choice is not None or parallel_tool_calls is not None:
        raise InvalidRequest(f"gen({name!r}): tool_choice and parallel_tool_calls go with tools=[...]")
    if choices:
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method)
    overrides: dict[str, Any] = {}  # one by one: this runs once per generation
    if max_tokens is not None:
        overrides["max_tokens"] = max_tokens
    if min_tokens is not None:
        overrides["min_tokens"] = min_tokens
    if n is not None:
        overrides["n"] = n
    if stop is not None:
        overrides["stop"] = ir.as_tuple(stop)
    if stop_token_ids is not None:
        overrides["stop_token_ids"] = ir.as_tuple(stop_token_ids)
    if stop_regex is not None:
        overrides["stop_regex"] = ir.as_tuple(stop_regex)
    if temperature is not None:
        overrides["temperature"] = temperature
    if top_p is not None:
        overrides["top_p"] = top_p
    if top_k is not None:
        overrides["top_k"] = top_k
    if min_p is not None:
        overrides["min_p"] = min_p
    if frequency_penalty is not None:
        overrides["frequency_penalty"] = frequency_penalty
    if presence_penalty is not None:
        overrides["presence_penalty"] = presence_penalty
    if repetition_penalty is not None:
        overrides["repetition_penalty"] = repetition_penalty
    if ignore_eos is not None:
        overrides["ignore_eos"] = ignore_eos
    if return_logprob is not None:
        overrides["return_logprob"] = return_logprob
    if logprob_start_len is not None:
        overrides["logprob_start_len"] = logprob_start_len
    if top_logprobs_num is not None:
        overrides["top_logprobs_num"] = top_logprobs_num
    if return_text_in_logprobs is not None:
        overrides["return_text_in_logprobs"] = return_text_in_logprobs
    if dtype is not None:
        overrides["dtype"] = dtype
    if seed is not None:
        overrides["seed"] = seed
    if logit_bias is not None:
        overrides["logit_bias"] = logit_bias
    if heal is not None:
        overrides["heal"] = heal
    if speculative is not None:
        overrides["speculative"] = speculative
    if tools is not None:
        return _tool_gen(ir.SglGen(name, overrides), tools, tool_choice, parallel_tool_calls)
    is_free = dtype is None and regex is None and json_schema is None and ebnf is None and lark is None
    grammar = None
    if not (is_free and structural_tags is None):
        if type is not None:
            raise InvalidRequest(f"gen({name!r}) was given a type and a grammar; one of them says what can be written")
        grammar = _grammar(
            dtype=dtype,
            regex=regex,
            json_schema=json_schema,
            ebnf=ebnf,
            lark=lark,
            structural_tags=structural_tags,
        )
    if type is not None:
        return _typed_gen(name, overrides, type, retries, grammar_options)
    if retries:
        raise InvalidRequest(f"gen({name!r}, retries={retries}) needs a type whose checks could fail")
    return ir.SglGen(name, overrides, _with_options(name, grammar, grammar_options))


def _typed_gen(name: str | None, overrides: dict[str, Any], type_: Any, retries: int, options: Any) -> ir.SglGen:
    if isinstance(type_, Grammar):
        spec = _with_options(name, type_.spec(), options)
        return ir.SglGen(name, overrides, spec, captures=type_ if type_.names else None)
    typed = typed_text(type_)
    spec = _with_options(name, typed.grammar, options)
    return ir.SglGen(name, overrides, spec, typed.parse, retries, ending=typed.ending)


def _with_options(name: str | None, grammar: GrammarSpec | None, options: Any) -> GrammarSpec | None:
    if options is None:
        return grammar
    if grammar is None:
        raise InvalidRequest(f"gen({name!r}, grammar_options=...) has no grammar that they could be options of")
    return replace(grammar, options={**grammar.options, **options})


_GEN_NAMES = frozenset(inspect.signature(_gen).parameters)


def _check_names(name: str | None, given: dict[str, Any]) -> None:
    unknown = given.keys() - _GEN_NAMES
    if unknown:
        word = min(unknown)
        near = difflib.get_close_matches(word, _GEN_NAMES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(_GEN_NAMES))}"
        raise TypeError(f"gen({name!r}) has no argument {word!r}{hint}") from None


def _tool_gen(plain: ir.SglGen, tools: Sequence[Any], choice: str | None, parallel: bool | None) -> ir.SglExpr:
    from .tools.expressions import SglToolGen
    from .tools.tool import as_tools

    checked = as_tools(tools)
    if not checked:
        raise InvalidRequest(f"gen({plain.name!r}, tools=[]): give one tool or more, or leave tools out")
    choice = "auto" if choice is None else choice
    names = [tool.name for tool in checked]
    if choice not in ("auto", "required", "none", *names):
        known = ", ".join(names)
        raise InvalidRequest(f"tool_choice={choice!r}: must be auto, required, none, or the name of a tool ({known})")
    return SglToolGen(plain, checked, choice, parallel is not False)


def describe_tools(tools: Sequence[Any]) -> ir.SglExpr:
    """What the model has to be told of ``tools``, in its own way; it belongs at the end of the system message."""
    from .tools.expressions import SglToolPrompt
    from .tools.tool import as_tools

    return SglToolPrompt(as_tools(tools))


gen.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        *[inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for p in _GEN_ORDER],
        *[
            parameter
            for parameter in inspect.signature(_gen).parameters.values()
            if parameter.name not in (*_GEN_ORDER, "name")
        ],
    ]
)


def _grammar(
    *,
    dtype: Any,
    regex: str | None,
    json_schema: Any,
    ebnf: str | None,
    lark: str | None,
    structural_tags: Any,
) -> GrammarSpec | None:
    given = {
        "regex": regex,
        "json_schema": json_schema,
        "ebnf": ebnf,
        "lark": lark,
        "structural_tags": structural_tags,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidRequest(f"gen() was given {' and '.join(named)}; one grammar can hold, so give one")
    if dtype is not None:
        pattern = ir.REGEX_OF_DTYPE.get(dtype)
        if pattern is None:
            raise InvalidRequest(f"dtype={dtype!r}: must be int, float, bool or str")
        if named:
            warnings.warn(f"gen() was given dtype={dtype!r} and {named[0]}: dtype holds", stacklevel=5)
        return GrammarSpec("regex", pattern)
    if regex is not None:
        try:
            re.compile(regex)  # a bad one raises here, where it is written
        except re.error as error:
            raise re.error(f"regex={regex!r}: {error.msg}", regex, error.pos) from None
        return GrammarSpec("regex", regex)
    if json_schema is not None:
        return GrammarSpec("json_schema", _schema_text(json_schema))
    if ebnf is not None:
        return GrammarSpec("ebnf", ebnf)
    if structural_tags is not None:
        tags = structural_tags if isinstance(structural_tags, str) else json.dumps(structural_tags)
        return GrammarSpec("structural_tags", tags)
    return None if lark is None else GrammarSpec("lark", lark)


def _schema_text(schema: Any) -> str:
    """A schema as text, as a dict, or as a pydantic model."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, dict):
        return json.dumps(schema)
    found = typed_text(schema).grammar
    if found is None or found.kind != "json_schema":
        raise InvalidRequest(f"json_schema={schema!r}: must be a JSON schema (text or dict) or a pydantic model")
    return found.text


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: Strings | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> ir.SglExpr:
    """``gen(dtype=int)``: digits, as text."""
    return _gen_dtype(int, locals())


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: Strings | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Strings | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> ir.SglExpr:
    """``gen(dtype=str)``: a quoted string, quotes included."""
    return _gen_dtype(str, locals())


def _gen_dtype(dtype: type, given: dict[str, Any]) -> ir.SglExpr:
    return gen(**given, dtype=dtype)
