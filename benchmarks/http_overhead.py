"""What HTTP costs: the throughput of 16 streams through ``phloem serve`` over that of the same streams at an engine.

The engine's client is ``protocol.Client`` in this process, without a server. Both have an engine process of their own
with the same flags; rounds alternate, so that both meet the same noise. The ratio is that of the medians.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.program_call import ProgramCall
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess

from . import RESULTS, print_header, save

BAR = 0.95


def prompts(number: int, streams: int) -> list[str]:
    return [f"Round {number}, request {index}: tell me about trees." for index in range(streams)]


def through_client(client: Client, number: int, streams: int, tokens: int) -> float:
    """Seconds until all of the round's streams have ended."""
    over = threading.Semaphore(0)
    heard = [0] * streams

    def hear_for(index: int) -> Callable[[object], None]:
        def hear(event: object) -> None:
            if isinstance(event, m.Delta):
                heard[index] += len(event.token_ids)
            elif isinstance(event, m.Closed):
                over.release()

        return hear

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    calls = []
    for index, prompt in enumerate(prompts(number, streams)):
        call = ProgramCall(client, hear_for(index))
        gen = o.Gen(op=1, seq=0, params=params, stream=True)
        call.submit([o.Text(op=0, seq=0, text=prompt), gen, o.Close(op=2, seq=0)])
        calls.append(call)
    for _ in calls:
        if not over.acquire(timeout=600):
            raise TimeoutError("the engine has not answered within 600 s")
    assert heard == [tokens] * streams, heard
    return time.perf_counter() - begin_s


async def through_http(port: int, number: int, streams: int, tokens: int) -> float:
    async def ask(prompt: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fields = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json"
        writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read(-1)
        assert b"data: [DONE]" in answer[-40:], answer[-300:]
        writer.close()

    begin_s = time.perf_counter()
    await asyncio.gather(*map(ask, prompts(number, streams)))
    return time.perf_counter() - begin_s


def measure_overhead(model: str, *, rounds: int, streams: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of each round, both ways; the first round warms up."""
    serve = [sys.executable, "-m", "phloem", "serve", model, "--port", "0"]
    found: dict[str, list[float]] = {"engine": [], "http": []}
    with (
        EngineProcess(EngineConfig(model=model)) as process,
        subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server,
    ):
        client = process.connect()
        try:
            assert server.stdout is not None
            said = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
            if said is None:
                raise RuntimeError("the server has ended before it was ready; its reason is above")
            for number in range(rounds + 1):
                seconds = {
                    "engine": through_client(client, number, streams, tokens),
                    "http": asyncio.run(through_http(int(said[1]), number, streams, tokens)),
                }
                for name, value in seconds.items() if number else ():
                    found[name].append(streams * tokens / value)
        finally:
            client.close()
            server.terminate()
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        print(f"{name:8}{medians[name]:10.1f} tok/s  ({min(values):.1f} to {max(values):.1f})")
    print(f"ratio   {medians['http'] / medians['engine']:10.3f}; bar: {BAR} or above")
    return {"tokens_per_s": found, "ratio": medians["http"] / medians["engine"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    about = print_header(model=args.model)
    measured = measure_overhead(args.model, rounds=args.rounds, streams=args.streams, tokens=args.tokens)
    save(RESULTS / "http_overhead.json", {"about": about, **measured})


if __name__ == "__main__":
    main()
