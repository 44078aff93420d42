"""A tool: its name, description, JSON schema of arguments, and Python function."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

from ...protocol.errors import InvalidRequest
from .signature import signature_of

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Tool:
    """Made by ``@tool`` or ``as_tool``. Calling it calls the function.

    ``read(text)`` validates JSON arguments and returns them as keyword arguments of the function's types.
    ``function`` is None if the tool was given as a schema only.
    """

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        function: Callable[..., Any] | None,
        read: Callable[[str], dict[str, Any]],
    ) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"tool name {name!r}: must be 1 to 64 letters, digits, '_', '-' or '.'")
        self.name = name
        self.description = description
        self.parameters = dict(parameters)
        self.function = function
        self.read = read
        if function is not None:
            functools.update_wrapper(self, function)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            raise InvalidRequest(f"tool {self.name!r} is a schema without a function; run the call yourself")
        return self.function(*args, **kwargs)

    def schema(self) -> dict[str, Any]:
        """The entry of a request's ``tools`` in the OpenAI API."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        if not self.description:
            del function["description"]
        return {"type": "function", "function": function}

    def __repr__(self) -> str:
        return f"<tool {self.name}({', '.join(self.parameters.get('properties', ()))})>"


@overload
def tool(function: Callable[..., Any]) -> Tool: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, *, name: str | None = None, description: str | None = None) -> Any:
    """Make a tool of a function. The model reads its name, its docstring and the types of its parameters.

    Every parameter needs a type. It is described in the docstring (``Args:``) or with ``Annotated[int, "..."]``.
    """

    def make(function: Callable[..., Any]) -> Tool:
        called = name or function.__name__
        found = signature_of(function, called)
        about = found.docs.summary if description is None else description
        return Tool(called, about, found.schema, function, found.read)

    return make if function is None else make(function)


def as_tool(value: Any) -> Tool:
    """A tool, a function, a pydantic model (running it makes an instance), or a schema as the OpenAI API has it."""
    if isinstance(value, Tool):
        return value
    if isinstance(value, Mapping):
        return _from_schema(value)
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        return _from_model(value)
    if callable(value):
        return tool(value)
    raise InvalidRequest(
        f"tools: {value!r} is not a tool; give a function with typed parameters, or @phloem.tool on one"
    )


def as_tools(values: Iterable[Any]) -> tuple[Tool, ...]:
    """Every item as a tool. Raises InvalidRequest if two have the same name."""
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequest(f"tools={values!r}: must be a list of tools")
    tools = tuple([as_tool(value) for value in values])
    names = [one.name for one in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools: two are called {twice!r}; give one another name with tool(name=...)")
    return tools


def _from_model(model: Any) -> Tool:
    schema = model.model_json_schema()
    about = schema.pop("description", "") or ""
    name = schema.pop("title", model.__name__)

    def read(text: str) -> dict[str, Any]:
        checked = model.model_validate_json(text)
        return {field: getattr(checked, field) for field in model.model_fields}

    return Tool(re.sub(r"[^A-Za-z0-9_.-]", "_", name), about, schema, model, read)


def _from_schema(value: Mapping[str, Any]) -> Tool:
    entry = value.get("function", value)
    name = entry.get("name") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"tools: {dict(value)!r} has no name; the form is {{'type': 'function', 'function': ...}}")
    parameters = entry.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f"tool {name!r}: parameters must be a JSON schema of type object, not {parameters!r}")
    return Tool(name, entry.get("description") or "", {"type": "object", **parameters}, None, _read_object)


def _read_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"arguments are a JSON object, not {text[:80]}")
    return value
