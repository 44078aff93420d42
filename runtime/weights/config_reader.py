"""Reads the fields of a model's config, and refuses values that cannot be right."""

import math
from typing import Any

from ...protocol.errors import Unsupported
from .damage import shown

MAX_SIZE = (1 << 31) - 1  # what the formats' own 32-bit fields can hold
MAX_LAYERS = 10_000
_LAYER_KEYS = ("num_hidden_layers", "block_count")


class ConfigReader:
    """Reads the fields of a config; an error names the field and the file."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.data, self.source = data, source

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool):
            raise Unsupported(f"{self.source}: {key} is {shown(repr(value))}; it must be one integer")
        most = MAX_LAYERS if key in _LAYER_KEYS else MAX_SIZE
        if not 0 <= value <= most:
            raise Unsupported(f"{self.source}: {key} is {value:,}; it must be between 0 and {most:,}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise Unsupported(f"{self.source}: {key} is {shown(repr(value))}; it must be a number of 0 or more")
        if default and not value:
            raise Unsupported(f"{self.source}: {key} is 0; it must be above 0")
        return float(value)

    def refuse(self, key: str, why: str) -> None:
        if self.data.get(key):
            raise Unsupported(f"{self.source}: {key} is set: {why}")
