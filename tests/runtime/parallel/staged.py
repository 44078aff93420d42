"""Logits of a tiny model on a mesh of virtual ranks, for tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import Executor
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.split import RankSplit
from phloem.runtime.parallel.tensor import SplitHead
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.tests.runtime.parallel.virtual import VirtualGroup, run_all

IDS = np.random.default_rng(0).integers(0, 96, 60).astype(np.int32)
SLOTS = np.random.default_rng(1).permutation(64).astype(np.int32)


def config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(path), **({"precision": "float32"} | options))


def steps(adapter: int = -1) -> list[StepPlan]:
    """A prompt in two chunks, then two tokens one by one; the logits of every token."""
    return [
        StepPlan(0, (PlanRow(1, 0, start, IDS[start:end], SLOTS[:end], start, end - start, 0, adapter),))
        for start, end in ((0, 31), (31, 58), (58, 59), (59, 60))
    ]


def executor_of(model: Model, num_slots: int = 64) -> Executor:
    num_layers = len(model.layers)
    sizes = {"num_slots": num_slots, "num_layers": num_layers}
    kv = KVPool.for_model(model.config, dtype=model.kv_dtype, device=model.device, **sizes)
    return Executor(model, kv, max_rows=2, max_len=64, use_graphs=False)


def whole_logits(path: Path, options: EngineConfig, adapter: int = -1) -> torch.Tensor:
    executor = executor_of(load_model(path, options))
    return torch.cat([executor.forward(step).whole().clone() for step in steps(adapter)])


def staged_logits(path: Path, mesh: Mesh, options: EngineConfig, adapter: int = -1) -> tuple[torch.Tensor, list[int]]:
    """The logits, and the bytes that each rank has read of the file."""

    def body(group: VirtualGroup) -> tuple[torch.Tensor | None, int]:
        split = RankSplit(group, mesh)
        model = load_model(path, options, split=split)
        assert isinstance(model.head, SplitHead) and split.source is not None
        executor, made = executor_of(model, mesh.pool_slots(64)), []
        with torch.inference_mode():
            for step in steps(adapter):
                features = executor.forward(step, needs_all=False).features
                made.append(model.head.whole_logits(features) if group.rank == 0 else model.head.send_whole(features))
        read = sum(split.source.read_bytes.values())
        return (torch.cat(made) if group.rank == 0 else None), read

    found = run_all(mesh.size, body)
    return found[0][0], [read for _, read in found]
