"""Seconds from the command ``phloem serve`` to the first token of an answer.

    python -m benchmarks.start [--model smollm2] [--rounds 5] [--first] [--save]

A later start finds compiled kernels and packed weights. ``--first`` measures one start more, with kernels in a new
folder, which it compiles: the first start on a machine. Processor time is that of all processes of the server.
"""

import argparse
import http.client
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

from . import RESULTS, print_header, save

LIMIT_S = 300.0
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}


def start(model: str, **environment: str) -> dict[str, float]:
    """Of one start: seconds until the server says that it is ready, until the first token, and of processors."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    cpu_s, began_s = _cpu_s(), time.perf_counter()
    command = [sys.executable, "-m", "phloem", "serve", model, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | environment)
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], LIMIT_S)[0] or not process.stdout.readline():
            raise SystemExit(f"{' '.join(command)}: not ready after {LIMIT_S:g} s")
        ready_s = time.perf_counter() - began_s
        _first_token(port, model)
        first_s = time.perf_counter() - began_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    return {"ready_s": round(ready_s, 3), "first_token_s": round(first_s, 3), "cpu_s": round(_cpu_s() - cpu_s, 2)}


def _first_token(port: int, model: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    body = json.dumps(QUESTION | {"model": model, "stream": True, "temperature": 0})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    while line := response.readline():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            return
    raise SystemExit("the stream has no token")


def _cpu_s() -> float:
    """Of children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", action="store_true", help="measure a start that compiles the kernels too")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/start.json")
    args = parser.parse_args()
    about: dict[str, Any] = print_header(model=args.model)
    if args.first:
        with tempfile.TemporaryDirectory() as kernels:
            about["first"] = start(args.model, NUMBA_CACHE_DIR=kernels)
        print("first start:", about["first"], flush=True)
    start(args.model)
    about["later"] = []
    for _ in range(args.rounds):
        about["later"].append(start(args.model))
        print("later start:", about["later"][-1], flush=True)
    print("median:", {key: median(one[key] for one in about["later"]) for key in about["later"][0]})
    if args.save:
        save(RESULTS / "start.json", about)


if __name__ == "__main__":
    main()
