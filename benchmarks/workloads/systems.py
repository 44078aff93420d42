"""The systems under test: each starts, runs the cases of a workload in its form, and stops.

Every system that was started stays up, idle, while another one runs. Each keeps its cache; a new seed brings new
prefixes.
"""

import asyncio
import contextlib
import re
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import phloem
from phloem import assistant, function, gen
from phloem import user as user_role

from ..serving import own_server
from ..vs_peers import SCRIPTS, llama_server, piped
from .clients import LLAMA_CPP, OURS, OpenAIClient, PipedClient, Usage
from .workload import Case, Workload, user

CLIENT_TIMEOUT_S = 600.0  # of an engine whose client this process is
PATIENCE_S = 300.0  # for the programs of a workload on one system of the plain way
GREEDY = {"temperature": 0.0, "heal": False}  # as the plain forms ask; a program's gen may differ


@dataclass(slots=True)
class Run:
    """The cases of one workload on one system. ``latencies_s``: of each case, where they ran one after the other.

    ``prompt_tokens``: of a program the tokens of its sequences; the plain way sends a prefix again with each request.
    """

    wall_s: float
    answers: list[Any]
    latencies_s: list[float] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)


class System(Protocol):
    """Something that runs workloads. ``version`` is known after ``start``; a second ``stop`` does nothing."""

    name: str
    version: str

    def start(self) -> None: ...

    def run(self, workload: Workload, cases: list[Case], *, alone: bool, to_the_end: bool = True) -> Run:
        """All cases at once or, with ``alone``, one after the other.

        ``to_the_end``: an answer without a grammar goes on past the token that ends a text, so that all systems
        generate as many tokens. The plain way raises TimeoutError after ``PATIENCE_S``.
        """
        ...

    def stop(self) -> None: ...


@function
def hello(s: Any) -> None:
    """What every system has computed before it is measured."""
    s += user_role("Say hello.")
    s += assistant(gen("hello", max_tokens=8))
    s += user_role("Yes or no?")
    s += assistant(gen("choice", max_tokens=4, regex="(yes|no)"))


class Programs:
    """Our engine, given whole programs."""

    def __init__(self, name: str, model: str, options: dict[str, Any]) -> None:
        self.name, self.version = name, f"Phloem {phloem.__version__}"
        self._model, self._options = model, options
        self._runtime: phloem.Runtime | None = None

    @property
    def runtime(self) -> phloem.Runtime:
        if self._runtime is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._runtime

    def start(self) -> None:
        self._runtime = phloem.Runtime(model=self._model, **self._options)
        hello.run(backend=self._runtime, **GREEDY).sync()

    def run(self, workload: Workload, cases: list[Case], *, alone: bool, to_the_end: bool = True) -> Run:
        return run_programs(self.runtime, workload, cases, alone=alone, ignore_eos=to_the_end)

    def stop(self) -> None:
        if self._runtime is not None:
            self._runtime.shutdown()
            self._runtime = None


def run_programs(backend: Any, workload: Workload, cases: list[Case], *, alone: bool, **sampling: Any) -> Run:
    """Run the program of ``cases``; ``sampling``: more defaults of every gen."""
    options = {"backend": backend, **GREEDY, **sampling}
    latencies_s = []
    start_s = time.perf_counter()
    if alone:
        states = []
        for case in cases:
            begin_s = time.perf_counter()
            states.append(workload.program.run(**case.inputs, **options))
            states[-1].sync()
            latencies_s.append(time.perf_counter() - begin_s)
    else:
        states = workload.program.run_batch([case.inputs for case in cases], **options)
    answers = [state["answer"] for state in states]
    found = Run(time.perf_counter() - start_s, answers, latencies_s)
    for state in states:
        stats = state.stats()
        found.usage.requests += stats["messages"]
        found.usage.prompt_tokens += stats["prompt_tokens"]
        found.usage.cached_tokens += stats["cached_tokens"]
        found.usage.output_tokens += stats["generated_tokens"]  # forced ones included
    return found


class Plain:
    """A server or engine, used the plain way. ``open_client`` starts it on an exit stack: its client and version."""

    def __init__(self, name: str, open_client: "OpenClient") -> None:
        self.name, self.version = name, "not started"
        self._open_client = open_client
        self._loop = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._client: OpenAIClient | PipedClient | None = None
        self._is_stopped = False

    def start(self) -> None:
        async def begin() -> tuple[OpenAIClient | PipedClient, str]:
            client, version = await self._open_client(self._stack)
            async with asyncio.timeout(PATIENCE_S):
                await client.chat([user("Say hello.")], 8)
                await client.chat([user("Yes or no?")], 4, regex="(yes|no)")
            return client, version

        self._client, self.version = self._loop.run(begin())

    def run(self, workload: Workload, cases: list[Case], *, alone: bool, to_the_end: bool = True) -> Run:
        if self._client is None:
            raise RuntimeError(f"{self.name} has not been started")
        self._client.to_the_end = to_the_end
        return self._loop.run(asyncio.wait_for(run_plain(self._client, workload, cases, alone=alone), PATIENCE_S))

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped, self._client = True, None
        self._loop.run(self._stack.aclose())
        self._loop.close()


