"""The word ``gen`` and its typed forms. They check their arguments and build expressions; nothing runs."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..constrained.spec import GrammarSpec
from ..protocol.errors import InvalidRequest
from ..protocol.sampling import FIELDS
from . import expressions as ir
from .choices import ChoicesSamplingMethod
from .grammar import Grammar
from .sampling_params import as_tuple
from .select import select
from .types import is_type, typed_text

# SGLang's gen() takes these by position, in this order; here a type may stand before them
_GEN_ORDER = (
    *("max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p"),
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "return_text_in_logprobs"),
    *("dtype", "choices", "choices_method", "regex", "json_schema"),
)

# the arguments of gen() besides the sampling parameters
_OWN = (
    *("dtype", "choices", "choices_method", "regex", "json_schema", "ebnf", "lark", "structural_tags"),
    *("grammar_options", "type", "retries", "tools", "tool_choice", "parallel_tool_calls"),
)
# name -> whether it takes several
_SAMPLING = {field.name: isinstance(field.default, tuple) for field in FIELDS if field.part != "grammar"}
_GEN_NAMES = frozenset((*_SAMPLING, *_OWN))


def gen(name: str | None = None, *args: Any, **kwargs: Any) -> ir.SglExpr:
    """Generate text here; ``s[name]`` will be it. A parameter that is None has the value that ``run()`` was given.

    The sampling parameters are those of the table in ``protocol/sampling.py``.

    One of ``regex``, ``json_schema``, ``ebnf``, ``lark``, ``structural_tags``, ``dtype`` or ``type`` restricts the
    text; ``grammar_options`` are options of that grammar (``{"whitespace": "compact"}``, see ``constrained.compile``).
    ``choices`` makes it a ``select``, which takes ``temperature`` and ``choices_method`` alone.
    ``n > 1`` gives a list; the text continues with the first.

    ``type``, also as second argument (``gen("age", int)``), makes ``s[name]`` a value of that type: see
    ``types.typed_text``; a ``grammar.Grammar`` works too. ``retries``: how often to generate again where the
    text passes the grammar but not the type's own checks (the program then waits for it right here).

    ``tools`` (functions) may be called in the text: ``s[name]`` is a ``ToolCalls``. ``tool_choice``: auto, required,
    none, or a tool's name; ``parallel_tool_calls=False``: one call at most.
    """
    if args:
        first = args[0]
        if is_type(first) or isinstance(first, Grammar):
            if "type" in kwargs:
                raise TypeError(f"gen({name!r}) was given two types")
            kwargs["type"] = first
            args = args[1:]
        elif first is not None and not isinstance(first, int | ir.SglArgument):
            raise InvalidRequest(f"gen({name!r}, {first!r}): the second argument is max_tokens (an int) or a type")
        _take_positional("gen", _GEN_ORDER, args, kwargs)
    overrides: dict[str, Any] = {}
    own: dict[str, Any] | None = None
    for word, value in kwargs.items():  # this runs once per generation
        if value is None:
            continue
        is_list = _SAMPLING.get(word)
        if is_list is None:
            own = own or {}
            own[word] = value
        else:
            overrides[word] = as_tuple(value) if is_list else value
    if own is None:
        if not kwargs.keys() <= _GEN_NAMES:
            _check_names(name, kwargs)
        return ir.SglGen(name, overrides)
    _check_names(name, kwargs)
    return _special_gen(name, overrides, **own)


def _take_positional(function: str, order: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Put ``args`` into ``kwargs`` under the names of ``order``."""
    if len(args) > len(order):
        raise TypeError(f"{function}() takes at most {len(order) + 2} positional arguments")
    for argument, value in zip(order, args, strict=False):
        if argument in kwargs:
            raise TypeError(f"{function}() got multiple values for argument {argument!r}")
        kwargs[argument] = value


