"""What several ranks cost on this machine: the order of a step, and each rank's bytes and memory.

``python -m benchmarks.parallel`` prints three tables. *Orders*: the time from the call of rank 0 until rank 1 has
decoded a step, over loopback. It is a round trip less half of the round trip of one byte. The arrays of the step are
made before, as rank 0 runs them too. ``arrays_ms``, ``encode_ms`` and ``decode_ms`` are processor times. *Memory*: the
bytes that each rank reads of a random Llama and a random mixture of 190 million weights in bfloat16, and the peak of
its own pages while it loads them, and of the file's pages that an embedding is read from: by tensors, by stages, by
slots, and by experts. A share is the whole model's memory over the number of ranks and the bytes that all read; of a
rank with other slots, it is what the rank reads. *Experts*: the share of the tokens that the busiest group of ranks
computes, for random choices that fall off by Zipf's law and change halfway; counted, not timed. *Prompt* (``--only
prompt`` alone): the processor time of each rank for a prompt of ``--tokens`` tokens and its first answer token, and the
time that a client waits, the least of five. *Step* (``--only step`` alone): a decode step of one token in each rank,
from a tape and call by call in turns: the processor time of the thread that runs it, and the time until its end.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import phloem
import torch
from phloem import benchmarks, kernels
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor.replays import Replays
from phloem.runtime.layers.batch import ForwardBatch, StepArrays
from phloem.runtime.layers.embedding import NoEmbedding
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.parallel.expert_copies import REVIEW_TOKENS
from phloem.runtime.parallel.expert_places import BLOCK, Places
from phloem.runtime.parallel.group import Alone, Group, connect
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.order_line import OrderLine
from phloem.runtime.parallel.orders import decode, encode
from phloem.runtime.parallel.rank import weight_bytes
from phloem.runtime.parallel.sharding import even_parts
from phloem.runtime.parallel.split import RankSplit
from phloem.runtime.scheduler import DecodePart, PlanRow, StepPlan
from phloem.runtime.weights.resolve import resolve_model
from phloem.tests.runtime.models.tiny import make_tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_layers": 8,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 64,
    "intermediate_size": 4096,
}

MIXTURE = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}


def plans(num_rows: int) -> dict[str, StepPlan]:
    ids, starts = np.arange(num_rows), np.full(num_rows, 700)
    rng = np.random.default_rng(0)
    slots_of_decodes = rng.permutation(num_rows).astype(np.int32)
    scattered = rng.permutation(232 * num_rows).astype(np.int32).reshape(num_rows, 232)

    def prompts(
        start: int, end: int, stale_from: int, *, vocab_size: int = 49_152, slots: np.ndarray | None = None
    ) -> StepPlan:
        rows = []
        for i in range(num_rows):
            tokens = rng.integers(0, vocab_size, end - start).astype(np.int32)
            own = np.arange(i * end, (i + 1) * end, dtype=np.int32) if slots is None else slots[i]
            rows.append(PlanRow(i, i, start, tokens, own, stale_from, 1))
        return StepPlan(0, tuple(rows))

    tokens = rng.integers(0, 49_152, num_rows).astype(np.int32)

    return {
        "sequences that only decode": StepPlan(0, (), DecodePart(ids, ids, starts, tokens, slots_of_decodes)),
        "rows one by one": prompts(700, 701, 700),
        "32 tokens of a prompt each": prompts(700, 732, 700),
        "32 tokens each of 152,000": prompts(700, 732, 700, vocab_size=151_936),
        "32 tokens after 200 from the cache": prompts(200, 232, 0),
        "32 tokens after 200 in scattered slots": prompts(200, 232, 0, slots=scattered),
    }


def least_time(call: Callable[[], object]) -> float:
    """Processor seconds of a call: the least of 50."""
    found = []
    for _ in range(50):
        begun_s = time.process_time()
        call()
        found.append(time.process_time() - begun_s)
    return min(found)


def answer_orders(folder: str, num_orders: int, num_pings: int) -> None:
    torch.set_num_threads(1)
    group = connect(Path(folder), rank=1, size=2, timeout_s=60.0)
    line, byte = OrderLine(group), torch.zeros(1, dtype=torch.uint8)
    for _ in range(num_orders):
        line.receive()
        group.send(byte, 0)
    for _ in range(num_pings):
        group.receive(byte, 0)
        group.send(byte, 0)


def measure_orders(group: Group, repeats: int, num_rows: int) -> dict[str, dict[str, float]]:
    line, byte = OrderLine(group), torch.zeros(1, dtype=torch.uint8)
    found: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {}
    for name, plan in plans(num_rows).items():
        step, times[name] = StepArrays.of(plan), []
        for _ in range(repeats):
            begun_s = time.perf_counter()
            line.send(step)
            group.receive(byte, 1)
            times[name].append(time.perf_counter() - begun_s)
    pings = []
    for _ in range(2 * repeats):
        begun_s = time.perf_counter()
        group.send(byte, 1)
        group.receive(byte, 1)
        pings.append(time.perf_counter() - begun_s)
    ping_ms = 1e3 * statistics.median(pings)
    for name, all_s in times.items():
        ordered = sorted(1e3 * one_s - ping_ms / 2 for one_s in all_s)
        plan = plans(num_rows)[name]
        step = StepArrays.of(plan)
        kind, payload = encode(step)
        found[name] = {
            "median_ms": ordered[len(ordered) // 2],
            "p90_ms": ordered[int(0.9 * len(ordered))],
            "arrays_ms": 1e3 * least_time(partial(StepArrays.of, plan)),
            "encode_ms": 1e3 * least_time(partial(encode, step)),
            "decode_ms": 1e3 * least_time(partial(decode, kind, payload)),
            "bytes": payload.nbytes,
        }
    return found | {"one byte, one way": {"median_ms": ping_ms / 2}}


def measure_experts(
    num_spare: int, *, num_experts: int, num_groups: int, per_token: int, exponent: float, num_steps: int
) -> dict[str, float]:
    """The busiest group's share of the tokens, over that of a group if all had as many: the mean over steps of 512
    tokens, without the ones in which copies are still made.
    """
    rng = np.random.default_rng(0)
    places = Places(even_parts(num_experts, num_groups), num_spare)
    load, num_copies, excess = np.zeros(num_experts), 0, []
    chance = np.empty(0)
    for step in range(num_steps):
        if step % (num_steps // 2) == 0:
            chance = rng.permutation(np.arange(1, num_experts + 1) ** -exponent)
        ranked = np.log(chance) + rng.gumbel(size=(512, num_experts))
        chosen = np.argpartition(-ranked, per_token, axis=1)[:, :per_token]
        counts = np.bincount(chosen.ravel(), minlength=num_experts)
        groups, firsts = places.share_out(counts)
        blocks = np.diff(np.append(firsts, len(groups)))
        sizes = np.full(len(groups), BLOCK)
        last = (firsts + blocks - 1)[blocks > 0]
        sizes[last] = counts[blocks > 0] - BLOCK * (blocks[blocks > 0] - 1)
        if step % (num_steps // 2) >= num_steps // 4:
            tokens = np.bincount(groups, sizes, num_groups)
            excess.append((places.tokens_at_home(counts).max(), tokens.max(), counts.sum() / num_groups))
        load += counts
        if (step + 1) % (REVIEW_TOKENS // 512) == 0:
            for move in places.moves(load):
                places.make(move)
                num_copies += 1
            load /= 2
    at_home, shared, even = np.mean(excess, axis=0)
    return {"without": at_home / even, "with": shared / even, "copies_made": num_copies}


class OfRank(Alone):
    """A group in which only loading happens."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def part(self, ranks: Sequence[int]) -> OfRank:
        return OfRank(list(ranks).index(self.rank), len(ranks))