async def run_plain(client: Any, workload: Workload, cases: list[Case], *, alone: bool) -> Run:
    """Run the plain form of ``cases`` with ``client``."""
    client.usage = Usage()
    latencies_s: list[float] = []

    async def one(case: Case) -> Any:
        begin_s = time.perf_counter()
        answer = await workload.plain(client, **case.inputs)
        latencies_s.append(time.perf_counter() - begin_s)
        return answer

    start_s = time.perf_counter()
    if alone:
        answers = [await one(case) for case in cases]
    else:
        async with asyncio.TaskGroup() as group:  # a failure of one ends the others
            tasks = [group.create_task(one(case)) for case in cases]
        answers = [task.result() for task in tasks]
    return Run(time.perf_counter() - start_s, answers, latencies_s if alone else [], client.usage)


# -- the systems by name ----------------------------------------------------------------------------------------------

OpenClient = Callable[[contextlib.AsyncExitStack], Awaitable[tuple[Any, str]]]


def our_server(model: str, flags: list[str]) -> OpenClient:
    """Our server, started with ``flags``."""

    async def begin(stack: contextlib.AsyncExitStack) -> tuple[OpenAIClient, str]:
        url = await asyncio.to_thread(stack.enter_context, own_server(model, flags))
        client = OpenAIClient(url, model, OURS)
        stack.push_async_callback(client.close)
        return client, f"Phloem {phloem.__version__}"

    return begin


def llama_cpp(path: str, model: Path, threads: int) -> OpenClient:
    """llama.cpp's server of that path, with 16 slots."""

    async def begin(stack: contextlib.AsyncExitStack) -> tuple[OpenAIClient, str]:
        url = await asyncio.to_thread(stack.enter_context, llama_server(path, model, threads))
        client = OpenAIClient(url, "model", LLAMA_CPP)
        stack.push_async_callback(client.close)
        said = subprocess.run([path, "--version"], capture_output=True, text=True)
        version = re.search(r"version: (.*)", said.stdout + said.stderr)
        return client, f"llama.cpp {version[1] if version else 'of unknown version'}"

    return begin


def behind_pipe(python: str, peer: str, model: Path, threads: int) -> OpenClient:
    """A peer of ``benchmarks.peers``, run by the Python that has it."""

    async def begin(stack: contextlib.AsyncExitStack) -> tuple[PipedClient, str]:
        script = Path(__file__).parents[1] / "peers" / SCRIPTS[peer]
        piped_peer = await stack.enter_async_context(piped([python, str(script), str(model), str(threads)]))
        return PipedClient(piped_peer), piped_peer.name

    return begin


@dataclass(frozen=True, slots=True)
class Peers:
    """Where other engines are. An empty one is not installed."""

    llama_server: str = ""
    openvino_python: str = ""
    transformers_python: str = ""


PROGRAM, HTTP, NO_CACHE = "program", "http", "http-no-cache"
LLAMA, OPENVINO, TRANSFORMERS = "llama.cpp", "openvino", "transformers"
SYSTEMS = (PROGRAM, HTTP, NO_CACHE, LLAMA, OPENVINO, TRANSFORMERS)
COMPARED = (PROGRAM, HTTP, LLAMA, OPENVINO)  # those of the bars


def make_system(name: str, model: str, path: Path, threads: int, peers: Peers) -> System | None:
    """The system of that name, not yet started; None where it is not installed."""
    flags = ["--num-threads", str(threads)]
    match name:
        case "program":
            return Programs(name, model, {"num_threads": threads, "client_timeout_s": CLIENT_TIMEOUT_S})
        case "http":
            return Plain(name, our_server(model, flags))
        case "http-no-cache":
            return Plain(name, our_server(model, [*flags, "--no-prefix-cache"]))
        case "llama.cpp" if peers.llama_server:
            return Plain(name, llama_cpp(peers.llama_server, path, threads))
        case "openvino" if peers.openvino_python:
            return Plain(name, behind_pipe(peers.openvino_python, name, path, threads))
        case "transformers" if peers.transformers_python:
            return Plain(name, behind_pipe(peers.transformers_python, name, path, threads))
    return None
