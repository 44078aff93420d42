"""The engine as a process of its own: the loop, the child's main function, and the parent's handle.

Names load on first use: ``phloem serve`` starts the engine's process before it loads anything else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .launcher import EngineProcess
    from .loop import run_engine, serve_engine
    from .python_process import LIBRARIES, PythonProcess

_HOMES = {
    "EngineProcess": ".launcher",
    "LIBRARIES": ".python_process",
    "PythonProcess": ".python_process",
    "run_engine": ".loop",
    "serve_engine": ".loop",
}

__all__ = ["EngineProcess", "PythonProcess", "LIBRARIES", "run_engine", "serve_engine"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
