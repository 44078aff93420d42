"""A function's signature and docstring as JSON schema, and JSON arguments parsed into Python values."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from ...protocol.errors import InvalidRequest

_SECTION = re.compile(r"\s*(args|arguments|parameters|returns?|yields?|raises|examples?|notes?)\s*:\s*", re.IGNORECASE)
_GOOGLE = re.compile(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_SPHINX = re.compile(r"\s*:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Docs:
    """The summary of a docstring and its description of each parameter."""

    summary: str
    parameters: dict[str, str]


@dataclass(frozen=True, slots=True)
class Signature:
    """``schema`` describes the arguments as one JSON object. ``read`` parses such an object into keyword arguments."""

    schema: dict[str, Any]
    read: Callable[[str], dict[str, Any]]
    docs: Docs


def signature_of(function: Callable[..., Any], name: str) -> Signature:
    """Types come from the annotations, descriptions from the docstring or ``Annotated[..., "..."]``."""
    from pydantic import Field

    docs = read_docstring(inspect.getdoc(function) or "")
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, tuple[Any, bool]] = {}
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        where = f"tool {name!r}: parameter {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidRequest(f"{where} is {parameter.kind.description}; a model can only give named arguments")
        if parameter.name not in hints:
            raise InvalidRequest(f"{where} has no type; write for example {parameter.name}: str")
        hint = hints[parameter.name]
        described = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, str)), None)
        text = described or docs.parameters.get(parameter.name)
        if text:
            hint = Annotated[hint, Field(description=text)]
        is_required = parameter.default is parameter.empty
        if not is_required:
            defaults[parameter.name] = parameter.default
        fields[parameter.name] = (hint, is_required)
    schema, read = _adapter(name, fields)
    for parameter_name, default in defaults.items():
        if _is_json(default):
            schema["properties"][parameter_name]["default"] = default
    return Signature(schema, read, docs)


def _adapter(name: str, fields: dict[str, tuple[Any, bool]]) -> tuple[dict[str, Any], Callable[[str], dict[str, Any]]]:
    # a TypedDict instead of a model, because its keys may have any name, such as json or copy
    import typing_extensions
    from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    keys = {key: hint if need else typing_extensions.NotRequired[hint] for key, (hint, need) in fields.items()}
    make: Any = typing_extensions.TypedDict
    arguments = make(name, keys)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter: Any = TypeAdapter(arguments)
        schema = adapter.json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(f"tool {name!r}: {reason}; use types that JSON can hold") from None
    properties = schema.setdefault("properties", {})
    for entry in properties.values():
        entry.pop("title", None)
    order = [key for key in ("type", "properties", "required") if key in schema]
    rest = [key for key in schema if key not in (*order, "title")]
    return {key: schema[key] for key in (*order, *rest)}, adapter.validate_json


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def read_docstring(text: str) -> Docs:
    """The text before the first section, and the parameters of ``Args:`` (Google) or ``:param x:`` (Sphinx)."""
    summary: list[str] = []
    parameters: dict[str, str] = {}
    section, current, indent = "", "", -1
    for line in text.splitlines():
        sphinx = _SPHINX.fullmatch(line)
        if sphinx is not None:
            section, current = "param", sphinx[1]
            parameters[current] = sphinx[2].strip()
            continue
        header = _SECTION.fullmatch(line)
        if header is not None and not line.startswith((" ", "\t")):
            section, current, indent = header[1].lower(), "", -1
            continue
        if not section:
            summary.append(line)
            continue
        if not line.strip() or line.lstrip().startswith(":"):
            current = ""
            continue
        depth = len(line) - len(line.lstrip())
        entry = _GOOGLE.fullmatch(line)
        if section in ("args", "arguments", "parameters") and entry is not None and (indent < 0 or depth <= indent):
            indent, current = depth, entry[1]
            parameters[current] = entry[2].strip()
        elif current:
            parameters[current] = f"{parameters[current]} {line.strip()}".strip()
    return Docs("\n".join(summary).strip(), parameters)
