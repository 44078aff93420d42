"""``@function``: a Python body that writes a program, and the ways to run, batch, trace and compile it.

The body runs in the caller's thread and waits only where it reads a value.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from ..protocol.errors import InvalidRequest
from ..protocol.messages import ProgramSettings
from .backend.base_backend import BaseBackend
from .backend.resolve import resolve_backend
from .batch import Batch, iter_in_loop, iter_states, run_in_loop, run_states
from .expressions import SglArgument
from .global_config import global_config
from .graph import Graph
from .nodes import Leading
from .program import ProgramRun
from .replay import replay
from .sampling_params import SAMPLING_NAMES, sampling_overrides
from .session import Turn
from .state import ProgramState
from .tracer import TracerProgramState, current_trace, leading_nodes, trace_call, trace_program

MIN_PREFIX_CHARS = 64  # run_batch() has a common beginning that is longer than this computed first
_SETTINGS = frozenset(ProgramSettings.__struct_fields__) - {"name"}  # a program has the name of its function
_RUN_OPTIONS = frozenset(("backend", "stream", "use_thread"))
_BATCH_OPTIONS = frozenset(("backend", "num_threads", "progress_bar", "generator_style"))


class RunOptions:
    """The keyword arguments of one call, split into arguments of the body, sampling, settings and options of the run.

    A name in the function's own signature is an argument of the body, so one may be called ``n`` or ``temperature``.
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
        if not global_config.skip_special_tokens_in_output:
            sampling.setdefault("skip_special_tokens", False)
        self.sampling = sampling_overrides(sampling)
        self.settings = ProgramSettings(**settings, name=function.__name__)


def _no_such_argument(function: SglFunction, name: str, options: frozenset[str]) -> str:
    own = ", ".join(function.arg_names) or "no arguments"
    near = difflib.get_close_matches(name, [*function.arg_names, *options, *SAMPLING_NAMES, *_SETTINGS], 1)
    hint = (
        f"did you mean {near[0]!r}?" if near else "run() also takes sampling parameters, backend=, stream=, deadline_s="
    )
    return f"{function.__name__}() got an unexpected keyword argument {name!r}; it takes {own}; {hint}"


async def _choose_async(
    backend: BaseBackend, prompt: tuple[Any, ...], settings: ProgramSettings, *, stream: bool
) -> Turn | None:
    """``backend.choose``, which must not block the event loop."""
    if backend.asks_before_run:
        return await asyncio.to_thread(backend.choose, prompt, settings, stream=stream)
    return backend.choose(prompt, settings, stream=stream)


