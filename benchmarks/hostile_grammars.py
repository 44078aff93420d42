"""The delay of other requests by grammars that are hard to compile or to follow: the gaps between tokens of a stream.

    python -m benchmarks.hostile_grammars [--data schemas.jsonl] [--save]

One client streams text that seldom repeats itself, since drafts of repeated text make long steps. Another client
requests each grammar twice, and with ``--data`` all its schemas, four at a time; between two grammars the stream is
alone. The first row has the same requests without a grammar: what a grammar adds is the difference to it. Times are
milliseconds between two pieces of text at the streaming client. Of the engine, the table has the tokens that were
accepted late because of their masks, the seconds of the thread that makes masks, and the milliseconds for which steps
waited for it. The answers under grammars are not judged: the server may refuse a grammar or stop an answer.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import phloem
from phloem.constrained import GrammarSpec
from phloem.protocol.errors import PhloemError

from . import RESULTS, header, save

PROMPT = "Tell a long story about a lighthouse. "
QUIET_S = 4.0  # before and after, alone
PAUSE_S = 1.0  # between two grammars, alone
ENGINE = {"deferred": "masks_deferred", "thread_s": "mask_thread_seconds", "wait_ms": "mask_wait_seconds"}


def _ranges(count: int) -> list[dict[str, Any]]:
    """Objects that overlap their neighbours in the names and bounds of their properties."""
    return [
        {
            "type": "object",
            "properties": {f"p{j}": {"type": "integer", "minimum": i} for j in range(max(0, i - 2), i + 3)},
            "required": [f"p{i % 7}"],
        }
        for i in range(count)
    ]


def _branches(key: str) -> list[dict[str, Any]]:
    return [{"properties": {f"a{i}": {"type": "string"}}, key: [f"a{i}"]} for i in range(12)]


def _text(pattern: str, **bounds: int) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, **bounds}


SCHEMAS: dict[str, dict[str, Any]] = {
    "oneOf of 40 objects": {"oneOf": _ranges(40)},
    "oneOf of 40 patterns": {"oneOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(40)]},
    "12 contains": {"type": "array", "allOf": [{"contains": {"minimum": i, "maximum": i + 5}} for i in range(12)]},
    "unevaluated of 12": {"anyOf": _branches("required"), "unevaluatedProperties": False},
    "8 ifs": {
        "type": "object",
        "allOf": [
            {
                "if": {"properties": {f"k{i}": {"const": 1}}},
                "then": {"required": [f"m{i}"]},
                "else": {"maxProperties": 20},
            }
            for i in range(8)
        ],
    },
    "unique items": {"type": "array", "uniqueItems": True, "minItems": 20},
    "unique of 400 names": {
        "type": "array",
        "items": {"enum": [f"name {i * 7919 % 1009}" for i in range(400)]},
        "uniqueItems": True,
        "minItems": 12,
    },
    "oneOf of 12 objects": {"oneOf": _ranges(12)},
    "patterns, maxLength 200": {
        "type": "object",
        "properties": {f"p{i}": _text(f"(foo|ba[rz]{i})+x?[0-9]", maxLength=200) for i in range(4)},
        "required": [f"p{i}" for i in range(4)],
    },
    "nested wide repeats": {
        "type": "array",
        "items": _text("^(([a-z]{1,20}[0-9]{0,9}){1,30}[,;]){2,40}$"),
        "minItems": 3,
    },
    "oneOf of 2 lengths": {
        "oneOf": [
            _text("^(\\S+\\s+){0,19}\\S+$", maxLength=120),
            _text("^([a-z]+ ){2,30}[a-z]+[.]$", minLength=30, maxLength=90),
        ]
    },
}
GRAMMARS: dict[str, GrammarSpec | None] = {
    "no grammar": None,  # the delay by the other request alone
    **{name: GrammarSpec("json_schema", json.dumps(schema)) for name, schema in SCHEMAS.items()},
    "20,000 words": GrammarSpec("regex", "|".join(f"word{i * 7919 % 100_003}x" for i in range(20_000))),
    "(a|b)*a(a|b){12}": GrammarSpec("regex", "(a|b)*a(a|b){12}"),
    "(x[a-z]{1,50}y?){1,500}": GrammarSpec("regex", "(x[a-z]{1,50}y?){1,500}"),
}


class Listener:
    """Streams one answer after the other. Records the gaps between pieces of text by the grammar that ran beside."""

    def __init__(self, runtime: phloem.Runtime) -> None:
        self.beside = "alone"
        self.gaps_ms: dict[str, list[float]] = defaultdict(list)
        self._runtime = runtime
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()))
        self._thread.start()

    async def _listen(self) -> None:
        while not self._stopping.is_set():
            last = 0.0
            # The penalty keeps the text from repeating itself, since drafts of repeated text make long steps.
            params = {"max_tokens": 400, "temperature": 0.8, "frequency_penalty": 1.0, "ignore_eos": True}
            async for _ in self._runtime.async_generate(PROMPT, params):
                now = time.perf_counter()
                if last:
                    self.gaps_ms[self.beside].append(1e3 * (now - last))
                last = now
                if self._stopping.is_set():
                    return

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def measure(model: str, data: Path | None) -> dict[str, dict[str, float]]:
    work: dict[str, dict[str, float]] = {}
    gc.disable()  # one collection in this process, which is not the engine's, took 38 ms
    with phloem.Runtime(model=model) as runtime:
        listener = Listener(runtime)
        try:
            time.sleep(QUIET_S)
            for name, grammar in GRAMMARS.items():
                before = runtime.metrics()
                listener.beside = name
                for seed in range(2):
                    _ask(runtime, grammar, seed)
                listener.beside = "alone"
                work[name] = _work(before, runtime.metrics())
                time.sleep(PAUSE_S)
            if data is not None:
                before = runtime.metrics()
                listener.beside = f"schemas of {data.name}"
                with data.open() as lines:
                    specs = [GrammarSpec("json_schema", json.loads(line)["text"]) for line in lines]
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda spec: _ask(runtime, spec, 1), specs))
                work[listener.beside] = _work(before, runtime.metrics())
            listener.beside = "alone"
            time.sleep(QUIET_S)
        finally:
            listener.stop()
    return {name: _summary(gaps) | work.get(name, {}) for name, gaps in listener.gaps_ms.items()}


def _work(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """What the engine did for masks between two reports."""
    scale = {"deferred": 1, "thread_s": 1, "wait_ms": 1e3}
    return {name: round(scale[name] * (after[key] - before[key]), 1) for name, key in ENGINE.items()}


def _ask(runtime: phloem.Runtime, grammar: GrammarSpec | None, seed: int) -> None:
    with contextlib.suppress(PhloemError):  # a refusal is fine here
        runtime.generate("Say: ", grammar=grammar, max_tokens=60, temperature=1.0, seed=seed)


def _summary(gaps_ms: list[float]) -> dict[str, float]:
    ordered = sorted(gaps_ms)
    at = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * len(ordered))], "max": ordered[-1]}
    return {"pieces": len(ordered), **{name: round(value, 1) for name, value in at.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="schemas, one JSON a line with a field text")
    parser.add_argument(
        "--save", action="store_true", help="write the figures to benchmarks/results/hostile_grammars.json"
    )
    args = parser.parse_args()
    found = measure(args.model, args.data)
    columns = ("pieces", "p50", "p99", "max", *ENGINE)
    print(f"{'beside':30}", *(f"{column:>8}" for column in columns))
    for name, row in found.items():
        print(f"{name:30}", *(f"{row.get(column, ''):>8}" for column in columns))
    if args.save:
        save(RESULTS / "hostile_grammars.json", header() | {"gaps_ms": found})


if __name__ == "__main__":
    main()
