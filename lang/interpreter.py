"""The names that programs written for SGLang import from ``lang.interpreter``. Holds nothing of its own."""

from .backend.executor import StreamExecutor
from .batch import run_batch as run_program_batch
from .state import ProgramState, ProgramStateGroup

__all__ = ["ProgramState", "ProgramStateGroup", "StreamExecutor", "run_program_batch"]
