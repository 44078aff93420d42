"""Speed over HTTP: streams, shared prefixes, classification, JSON answers and chats against any OpenAI-like server.

    python -m benchmarks.serving                                    # starts our server with the default model
    python -m benchmarks.serving --url http://127.0.0.1:8080 --no-extensions --label llama-server

Every request streams. The client stores what arrives with its time and parses it after the answer has ended, so it
takes little CPU time from the server. Time to first token: from sending the request to the chunk with the
first text.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from . import RESULTS, print_header, save
from .light_http import LightClient
from .prose import DOCUMENT, NOTES, QUESTIONS, SUBJECTS, shared_guide

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing", "event"]},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 1, "maxItems": 3},
        "finished": {"type": "boolean"},
    },
    "required": ["name", "kind", "year", "tags", "finished"],
    "additionalProperties": False,
}
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Answer:
    """One streamed answer. Seconds count from sending the request; ``last_s`` is its last text."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_s: float
    last_s: float


@dataclass(slots=True)
class Figures:
    """One workload. ``tokens_per_s``: output tokens divided by the wall time of the workload, one value per repeat."""

    workload: str
    requests: int
    concurrency: int
    tokens_per_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    token_ms: float = 0.0
    valid: int | None = None


class Asked(Protocol):
    """A server or engine that answers a workload's requests."""

    async def ask(self, messages: Messages, max_tokens: int, *, to_the_end: bool = False, **more: Any) -> Answer: ...

    async def flush(self) -> None: ...


class Target:
    """A server under test.

    ``extensions``: the server takes ``ignore_eos``. ``can_flush``: it also empties its cache on request.
    ``keep_alive``: connections are used again. Turn it off for a server that closes connections which carry a request.
    """

    def __init__(
        self,
        url: str,
        *,
        extensions: bool,
        model: str,
        api_key: str | None = None,
        can_flush: bool = True,
        keep_alive: bool = True,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = LightClient(url, headers=headers, keep_alive=keep_alive)
        self.extensions = extensions
        self.can_flush = extensions and can_flush
        self.model = model

    async def ask(self, messages: Messages, max_tokens: int, *, to_the_end: bool = False, **more: Any) -> Answer:
        """One chat completion. ``to_the_end``: ask a server with extensions not to stop before ``max_tokens``."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        if to_the_end and self.extensions:
            body["ignore_eos"] = True
        return read_answer(await self._post("/v1/chat/completions", msgspec.json.encode(body)))

    async def flush(self) -> None:
        if self.can_flush:
            await self._post("/flush_cache", b"")

    async def _post(self, path: str, body: bytes) -> list[tuple[float, bytes]]:
        try:
            reply = await self.http.post(path, body)
        except OSError as error:
            raise SystemExit(f"{path}: {error}; is a server running there?") from None
        if reply.status != 200:
            raise SystemExit(f"{path}: {reply.status}: {reply.body.decode(errors='replace')}")
        return reply.pieces


def read_answer(chunks: list[tuple[float, bytes]]) -> Answer:
    """The answer in a stream's network chunks: (seconds, bytes). Without usage in the stream, texts count as tokens."""
    texts: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    rest = b""
    for seconds, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                raise SystemExit(f"the stream ended with an error: {event['error']}")
            usage = event.get("usage") or usage
            text = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if text:
                texts.append(text)
                times.append(seconds)
    return Answer(
        text="".join(texts),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens", len(texts)),
        first_s=times[0] if times else chunks[-1][0],
        last_s=times[-1] if times else chunks[-1][0],
    )


# -- workloads: the answers to all requests, at most `concurrency` at a time ------------------------------------------


async def at_once(concurrency: int, tasks: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    gate = asyncio.Semaphore(concurrency)

    async def one(task: Callable[[], Awaitable[Any]]) -> Any:
        async with gate:
            return await task()

    return await asyncio.gather(*(one(task) for task in tasks))


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


async def single(target: Asked, count: int) -> list[Answer]:
    """One stream of 128 tokens."""
    assert count == 1
    return [await target.ask(user(f"Write a short story about {SUBJECTS[0]}."), 128, to_the_end=True)]


async def concurrent(target: Asked, count: int) -> list[Answer]:
    """Stories of 128 tokens, 16 at once."""
    prompts = [user(f"Write a short story about {subject}.") for subject in SUBJECTS[:count]]
    return await at_once(16, [lambda p=p: target.ask(p, 128, to_the_end=True) for p in prompts])


async def shared_prefix(target: Asked, count: int) -> list[Answer]:
    """Questions about one document of about 1,100 tokens, 32 tokens each, 16 at once."""
    prompts = [
        [{"role": "system", "content": f"Answer from this text.\n\n{DOCUMENT}"}, *user(question)]
        for question in QUESTIONS[:count]
    ]
    return await at_once(16, [lambda p=p: target.ask(p, 32, to_the_end=True) for p in prompts])


async def classification(target: Asked, count: int) -> list[Answer]:
    """Notes after one instruction of about 600 tokens, 4 tokens each, 16 at once."""
    prompts = [[{"role": "system", "content": shared_guide()}, *user(f"The note: {note}")] for note in NOTES[:count]]
    return await at_once(16, [lambda p=p: target.ask(p, 4, to_the_end=True) for p in prompts])


async def json_schema(target: Asked, count: int) -> list[Answer]:
    """Answers that follow one JSON schema, 16 at once."""
    form = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA, "strict": True}}
    prompts = [user(f"Invent a catalogue entry about {subject}. Answer as JSON.") for subject in SUBJECTS[:count]]
    return await at_once(16, [lambda p=p: target.ask(p, 160, response_format=form) for p in prompts])


