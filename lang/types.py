"""Python types as grammars: the texts that a type allows, and how to parse a text into a value.

Whatever the grammar cannot express is checked when the text is parsed.
"""

from __future__ import annotations

import datetime
import enum
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from ..constrained.spec import GrammarSpec
from ..protocol.errors import InvalidRequest, PhloemError
from ..protocol.tool_format import closed_schema
from .number_patterns import FLOAT, integer_pattern

_MAX_ENUMERATED = 1000  # a range with a step becomes a list of choices up to this length
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"


class ParseError(PhloemError, ValueError):
    """A generated text is not a value of its type. ``raw``: the text."""

    def __init__(self, message: str, *, raw: str = "", where: str = "") -> None:
        super().__init__(message, where=where)
        self.raw = raw


@dataclass(frozen=True, slots=True)
class Ending:
    """What may follow a number. ``pattern``: text that ends the number; ``rest``: everything that may follow it.

    Without an ending the grammar allows only a further digit or the end of the text, so a model that wants to write a
    full stop would write another digit.
    """

    pattern: str
    rest: str


_AFTER_INTEGER = Ending("[^0-9-]", r"([^0-9-](.|\n)*)?")
_AFTER_FLOAT = Ending(r"[^0-9.-]|\.[^0-9]", r"([^0-9.-](.|\n)*|\.[^0-9](.|\n)*)?")


@dataclass(frozen=True, slots=True)
class TypedText:
    """``grammar`` restricts the text (None: any text). ``parse`` reads it and raises ValueError for a wrong value."""

    grammar: GrammarSpec | None
    parse: Callable[[str], Any]
    ending: Ending | None = None


def typed_text(type_: Any) -> TypedText:
    """The grammar and the parser of values of ``type_``.

    int, float, bool, str, range(...), Literal, Enum, date, time, datetime are plain text. Every other type that
    pydantic knows (list, dict, tuple, Union, dataclass, TypedDict, NamedTuple, BaseModel, Annotated) is JSON.
    """
    if isinstance(type_, range):
        return _of_range(type_)
    try:
        return _of_type(type_)
    except TypeError:  # unhashable: Literal of lists and the like
        return _of_type.__wrapped__(type_)


def is_type(value: object) -> bool:
    """Whether ``value``, given in the position of ``max_tokens``, is a type."""
    return isinstance(value, type | range) or get_origin(value) is not None


@lru_cache(maxsize=256)
def _of_type(type_: Any) -> TypedText:
    if type_ is str:
        return TypedText(None, str)
    if type_ is bool:
        return _of_choices({"true": True, "false": False})
    if get_origin(type_) is Literal:
        return _of_choices({_bare(value): value for value in get_args(type_)})
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return _of_choices({_bare(member.value): member for member in type_})
    if type_ is datetime.date:
        return TypedText(GrammarSpec("regex", _DATE), datetime.date.fromisoformat)
    if type_ is datetime.time:
        return TypedText(GrammarSpec("regex", _TIME), datetime.time.fromisoformat)
    if type_ is datetime.datetime:
        return TypedText(GrammarSpec("regex", f"{_DATE}T{_TIME}"), datetime.datetime.fromisoformat)
    return _of_schema(type_)


def _bare(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    if not text:
        raise InvalidRequest("an empty text cannot be a choice; remove it from the type")
    return text


def _of_choices(values: dict[str, Any]) -> TypedText:
    return TypedText(GrammarSpec("choices", json.dumps(list(values))), values.__getitem__)


def _of_range(values: range) -> TypedText:
    if not values:
        raise InvalidRequest(f"{values!r} contains no number, so nothing could be generated")
    if values.step != 1:
        if len(values) > _MAX_ENUMERATED:
            raise InvalidRequest(
                f"{values!r} has {len(values):,} values; with a step at most {_MAX_ENUMERATED:,} are possible"
            )
        return _of_choices({str(value): value for value in values})
    return TypedText(GrammarSpec("regex", integer_pattern(values[0], values[-1])), int, _AFTER_INTEGER)


def _of_schema(type_: Any) -> TypedText:
    import typing_extensions
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    if is_typeddict(type_) and sys.version_info < (3, 12):  # pydantic needs the newer TypedDict there
        fields = get_type_hints(type_, include_extras=True)
        newer: Any = typing_extensions.TypedDict
        type_ = newer(type_.__name__, fields, total=type_.__total__)
    try:
        adapter: Any = TypeAdapter(type_)
        schema = adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(
            f"gen() cannot write a {type_!r}: {reason}; use a type that JSON can hold, or regex= and read it yourself"
        ) from None
    closed = closed_schema(schema)
    if closed.get("type") == "integer" and set(closed) <= {"type", *_LIMITS}:
        pattern = _integer_pattern(closed)  # JSON allows 4.000 as an integer
        return TypedText(GrammarSpec("regex", pattern), adapter.validate_json, _AFTER_INTEGER)
    if closed == {"type": "number"}:
        return TypedText(GrammarSpec("regex", FLOAT), adapter.validate_json, _AFTER_FLOAT)
    return TypedText(GrammarSpec("json_schema", json.dumps(closed)), adapter.validate_json)


def _integer_pattern(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + 1
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1
    if low is not None and high is not None and low > high:
        raise InvalidRequest(f"there is no integer from {low} to {high}")
    return integer_pattern(low, high)


def parse_or_explain(name: str | None, parse: Callable[[str], Any], text: str, finish_reason: str) -> Any:
    """``parse(text)``. Raises ``ParseError``, which tells a wrong value from one that max_tokens cut short."""
    try:
        return parse(text)
    except (ValueError, KeyError) as error:
        if finish_reason == "length":
            message = f"{name!r} was cut short by max_tokens: {text!r}; allow more"
        else:
            reason = str(error).replace("\n", " ")
            message = f"{name!r} is not a valid value: {text!r} ({reason}); retries=2 would try again"
        raise ParseError(message, raw=text) from error
