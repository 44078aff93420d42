"""Functions become tools: their description for the model, and their arguments as Python values."""

import dataclasses
import datetime
import enum
from typing import Annotated, Literal

import phloem
import pytest
from phloem.lang.tools.calls import ToolCall
from phloem.lang.tools.tool import as_tool, as_tools
from phloem.protocol.errors import InvalidRequest
from pydantic import BaseModel, Field


class Unit(enum.Enum):
    METRIC = "metric"
    IMPERIAL = "imperial"


@dataclasses.dataclass
class Place:
    city: str
    country: str = "FR"


@phloem.tool
def weather(place: Place, day: datetime.date, unit: Unit = Unit.METRIC, hours: Annotated[int, "how far"] = 3) -> str:
    """The weather of a place.

    Args:
        place: where, as exactly
            as known
        day (date): when

    Returns:
        a sentence
    """
    return f"{place.city} {day:%d.%m.} {unit.name} {hours}"


def test_the_schema_holds_types_defaults_and_what_the_docstring_says():
    function = weather.schema()["function"]
    assert (function["name"], function["description"]) == ("weather", "The weather of a place.")
    parameters = function["parameters"]
    assert list(parameters)[:3] == ["type", "properties", "required"] and parameters["required"] == ["place", "day"]
    assert parameters["properties"]["place"]["description"] == "where, as exactly as known"
    assert parameters["properties"]["day"] == {"type": "string", "format": "date", "description": "when"}
    assert parameters["properties"]["hours"] == {"type": "integer", "description": "how far", "default": 3}
    assert parameters["additionalProperties"] is False


def test_a_call_has_typed_arguments_and_runs_with_defaults():
    call = ToolCall(weather, '{"place": {"city": "Lyon"}, "day": "2024-05-06"}')
    assert call.arguments == {"place": Place("Lyon"), "day": datetime.date(2024, 5, 6)}
    assert call.run() == "Lyon 06.05. METRIC 3"
    assert ToolCall(weather, '{"place": {"city": "Rom"}, "day": "2024-05-06", "unit": "imperial"}').run() == (
        "Rom 06.05. IMPERIAL 3"
    )


def test_a_decorated_function_is_still_one():
    assert weather(Place("Bonn"), datetime.date(2024, 1, 2)) == "Bonn 02.01. METRIC 3"
    assert weather.__doc__.startswith("The weather")


def test_parameters_may_be_called_as_methods_of_models_are():
    @phloem.tool(name="copy-it", description="Copies.")
    def copying(json: str, copy: bool, schema: list[int]) -> str:
        """:param json: a text"""
        return f"{json}{copy}{schema}"

    assert copying.name == "copy-it" and copying.description == "Copies."
    assert copying.parameters["properties"]["json"]["description"] == "a text"
    assert ToolCall(copying, '{"json": "a", "copy": true, "schema": [1]}').run() == "aTrue[1]"


def test_a_model_and_a_plain_schema_are_tools_too():
    class Order(BaseModel):
        """An order."""

        pieces: int = Field(ge=1)

    order = as_tool(Order)
    assert (order.name, order.description) == ("Order", "An order.")
    assert ToolCall(order, '{"pieces": 2}').run() == Order(pieces=2)
    plain = as_tool({"type": "function", "function": {"name": "ping"}})
    assert plain.parameters == {"type": "object", "properties": {}}
    with pytest.raises(InvalidRequest, match="'ping' is a schema without a function"):
        ToolCall(plain, "{}").run()


def test_a_function_that_cannot_be_a_tool_is_refused_by_name():
    with pytest.raises(InvalidRequest, match=r"tool 'f': parameter 'x' has no type; write for example x: str"):

        @phloem.tool
        def f(x): ...

    with pytest.raises(InvalidRequest, match=r"tool 'g': parameter 'more' is variadic keyword"):

        @phloem.tool
        def g(**more: int): ...

    with pytest.raises(InvalidRequest, match=r"tool 'h': .*use types that JSON can hold"):

        @phloem.tool
        def h(x: Unpicklable): ...

    with pytest.raises(InvalidRequest, match="two are called 'weather'"):
        as_tools([weather, weather])
    with pytest.raises(InvalidRequest, match="is not a tool"):
        as_tool(7)
    with pytest.raises(InvalidRequest, match="parameters must be a JSON schema of type object"):
        as_tool({"name": "p", "parameters": {"type": "array"}})
    with pytest.raises(InvalidRequest, match="tool name 'a b'"):
        phloem.tool(name="a b")(lambda: None)


class Unpicklable:
    pass


def test_the_arguments_of_gen_with_tools_are_checked_at_once():
    with pytest.raises(InvalidRequest, match=r"gen\('x', tools=\[\]\)"):
        phloem.gen("x", tools=[])
    with pytest.raises(InvalidRequest, match=r"tool_choice='nope': must be auto, required, none, .* \(weather\)"):
        phloem.gen("x", tools=[weather], tool_choice="nope")
    with pytest.raises(InvalidRequest, match="go with tools"):
        phloem.gen("x", tool_choice="auto")
    with pytest.raises(InvalidRequest, match="restricts the text itself"):
        phloem.gen("x", tools=[weather], regex="a")


def test_literals_keep_their_values():
    @phloem.tool
    def pick(color: Literal["red", "green"]) -> str:
        """Pick."""
        return color

    assert pick.parameters["properties"]["color"]["enum"] == ["red", "green"]
