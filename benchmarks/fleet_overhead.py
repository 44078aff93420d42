"""The overhead of ``FleetClient`` over ``Client``: time to first token, time per token, and time per delta.

The same requests go through a ``Client`` and a ``FleetClient`` with one engine, in turns, to the same engine process.
Wall times are noisy on a busy machine; the processor time of the client's process bounds what the fleet adds.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from phloem.cluster.client import FleetClient
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.journal import Journal
from phloem.protocol.program_call import ProgramCall
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess

NUM_TOKENS = 48
BATCH = 4  # requests of one client in a row; the mean of their times is one value
LABELS = {
    "first_s": "to the first token",
    "first_cpu_s": "the client's processor time until then",
    "token_s": "each later token",
    "cpu_s": f"the client's processor time, {NUM_TOKENS} tokens",
}
FIRST_TOKEN_BAR_S = 1e-3


def request(client: Client | FleetClient, number: int) -> dict[str, float]:
    """Of one stream: seconds to the first token and of a later token, and this process's CPU seconds until the first
    token and in all.
    """
    over = threading.Event()
    times: list[float] = []
    cpu_times: list[float] = []

    def hear(event: object) -> None:
        if isinstance(event, m.Delta):
            times.append(time.perf_counter())
            cpu_times.append(time.process_time())
        elif isinstance(event, m.Closed):
            over.set()

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ops: list[o.AnyOp] = [
        o.Text(op=0, seq=0, text=f"Request {number}: tell me about trees."),
        o.Gen(op=1, seq=0, params=params, stream=True),
        o.Close(op=2, seq=0),
    ]
    call = ProgramCall(client, hear)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    call.submit(ops)
    if not over.wait(120.0):
        raise TimeoutError("the engine has not answered within 120 s")
    cpu_s = time.process_time() - begin_cpu_s
    return {
        "first_s": times[0] - begin_s,
        "first_cpu_s": cpu_times[0] - begin_cpu_s,
        "token_s": (times[-1] - times[0]) / (len(times) - 1),
        "cpu_s": cpu_s,
    }


def in_turns(clients: dict[str, Client | FleetClient], rounds: int) -> dict[str, dict[str, list[float]]]:
    """The mean times of ``rounds`` batches, by client. The client that goes first changes with every round."""
    found: dict[str, dict[str, list[float]]] = {name: {what: [] for what in LABELS} for name in clients}
    names = list(clients)
    for number in range(-1, rounds):
        names.reverse()
        for name in names:
            batch = [request(clients[name], number) for _ in range(BATCH)]
            for what in LABELS if number >= 0 else ():  # the first requests warm up
                found[name][what].append(statistics.mean(times[what] for times in batch))
    return found


def delta_s(take: Callable[[m.Delta], object], *, times: int = 50_000) -> float:
    """CPU seconds of one call, the best of five."""
    delta = m.Delta("p", 1, " tree", (4321,))
    best = float("inf")
    for _ in range(5):
        start_s = time.process_time()
        for _ in range(times):
            take(delta)
        best = min(best, (time.process_time() - start_s) / times)
    return best


def journal_delta_s() -> float:
    journal = Journal("p", max_bytes=1 << 40)
    journal.sent(m.Submit("p", [o.Gen(op=1, seq=0, stream=True)]))
    journal.came(m.Accepted("p"))
    return delta_s(journal.came)


def measure_overhead(model: str, rounds: int) -> dict[str, Any]:
    """Send ``rounds`` batches of requests through each client and print a table."""
    with EngineProcess(EngineConfig(model=model)) as process:
        fleet = FleetClient(tokenize=lambda ops: [])
        fleet.add("0", process.connect())
        client = process.connect()
        found = in_turns({"client": client, "fleet": fleet}, rounds)
        client.close()
        fleet.close()
    made: dict[str, Any] = {"journal_delta_s": journal_delta_s(), **compared(found, "fleet")}
    print(f"the journal's part of a delta: {1e6 * made['journal_delta_s']:.2f} microseconds of processor time")
    print(f"bar: {1e3 * FIRST_TOKEN_BAR_S:g} ms to the first token")
    return made


def compared(found: dict[str, dict[str, list[float]]], other: str) -> dict[str, Any]:
    """Print and return the times of ``client`` beside those of ``other``."""
    made: dict[str, Any] = {}
    for what in LABELS:
        pairs = zip(found[other][what], found["client"][what], strict=True)
        differences = sorted(a - b for a, b in pairs)
        low, high = differences[len(differences) // 4], differences[3 * len(differences) // 4]
        made[what] = {
            "client": statistics.median(found["client"][what]),
            other: statistics.median(found[other][what]),
            "difference": statistics.median(differences),
            "quartiles": (low, high),
        }
    print(f"{'ms, medians':34}{'client':>10}{other:>10}{'difference':>12}  quartiles of the difference")
    for what, label in LABELS.items():
        row = made[what]
        low, high = (1e3 * value for value in row["quartiles"])
        values = [1e3 * row[name] for name in ("client", other, "difference")]
        print(f"{label:34}{values[0]:10.3f}{values[1]:10.3f}{values[2]:12.3f}  {low:.3f} .. {high:.3f}")
    return made
