"""Phloem against other engines on the same model file, prompts, schemas and cores.

    python -m benchmarks.vs_peers --out benchmarks/results/vs_peers.json
    python -m benchmarks.vs_peers --model qwen2.5-coder-1.5b --peers phloem,openvino --only single,concurrent

Installed peers are measured. ``--llama-server`` (or $LLAMA_SERVER): the path of llama.cpp's server, built for the same
instruction set as ours, with ``-DGGML_NATIVE=ON``, or for ``--cpu-isa avx2`` with ``-DGGML_NATIVE=OFF -DGGML_AVX2=ON
-DGGML_FMA=ON -DGGML_F16C=ON``. ``--openvino-python`` ($OPENVINO_PYTHON): a Python with openvino-genai.
``--transformers-python`` ($TRANSFORMERS_PYTHON): a Python with transformers, gguf and accelerate; this one by default.
One engine runs at a time, and each repeat starts with an empty cache. Figures that ``--out`` already holds are kept, so
several runs can fill one table. Use an idle machine: other programs slow the engines by different factors.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phloem import cpu_isa, processor

from . import RESULTS, header, save
from .llama_cpp import llama_server
from .quality import measure_quality
from .serving import WORKLOADS, Answer, Figures, Messages, Target, measure, own_server

PEERS = ("phloem", "llama.cpp", "openvino", "transformers")
SCRIPTS = {"openvino": "openvino_genai_peer.py", "transformers": "transformers_peer.py"}
SMALL = "smollm2"
SLOW_PEER = {"shared-prefix", "json-schema", "chats"}  # transformers has no cache between calls and no grammars
COUNTS = {"concurrent": 16, "classification": 16, "json-schema": 16}  # workloads of models larger than the small one


@dataclass(frozen=True, slots=True)
class Bar:
    """Our speed is at least ``factor`` times the peer's; with ``first_token`` our time is at most so much of theirs."""

    workload: str
    peer: str
    factor: float
    first_token: bool = False


BARS = {
    SMALL: (
        Bar("single", "llama.cpp", 1.0),
        Bar("concurrent", "openvino", 1.0),
        Bar("concurrent", "llama.cpp", 2.2),
        Bar("shared-prefix", "openvino", 5.0),
        Bar("classification", "openvino", 5.0),
        Bar("json-schema", "openvino", 1.3),
        Bar("chats", "llama.cpp", 1.6),
        Bar("chats", "llama.cpp", 0.4, first_token=True),
    ),
    "qwen2.5-coder-1.5b": (
        Bar("single", "llama.cpp", 0.9),
        Bar("concurrent", "openvino", 1.0),
        Bar("json-schema", "openvino", 1.3),
        Bar("classification", "openvino", 8.0),
    ),
}


# Bars for one instruction set, either forced or the best that the CPU has.
ISA_BARS = {
    ("amx", SMALL): (
        Bar("single", "openvino", 2.0),
        Bar("concurrent", "openvino", 1.5),
        Bar("shared-prefix", "openvino", 8.0),
        Bar("classification", "openvino", 8.0),
        Bar("json-schema", "openvino", 2.0),
    ),
    ("amx", "qwen2.5-coder-1.5b"): (
        Bar("concurrent", "openvino", 3.0),
        Bar("shared-prefix", "openvino", 8.0),
        Bar("classification", "openvino", 10.0),
        Bar("json-schema", "openvino", 3.5),
    ),
    ("avx2", SMALL): (
        Bar("single", "llama.cpp", 1.0),
        Bar("concurrent", "llama.cpp", 2.0),
        Bar("shared-prefix", "llama.cpp", 5.0),
        Bar("classification", "llama.cpp", 5.0),
        Bar("json-schema", "llama.cpp", 2.0),
    ),
}


class PeerFailed(RuntimeError):
    """A peer behind a pipe refused a request, or ended."""


