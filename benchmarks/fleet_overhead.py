"""What a fleet's client costs over a plain one: the time to the first token, the time of a token, and of a delta.

    python -m benchmarks.fleet_overhead [--model smollm2] [--save]

The same requests go through a ``Client`` and a ``FleetClient`` with one engine, in turns, to the same engine process.
Wall times are noisy on a busy machine; the processor time of the client's process bounds what the fleet adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from phloem.cluster.client import FleetClient
from phloem.cluster.journal import Journal
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.program_call import ProgramCall
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess

from . import RESULTS, header

NUM_TOKENS = 48
LABELS = {
    "first_s": "to the first token",
    "token_s": "each later token",
    "cpu_s": f"processor time of {NUM_TOKENS} tokens' client",
}
FIRST_TOKEN_BAR_S = 1e-3


def request(client: Client | FleetClient, number: int) -> dict[str, float]:
    """Of one stream: seconds to the first token, seconds of each later token, and this process's processor seconds."""
    over = threading.Event()
    times: list[float] = []

    def hear(event: object) -> None:
        if isinstance(event, m.Delta):
            times.append(time.perf_counter())
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
    return {"first_s": times[0] - begin_s, "token_s": (times[-1] - times[0]) / (len(times) - 1), "cpu_s": cpu_s}


def in_turns(clients: dict[str, Client | FleetClient], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By client, the times of ``rounds`` requests each. Who goes first changes with every round."""
    found: dict[str, dict[str, list[float]]] = {name: {what: [] for what in LABELS} for name in clients}
    names = list(clients)
    for number in range(-4, rounds):
        names.reverse()
        for name in names:
            times = request(clients[name], number)
            for what, value in times.items() if number >= 0 else ():  # the others warm up
                found[name][what].append(value)
    return found


def delta_s(take: Callable[[m.Delta], object], *, times: int = 50_000) -> float:
    """Processor seconds of one call, the best of five."""
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


def measure(model: str, rounds: int) -> dict[str, Any]:
    with EngineProcess(EngineConfig(model=model)) as process:
        fleet = FleetClient(tokenize=lambda ops: [])
        fleet.add("0", process.connect())
        client = process.connect()
        found = in_turns({"client": client, "fleet": fleet}, rounds)
        client.close()
        fleet.close()
    made: dict[str, Any] = {"journal_delta_s": journal_delta_s()}
    for what in LABELS:
        pairs = zip(found["fleet"][what], found["client"][what], strict=True)
        differences = sorted(a - b for a, b in pairs)
        low, high = differences[len(differences) // 4], differences[3 * len(differences) // 4]
        made[what] = {
            "client": statistics.median(found["client"][what]),
            "fleet": statistics.median(found["fleet"][what]),
            "difference": statistics.median(differences),
            "quartiles": (low, high),
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    about = header()
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    made = measure(options.model, options.rounds)
    print(f"{'ms, medians':34}{'client':>10}{'fleet':>10}{'difference':>12}  quartiles of the difference")
    for what, label in LABELS.items():
        row = made[what]
        low, high = (1e3 * value for value in row["quartiles"])
        client, fleet, difference = (1e3 * row[name] for name in ("client", "fleet", "difference"))
        print(f"{label:34}{client:10.3f}{fleet:10.3f}{difference:12.3f}  {low:.3f} .. {high:.3f}")
    print(f"the journal's part of a delta: {1e6 * made['journal_delta_s']:.2f} microseconds of processor time")
    print(f"bar: {1e3 * FIRST_TOKEN_BAR_S:g} ms to the first token")
    if options.save:
        path = RESULTS / "fleet_overhead.json"
        path.write_text(json.dumps({**about, "figures": made}, indent=1) + "\n")
        print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
