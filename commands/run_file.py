"""``phloem run``: a program file, with an engine or a server as the default backend."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from ..engines import Connection
from ..lang.backend.base_backend import BaseBackend
from ..lang.backend.phloem_backend import PhloemBackend
from ..lang.global_config import global_config
from ..protocol.errors import InvalidRequest, Unsupported
from .answers import Source

FAILED = 1


def run_file(
    path: Path,
    arguments: Sequence[str],
    *,
    open_source: Callable[[], AbstractContextManager[Source]],
    is_chosen: bool,
    note: Callable[[str], object],
) -> int:
    """Run the file as ``python FILE ARGUMENTS`` would; 1 after an exception, which is shown as Python shows it.

    ``is_chosen``: the user has named the backend, so it is opened first, and a ``phloem.Runtime`` or ``phloem.Engine``
    that the file makes is that one. Otherwise it is opened when a program asks for the default backend.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None
    package = importlib.import_module(__name__.partition(".")[0])
    with ExitStack() as stack:
        backend = LazyBackend(stack, open_source)
        if is_chosen:
            runtime = _stand_in(backend.endpoint, note)
            for name in ("Runtime", "Engine"):
                _replace(stack, package, name, runtime)
        _replace(stack, global_config, "default_backend", backend)
        _replace(stack, sys, "argv", [str(path), *arguments])
        _replace(stack, sys, "path", [str(path.resolve().parent), *sys.path[1:]])
        module = types.ModuleType("__main__")
        module.__file__ = str(path)
        stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        sys.modules["__main__"] = module
        try:
            exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
            sys.excepthook(type(error), error.with_traceback(below), below)
            return FAILED
    return 0


class LazyBackend:
    """A backend that is opened when a program first asks for it, and closed with ``stack``."""

    def __init__(self, stack: ExitStack, open_source: Callable[[], AbstractContextManager[Source]]) -> None:
        self._stack = stack
        self._open_source = open_source

    @cached_property
    def endpoint(self) -> BaseBackend:
        return self._stack.enter_context(self._open_source()).backend


def _stand_in(backend: BaseBackend, note: Callable[[str], object]) -> type[Connection]:
    """A class to use in place of ``Runtime``: all its instances are connections to ``backend``."""
    notes = {"the program's own phloem.Runtime or Engine is not started: the one of the command line takes its place"}

    class GivenRuntime(Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            if not isinstance(backend, PhloemBackend):
                name = type(backend).__name__
                raise Unsupported(f"phloem.Runtime: the server of --url ({name}) has no engine of Phloem; give --model")
            self.client = backend.client
            while notes:
                note(notes.pop())

        def shutdown(self) -> None:
            """Nothing: the command closes it."""

    return GivenRuntime


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``stack`` closes."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)