class Piped:
    """An engine behind the line protocol of ``benchmarks.peers``. Its requests raise ``PeerFailed``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.name = ""

    async def ready(self) -> None:
        line = await asyncio.wait_for(self._out.readline(), 600)
        if not line:
            raise PeerFailed("the peer ended before it was ready")
        self.name = json.loads(line)["ready"]
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while line := await self._out.readline():
            answer = json.loads(line)
            future = self._waiting.pop(answer.pop("id"))
            if not future.done():  # cancelled: nobody waits for this answer
                future.set_result(answer)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerFailed(f"{self.name} ended in the middle of its work"))

    async def ask(self, messages: Messages, max_tokens: int, *, to_the_end: bool = False, **more: Any) -> Answer:
        form = more.pop("response_format", None)
        assert not more, more
        schema = form and form["json_schema"]["schema"]
        return await self.request(messages, max_tokens, to_the_end=to_the_end, schema=schema)

    async def request(self, prompt: Messages | str, max_tokens: int, *, to_the_end: bool, **more: Any) -> Answer:
        """Send a conversation or plain text; ``more``: further fields of a request of ``benchmarks.peers``."""
        if self._reader is None or self._reader.done():
            raise PeerFailed(f"{self.name or 'the peer'} is not running")
        where = {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
        request = {"id": next(self._ids), **where, "max_tokens": max_tokens, "to_the_end": to_the_end, **more}
        future = self._waiting[request["id"]] = asyncio.get_running_loop().create_future()
        self._in.write(json.dumps(request).encode() + b"\n")
        answer = await future
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return Answer(cached_tokens=0, **answer)

    async def flush(self) -> None:
        """Does nothing: a fresh process has an empty cache."""


@contextlib.asynccontextmanager
async def piped(command: list[str]) -> AsyncIterator[Piped]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24
    )
    try:
        peer = Piped(process)
        await peer.ready()
        yield peer
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.terminate()
        await process.wait()


async def ask_server(url: str, model: str, name: str, repeats: int, count: int) -> Figures:
    """Only our server has ``flush_cache``; ours and llama.cpp's take ``ignore_eos``."""
    target = Target(url, extensions=True, model=model, can_flush=False, keep_alive=False)
    await target.ask([{"role": "user", "content": "Say hello."}], 8)
    figures = await measure(target, name, repeats, count=count)
    await target.http.aclose()
    return figures


async def ask_pipe(command: list[str], name: str, count: int) -> tuple[Figures, str]:
    async with piped(command) as peer:
        await peer.ask([{"role": "user", "content": "Say hello."}], 8, to_the_end=True)
        return await measure(peer, name, 1, count=count), peer.name


class Run:
    """The measurements of one invocation. ``results``: the figures in the file."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        self.args, self.path = args, path
        self.commands = installed(args)

    def one(self, peer: str, workload: str) -> Figures:
        """Run every repeat in a fresh process, so that each starts with an empty cache."""
        args = self.args
        count = args.count or (0 if args.model == SMALL else COUNTS.get(workload, 0))
        found = []
        for _ in range(args.repeats):
            if peer == "phloem":
                flags = ["--num-threads", str(args.threads), "--cpu-isa", args.cpu_isa, *shlex.split(args.server_args)]
                with own_server(args.model, flags) as url:
                    found.append(asyncio.run(ask_server(url, args.model, workload, 1, count)))
            elif peer == "llama.cpp":
                with llama_server(self.commands[peer], self.path, args.threads) as url:
                    found.append(asyncio.run(ask_server(url, args.model, workload, 1, count)))
            else:
                script = Path(__file__).parent / "peers" / SCRIPTS[peer]
                command = [self.commands[peer], str(script), str(self.path), str(args.threads)]
                found.append(asyncio.run(ask_pipe(command, workload, count))[0])
        return joined(found)


def joined(runs: list[Figures]) -> Figures:
    """The medians of the runs' times. Counts are those of one run; ``valid`` is the smallest."""
    first = runs[0]
    first.tokens_per_s = [rate for run in runs for rate in run.tokens_per_s]
    first.wall_s = [wall for run in runs for wall in run.wall_s]
    for name in ("ttft_p50_ms", "ttft_p99_ms", "token_ms"):
        setattr(first, name, statistics.median(getattr(run, name) for run in runs))
    if first.valid is not None:
        first.valid = min(run.valid or 0 for run in runs)
    return first


def installed(args: argparse.Namespace) -> dict[str, str]:
    """The installed peers, each with the function that starts it."""
    found = {"phloem": sys.executable}
    if args.llama_server:
        found["llama.cpp"] = args.llama_server
    if args.openvino_python:
        found["openvino"] = args.openvino_python
    if args.transformers_python:
        found["transformers"] = args.transformers_python
    elif all(map(importlib.util.find_spec, ("transformers", "gguf", "accelerate"))):
        found["transformers"] = sys.executable
    return found


# -- the table --------------------------------------------------------------------------------------------------------


def speed(figures: dict[str, Any]) -> float:
    """Tokens per second if the number of tokens is fixed; answers per second if the model ends its answers."""
    wall = statistics.median(figures["wall_s"])
    return float((figures["requests"] if figures["workload"] == "json-schema" else figures["output_tokens"]) / wall)


def bars(model: str, isa: str) -> tuple[Bar, ...]:
    return ISA_BARS.get((isa, model), BARS.get(model, ()))


