"""Strict request models: unknown fields, and known fields that are not served, are refused by name."""

import json
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def unserved(*neutral: Any) -> AfterValidator:
    """For a field that is not served: only null and the ``neutral`` values pass."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is None or value in neutral:
            return value
        allowed = f"; only {' or '.join(json.dumps(n) for n in neutral)} is accepted" if neutral else ""
        message = f"{info.field_name!r} is not supported by this server{allowed}"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})

    return AfterValidator(check)


def fault(message: str, param: str) -> PydanticCustomError:
    """An error between fields; ``param`` is the one to change."""
    return PydanticCustomError("conflict", "{message}", {"message": message, "param": param})
