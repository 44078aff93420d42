"""How strangers' JSON is held to its fields: unknown ones are refused, and known ones that are not served, by name.

Never knows an endpoint.
"""

import json
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def unserved(*neutral: Any) -> AfterValidator:
    """Of a field that is understood and not served: null and the ``neutral`` values, which ask for nothing, pass."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is None or value in neutral:
            return value
        allowed = f"; only {' or '.join(json.dumps(n) for n in neutral)} is accepted" if neutral else ""
        message = f"{info.field_name!r} is not supported by this server{allowed}"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})

    return AfterValidator(check)


def fault(message: str, param: str) -> PydanticCustomError:
    """An error between fields; ``param`` names the one to change."""
    return PydanticCustomError("conflict", "{message}", {"message": message, "param": param})
