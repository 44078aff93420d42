"""What a low-rank adapter adds to a decode step on a CPU.

    python -m benchmarks.adapters [--model smollm2] [--rank 16] [--context 100] [--rounds 20]

The ways take turns in one process, on one thread, and the time is that thread's own. ``no adapter`` and ``tape`` run
from tapes, ``calls`` call by call, and ``torch`` call by call with torch's products for the adapter. The adapter is
random and changes every product of every layer.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from phloem import kernels
from phloem.kernels import reference
from phloem.kernels.backend import CPU, using
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor.step_tapes import StepTapes
from phloem.runtime.layers.batch import ForwardBatch
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.scheduler import PlanRow, StepPlan
from phloem.runtime.weights import open_weights, resolve_model
from phloem.runtime.weights.model_config import ModelConfig
from safetensors.torch import save_file

from . import print_header

STEPS = 10  # of one way before the next one's turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print_header()
    path = resolve_model(args.model)
    kernels.set_threads(1)
    kernels.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), open_weights(path).config, rank=args.rank)
        model = load_model(path, EngineConfig(model=args.model, adapters={"random": folder}))
    kernels.set_kernel_threads(1)
    for num_rows in (1, 16):
        found = timed(ways(model, num_rows, args.context), rounds=args.rounds)
        medians = {name: statistics.median(times) for name, times in found.items()}
        for name, times in found.items():
            low, _, high = statistics.quantiles(times, n=4)
            median, added = medians[name], medians[name] - medians["no adapter"]
            print(f"{num_rows:>3} rows  {name:<10}  {median:6.2f} ms a step ({low:.2f} to {high:.2f}), +{added:.2f}")


def write_adapter(folder: Path, config: ModelConfig, *, rank: int) -> None:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(config.num_layers):
        for name, (rows, columns) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, columns) / columns**0.5
            tensors[f"{at}.lora_B.weight"] = 0.01 * torch.randn(rows, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def ways(model: Model, num_rows: int, context: int) -> dict[str, Callable[[], object]]:
    """Each runs one step of one token a row."""
    kv = KVPool.for_model(model.config, num_slots=num_rows * context, dtype=model.kv_dtype)
    table = np.arange(num_rows * context, dtype=np.int32).reshape(num_rows, context)
    rows = [PlanRow(i, i, context - 1, np.full(1, 9, np.int32), table[i], 0, 1) for i in range(num_rows)]
    tapes = StepTapes(model, kv)
    in_torch = replace(CPU, add_adapters=reference.add_adapters)

    def batch(number: int) -> ForwardBatch:
        plain = ForwardBatch.from_plan(StepPlan(0, tuple(rows)), table)
        return plain if number < 0 else plain.with_adapters(torch.full((num_rows,), number), len(model.adapters))

    def run_in_torch() -> None:
        with using(in_torch):
            model.features(batch(0), kv)

    return {
        "no adapter": lambda: tapes.forward(batch(-1)),
        "tape": lambda: tapes.forward(batch(0)),
        "calls": lambda: model.features(batch(0), kv),
        "torch": run_in_torch,
    }


@torch.inference_mode()
def timed(runs: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """By way, the milliseconds of each step after the first round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            for _ in range(STEPS):
                start = time.thread_time()
                run()
                if turn:
                    found[name].append(1e3 * (time.thread_time() - start))
    return found


if __name__ == "__main__":
    main()
