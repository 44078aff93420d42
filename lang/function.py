"""``@function``: a Python body that writes a program, and the ways to run it.

The body runs in the caller's thread and waits only where it reads a value. Knows no backend by name.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import InvalidRequest
from ..protocol.messages import ProgramSettings
from .backend.base_backend import BaseBackend, as_backend
from .expressions import SAMPLING_NAMES, SglArgument, sampling_overrides
from .global_config import global_config
from .program import Program
from .state import ProgramState

if TYPE_CHECKING:
    from .compiler import CompiledFunction
    from .graph import Graph
    from .tracer import TracerProgramState

_SETTINGS = frozenset(ProgramSettings.__struct_fields__) - {"name"}  # a program is called as its function is
_RUN_OPTIONS = frozenset(("backend", "stream", "use_thread"))
_BATCH_OPTIONS = frozenset(("backend", "num_threads", "progress_bar", "generator_style"))


class RunOptions:
    """The keyword arguments of one call, sorted: to the program, to the sampling, to the run.

    The function's own signature decides first, so that an argument may be called ``n`` or ``temperature``.
    """

    __slots__ = ("arguments", "options", "sampling", "settings")

    def __init__(self, function: SglFunction, given: dict[str, Any], options: frozenset[str]) -> None:
        self.arguments: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for name, value in given.items():
            if name in function.arg_names:
                self.arguments[name] = value
            elif name in options:
                self.options[name] = value
            elif name in SAMPLING_NAMES:
                sampling[name] = value
            elif name in _SETTINGS:
                settings[name] = value
            elif function.takes_any or options is not _RUN_OPTIONS:
                self.arguments[name] = value
            else:
                raise TypeError(_no_such_argument(function, name, options))
        self.sampling = sampling_overrides(sampling)
        self.settings = ProgramSettings(**settings, name=function.__name__)


def _no_such_argument(function: SglFunction, name: str, options: frozenset[str]) -> str:
    own = ", ".join(function.arg_names) or "no arguments"
    near = difflib.get_close_matches(name, [*function.arg_names, *options, *SAMPLING_NAMES, *_SETTINGS], 1)
    hint = (
        f"did you mean {near[0]!r}?" if near else "run() also takes sampling parameters, backend=, stream=, deadline_s="
    )
    return f"{function.__name__}() got an unexpected keyword argument {name!r}; it takes {own}; {hint}"


class SglFunction:
    """A program. ``run`` it, ``run_batch`` it, ``bind`` some arguments."""

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: dict[str, Any] | None = None,
    ) -> None:
        if num_api_spec_tokens is not None and (not isinstance(num_api_spec_tokens, int) or num_api_spec_tokens < 1):
            raise InvalidRequest(f"num_api_spec_tokens={num_api_spec_tokens!r}: must be 1 or more, or None")
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = bind_arguments or {}
        self.pin_prefix_rid: Any = None
        spec = inspect.getfullargspec(func)
        if not spec.args or spec.args[0] != "s":
            name = getattr(func, "__name__", repr(func))
            raise AssertionError(f"the first argument of {name}() must be named s: it is the program's state")
        self.arg_names: list[str] = [*spec.args[1:], *spec.kwonlyargs]
        self.is_async = inspect.iscoroutinefunction(func)
        self.takes_any = spec.varkw is not None
        self.arg_defaults: tuple[Any, ...] = spec.defaults or ()
        positional = spec.args[len(spec.args) - len(self.arg_defaults) :]
        self.default_of: dict[str, Any] = {
            **dict(zip(positional, self.arg_defaults, strict=True)),
            **(spec.kwonlydefaults or {}),
        }
        self.__name__ = getattr(func, "__name__", "program")
        self.__doc__ = func.__doc__

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body; returns when it ends, values may still be on their way.

        Besides the program's own arguments: sampling defaults for every gen (``temperature=``, ``max_new_tokens=``,
        ``stop=``, ...), ``backend=``, ``stream=True`` (the body then runs on a thread, and ``text_iter`` of the result
        yields as it is generated), and the run's settings (``deadline_s=``, ``priority=``, ``tenant=``).

        Of an ``async def`` program this is ``run_async``: await it.
        """
        if self.is_async:
            return self.run_async(*args, **kwargs)
        options = RunOptions(self, kwargs, _RUN_OPTIONS)
        backend = resolve_backend(options.options.get("backend"))
        stream = bool(options.options.get("stream", False))
        inline = not options.options.get("use_thread", True)
        return self.run_in(backend, args, options, stream=stream, inline=inline)

    def run_in(
        self,
        backend: BaseBackend,
        args: tuple[Any, ...],
        options: RunOptions,
        *,
        stream: bool = False,
        inline: bool = False,
    ) -> ProgramState:
        if stream:
            self._refuse_to_stream()
        arguments = {**options.arguments, **self.bind_arguments}
        program = Program(
            backend,
            sampling=options.sampling,
            stream=stream,
            settings=options.settings,
            inline=inline,
            arguments=arguments,
            num_api_spec_tokens=self.num_api_spec_tokens,
        )
        state = ProgramState(program.root)
        if stream and not inline:
            program.body_thread = None
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(self._run_body, state, args, arguments), name=self.__name__, daemon=True
            )
            thread.start()
        else:
            self._run_body(state, args, arguments)
            if program.error is not None:
                raise program.error
        return state

    def _refuse_to_stream(self) -> None:
        if self.num_api_spec_tokens is not None:
            raise InvalidRequest(
                f"{self.__name__}() writes ahead (num_api_spec_tokens={self.num_api_spec_tokens}), so its text is not "
                "known as it comes; leave out stream=True or num_api_spec_tokens"
            )

    def _write(self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """What the body says, and nothing else."""
        state.ret_value = self.func(state, *args, **arguments)

    def _run_body(self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """The body from beginning to end; what it raises is left in ``program.error``."""
        program = state._program
        program.body_thread = threading.get_ident()
        try:
            self._write(state, args, arguments)
        except BaseException as error:
            program.abort(error)
            if not isinstance(error, Exception):
                raise
        else:
            program.end()

    async def run_async(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run in the running event loop; read values with ``await s.get(name)``.

        With ``stream=True`` it returns at once and the body goes on as a task: ``async for text in
        s.text_async_iter()``. Cancelling the awaiting task cancels the program at the runtime.
        """
        options = RunOptions(self, kwargs, _RUN_OPTIONS)
        return await self.run_in_loop(resolve_backend(options.options.get("backend")), args, options)

    async def run_in_loop(self, backend: BaseBackend, args: tuple[Any, ...], options: RunOptions) -> ProgramState:
        loop = asyncio.get_running_loop()
        arguments = {**options.arguments, **self.bind_arguments}
        if options.options.get("stream"):
            self._refuse_to_stream()
        program = Program(
            backend,
            sampling=options.sampling,
            stream=bool(options.options.get("stream", False)),
            settings=options.settings,
            arguments=arguments,
            loop=loop,
            num_api_spec_tokens=self.num_api_spec_tokens,
        )
        state = ProgramState(program.root)
        if program.stream:
            program.body_task = loop.create_task(self._run_body_async(state, args, arguments))
            return state
        await self._run_body_async(state, args, arguments)
        if program.error is not None:
            raise program.error
        return state

    async def _run_body_async(self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        program = state._program
        try:
            if self.is_async:
                state.ret_value = await self.func(state, *args, **arguments)
            else:
                self._write(state, args, arguments)
        except BaseException as error:
            program.abort(error)
            if not isinstance(error, Exception):
                raise
        else:
            await program.end_async()

    async def run_batch_async(self, batch_kwargs: Sequence[Any], **kwargs: Any) -> list[ProgramState]:
        """``run_batch`` in the running event loop: everything in flight at once, or ``num_threads`` items at a time."""
        from .batch import run_batch_in_loop

        return await run_batch_in_loop(self, batch_kwargs, self._batch_options(kwargs))

    def iter_batch_async(self, batch_kwargs: Sequence[Any], **kwargs: Any) -> AsyncIterator[ProgramState]:
        """``async for state in program.iter_batch_async(items)``: each state as soon as it and those before it ended.

        Leaving the loop early cancels what still runs.
        """
        from .batch import iter_batch_in_loop

        return iter_batch_in_loop(self, batch_kwargs, self._batch_options(kwargs))

    def run_batch(self, batch_kwargs: Sequence[Any], **kwargs: Any) -> list[ProgramState] | Iterator[ProgramState]:
        """Run once per item (a dict of arguments, or a tuple in their order); the states in that order.

        All items are in flight at once; ``num_threads=k`` holds it to k at a time. An item whose body raises gives a
        state whose ``error()`` is that exception and whose values raise it. ``progress_bar=True`` shows one;
        ``generator_style=True`` yields each state as soon as it and those before it have finished (of an async program:
        ``iter_batch_async``). Leaving it early, or Ctrl-C, cancels what still runs.
        """
        from .batch import run_batch

        return run_batch(self, batch_kwargs, self._batch_options(kwargs))

    def _batch_options(self, given: dict[str, Any]) -> RunOptions:
        options = RunOptions(self, given, _BATCH_OPTIONS)
        if "stream" in options.arguments:
            raise InvalidRequest(
                "run_batch(stream=...): a batch gives whole states; generator_style=True yields each as it ends, and "
                "run(..., stream=True) of one program yields its text as it comes"
            )
        if options.arguments:
            raise InvalidRequest(
                f"run_batch() does not know {', '.join(map(repr, options.arguments))}; arguments of the program stand "
                "in the items, or are bound with .bind(...)"
            )
        return options

    def bind(self, **kwargs: Any) -> SglFunction:
        """The same program with these arguments fixed; they win over what a call says."""
        unknown = [name for name in kwargs if name not in self.arg_names]
        if unknown:
            raise AssertionError(
                f"bind({unknown[0]}=...): {self.__name__}() has no such argument; it has {', '.join(self.arg_names)}"
            )
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run; inside another program's trace, become part of it."""
        from .tracer import current_trace, trace_call

        if current_trace() is not None:
            return trace_call(self, args, kwargs)
        return self.run(*args, **kwargs)

    # -- without running ----------------------------------------------------------------------------------------------

    def trace(self, *, backend: Any = None, **kwargs: Any) -> TracerProgramState:
        """What the body says; arguments that are not given are holes. No model is asked."""
        from .tracer import trace_program

        return trace_program(self, kwargs, resolve_backend(backend))

    def compile(self, *, backend: Any = None, **constants: Any) -> CompiledFunction:
        """Trace the body once; its runs are one message each and call the body no more.

        Raises ``TraceError`` where the body branches on a value or an argument. ``constants`` fixes arguments.
        """
        from .compiler import CompiledFunction

        compiled = CompiledFunction(self, constants)
        if backend is not None or global_config.default_backend is not None:
            compiled.trace_for(resolve_backend(backend))
        return compiled

    def graph(self, *, backend: Any = None, **arguments: Any) -> Graph:
        """The program's operations: ``print(prog.graph())``, or ``prog.graph().svg()``."""
        from .graph import Graph

        return Graph.of(self.__name__, self.trace(backend=backend, **arguments))

    def cache(self, backend: Any = None) -> None:
        """Compute what every run of this program begins with, so that the first one finds it."""
        from .tracer import leading_nodes

        chosen = resolve_backend(backend)
        nodes = leading_nodes(self, chosen)
        if nodes:
            chosen.cache_nodes(nodes)

    def pin(self, backend: Any = None, *, ttl_s: float = 3600.0) -> int | None:
        """Like ``cache``, and kept from eviction for ``ttl_s``; the number of tokens, where the backend tells it."""
        from .tracer import leading_nodes

        chosen = resolve_backend(backend)
        nodes = leading_nodes(self, chosen)
        return chosen.pin_nodes(nodes, ttl_s) if nodes else 0

    def unpin(self, backend: Any = None) -> None:
        """End a ``pin``."""
        self.pin(backend, ttl_s=0.0)

    def fill_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of the body: bound, given, or else a hole."""
        unknown = [name for name in given if name not in self.arg_names]
        if unknown and not self.takes_any:
            raise InvalidRequest(
                f"{self.__name__}() has no argument {unknown[0]!r}; it has {', '.join(self.arg_names)}"
            )
        arguments: dict[str, Any] = {name: SglArgument(name) for name in self.arg_names}
        return {**arguments, **given, **self.bind_arguments}

    def arguments_of(self, item: Any) -> dict[str, Any]:
        """One item of a batch as keyword arguments."""
        if isinstance(item, dict):
            return item
        if not isinstance(item, tuple | list):
            raise InvalidRequest(f"a batch item is a dict or a tuple of arguments, not {type(item).__name__}: {item!r}")
        free = [name for name in self.arg_names if name not in self.bind_arguments]
        least = len([name for name in free if name not in self.default_of])
        if not least <= len(item) <= len(free):
            wanted = str(len(free)) if least == len(free) else f"{least} to {len(free)}"
            raise InvalidRequest(
                f"Given arguments mismatch the SGL function signature: {len(item)} given, but {self.__name__}() takes "
                f"{wanted} ({', '.join(free)})"
            )
        return dict(zip(free, item, strict=False))

    def __repr__(self) -> str:
        return f"<program {self.__name__}({', '.join(self.arg_names)})>"


def resolve_backend(backend: Any) -> BaseBackend:
    """``backend``, or the default one."""
    chosen = backend if backend is not None else global_config.default_backend
    if chosen is None:
        raise InvalidRequest(
            "no backend: phloem.set_default_backend(phloem.Runtime(model=...)) once, or run(..., backend=...)"
        )
    return as_backend(chosen)
