"""The names that programs written for SGLang import from ``lang.interpreter``."""

from .backend.executor import StreamExecutor
from .state import ProgramState, ProgramStateGroup

__all__ = ["ProgramState", "ProgramStateGroup", "StreamExecutor"]
