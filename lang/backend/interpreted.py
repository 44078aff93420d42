"""The interpreted path: one call to the backend per generation.

At most one task at a time runs a sequence. A task that has to wait for another sequence returns its thread.
Backends with ``generate_async`` run on one event loop, the others on a pool of at most ``max_threads`` threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, Literal

from ...protocol.errors import Cancelled, DeadlineExceeded, DependencyFailed, PhloemError, Unsupported
from ...protocol.messages import ProgramSettings
from ...protocol.tool_format import ToolFormat
from ..chat_template import ChatTemplate
from ..global_config import global_config
from ..images import data_url
from ..nodes import (
    CloseNode,
    DefaultSystemNode,
    ForkNode,
    GenNode,
    ImageNode,
    JoinNode,
    MarkNode,
    Node,
    PasteNode,
    PinNode,
    RoleNode,
    RollbackNode,
    SelectNode,
    TextNode,
)
from ..sampling_params import SglSamplingParams, to_sgl_params
from ..session import RunTerms
from ..values import Leaf
from .base_backend import BaseBackend
from .drivers import Alarm, loop_of, pool_of
from .executor import StreamExecutor
from .speculation import complete, converse

_Steps = Generator[GenNode | SelectNode, Any, None]


class InterpretedSession:
    decides_custom_choices = True
    eos_ids: frozenset[int] | None = None

    def __init__(self, backend: BaseBackend, run: RunTerms) -> None:
        self._backend = backend
        self._arguments = run.arguments
        self._stream = run.stream
        self._inline = run.inline
        self._num_api_spec_tokens = run.num_api_spec_tokens
        self._loop = run.loop
        self._template: ChatTemplate = backend.get_chat_template()
        self._is_async = callable(getattr(backend, "generate_async", None))
        self._lock = run.lock
        self._executors: dict[int, StreamExecutor] = {}
        self._joining: Sequence[StreamExecutor] = ()  # sequences that wait for forks to end
        self._ended: PhloemError | None = None  # the run was cancelled or is past its deadline
        self._num_open = 0
        self._costs = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "calls": 0}
        self.closed = Leaf(run.lock, None)
        self._alarm: Alarm | None = None
        self._settings = run.settings or ProgramSettings()
        backend.check_settings(self._settings)
        if (deadline_s := self._settings.deadline_s) is not None:
            self._alarm = Alarm(backend, deadline_s, self._expire)

    def executor(self, seq: int) -> StreamExecutor:
        return self._executors[seq]

    # -- roles --------------------------------------------------------------------------------------------------------

    def default_system(self) -> tuple[str, str] | None:
        content = self._template.default_system_prompt
        if content is None:
            return None
        prefix, suffix = self._template.get_prefix_and_suffix("system", [])
        return content, prefix + content + suffix

    def role_text(self, role: str, *, is_begin: bool, messages: list[dict[str, Any]]) -> str:
        return self._template.get_prefix_and_suffix(role, messages)[0 if is_begin else 1]

    def tool_format(self) -> ToolFormat:
        return ToolFormat()

    # -- sending ------------------------------------------------------------------------------------------------------

    def ship(self, nodes: list[Node], *, is_awaited: bool = False) -> None:
        """Queue ``nodes`` and start their sequences. The only sequence of a caller that waits runs in its thread."""
        touched: dict[int, StreamExecutor] = {}
        executors = self._executors
        with self._lock:
            for node in nodes if self._ended is None else ():
                seq = node.seq
                executor = touched.get(seq)
                if executor is None:
                    executor = executors.get(seq)
                    if executor is None:
                        executor = self._new_executor(seq)
                    touched[seq] = executor
                executor.queue.append(node)
                if type(node) is ForkNode:
                    for child in node.children:
                        self._new_executor(child, awaits_fork=True)
        if self._ended is not None:
            for node in nodes:
                if isinstance(node, GenNode | SelectNode | PinNode):
                    node.leaf.fail(self._ended)
            return
        here = self._inline or (is_awaited and not self._is_async and len(touched) == len(executors) == 1)
        for executor in touched.values():
            self._start(executor, here=here)

    def _new_executor(self, seq: int, *, awaits_fork: bool = False) -> StreamExecutor:
        executor = StreamExecutor(self._backend, seq, self._template, stream=self._stream, awaits_fork=awaits_fork)
        self._executors[seq] = executor
        self._num_open += 1
        executor.arguments = self._arguments
        executor.settings = self._settings
        if seq == 0:  # forks do not speculate
            executor.num_api_spec_tokens = self._num_api_spec_tokens
        self._backend.begin_program(executor)
        return executor

    def cancel(self, leaf: Leaf | None = None) -> None:
        """Fail the leaves now and make no further call. The result of a call that is under way is dropped."""
        gone = Cancelled("cancelled by the program")
        if leaf is not None:
            leaf.fail(gone, ("".join(leaf.chunks or ()),))
        else:
            self._end(gone)

    def _expire(self, deadline_s: float) -> None:
        self._end(DeadlineExceeded(f"the program's deadline of {deadline_s:g} s has passed"))

    def _end(self, error: PhloemError) -> None:
        with self._lock:
            if self.closed.is_done:
                return
            pending: list[Leaf] = []
            for executor in self._executors.values():
                pending += [n.leaf for n in executor.queue if isinstance(n, GenNode | SelectNode | PinNode)]
                executor.queue.clear()
                executor.is_finished = True
                executor.error_ = error
            self._ended = error
            self._num_open = 0
        for leaf in pending:
            leaf.fail(error, ("".join(leaf.chunks or ()),))
        self._finish_alarm()
        self.closed.resolve((), dict(self._costs))

    def _finish_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    # -- driving ------------------------------------------------------------------------------------------------------

    def _start(self, executor: StreamExecutor, *, here: bool = False) -> None:
        with self._lock:
            if executor.is_driven or executor.awaits_fork or not executor.queue:
                return
            executor.is_driven = True
        if here or self._inline:
            self._drive(executor)
        elif self._is_async and self._loop is not None and not self._backend.has_own_loop:
            self._create_task(self._loop, executor)
        elif self._is_async:
            loop_of(self._backend).call(self._drive_async, executor)
        else:
            pool_of(self._backend).submit(self._drive, executor)

    def _create_task(self, loop: asyncio.AbstractEventLoop, executor: StreamExecutor) -> None:
        """Run it on the async program's own loop. Called on any thread."""
        try:
            is_here = asyncio.get_running_loop() is loop
        except RuntimeError:
            is_here = False
        if is_here:
            steps = self._steps(executor)
            if (node := next(steps, None)) is not None:  # only a call to the backend needs a task
                executor.task = loop.create_task(self._drive_async(executor, steps, node))
        else:
            loop.call_soon_threadsafe(self._create_task, loop, executor)

    def _drive(self, executor: StreamExecutor) -> None:
        steps = self._steps(executor)
        result: Any = None
        while True:
            try:
                node = steps.send(result)
            except StopIteration:
                return
            try:
                result = self._call(executor, node)
            except Exception as error:
                result = error

    async def _drive_async(
        self, executor: StreamExecutor, steps: _Steps | None = None, node: GenNode | SelectNode | None = None
    ) -> None:
        """``steps`` and ``node``: its started generator and the first call to make."""
        if steps is None:
            steps = self._steps(executor)
        result: Any = None
        while True:
            if node is None:
                try:
                    node = steps.send(result)
                except StopIteration:
                    executor.task = None
                    return
            try:
                result = await self._call_async(executor, node)
            except (Exception, asyncio.CancelledError) as error:
                result = error
            node = None

    def _call(self, executor: StreamExecutor, node: GenNode | SelectNode) -> Any:
        backend = self._backend
        if isinstance(node, SelectNode):
            return backend.select(executor, list(node.choices), node.temperature, node.method)
        params = self.params_of(node)
        if not node.stream or node.n > 1:  # several candidates are not streamed: their chunks would mix
            return backend.generate(executor, params)
        parts: list[str] = []
        meta: dict[str, Any] = {}
        for chunk, chunk_meta in backend.generate_stream(executor, params):
            if node.leaf.is_done:  # cancelled: leaving the loop ends the call
                break
            parts.append(chunk)
            meta = chunk_meta
            node.leaf.push(chunk)
        return "".join(parts), meta

    async def _call_async(self, executor: StreamExecutor, node: GenNode | SelectNode) -> Any:
        backend: Any = self._backend
        if isinstance(node, SelectNode):
            if (select := getattr(backend, "select_async", None)) is None:
                return await asyncio.to_thread(self._call, executor, node)
            return await select(executor, list(node.choices), node.temperature, node.method)
        if not node.stream or node.n > 1:
            return await backend.generate_async(executor, self.params_of(node))
        if (generate_stream := getattr(backend, "generate_stream_async", None)) is None:
            return await asyncio.to_thread(self._call, executor, node)
        parts: list[str] = []
        meta: dict[str, Any] = {}
        async for chunk, chunk_meta in generate_stream(executor, self.params_of(node)):
            if node.leaf.is_done:  # cancelled: leaving the loop ends the call
                break
            parts.append(chunk)
            meta = chunk_meta
            node.leaf.push(chunk)
        return "".join(parts), meta

    def params_of(self, node: GenNode) -> SglSamplingParams:
        return to_sgl_params(node.defaults, node.gen.overrides, node.gen.grammar, extra_stop=self._template.stop_str)

    def _steps(self, executor: StreamExecutor) -> _Steps:
        """Run nodes in order; yields each call to be made and takes its result (or the exception it raised)."""
        queue = executor.queue
        while True:
            # only this driver takes from the queue, so it needs the lock only to stop;
            # a node stays in the queue until it is done, so that ``_end`` finds it
            try:
                node = queue[0]
            except IndexError:  # nothing left, or the program has just been ended
                with self._lock:
                    if queue:
                        continue
                    executor.is_driven = False
                    return
            if isinstance(node, JoinNode | PasteNode):
                with self._lock:
                    blocker = self._blocker(executor, node)
                    executor.is_driven = blocker is None
                if blocker is not None:
                    if isinstance(blocker, Leaf) and blocker.subscribe(blocker.done, lambda: self._start(executor)):
                        self._start(executor)
                    return
            try:
                if executor.error_ is not None and not isinstance(node, CloseNode):
                    self._skip(executor, node)
                elif isinstance(node, TextNode):
                    executor.text_ += node.text
                    if executor.ahead is not None:
                        executor.follow(node.text)
                elif isinstance(node, GenNode) and executor.num_api_spec_tokens is not None:
                    speculate = converse if self._backend.is_chat_model else complete
                    yield from speculate(self, executor, node)
                elif isinstance(node, GenNode | SelectNode):
                    result = yield node
                    if isinstance(result, BaseException):
                        raise result
                    self._take(executor, node, result)
                else:
                    self._run(executor, node)
            except (Exception, asyncio.CancelledError) as error:
                executor.error_ = error
                self._fail(executor, node, error)
            if queue:  # empty if the program was ended meanwhile
                queue.popleft()

    def _blocker(self, executor: StreamExecutor, node: Node) -> Leaf | Literal["children"] | None:
        """What ``node`` waits for, or None. Called with the lock held."""
        if isinstance(node, PasteNode) and not node.source.is_done:
            return node.source
        if isinstance(node, JoinNode) and not all(self._executors[child].is_finished for child in node.children):
            self._joining = (*self._joining, executor)  # a child's Close wakes it
            return "children"
        return None

    # -- what nodes do ------------------------------------------------------------------------------------------------

    def _run(self, executor: StreamExecutor, node: Node) -> None:
        match node:
            case PasteNode():
                if node.source.error is not None:
                    raise DependencyFailed(f"{node.source.name!r} is pasted here, but failed") from node.source.error
                executor.text_ += node.source.texts[node.index]
                executor.follow(node.source.texts[node.index])
            case RoleNode():
                executor.follow(node.text)
                executor.planned = None
                self._role(executor, node)
            case DefaultSystemNode():
                executor.follow(node.text)
                executor.messages_.append({"role": "system", "content": node.content})
                executor.text_ += node.text
            case ImageNode():
                executor.images_ = (*executor.images_, (node.hash, node.data))
                executor.cur_images = (*executor.cur_images, (node.hash, node.data))
                self._backend.fill_image(executor)
            case ForkNode():
                children = [self._executors[child] for child in node.children]
                if len(children) > 1:
                    self._backend.commit_lazy_operations(executor)
                self._backend.fork_program(executor, children)
                self._start_children(executor, children)
            case JoinNode():
                if node.mode == "concate_and_append":
                    self._concatenate(executor, [self._executors[child] for child in node.children])
            case MarkNode():
                node.mark.op = len(executor.text_)
            case RollbackNode():
                executor.text_ = executor.text_[: node.mark.op]
                executor.ahead = None
            case CloseNode():
                self._close(executor)
            case PinNode():
                node.leaf.fail(Unsupported(f"{type(self._backend).__name__} cannot pin prefixes"))
            case _:
                raise AssertionError(node)

    def _role(self, executor: StreamExecutor, node: RoleNode) -> None:
        if node.is_begin:
            executor.text_ += node.text
            executor.cur_role = node.role
            executor.cur_role_begin_pos = len(executor.text_)
            executor.cur_images = ()
            return
        content = executor.text_[executor.cur_role_begin_pos :].lstrip()
        if executor.cur_images:
            urls = [{"type": "image_url", "image_url": {"url": data_url(data)}} for _, data in executor.cur_images]
            executor.messages_.append({"role": node.role, "content": [{"type": "text", "text": content}, *urls]})
        else:
            executor.messages_.append({"role": node.role, "content": content})
        executor.text_ += node.text
        executor.cur_role = None
        executor.cur_images = ()

    def _start_children(self, executor: StreamExecutor, children: list[StreamExecutor]) -> None:
        for child in children:
            child.start_as(executor)
        for child in children:
            self._start(child)

    def _concatenate(self, executor: StreamExecutor, children: list[StreamExecutor]) -> None:
        for child in children:
            if child.error_ is not None:
                raise DependencyFailed("a fork that is joined here has failed") from child.error_
        if self._backend.support_concate_and_append and global_config.enable_parallel_encoding:
            self._backend.concatenate_and_append([child.sid for child in children], executor.sid)
        for child in children:
            executor.text_ += child.text_[child.fork_start_text_pos :]

    def charge(self, meta: dict[str, Any] | None) -> None:
        """Count one call and its tokens."""
        self._costs["calls"] += 1
        if meta:
            for cost in ("prompt_tokens", "cached_tokens", "completion_tokens"):
                if isinstance(count := meta.get(cost), int):
                    self._costs[cost] += count

    def take_text(self, executor: StreamExecutor, node: GenNode, text: str, meta: dict[str, Any]) -> None:
        """Keep a gen's text. With ``is_speculated`` no call was made for it."""
        if not meta.get("is_speculated"):
            self.charge(meta)
        self._keep(executor, node, [text], meta)

    def _take(self, executor: StreamExecutor, node: GenNode | SelectNode, result: Any) -> None:
        """Keep the result of a call and count its cost."""
        if isinstance(node, SelectNode):
            texts = [result.decision]
            meta = result.meta_info
        else:
            text, meta = result
            texts = [text] if isinstance(text, str) else list(text)
            if len(texts) != node.n:
                raise Unsupported(
                    f"n={node.n}: {type(self._backend).__name__} returned {len(texts)} candidate(s); use fork({node.n})"
                )
        self.charge(meta)
        executor.ahead = None
        self._keep(executor, node, texts, meta)

    def _keep(self, executor: StreamExecutor, node: GenNode | SelectNode, texts: list[str], meta: Any) -> None:
        name = node.leaf.name
        if isinstance(node, GenNode) or node.append:
            executor.text_ += texts[0]
        executor.variables[name] = texts if len(texts) > 1 else texts[0]
        executor.meta_info[name] = meta
        node.leaf.resolve(texts, meta)

    def _skip(self, executor: StreamExecutor, node: Node) -> None:
        """Fail ``node``, which follows one that failed."""
        error = DependencyFailed(f"an earlier operation failed: {executor.error_}")
        error.__cause__ = executor.error_
        self._fail(executor, node, error)

    def _fail(self, executor: StreamExecutor, node: Node, error: BaseException) -> None:
        if isinstance(node, GenNode | SelectNode | PinNode):
            node.leaf.fail(error, ("".join(node.leaf.chunks or ()),))
        elif isinstance(node, ForkNode):
            self._start_children(executor, [self._executors[child] for child in node.children])
        elif isinstance(node, CloseNode):
            self._finish(executor)

    def _close(self, executor: StreamExecutor) -> None:
        try:
            self._backend.end_program(executor)
        finally:
            self._finish(executor)

    def _finish(self, executor: StreamExecutor) -> None:
        with self._lock:
            if executor.is_finished:
                return
            executor.is_finished = True
            joining, self._joining = self._joining, ()
            self._num_open -= 1
            is_over = self._num_open == 0
        for waiting in joining:
            self._start(waiting)
        if is_over:
            self._finish_alarm()
            self.closed.resolve((), dict(self._costs))