def table(model: str, isa: str, results: dict[str, dict[str, Any]]) -> Iterator[str]:
    peers = [peer for peer in PEERS if any(peer in row for row in results.values())]
    yield f"\n{model}: tok/s (median), seconds for the whole, TTFT p50"
    yield f"{'work':<16}" + "".join(f"{peer:>34}" for peer in peers)
    for workload in WORKLOADS:
        if row := results.get(workload):
            yield f"{workload:<16}" + "".join(f"{cell(row.get(peer)):>34}" for peer in peers)
    yield f"\n{'bar':<44}{'must be':>10}{'is':>8}"
    for bar in bars(model, isa):
        row = results.get(bar.workload, {})
        if "phloem" not in row or bar.peer not in row:
            yield f"{named(bar):<44}{bar.factor:>10}{'-':>8}   not measured"
            continue
        ours, theirs = row["phloem"], row[bar.peer]
        if bar.first_token:
            ratio = ours["ttft_p50_ms"] / theirs["ttft_p50_ms"]
            holds = ratio <= bar.factor
        else:
            ratio = speed(ours) / speed(theirs)
            holds = ratio >= bar.factor and ours["valid"] in (None, ours["requests"])
        yield f"{named(bar):<44}{bar.factor:>10}{ratio:>8.2f}   {'holds' if holds else 'MISSED'}"


def named(bar: Bar) -> str:
    what = "time to first token" if bar.first_token else "speed"
    return f"{bar.workload}: {what} over {bar.peer}'s"


def cell(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "-"
    wall = statistics.median(figures["wall_s"])
    valid = "" if figures["valid"] is None else f" {figures['valid']}/{figures['requests']}"
    return f"{figures['output_tokens'] / wall:.0f} tok/s {wall:.2f} s {figures['ttft_p50_ms']:.0f} ms{valid}"


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vs_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = [*WORKLOADS, "quality"]
    parser.add_argument("--model", default=SMALL, help="an alias or a .gguf file (default: %(default)s)")
    parser.add_argument("--only", default=",".join(parts), help="comma-separated: " + ", ".join(parts))
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated: " + ", ".join(PEERS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload by each engine")
    parser.add_argument("--count", type=int, default=0, help="requests of each workload, for a quick look; 0: all")
    parser.add_argument("--threads", type=int, default=processor.num_cores(), help="of every engine")
    parser.add_argument("--quality-tokens", type=int, default=4096, help="tokens of text to measure quality on")
    parser.add_argument(
        "--cpu-isa",
        choices=[one.name for one in cpu_isa.available()],
        default=cpu_isa.available()[0].name,
        help="our instruction set (default: %(default)s)",
    )
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER"))
    parser.add_argument("--openvino-python", default=os.environ.get("OPENVINO_PYTHON"))
    parser.add_argument("--transformers-python", default=os.environ.get("TRANSFORMERS_PYTHON"))
    parser.add_argument("--server-args", default="", help="more arguments for our server, in one string")
    parser.add_argument("--out", type=Path, help="(default: vs_peers.json for avx512_vnni, else vs_peers-ISA.json)")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = RESULTS / ("vs_peers.json" if args.cpu_isa == "avx512_vnni" else f"vs_peers-{args.cpu_isa}.json")
    for option, known in (("only", parts), ("peers", PEERS)):
        names = [name.strip() for name in getattr(args, option).split(",")]
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option}: {unknown[0]!r} is not one of: {', '.join(known)}")
        setattr(args, option, names)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    from phloem.runtime.weights.resolve import resolve_model

    args = parsed(argv)
    path = resolve_model(args.model)
    run = Run(args, path)
    held: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"models": {}}
    held |= header() | {"cpu_isa": args.cpu_isa}
    entry = held["models"].setdefault(args.model, {"workloads": {}})
    print(*(f"{key}: {value}" for key, value in held.items() if key != "models"), sep="\n")
    missing = [peer for peer in args.peers if peer not in run.commands]
    if missing:
        print(f"not installed: {', '.join(missing)}")

    for workload in args.only:
        for peer in args.peers if workload != "quality" else ():
            if peer in missing or (peer == "transformers" and workload in SLOW_PEER):
                continue
            found = asdict(run.one(peer, workload))
            entry["workloads"].setdefault(workload, {})[peer] = {**found, "commit": held["commit"]}
            print(f"{workload:<16}{peer:<14}{cell(found)}", flush=True)
            save(args.out, held)
    if "quality" in args.only:
        entry["quality"] = [asdict(q) for q in measure_quality(path, ["auto"], args.quality_tokens, args.threads)]
        save(args.out, held)
    print(*table(args.model, args.cpu_isa, entry["workloads"]), sep="\n")
    for q in entry.get("quality", ()):
        print(
            f"quality of precision {q['precision']} ({q['describe']}): perplexity {q['perplexity']:.3f}, float32's "
            f"{q['reference_perplexity']:.3f}; top-1 agreement {q['top1']:.1%} of {q['tokens']:,} tokens"
        )
    print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