class SglFunction:
    """A program, made by ``@function``."""

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
        spec = inspect.getfullargspec(func)
        if not spec.args or spec.args[0] != "s":
            name = getattr(func, "__name__", repr(func))
            raise AssertionError(f"the first argument of {name}() must be named s: it is the program's state")
        self.arg_names: list[str] = [*spec.args[1:], *spec.kwonlyargs]
        self.is_async = inspect.iscoroutinefunction(func)
        self.takes_any = spec.varkw is not None
        defaults = spec.defaults or ()
        positional = spec.args[len(spec.args) - len(defaults) :]
        self.default_of: dict[str, Any] = {
            **dict(zip(positional, defaults, strict=True)),
            **(spec.kwonlydefaults or {}),
        }
        self.__name__ = getattr(func, "__name__", "program")
        self.__doc__ = func.__doc__

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body. Returns when the body ends; values may still be computed then.

        Besides the program's own arguments it takes sampling defaults for every gen (``temperature=``,
        ``max_new_tokens=``, ``stop=``, ...), ``backend=``, ``stream=True`` (the body then runs on a thread, and
        ``text_iter`` of the result yields text as it is generated), and the run's settings (``deadline_s=``,
        ``priority=``, ``tenant=``). Of an ``async def`` program this is ``run_async``: await it.
        """
        if self.is_async:
            return self.run_async(*args, **kwargs)
        options = RunOptions(self, kwargs, _RUN_OPTIONS)
        backend = resolve_backend(options.options.get("backend"))
        stream = bool(options.options.get("stream", False))
        inline = not options.options.get("use_thread", True)
        arguments = {**options.arguments, **self.bind_arguments}
        turn = backend.choose((*args, arguments), options.settings, stream=stream)
        state = self._begin(backend, options, arguments, turn=turn, stream=stream, inline=inline)
        program = state.program
        if stream and not inline:
            program.body_thread = None
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run, args=(self._run_body, state, args, arguments), name=self.__name__, daemon=True
            )
            thread.start()
        else:
            state = self._run_body(state, args, arguments)
            if state.program.error is not None:
                raise state.program.error
        return state

    def _begin(
        self,
        backend: BaseBackend,
        options: RunOptions,
        arguments: dict[str, Any],
        *,
        turn: Turn | None,
        stream: bool = False,
        inline: bool = False,
        is_awaited: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> ProgramState:
        """The state of one run whose body has not begun."""
        if stream and self.num_api_spec_tokens is not None:
            raise InvalidRequest(
                f"{self.__name__}() generates ahead (num_api_spec_tokens={self.num_api_spec_tokens}), so its text "
                "cannot be streamed; leave out stream=True or num_api_spec_tokens"
            )
        program = ProgramRun(
            backend if turn is None else turn.backend,
            sampling=options.sampling,
            stream=stream,
            settings=options.settings,
            inline=inline,
            is_awaited=is_awaited,
            loop=loop,
            arguments=arguments,
            num_api_spec_tokens=self.num_api_spec_tokens,
            turn=turn,
        )
        return ProgramState(program.root)

    def _write(self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """Call the body."""
        state.ret_value = self.func(state, *args, **arguments)

    def _run_body(
        self,
        state: ProgramState,
        args: tuple[Any, ...],
        arguments: dict[str, Any],
        on_again: Callable[[ProgramState], None] | None = None,
    ) -> ProgramState:
        """Run the body to its end, again where its turn says so: the last state, and ``on_again`` gets each new one."""
        self._run_body_once(state, args, arguments)
        while (turn := state.program.turn) is not None and (turn := turn.next(state)) is not None:
            program = state.program.again(turn)
            state = ProgramState(program.root)
            if on_again is not None:
                on_again(state)
            self._run_body_once(state, args, arguments)
        return state

    def _run_body_once(self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """An exception that the body raises is kept in ``program.error``."""
        program = state.program
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

        With ``stream=True`` it returns at once and the body runs as a task: ``async for text in
        s.text_async_iter()``. Cancelling the awaiting task cancels the program at the runtime.
        """
        options = RunOptions(self, kwargs, _RUN_OPTIONS)
        backend = resolve_backend(options.options.get("backend"))
        loop = asyncio.get_running_loop()
        arguments = {**options.arguments, **self.bind_arguments}
        stream = bool(options.options.get("stream", False))
        turn = await _choose_async(backend, (*args, arguments), options.settings, stream=stream)
        state = self._begin(backend, options, arguments, turn=turn, stream=stream, loop=loop)
        program = state.program
        if program.stream:
            program.body_task = loop.create_task(self._run_body_async(state, args, arguments))
            return state
        state = await self._run_body_async(state, args, arguments)
        if state.program.error is not None:
            raise state.program.error
        return state

    async def _run_body_async(
        self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]
    ) -> ProgramState:
        """``_run_body`` for an event loop."""
        await self._run_body_once_async(state, args, arguments)
        while (turn := state.program.turn) is not None and (turn := await turn.next_async(state)) is not None:
            program = state.program.again(turn)
            state = ProgramState(program.root)
            await self._run_body_once_async(state, args, arguments)
        return state

    async def _run_body_once_async(self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        program = state.program
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
        """``run_batch`` in the running event loop: all items run at once, or ``num_threads`` at a time."""
        options = self._batch_options(kwargs)
        batch = self._batch(batch_kwargs, options)
        if options.options.get("generator_style"):
            raise InvalidRequest(
                f"generator_style: write async for state in {self.__name__}.iter_batch_async(...), which yields each "
                "state as it ends"
            )
        return await run_in_loop(batch) if batch.items else []

    def iter_batch_async(self, batch_kwargs: Sequence[Any], **kwargs: Any) -> AsyncIterator[ProgramState]:
        """``async for state in program.iter_batch_async(items)``: each state once it and those before it ended.

        Leaving the loop early cancels the items that still run.
        """
        return iter_in_loop(self._batch(batch_kwargs, self._batch_options(kwargs)))

    def run_batch(self, batch_kwargs: Sequence[Any], **kwargs: Any) -> list[ProgramState] | Iterator[ProgramState]:
        """Run once per item (a dict of arguments, or a tuple in their order). Returns the states in that order.

        All items run at once; ``num_threads=k`` limits this to k. If the body of an item raises, ``error()`` of its
        state is that exception and its values raise it. ``progress_bar=True`` shows a progress bar.
        ``generator_style=True`` yields each state once it and those before it have finished (an async program has
        ``iter_batch_async``). Leaving the loop early, or Ctrl-C, cancels the items that still run.
        """
        options = self._batch_options(kwargs)
        batch = self._batch(batch_kwargs, options)
        is_generator = bool(options.options.get("generator_style"))
        if not batch.items:
            return []
        if not self.is_async:
            return iter_states(batch) if is_generator else run_states(batch)
        if is_generator:
            raise InvalidRequest(
                f"generator_style: the states of an async program come in an event loop; "
                f"write async for state in {self.__name__}.iter_batch_async(...)"
            )
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(run_in_loop(batch))
        raise InvalidRequest(
            f"run_batch() of the async program {self.__name__}() cannot start a second event loop inside the running "
            f"one; write await {self.__name__}.run_batch_async(...)"
        )

    def _batch(self, given: Sequence[Any], options: RunOptions) -> Batch:
        """``given`` as a checked batch. A long common beginning is cached first."""
        if not isinstance(given, list | tuple):
            raise InvalidRequest(f"run_batch() takes a list of items, not {type(given).__name__}")
        items = [self.arguments_of(item) for item in given]
        for item in items:
            unknown = [name for name in item if name not in self.arg_names]
            if unknown and not self.takes_any:
                raise InvalidRequest(
                    f"Given arguments mismatch the SGL function signature: {self.__name__}() has no argument "
                    f"{unknown[0]!r}; it has {', '.join(self.arg_names)}"
                )
        limit = options.options.get("num_threads", "auto")
        if limit != "auto" and (not isinstance(limit, int) or limit < 1):
            raise InvalidRequest(f"num_threads={limit!r}: must be 'auto' or 1 or more")
        backend = resolve_backend(options.options.get("backend")) if items else BaseBackend()
        if items:
            backend.check_settings(options.settings)
        if len(items) > 1 and backend.precache_in_batch and global_config.enable_precache_with_tracing:
            nodes = self._leading_nodes(backend)
            if sum(len(node.text) for node in nodes) > MIN_PREFIX_CHARS:
                backend.cache_nodes(nodes)

        def begin(arguments: dict[str, Any], *, is_awaited: bool) -> ProgramState:
            turn = backend.choose((arguments,), options.settings, stream=False)
            return self._begin(backend, options, arguments, turn=turn, is_awaited=is_awaited)

        async def begin_async(arguments: dict[str, Any], loop: asyncio.AbstractEventLoop) -> ProgramState:
            turn = await _choose_async(backend, (arguments,), options.settings, stream=False)
            return self._begin(backend, options, arguments, turn=turn, loop=loop)

        return Batch(
            name=self.__name__,
            items=[{**item, **self.bind_arguments} for item in items],
            begin=begin,
            begin_async=begin_async,
            run_body=lambda state, arguments, on_again: self._run_body(state, (), arguments, on_again),
            run_body_async=lambda state, arguments: self._run_body_async(state, (), arguments),
            limit=None if limit == "auto" else limit,
            shows_progress=bool(options.options.get("progress_bar")),
        )

    def _batch_options(self, given: dict[str, Any]) -> RunOptions:
        options = RunOptions(self, given, _BATCH_OPTIONS)
        if "stream" in options.arguments:
            raise InvalidRequest(
                "run_batch(stream=...): a batch returns finished states; generator_style=True yields each as it ends, "
                "and run(..., stream=True) of one program yields its text as it is generated"
            )
        if options.arguments:
            raise InvalidRequest(
                f"run_batch() does not know {', '.join(map(repr, options.arguments))}; arguments of the program belong "
                "into the items, or into .bind(...)"
            )
        return options

    def bind(self, **kwargs: Any) -> SglFunction:
        """The same program with these arguments fixed. They override those of a call."""
        unknown = [name for name in kwargs if name not in self.arg_names]
        if unknown:
            raise AssertionError(
                f"bind({unknown[0]}=...): {self.__name__}() has no such argument; it has {', '.join(self.arg_names)}"
            )
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program. While another program is traced, become a part of that trace."""
        if (outer := current_trace()) is not None:
            return trace_call(outer, self.func, args, {**kwargs, **self.bind_arguments})
        return self.run(*args, **kwargs)

    # -- without running ----------------------------------------------------------------------------------------------

    def trace(self, *, backend: Any = None, **kwargs: Any) -> TracerProgramState:
        """Run the body without a model. Arguments that are not given are holes.

        Role texts come from ``backend``, else from the default backend, else from SGLang's default template.
        """
        return trace_program(self.func, self.fill_arguments(kwargs), self._traceable(backend))

    def compile(self, *, backend: Any = None, **constants: Any) -> CompiledFunction:
        """Trace the body once. A run then sends one message and does not call the body.

        Raises ``TraceError`` where the body branches on a value or an argument. ``constants`` fixes arguments.
        """
        compiled = CompiledFunction(self, constants)
        if backend is not None or global_config.default_backend is not None:
            compiled.trace_for(resolve_backend(backend))
        return compiled

    def graph(self, *, backend: Any = None, **arguments: Any) -> Graph:
        """The program's operations: ``print(prog.graph())``, or ``prog.graph().svg()``."""
        return Graph.of(self.__name__, self.trace(backend=backend, **arguments).program.log)

    def cache(self, backend: Any = None) -> None:
        """Compute the KV of the constant text that every run begins with."""
        chosen = resolve_backend(backend)
        nodes = self._leading_nodes(chosen)
        if nodes:
            chosen.cache_nodes(nodes)

    def pin(self, backend: Any = None, *, ttl_s: float = 3600.0) -> int | None:
        """Like ``cache``, and protect that prefix from eviction for ``ttl_s``.

        Returns the number of tokens, or None if the backend does not report it.
        """
        chosen = resolve_backend(backend)
        nodes = self._leading_nodes(chosen)
        return chosen.pin_nodes(nodes, ttl_s) if nodes else 0

    def unpin(self, backend: Any = None) -> None:
        """End a ``pin``."""
        self.pin(backend, ttl_s=0.0)

    def _leading_nodes(self, backend: BaseBackend) -> list[Leading]:
        return leading_nodes(self.func, self.fill_arguments({}), backend)

    def _traceable(self, backend: Any) -> BaseBackend:
        if backend is None and global_config.default_backend is None:
            return BaseBackend()
        return resolve_backend(backend)

    def fill_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of the body: bound, given, or a hole."""
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


class CompiledFunction(SglFunction):
    """A program whose body was traced once per backend, since role texts differ. Arguments are strs or numbers."""

    def __init__(self, function: SglFunction, constants: Mapping[str, Any]) -> None:
        super().__init__(
            function.func, function.num_api_spec_tokens, bind_arguments={**constants, **function.bind_arguments}
        )
        self._traces: weakref.WeakKeyDictionary[Any, TracerProgramState] = weakref.WeakKeyDictionary()
        self._tracing = threading.Lock()

    def trace_for(self, backend: BaseBackend) -> TracerProgramState:
        with self._tracing:
            trace = self._traces.get(backend.identity)
            if trace is None:
                trace = self._traces[backend.identity] = trace_program(self.func, self.fill_arguments({}), backend)
            return trace

    def bind(self, **kwargs: Any) -> SglFunction:
        return CompiledFunction(super().bind(**kwargs), {})

    def graph(self, *, backend: Any = None, **arguments: Any) -> Graph:
        if arguments:
            return super().graph(backend=backend, **arguments)
        return Graph.of(self.__name__, self.trace_for(self._traceable(backend)).program.log)

    def _repr_html_(self) -> str | None:
        """Its graph, for a notebook; None before it was traced."""
        traces = list(self._traces.values())
        return Graph.of(self.__name__, traces[0].program.log).svg() if traces else None

    def _write(self, state: ProgramState, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        given = {**dict(zip(self._free_names(), args, strict=False)), **arguments}
        replay(self.trace_for(state.program.backend), state, self._fill_holes(given, len(args)))

    def _free_names(self) -> list[str]:
        return [name for name in self.arg_names if name not in self.bind_arguments]

    def _fill_holes(self, given: dict[str, Any], num_positional: int) -> dict[str, Any]:
        free = self._free_names()
        unknown = [name for name in given if name not in self.arg_names]
        if unknown or num_positional > len(free):
            what = repr(unknown[0]) if unknown else f"{num_positional} positional arguments"
            takes = ", ".join(free) or "no arguments"
            raise TypeError(f"{self.__name__}() compiled takes {takes}; it was given {what}")
        missing = [name for name in free if name not in given and name not in self.default_of]
        if missing:
            raise TypeError(f"{self.__name__}() compiled is missing {', '.join(missing)}")
        return {**self.default_of, **given}
