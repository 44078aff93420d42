"""Phloem: a language for programs that call a language model many times, and the runtime made for them.

The names below load on first use (PEP 562), so ``import phloem`` costs nothing and imports no torch.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

_HOMES: dict[str, str] = {}


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'phloem' has no attribute {name!r}; it has: {', '.join(sorted(_HOMES))}")
    value = getattr(_import_module(home, "phloem"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
