"""A JSON Schema whose objects allow only the properties that they list."""

from typing import Any


def closed_schema(schema: Any) -> Any:
    """``schema`` closed: no properties beyond those it lists, and no titles, descriptions or examples."""
    if isinstance(schema, list):
        return [closed_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "patternProperties"):
            closed[key] = {name: closed_schema(inner) for name, inner in value.items()}
        elif key in ("title", "description", "default", "examples", "discriminator"):
            continue
        elif key in ("enum", "const"):
            closed[key] = value
        else:
            closed[key] = closed_schema(value)
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
