"""Tools in OpenAI requests: their definitions, ``tool_choice``, and the calls of earlier turns."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .strict import Strict


class FunctionEntry(Strict):
    """``strict`` changes nothing: every argument is held to the schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolEntry(Strict):
    type: Literal["function"]
    function: FunctionEntry

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "ToolEntry":
        if (self.function.parameters or {}).get("type", "object") != "object":
            raise PydanticCustomError("parameters", "a function's parameters are a JSON schema of type 'object'")
        return self

    def schema_of(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description:
            function["description"] = self.function.description
        function["parameters"] = {"type": "object", **(self.function.parameters or {"properties": {}})}
        return {"type": "function", "function": function}


class ChosenFunction(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: ChosenFunction


class WrittenFunction(Strict):
    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_json(self) -> "WrittenFunction":
        try:
            is_object = isinstance(json.loads(self.arguments), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise PydanticCustomError("arguments", "arguments must be a JSON object, as text")
        return self


class WrittenCall(Strict):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: WrittenFunction
    index: int | None = None  # some clients send the index of the stream back

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"type": "function", "id": self.id, "function": function}
