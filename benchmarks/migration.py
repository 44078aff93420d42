"""The pause of a stream that moves from one engine to another while it runs, by the length of its text.

    python -m benchmarks.migration [--model smollm2] [--moves 10] [--lengths 256 1024 4096] [--out FILE]

Two replicas on this machine; one stream at a time, moved to and fro. Pause: from the last token of the source to the
first of the target. Beside it the usual time between two tokens, and the seconds that an engine takes to compute the
prompt, which is the pause of a replay without its KV. The text must equal that of a run without moves.
"""

import argparse
import itertools
import queue
import time
from pathlib import Path
from statistics import median
from typing import Any

import phloem
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.program_call import ProgramCall
from phloem.protocol.sampling import SamplingParams

from . import header, save

EVERY = 24  # tokens between two moves
WAIT_S = 120.0


class Stream:
    """One program; ``times`` are those of its tokens."""

    def __init__(self, runtime: phloem.Runtime, prompt_len: int, num_tokens: int, seed: int) -> None:
        self.times: list[float] = []
        self.token_ids: list[int] = []
        self.begun_s = time.perf_counter()
        self._pieces: queue.Queue[object] = queue.Queue()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, speculative=False)
        ids = tuple(1000 + (seed * 7919 + i * 31) % 20_000 for i in range(prompt_len))
        ops = [
            o.Special(op=0, seq=0, ids=ids),
            o.Gen(op=1, seq=0, params=params, stream=True),
            o.Close(op=2, seq=0),
        ]
        self.call = ProgramCall(runtime.client, self._take)
        self.call.submit(ops, None)

    def _take(self, event: object) -> None:
        if isinstance(event, m.Delta):
            self.times.append(time.perf_counter())
            self.token_ids += event.token_ids
        if isinstance(event, m.Delta | m.Closed):
            self._pieces.put(event)

    def hear(self, num: int) -> None:
        for _ in range(num):
            self._pieces.get(timeout=WAIT_S)

    def end(self) -> None:
        while not isinstance(self._pieces.get(timeout=WAIT_S), m.Closed):
            pass


def measure(runtime: phloem.Runtime, prompt_len: int, moves: int) -> dict[str, Any]:
    num_tokens = EVERY * (moves + 2)
    found = []
    for is_moving in (False, True):
        runtime.client.query("flush_cache")
        stream = Stream(runtime, prompt_len, num_tokens, prompt_len)
        stream.hear(EVERY)
        first_s = stream.times[0] - stream.begun_s
        pauses, copied = [], []
        for _ in range(moves if is_moving else 0):
            on = next(r["name"] for r in runtime.client.query("fleet")["replicas"] if r["programs"])
            began_s = time.perf_counter()
            moved = runtime.client.migrate(stream.call.program, "1" if on == "0" else "0").result(WAIT_S)
            ended_s = time.perf_counter()
            assert not moved.why, moved
            stream.hear(EVERY // 2)
            near = [at for at in stream.times if began_s - 0.5 <= at]
            pauses.append(max(b - a for a, b in itertools.pairwise(near) if b > ended_s - 0.2))
            copied.append((moved.blocks, ended_s - began_s))
        stream.end()
        found.append((stream, first_s, pauses, copied))
    (still, first_s, _, _), (moving, _, pauses, copied) = found
    assert still.token_ids == moving.token_ids, "the text of the stream that moved differs"
    gaps = [b - a for a, b in itertools.pairwise(still.times)]
    return {
        "prompt_tokens": prompt_len,
        "moves": len(pauses),
        "between_tokens_s": round(median(gaps), 4),
        "pause_p50_s": round(median(pauses), 4),
        "pause_max_s": round(max(pauses), 4),
        "prompt_s": round(first_s, 3),
        "first_move_blocks": copied[0][0],
        "first_move_s": round(copied[0][1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--moves", type=int, default=10)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with phloem.Runtime(model=args.model, replicas=2) as runtime:
        while sum(replica.state == "ready" for replica in runtime.fleet()) < 2:
            time.sleep(0.1)
        for prompt_len in args.lengths:
            rows.append(measure(runtime, prompt_len, args.moves))
            print(rows[-1], flush=True)
    if args.out is not None:
        save(args.out, header() | {"model": args.model, "runs": rows})


if __name__ == "__main__":
    main()
