"""Finding, fetching and reading weights. Names load on first use: finding or fetching a model imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gguf_header import GGUFHeader, read_header
    from .model_config import ModelConfig
    from .weight_file import WeightFile, open_weights

_HOMES = {
    "GGUFHeader": ".gguf_header",
    "read_header": ".gguf_header",
    "ModelConfig": ".model_config",
    "WeightFile": ".weight_file",
    "open_weights": ".weight_file",
    "resolve_model": ".resolve",
}

__all__ = ["GGUFHeader", "ModelConfig", "WeightFile", "open_weights", "read_header", "resolve_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