def _special_gen(
    name: str | None,
    overrides: dict[str, Any],
    *,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    type: Any = None,
    retries: int = 0,
    grammar_options: Mapping[str, str | int | bool] | None = None,
    tools: Sequence[Any] | None = None,
    tool_choice: str | None = None,
    parallel_tool_calls: bool | None = None,
    **grammars: Any,
) -> ir.SglExpr:
    """A gen with a grammar, a type, choices or tools. ``grammars``: regex, json_schema, ebnf, lark, structural_tags."""
    if tools is not None:
        if dtype is not None or choices is not None or type is not None or grammars or grammar_options or retries:
            raise InvalidRequest(
                f"gen({name!r}, tools=...) restricts the text itself; give no type, grammar or choices"
            )
        return _tool_gen(ir.SglGen(name, overrides), tools, tool_choice, parallel_tool_calls)
    if tool_choice is not None or parallel_tool_calls is not None:
        raise InvalidRequest(f"gen({name!r}): tool_choice and parallel_tool_calls go with tools=[...]")
    if choices:
        mine = {
            "dtype": dtype,
            "type": type,
            "retries": retries or None,
            "grammar_options": grammar_options,
            **grammars,
        }
        others = [
            *(word for word in overrides if word != "temperature"),
            *(w for w, v in mine.items() if v is not None),
        ]
        if others:
            raise InvalidRequest(
                f"gen({name!r}, choices=...) picks one of the choices by their probability, so {others[0]} has no "
                "effect; leave it out",
                where=others[0],
            )
        return select(name, choices, overrides.get("temperature", 0.0), choices_method)
    if dtype is not None:
        overrides["dtype"] = dtype
    grammar = None if dtype is None and not grammars else _grammar(dtype, grammars)
    if type is not None:
        if grammar is not None:
            raise InvalidRequest(f"gen({name!r}) was given a type and a grammar; give one of them")
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
        raise InvalidRequest(f"gen({name!r}, grammar_options=...) has no grammar for these options")
    return replace(grammar, options={**grammar.options, **options})


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
    """The description of ``tools`` in the format of the model. It belongs at the end of the system message."""
    from .tools.expressions import SglToolPrompt
    from .tools.tool import as_tools

    return SglToolPrompt(as_tools(tools))


def _grammar(dtype: Any, given: Mapping[str, Any]) -> GrammarSpec:
    """The grammar of ``dtype``, or of ``given`` (keyword -> text)."""
    if len(given) > 1:
        raise InvalidRequest(f"gen() was given {' and '.join(given)}; give one grammar")
    if dtype is not None:
        pattern = ir.REGEX_OF_DTYPE.get(dtype)
        if pattern is None:
            raise InvalidRequest(f"dtype={dtype!r}: must be int, float, bool or str")
        if given:
            warnings.warn(f"gen() was given dtype={dtype!r} and {next(iter(given))}: dtype is used", stacklevel=4)
        return GrammarSpec("regex", pattern)
    ((kind, value),) = given.items()
    match kind:
        case "regex":
            try:
                re.compile(value)  # so that a bad pattern raises at the gen
            except re.error as error:
                raise re.error(f"regex={value!r}: {error.msg}", value, error.pos) from None
            return GrammarSpec("regex", value)
        case "json_schema":
            return GrammarSpec("json_schema", _schema_text(value))
        case "structural_tags":
            return GrammarSpec("structural_tags", value if isinstance(value, str) else json.dumps(value))
        case "ebnf" | "lark":
            return GrammarSpec(kind, value)
        case _:
            raise AssertionError(kind)


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


# in SGLang's order as well
_GEN_DTYPE_ORDER = tuple(word for word in _GEN_ORDER if word not in ("min_tokens", *_OWN))


def gen_int(name: str | None = None, *args: Any, **kwargs: Any) -> ir.SglExpr:
    """``gen(dtype=int)``: digits, as text."""
    return _gen_dtype("gen_int", int, name, args, kwargs)


def gen_string(name: str | None = None, *args: Any, **kwargs: Any) -> ir.SglExpr:
    """``gen(dtype=str)``: a quoted string, quotes included."""
    return _gen_dtype("gen_string", str, name, args, kwargs)


def _gen_dtype(
    function: str, dtype: type, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ir.SglExpr:
    for word in kwargs:
        if word not in _GEN_DTYPE_ORDER:
            raise TypeError(f"{function}({name!r}) has no argument {word!r}; gen(dtype={dtype.__name__}) takes more")
    _take_positional(function, _GEN_DTYPE_ORDER, args, kwargs)
    return gen(name, **kwargs, dtype=dtype)


def _signature(order: Sequence[str], others: Iterable[str] = ()) -> inspect.Signature:
    """``name``, the positional words of ``order``, then ``others`` by keyword alone."""
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    words = [(word, positional) for word in ("name", *order)] + [(word, keyword) for word in others]
    return inspect.Signature([inspect.Parameter(word, kind, default=None) for word, kind in words])


gen.__signature__ = _signature(  # type: ignore[attr-defined]
    _GEN_ORDER, [word for word in (*_SAMPLING, *_OWN) if word not in _GEN_ORDER]
)
for _function in (gen_int, gen_string):
    _function.__signature__ = _signature(_GEN_DTYPE_ORDER)  # type: ignore[attr-defined]
