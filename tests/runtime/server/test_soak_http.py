"""Many streams while some clients leave and others dribble or never read: no text is lost, and all comes back.

A short run by default: one round of few streams. ``make soak-http`` runs rounds of 1,024 streams, 256 at once, beside
200 bad connections, for ``PHLOEM_SOAK_HTTP_MINUTES``, and checks that memory stays flat.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import socket
import statistics
import sys
import time
from pathlib import Path

import httpx
from phloem.tests.runtime.server.test_serve import address, children, running
from phloem.tests.runtime.wire import wait_until

MINUTES = float(os.environ.get("PHLOEM_SOAK_HTTP_MINUTES", "0"))
AT_ONCE, PER_ROUND, NUM_BAD = (256, 1024, 200) if MINUTES else (16, 32, 12)
LEAVING = 0.1  # of the streams
MAX_GROWTH = 0.05  # of resident memory, from the first quarter of the rounds to the last

log = logging.getLogger(__name__)


def body_of(index: int) -> dict[str, object]:
    """One of 24 requests, so that the cache holds some and evicts others."""
    prompt = f"request {index % 24} " * (1 + index % 7)
    tokens = 40 + 8 * (index % 24)
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}


def head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % length
    )


def text_of(answer: bytes) -> str:
    """The text of a whole stream; fails where it did not end as it should."""
    headers, _, rest = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 "), answer[:300]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    *events, last = filter(None, body.decode().split("\n\n"))
    assert last == "data: [DONE]", last
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


async def stream(port: int, index: int, rng: random.Random | None) -> str | None:
    """The answer's text; None where the client left it, as it does with an ``rng`` that says so."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(body_of(index)).encode()
        writer.write(head(len(body)) + body)
        if rng is not None and rng.random() < LEAVING:
            await reader.read(rng.randint(1, 4000))
            return None
        return text_of(await reader.read(-1))
    finally:
        writer.transport.abort()


async def misbehave(port: int, index: int) -> None:
    """A connection that dribbles its headers, or asks and never reads, until the server ends it; then another one."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=connection, limit=1)
            try:
                if index % 2:
                    for byte in head(10) * 1000:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        if reader.at_eof():
                            break
                        await asyncio.sleep(0.1)
                else:
                    body = json.dumps(body_of(index) | {"max_tokens": 400, "logprobs": 20}).encode()
                    writer.write(head(len(body)) + body)
                    while not writer.transport.is_closing() and not reader.at_eof():
                        await asyncio.sleep(0.1)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.05)


async def play_round(port: int, expected: dict[int, str], rng: random.Random) -> int:
    """``PER_ROUND`` streams, ``AT_ONCE`` at a time, beside the bad connections; the number that was read to its end."""
    bad = [asyncio.ensure_future(misbehave(port, index)) for index in range(NUM_BAD)]
    waiting = list(range(PER_ROUND))
    rng.shuffle(waiting)
    num_read = 0

    async def work() -> None:
        nonlocal num_read
        while waiting:
            index = waiting.pop()
            text = await stream(port, index, rng)
            if text is not None:
                assert text == expected[index % 168]
                num_read += 1

    try:
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    finally:
        for task in bad:
            task.cancel()
        await asyncio.gather(*bad, return_exceptions=True)
    return num_read


def numbers(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=300).text
    return {name: float(value) for name, value in re.findall(r'^(phloem_\w+?)(?:\{replica="0"\})? (\S+)$', text, re.M)}


def is_at_rest(url: str) -> bool:
    """No program runs, this request is the only one, and each slot is free or cached."""
    now = numbers(url)
    used = now["phloem_engine_slots_locked"] + now["phloem_engine_slots_leased"]
    counts = [now[f"phloem_engine_{name}"] for name in ("programs", "running", "waiting")]
    return used == 0 and not any(counts) and now["phloem_http_requests_in_flight"] == 1


def resident_mb(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) / 1000


def test_streams_survive_clients_that_leave_dribble_and_never_read(tiny_model_path):
    command = [sys.executable, "-m", "phloem", "serve", str(tiny_model_path), "--port", "0", "--precision", "float32"]
    command += ["--num-threads", "1", "--num-slots", "16384", "--header-timeout-s", "2", "--write-timeout-s", "2"]
    rng, end_s = random.Random(7), time.monotonic() + 60 * MINUTES
    with running(command) as server:
        url = re.search(r"http://127\.0\.0\.1:(\d+)", address(server))
        port = int(url[1])
        # 168 = 24 * 7 requests differ; alone, each gives what it gives under load
        expected = {i: asyncio.run(stream(port, i, None)) for i in range(min(168, PER_ROUND))}
        memory: list[float] = []
        while True:
            num_read = asyncio.run(play_round(port, expected, rng))
            assert PER_ROUND * 0.7 < num_read < PER_ROUND
            wait_until(lambda: is_at_rest(url[0]))
            parts = [resident_mb(pid) for pid in (server.pid, *children(server.pid))]
            memory.append(sum(parts))
            shown = " + ".join(f"{part:.0f}" for part in parts)
            log.info("round %d: %d streams read, server and engine %s MB", len(memory), num_read, shown)
            if time.monotonic() >= end_s:
                break
    if len(memory) >= 8:
        quarter = len(memory) // 4
        first, last = statistics.median(memory[:quarter]), statistics.median(memory[-quarter:])
        assert last < first * (1 + MAX_GROWTH), f"{first:.0f} MB became {last:.0f} MB in {len(memory)} rounds"
