"""Cases of ``benchmarks.gpu``: what ranks do on one GPU. Several GPUs are not measured.

*Collective*: one rank sends itself a tensor over NCCL, as one group of transfers, which is how ranks move all their
tensors; called by the host, and from a CUDA graph. *Split logits*: two ranks take turns on the device; their logits
are compared with those of one rank.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from phloem.benchmarks import roofline
from phloem.kernels.backend import CPU, using
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor.accelerator import CudaAccelerator
from phloem.runtime.parallel.group import links_of
from phloem.runtime.parallel.links import NcclLink
from phloem.runtime.parallel.mesh import Mesh
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.parallel.process_groups import Loopback
from phloem.tests.runtime.parallel.staged import staged_logits, whole_logits

if TYPE_CHECKING:
    from .gpu import Bench

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MESHES = (Mesh(tensor=2), Mesh(tensor=2, expert=2), Mesh(pipeline=2), Mesh(sequence=2))
MOST_ERROR = 2e-2  # of the largest logit, where products round float32 to TF32


def ranks(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        link = _own_link(bench, Path(folder))
        _collectives(bench, link)
        link.close()
        _split_logits(bench, Path(folder))


def _own_link(bench: Bench, folder: Path) -> NcclLink:
    if bench.smoke:
        return NcclLink(Loopback())
    store = dist.FileStore(str(folder / "ranks"), 1)
    return links_of(store, torch.device("cuda", torch.cuda.current_device()), rank=0, size=1, timeout_s=60.0)["cuda"]


def _collectives(bench: Bench, link: NcclLink) -> None:
    for rows, width in ((8, 8192), (256, 8192), (4096, 8192)) if not bench.smoke else ((2, 16),):
        x, into = bench.randn(rows, width), torch.empty(rows, width, dtype=bench.dtype, device=bench.device)

        def move(x: torch.Tensor = x, into: torch.Tensor = into) -> torch.Tensor:
            link.move([(x, 0)], [(into, 0)])()
            return into

        case, work = f"{rows:,} x {width:,}", roofline.Work(2 * x.numel() * x.element_size())
        bench.add("collective to itself", case, move, lambda x=x: x, work, in_graph=False)
        if not bench.smoke:
            graph, moved = CudaAccelerator(bench.device).capture(move)

            def replay(graph=graph, moved=moved) -> torch.Tensor:  # type: ignore[no-untyped-def]
                graph.replay()
                return moved

            bench.add("collective to itself", f"{case}, in a graph", replay, lambda x=x: x, work, in_graph=False)
            del graph, replay


def _split_logits(bench: Bench, folder: Path) -> None:
    path = make_tiny_model(folder / "model", seed=1, family="qwen3_moe", **MOE)
    config = EngineConfig(model=str(path), precision="float32", device=str(bench.device))
    with using(CPU) if bench.smoke else nullcontext():  # the interpreter would take ten seconds
        expected = whole_logits(path, config)
        for mesh in MESHES:
            found, _ = staged_logits(path, mesh, config)
            error = float((found - expected).abs().max() / expected.abs().max())
            bench.note("split logits", str(mesh), error, limit=1e-4 if bench.smoke else MOST_ERROR)


PARTS = {"ranks": ranks}
