"""The sampling parameters as flags and as words of a chat, made from the table in ``protocol/sampling.py``."""

from __future__ import annotations

import argparse
import difflib
import typing
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..flags import explained
from ..protocol.errors import InvalidParams
from ..protocol.sampling import FIELDS, Field

MAX_TOKENS = 1024  # of an answer, where the user names no limit

# the log-probabilities, which stand beside the others, are not shown in a terminal
_FIELDS = {field.name: field for field in FIELDS if field.part == "params" and not field.is_beside}
_WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def add_sampling_flags(parser: argparse.ArgumentParser, *, without: Iterable[str] = ()) -> None:
    """One flag per sampling parameter, none of which has a default. ``without``: those that ``parser`` has already."""
    group = parser.add_argument_group("sampling")
    for field in _FIELDS.values():
        if field.name in without:
            continue
        options: dict[str, Any] = {"dest": _dest(field), "help": f"{field.meaning} (default: {_default(field)})"}
        if _kind(field) is bool:
            group.add_argument(_flag(field), action=argparse.BooleanOptionalAction, **options)
            continue
        if isinstance(field.default, tuple | dict):
            options |= {"action": "append", "help": f"{field.meaning}; may be repeated"}
        group.add_argument(_flag(field), type=explained(partial(read_value, field)), metavar=_unit(field), **options)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters of the flags that were given."""
    found: dict[str, Any] = {}
    for field in _FIELDS.values():
        value = getattr(args, _dest(field), None)
        if value is None:
            continue
        if isinstance(field.default, dict):
            value = {key: number for one in value for key, number in one.items()}
        elif isinstance(field.default, tuple):
            value = tuple(item for one in value for item in one)
        found[field.name] = value
    return found


def field_named(name: str) -> Field:
    """The parameter ``name``, as a flag or a Python keyword spells it. Raises InvalidParams for another name."""
    wanted = name.removeprefix("--").replace("-", "_")
    if wanted in _FIELDS:
        return _FIELDS[wanted]
    near = difflib.get_close_matches(wanted, _FIELDS, n=1)
    meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(_FIELDS)}"
    raise InvalidParams(f"{name!r} is not a sampling parameter; {meant}")


def read_value(field: Field, text: str) -> Any:
    """The value that ``text`` writes. Raises InvalidParams that names the value and its limit."""
    try:
        value = _read(field, text)
    except ValueError:
        raise InvalidParams(f"{text!r} is not {_form(field)}") from None
    if not field.holds(value):
        raise InvalidParams(f"{text} is out of bounds; it must be {field.must_be}")
    return value


def _read(field: Field, text: str) -> Any:
    if isinstance(field.default, dict):
        pairs = (entry.split("=", 1) for entry in text.split(","))
        return {int(token): _number(bias) for token, bias in pairs}
    if isinstance(field.default, tuple):
        return (text,) if field.type == tuple[str, ...] else tuple(map(int, text.split(",")))
    kind = _kind(field)
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]
    return _number(text) if kind is float else kind(text)


def _number(text: str) -> float:
    value = float(text)
    if value != value:
        raise ValueError(text)
    return value


def _form(field: Field) -> str:
    """What a value looks like, in words."""
    if isinstance(field.default, dict):
        return "TOKEN=BIAS, for example 42=-1.5"
    if isinstance(field.default, tuple):
        return "token ids with commas between them, for example 1,2"
    return {bool: "on or off", int: "a whole number", float: "a number"}[_kind(field)]


def _kind(field: Field) -> Any:
    """bool, int, float or str; a Literal is str."""
    if typing.get_origin(field.type) is typing.Literal:
        return str
    return next((kind for kind in typing.get_args(field.type) if kind is not type(None)), field.type)


def _unit(field: Field) -> str:
    if isinstance(field.default, dict):
        return "TOKEN=BIAS"
    if isinstance(field.default, tuple):
        return "TEXT" if field.type == tuple[str, ...] else "TOKEN"
    if typing.get_origin(field.type) is typing.Literal:
        return "|".join(typing.get_args(field.type))
    return "N" if _kind(field) is int else "X"


def _default(field: Field) -> str:
    ours = {"max_tokens": MAX_TOKENS, "seed": "drawn by the engine", "heal": True}
    return str(ours.get(field.name, field.default))


def _flag(field: Field) -> str:
    return f"--{field.name.replace('_', '-')}"


def _dest(field: Field) -> str:
    return f"sampling_{field.name}"