async def chats(target: Asked, count: int) -> list[Answer]:
    """Chats of 6 turns, 48 tokens a turn, 8 at once."""

    async def chat(first: int) -> list[Answer]:
        messages: Messages = [{"role": "system", "content": "You are a patient guide to an old orchard."}]
        answers = []
        for turn in range(6):
            messages += user(f"Visitor {first + 1} asks: {QUESTIONS[(first * 6 + turn) % len(QUESTIONS)]}")
            answers.append(await target.ask(messages, 48, to_the_end=True))
            messages = [*messages, {"role": "assistant", "content": answers[-1].text}]
        return answers

    found = await at_once(8, [lambda i=i: chat(i) for i in range(count)])
    return [answer for answers in found for answer in answers]


@dataclass(frozen=True, slots=True)
class Workload:
    """``count`` requests or chats, ``concurrency`` at a time."""

    concurrency: int
    count: int
    run: Callable[[Asked, int], Awaitable[list[Answer]]]


WORKLOADS = {
    "single": Workload(1, 1, single),
    "concurrent": Workload(16, 32, concurrent),
    "shared-prefix": Workload(16, 32, shared_prefix),
    "classification": Workload(16, 32, classification),
    "json-schema": Workload(16, 32, json_schema),
    "chats": Workload(8, 8, chats),
}


async def measure(target: Asked, name: str, repeats: int, *, count: int = 0) -> Figures:
    """Each repeat begins with an empty cache if the server can flush it. ``count`` 0: the workload's own count."""
    workload = WORKLOADS[name]
    answers: list[Answer] = []
    figures = Figures(name, requests=0, concurrency=workload.concurrency)
    for _ in range(repeats):
        await target.flush()
        start = time.perf_counter()
        now = await workload.run(target, min(count or workload.count, workload.count))
        figures.wall_s.append(time.perf_counter() - start)
        figures.tokens_per_s.append(sum(a.completion_tokens for a in now) / figures.wall_s[-1])
        figures.requests = len(now)
        answers += now
    firsts = sorted(a.first_s * 1e3 for a in answers)
    gaps = [(a.last_s - a.first_s) * 1e3 / (a.completion_tokens - 1) for a in answers if a.completion_tokens > 1]
    figures.output_tokens = sum(a.completion_tokens for a in answers)
    figures.prompt_tokens = sum(a.prompt_tokens for a in answers)
    figures.cached_tokens = sum(a.cached_tokens for a in answers)
    figures.ttft_p50_ms = statistics.median(firsts)
    figures.ttft_p99_ms = firsts[min(len(firsts) - 1, int(len(firsts) * 0.99))]
    figures.token_ms = statistics.median(gaps) if gaps else 0.0
    if name == "json-schema":
        figures.valid = sum(follows_schema(a.text) for a in answers)
    return figures


