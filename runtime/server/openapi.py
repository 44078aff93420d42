"""The OpenAPI document of the server, and what a route says about itself for it.

A route reads its body itself (``Service.respond``), so it names the body's model to ``body_of`` and its answers to
``answers`` or ``texts``. FastAPI adds the paths, the parameters and the docstrings.
"""

import inspect
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]

EVENTS = "text/event-stream"
_REF = "#/components/schemas/"
_REQUEST_ID = {
    "description": "The request's own, if it has one of at most 128 visible ASCII characters; else a new one.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}


class _Body(dict[str, Any]):
    """Filled when the document is made: the schemas take pydantic 40 ms, which a server's start would wait for."""

    def __init__(self, model: type[BaseModel] | type[msgspec.Struct]) -> None:
        super().__init__(requestBody={})
        self._model = model

    def items(self) -> Any:
        if not self["requestBody"]:
            schema = {"schema": _schema_of(self._model)}
            self["requestBody"] = {"required": True, "content": {"application/json": schema}}
        return super().items()


def body_of(model: type[BaseModel] | type[msgspec.Struct]) -> dict[str, Any]:
    """A route's ``openapi_extra``: its body is JSON, one ``model``."""
    return _Body(model)


def _schema_of(model: type[BaseModel] | type[msgspec.Struct]) -> dict[str, Any]:
    if issubclass(model, BaseModel):
        return model.model_json_schema(ref_template=_REF + "{model}")
    return _schema_of_struct(model)


def answers(model: Any, *, status: int = 200, said: str = "The answer.", stream: str = "") -> Responses:
    """A route's ``responses``: JSON, one ``model``. ``stream``: what comes where the request asks for events."""
    if not stream:
        return {status: {"model": model, "description": said}}
    said = f"{said} With `stream`: {stream}"  # OpenAPI 3.1 has no schema for events
    return {status: {"model": model, "description": said, "content": {EVENTS: {}}}}


def texts(said: str, *media: str) -> Responses:
    """A route's ``responses``: a text of one of the types ``media``. Its ``response_class`` is ``Response``."""
    return {200: {"description": said, "content": {name: {"schema": {"type": "string"}} for name in media}}}


def errors_as(model: type[BaseModel]) -> Responses:
    """A router's ``responses``: how all its routes answer errors."""
    return {
        "4XX": {"model": model, "description": "The request cannot be served; the message says why."},
        "5XX": {"model": model, "description": "The server or its engine has failed; the request may be right."},
    }


def document(app: FastAPI, *, version: str, needs_key: bool) -> dict[str, Any]:
    """The document of all routes of ``app``."""
    made = get_openapi(title="Phloem", version=version, routes=app.routes, separate_input_output_schemas=False)
    components = made["components"]
    schemas = components["schemas"]
    for operation in operations(made).values():
        for media in operation.get("requestBody", {}).get("content", {}).values():
            for name, part in media["schema"].pop("$defs", {}).items():
                assert schemas.setdefault(name, part) == part, f"two schemas are called {name}"
        for answer in operation["responses"].values():
            answer.setdefault("headers", {})["x-request-id"] = {"$ref": "#/components/headers/x-request-id"}
    components["headers"] = {"x-request-id": _REQUEST_ID}
    if needs_key:
        bearer, key = {"type": "http", "scheme": "bearer"}, {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"bearer": bearer, "key": key}
        made["security"] = [{"bearer": []}, {"key": []}]
    return made


def _schema_of_struct(model: type[msgspec.Struct]) -> dict[str, Any]:
    """As pydantic writes it: the other structs are under ``$defs``. The tag of the body itself may be left out."""
    _, parts = msgspec.json.schema_components((model,), ref_template=_REF + "{name}")
    for part in parts.values():
        part["description"] = inspect.cleandoc(part.get("description", ""))
    schema = parts.pop(model.__name__)
    schema["required"].remove(model.__struct_config__.tag_field)
    return {**schema, "$defs": parts}


def operations(made: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Those of a document, by method and path."""
    return {(method, path): found for path, item in made["paths"].items() for method, found in item.items()}
