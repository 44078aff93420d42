"""Parameters of a query, read as strictly as the document of the API describes them."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError


def _whole(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]+", value):
        raise PydanticCustomError("whole", "must be a whole number")
    return value


def _switch(value: Any) -> Any:
    if isinstance(value, str) and value not in ("true", "false"):
        raise PydanticCustomError("switch", "must be true or false")
    return value


# pydantic alone also takes "0.0" and " 1" for whole numbers, and "yes" and "1" for true.
Whole = Annotated[int, BeforeValidator(_whole)]
Switch = Annotated[bool, BeforeValidator(_switch)]