def follows_schema(text: str) -> bool:
    """Whether ``text`` satisfies ``SCHEMA``. Checked by hand, so the benchmark needs no validator."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False
    return (
        isinstance(value, dict)
        and set(value) == set(SCHEMA["required"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 40
        and value["kind"] in ("person", "place", "thing", "event")
        and type(value["year"]) is int
        and 1000 <= value["year"] <= 2100
        and isinstance(value["tags"], list)
        and 1 <= len(value["tags"]) <= 3
        and all(isinstance(tag, str) and len(tag) <= 16 for tag in value["tags"])
        and isinstance(value["finished"], bool)
    )


# -- running ----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def own_server(model: str, args: list[str]) -> Iterator[str]:
    """Run our server in its own process until the block ends; yields its address."""
    port = free_port()
    with started([sys.executable, "-m", "phloem", "serve", model, "--port", str(port), *args], port) as url:
        yield url


@contextlib.contextmanager
def started(command: list[str], port: int, *, output: int | None = None) -> Iterator[str]:
    """Run a server that answers ``/health`` on ``port`` until the block ends; yields its address."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 300
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with status {process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} was not ready after 300 s")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=10.0).status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        stop(process)


def stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def line(f: Figures) -> str:
    rates = f.tokens_per_s
    spread = f" ({min(rates):.1f}-{max(rates):.1f})" if len(rates) > 1 else ""
    cached = f"{f.cached_tokens / f.prompt_tokens:6.1%}" if f.prompt_tokens else "     ?"
    valid = "" if f.valid is None else f"   {f.valid}/{f.requests * len(rates)} follow the schema"
    return (
        f"{f.workload:<15}{f.requests:>5}{f.concurrency:>6}{statistics.median(rates):>10.1f}{spread:<16}"
        f"{f.ttft_p50_ms:>9.0f}{f.ttft_p99_ms:>9.0f}{f.token_ms:>9.1f}{cached:>9}{valid}"
    )


async def run(target: Target, names: list[str], repeats: int) -> list[Figures]:
    await target.ask(user("Say hello."), 8)
    print(
        f"{'workload':<15}{'reqs':>5}{'conc':>6}{'tok/s':>10}{'':<16}{'ttft p50':>9}{'p99 ms':>9}{'ms/tok':>9}  cached"
    )
    found = []
    for name in names:
        found.append(await measure(target, name, repeats))
        print(line(found[-1]), flush=True)
    await target.http.aclose()
    return found


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="a running server; without it the benchmark starts ours")
    parser.add_argument("--model", default="smollm2", help="the model to start, or to ask for at --url")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated: " + ", ".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=1, help="runs of each workload")
    parser.add_argument("--no-extensions", action="store_true", help="send only standard OpenAI fields")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--server-args", default="", help="more arguments for our server, in one string")
    parser.add_argument("--label", default="phloem", help="label in the name of the result file")
    parser.add_argument("--out", type=Path, help="the result file (default benchmarks/results/serving-LABEL.json)")
    args = parser.parse_args(argv)
    args.workloads = [name.strip() for name in args.workloads.split(",")]
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]!r}; they are: {', '.join(WORKLOADS)}")
    if args.url and not args.url.startswith("http://"):
        parser.error(f"--url {args.url}: must be http://HOST[:PORT]; the benchmark speaks no TLS")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    about = print_header()
    server = contextlib.nullcontext(args.url) if args.url else own_server(args.model, shlex.split(args.server_args))
    with server as url:
        target = Target(url, extensions=not args.no_extensions, model=args.model, api_key=args.api_key)
        found = asyncio.run(run(target, args.workloads, args.repeats))
    out = args.out or RESULTS / f"serving-{args.label}.json"
    save(out, {**about, "workloads": [asdict(f) for f in found]})
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
