"""JSON files of a model's folder."""

from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import UnknownModel


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises UnknownModel where there is none."""
    data = read_value(path)
    if not isinstance(data, dict):
        raise UnknownModel(f"{path} holds no JSON object")
    return data


def read_value(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UnknownModel(f"{path} cannot be read: {error}") from error