def own_bytes() -> int:
    """This process's pages that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def mapped_bytes(model: Model) -> int:
    """Of the embedding, where it is read from the file's pages; no other weight is."""
    if isinstance(model.embedding, NoEmbedding):
        return 0
    table = model.embedding.weight
    for line in Path("/proc/self/maps").read_text().splitlines():
        pages, *_, last = line.split()
        first, end = (int(address, 16) for address in pages.split("-"))
        if first <= table.data_ptr() < end:
            return table.nbytes if last.startswith("/") else 0
    return 0


def load_share(path: str, rank: int, mesh: Mesh, answer: Any) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(model=path, precision="bfloat16")
    load_model(make_tiny_model(Path(tempfile.mkdtemp()), seed=0), config)  # libraries and kernels
    gc.collect()
    before, peak, is_over = own_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.001):
            peak = max(peak, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    split = RankSplit(OfRank(rank, mesh.size), mesh) if mesh.size > 1 else None
    model = load_model(path, config, split=split)
    is_over.set()
    watcher.join()
    read = weight_bytes(split) if split is not None else None
    mapped = mapped_bytes(model)
    answer.put((peak - before + mapped, own_bytes() - before + mapped, read))
    del model


def processes() -> list[int]:
    """The processes that this one has started, and those that they have."""
    found, waiting = [], [os.getpid()]
    while waiting:
        for tasks in Path(f"/proc/{waiting.pop()}/task").iterdir():
            waiting += map(int, (tasks / "children").read_text().split())
            found += [pid for pid in waiting if pid not in found]
    return sorted(found)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_prompt(model: str, split: str, ranks: int, num_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"num_threads": 1, "prefix_cache": False, f"{split}_parallel": ranks}
    with phloem.Runtime(model, **options) as runtime:
        waited_s, times_s = [], []
        pids = [pid for pid in processes() if "phloem" in Path(f"/proc/{pid}/cmdline").read_text()]
        for i in range(6):
            before = [processor_s(pid) for pid in pids]
            begun_s = time.perf_counter()
            runtime.generate(f"{i}" + " leaf" * num_tokens, temperature=0.0, max_tokens=1)
            waited_s.append(time.perf_counter() - begun_s)
            times_s.append([processor_s(pid) - start_s for pid, start_s in zip(pids, before, strict=True)])
    ranks_s = min(times_s[1:], key=sum)
    return {"split": split, "ranks": ranks, "tokens": num_tokens, "waited_s": min(waited_s[1:]), "processor_s": ranks_s}


def run_steps(model: str, folder: str, rank: int, size: int, repeats: int, answer: Any) -> None:
    """Puts [2, repeats, 2] on ``answer``: seconds of the processor and of the clock, from a tape and call by call."""
    group = connect(Path(folder), rank=rank, size=size, timeout_s=60.0)
    kernels.set_threads(1)
    split = RankSplit(group, Mesh(tensor=size)) if size > 1 else None
    loaded = load_model(resolve_model(model), EngineConfig(model=model), split=split)
    kernels.set_kernel_threads(1)
    num_warm, times_s = 5, np.zeros((2, repeats + 5, 2))
    kv = KVPool.for_model(loaded.config, num_slots=2 * times_s.shape[1], dtype=loaded.kv_dtype, device=loaded.device)
    tapes, table = Replays(loaded, kv), np.zeros((1, kv.num_slots), np.int32)
    with torch.inference_mode():
        for position in range(kv.num_slots):
            slots = np.arange(position + 1, dtype=np.int32)
            row = PlanRow(0, 0, position, np.array([5], np.int32), slots, 0, 1)
            batch = ForwardBatch.from_plan(StepPlan(0, (row,)), table)
            begun_s, processor_s = time.perf_counter(), time.thread_time()
            features = loaded.features(batch, kv) if position % 2 else tapes.forward(batch)
            assert features is not None, "this step has no tape"
            found = time.thread_time() - processor_s, time.perf_counter() - begun_s
            times_s[position % 2, position // 2] = found
    answer.put(times_s[:, num_warm:])


def measure_steps(spawn: Any, model: str, size: int, repeats: int) -> dict[str, dict[str, float]]:
    """Of the first rank that answers: all do the same."""
    answer = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=run_steps, args=(model, folder, rank, size, repeats, answer)) for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        times_ms = 1e3 * np.median(answer.get(), axis=1)
        for rank in ranks:
            rank.join()
    names = ("processor_ms", "waited_ms")
    return {way: dict(zip(names, times_ms[i].tolist(), strict=True)) for i, way in enumerate(("tape", "calls"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--exponent", type=float, default=0.8, help="of Zipf's law, by which experts are chosen")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--split", choices=("tensor", "sequence"), default="tensor")
    parser.add_argument("--only", choices=("orders", "memory", "experts", "prompt", "step"))
    parser.add_argument("--model", default="smollm2", help="of --only prompt and step")
    parser.add_argument("--tokens", type=int, default=2000, help="of --only prompt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = benchmarks.print_header()
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    if args.only == "prompt":
        report["prompt"] = []
        for size in (1, *args.ranks):
            report["prompt"].append(measure_prompt(args.model, args.split, size, args.tokens))
            print(report["prompt"][-1])
    if args.only == "step":
        report["step"] = {size: measure_steps(spawn, args.model, size, args.repeats) for size in (1, *args.ranks)}
        for size, ways in report["step"].items():
            print(f"{size} ranks: {ways}")
    if args.only in (None, "experts"):
        report["experts"] = []
        for num_experts, num_groups, per_token in ((8, 4, 2), (128, 8, 8)):
            for num_spare in (0, 1, 2, 4):
                shape = {"num_experts": num_experts, "num_groups": num_groups, "per_token": per_token}
                one = measure_experts(num_spare, exponent=args.exponent, num_steps=1024, **shape)
                report["experts"].append(shape | {"expert_copies": num_spare} | one)
                print(
                    f"{num_experts} experts on {num_groups} groups, {per_token} a token, {num_spare} spare places: the "
                    f"busiest group has {one['without']:.2f} times its even share without copies, {one['with']:.2f} "
                    f"times with; {one['copies_made']} copies made"
                )
    if args.only in (None, "orders"):
        with tempfile.TemporaryDirectory() as folder:
            other = spawn.Process(target=answer_orders, args=(folder, len(plans(1)) * args.repeats, 2 * args.repeats))
            other.start()
            group = connect(Path(folder), rank=0, size=2, timeout_s=60.0)
            report["orders"] = measure_orders(group, args.repeats, args.rows)
            other.join()
        for name, figures in report["orders"].items():
            print(f"{args.rows} rows, {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    if args.only in (None, "memory"):
        models = Path(tempfile.mkdtemp())
        dense = make_tiny_model(models / "dense", seed=0, dtype=torch.bfloat16, **SIZES)
        mixture = make_tiny_model(models / "mixture", seed=0, family="qwen3_moe", dtype=torch.bfloat16, **MIXTURE)
        tensors = [Mesh(tensor=size) for size in args.ranks]
        stages = [Mesh(pipeline=size) for size in args.ranks]
        slots = [Mesh(sequence=size) for size in args.ranks]
        parts = [Mesh(tensor=size, expert=size) for size in args.ranks]
        report["memory"] = []
        for path, meshes in ((dense, [Mesh(), *tensors, *stages, *slots]), (mixture, [Mesh(), *parts])):
            whole_held = 0
            for mesh in meshes:
                for rank in range(mesh.size):
                    answer = spawn.Queue()
                    process = spawn.Process(target=load_share, args=(str(path), rank, mesh, answer))
                    process.start()
                    peak, held, read = answer.get()
                    process.join()
                    whole_held = whole_held or held
                    line: dict[str, Any] = {"rank": rank, "peak_bytes": peak, "held_bytes": held}
                    if read is not None:
                        line |= {"read_bytes": read.read, "replicated_bytes": read.replicated}
                        share = read.read if mesh.sequence > 1 else whole_held / mesh.size + read.replicated
                        line["peak_over_share"] = peak / share
                    values = ", ".join(f"{key} {value:,.3f}".replace(".000", "") for key, value in line.items())
                    print(f"{path.name}, {mesh}: {values}")
                    report["memory"].append({"model": path.name, "mesh": str(mesh)} | line)
    if args.out is not None:
        benchmarks.save(args.out, report)


if __name__ == "__main__":
    main()
