"""The host's cost of a step: everything except the model. A stand-in returns constant results at once.

    python -m benchmarks.host_work --rows 256

On a GPU the host's part of a step is hidden while it is shorter than the device's part (``docs/gpu.md``). Measuring it
needs no GPU: the loop runs one step ahead of a stand-in device whose model computes nothing. Times are CPU times,
because other programs on the machine change them less than wall times.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from phloem import kernels
from phloem.kernels.backend import CPU, using
from phloem.protocol.messages import Submit
from phloem.protocol.ops import Close, Gen, GrammarSpec, Special
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.executor.stand_in import StandIn, StandInGraph

from . import header
from .shapes import write_shape

STEPS = 200
LETTERS = range(97, 123)
KINDS = (  # what all sequences do: name, grammar, whether their deltas are streamed
    ("free text", "", False),
    ("a grammar each", "[a-z]*", False),
    ("a grammar, all in step", "[a-z]{900}", False),
    ("streamed", "", True),
)


class Nothing:
    """A graph that computes nothing."""

    def replay(self) -> None: ...


class Idle(StandIn):
    """A device whose graphs give the same result at every replay."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[StandInGraph, torch.Tensor]:
        return Nothing(), run()


def measure(num_rows: int, *, grammar: str, stream: bool = False) -> tuple[float, float]:
    """Milliseconds of a decode step of ``num_rows`` sequences: median and least. Each sequence draws random letters."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape("Qwen3-0.6B", Path(folder), is_toy=True)
        config = EngineConfig(
            model=str(path),
            weights="random",
            precision="float32",
            max_running=num_rows,
            max_waiting=num_rows + 1,
            num_slots=num_rows * 1024,
            max_seq_len=1024,
            max_step_tokens=8192,
            speculative="off",
            num_threads=1,
        )
        engine = EngineCore(config, accelerator=Idle())
    logits = torch.zeros(num_rows, engine.vocab_size)

    def head(features: torch.Tensor, blocks: object, out: torch.Tensor | None) -> torch.Tensor:
        return logits[: len(features)] if out is None else out

    engine.executor._head = head
    letters = torch.randint(LETTERS.start, LETTERS.stop, (64, num_rows))
    zeros, turns = torch.zeros(num_rows), itertools.cycle(range(len(letters)))

    def sample(logits: torch.Tensor, batch: kernels.SampleBatch, **masks: object) -> kernels.batch.Sampled:
        return kernels.batch.Sampled(letters[next(turns), : len(logits)], zeros[: len(logits)])

    inbox = []
    for i in range(num_rows):
        params = SamplingParams(max_tokens=900, temperature=0.6, ignore_eos=True, seed=i)
        spec = GrammarSpec("regex", grammar) if grammar else None
        gen = Gen(op=1, seq=0, params=params, grammar=spec, stream=stream)
        ops = [Special(op=0, seq=0, ids=tuple(LETTERS)), gen, Close(op=2, seq=0)]
        inbox.append((b"bench", Submit(program=str(i), ops=ops)))
    with using(replace(CPU, sample=sample, sample_masked=sample)):
        engine.step(inbox)
        while engine.scheduler.num_waiting or engine.generations.compiling:
            engine.step([])
        for _ in range(20):
            engine.step([])
        gc.collect()
        gc.freeze()
        taken = []
        for _ in range(STEPS):
            start_s = time.process_time()
            engine.step([])
            taken.append(time.process_time() - start_s)
        gc.unfreeze()
    assert len(engine.scheduler.running) == num_rows
    engine.close()
    return 1e3 * median(taken), 1e3 * min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="sequences that decode")
    arguments = parser.parse_args()
    about = header()
    print(f"{about['command']}, commit {about['commit']}, {about['machine']}")
    for rows in arguments.rows:
        for name, grammar, stream in KINDS:
            middle, least = measure(rows, grammar=grammar, stream=stream)
            print(f"{rows:>4} rows, {name:<24} {middle:6.2f} ms a step, best {least:.2f}")


if __name__ == "__main__":
    main()
