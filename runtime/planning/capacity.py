"""The largest batch of one replica within a goal, and the replicas that a load needs.

In a steady state each of b sequences has a prompt of isl tokens and an answer of osl tokens, so a step that decodes b
tokens also prefills b * isl / osl tokens. The time between two tokens of an answer is that step's time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...protocol.errors import InvalidParams
from .hardware import Hardware
from .shapes import ModelShape
from .step_time import StepTime, step_time

MEMORY_SHARE = 0.9  # of the device's memory, for weights and KV together
MAX_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Goal:
    """Prompts of ``isl`` tokens, answers of ``osl``; first token within ``ttft_s``, each next one within ``tpot_s``.

    ``cached_share``: share of a prompt that the prefix cache holds, images included. ``chunk``: most prompt tokens of a
    step. ``images``: of a prompt, beside its ``isl`` tokens of text.
    """

    isl: int
    osl: int
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    cached_share: float = 0.0
    chunk: int = 512
    images: int = 0

    def __post_init__(self) -> None:
        for name in ("isl", "osl", "ttft_s", "tpot_s", "chunk"):
            if not getattr(self, name) > 0:
                raise InvalidParams(f"{name}={getattr(self, name)}: must be more than 0")
        if not 0.0 <= self.cached_share < 1.0:
            raise InvalidParams(f"cached_share={self.cached_share}: must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """How devices share out one model; ``expert`` divides ``tensor``. ``copies``: spare places for experts."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    copies: int = 0
    sequence: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        """The engine's options."""
        counts = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert, "sequence": self.sequence}
        options = [f"--{name}-parallel {count}" for name, count in counts.items() if count > 1]
        if self.copies:
            options.append(f"--expert-copies {self.copies}")
        return " ".join(options) or "one device each"

    def share(self, shape: ModelShape) -> ModelShape:
        return shape.share(self.tensor, stages=self.pipeline, expert_parts=self.expert, expert_copies=self.copies)


@dataclass(frozen=True, slots=True)
class Capacity:
    """``batch`` 0: not even one sequence fits. ``limit`` says why the batch cannot be larger by one."""

    batch: int
    limit: str
    slots: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    step: StepTime
    split: DeviceSplit = DeviceSplit()

    def replicas(self, goal: Goal, requests_per_s: float) -> int:
        """Replicas that ``requests_per_s`` need."""
        if self.batch == 0:
            raise InvalidParams(f"no replica meets the goal: {self.limit}")
        return max(1, math.ceil(requests_per_s * goal.osl / self.tokens_per_s))


def find_capacity(shape: ModelShape, hardware: Hardware, goal: Goal, *, split: DeviceSplit = DeviceSplit()) -> Capacity:
    """The largest batch that memory and goal allow, on the devices of ``split`` together."""
    if split.num_devices > 1 and not hardware.link_rate:
        raise InvalidParams(
            f"{split} on {hardware.name}: the rate of its links is not known; plans for several devices are made for "
            f"those with links",
            where="tensor_parallel",
        )
    if goal.images:
        if shape.tower is None:
            raise InvalidParams(f"images={goal.images}: {shape.name} reads text only; give a model that reads images")
        goal = replace(goal, isl=goal.isl + goal.images * shape.tower.tokens)
    share = split.share(shape)
    free = hardware.memory_bytes * MEMORY_SHARE - share.weights_size_bytes
    slots = max(0, int(free / share.slot_size_bytes)) * split.sequence
    fit = min(slots // (goal.isl + goal.osl), MAX_BATCH)
    if fit < 1:
        need = share.weights_size_bytes + (goal.isl + goal.osl) * share.slot_size_bytes / split.sequence
        have = hardware.memory_bytes * MEMORY_SHARE
        limit = f"memory: {need / 1e9:.1f} GB for weights and one sequence, {have / 1e9:.1f} GB available"
        return _capacity(shape, hardware, goal, 0, limit, slots, split)
    # Both times grow with the batch, so bisect.
    low, high = 0, fit
    while low < high:
        middle = (low + high + 1) // 2
        if _broken(goal, *_times(shape, hardware, goal, middle, split)[:2]):
            high = middle - 1
        else:
            low = middle
    limit = (
        "memory for keys and values"
        if low == fit < MAX_BATCH
        else f"the most that plans go to is {MAX_BATCH:,} sequences"
    )
    if goal.ttft_s == goal.tpot_s == math.inf:
        limit += "; no goal for times was given (--tpot-s, --ttft-s)"
    if low < fit:
        limit = _broken(goal, *_times(shape, hardware, goal, low + 1, split)[:2])
    return _capacity(shape, hardware, goal, low, limit, slots, split)


def best_split(shape: ModelShape, hardware: Hardware, goal: Goal, *, devices: int) -> list[Capacity]:
    """For each split of ``devices`` into equal replicas its capacity, most tokens a second first: of tensors, stages,
    experts (of a mixture all are split, or none) and slots of sequences.

    ``Capacity.tokens_per_s`` is of one replica of ``devices // split.num_devices``.
    """
    if devices < 1:
        raise InvalidParams(f"devices={devices}: give 1 or more")
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    if shape.tower is not None:
        sizes = [1]  # such a model is not split
    splits = [
        DeviceSplit(tensor, pipeline, expert, sequence=sequence)
        for tensor in sizes
        for pipeline in sizes
        for sequence in sizes
        for expert in sorted({1, tensor})
        if devices % (tensor * pipeline * sequence) == 0
        if tensor <= shape.num_heads and pipeline <= shape.num_layers
        if expert == 1 or expert <= shape.num_experts
    ]
    found = [find_capacity(shape, hardware, goal, split=split) for split in splits]
    return sorted(found, key=lambda one: -one.tokens_per_s * (devices // one.split.num_devices))


def _capacity(
    shape: ModelShape, hardware: Hardware, goal: Goal, batch: int, limit: str, slots: int, split: DeviceSplit
) -> Capacity:
    ttft_s, tpot_s, step = _times(shape, hardware, goal, max(batch, 1), split)
    return Capacity(batch, limit, slots, ttft_s, tpot_s, batch / tpot_s, step, split)


def _times(
    shape: ModelShape, hardware: Hardware, goal: Goal, batch: int, split: DeviceSplit
) -> tuple[float, float, StepTime]:
    """(time to first token, time per token, the mean step) of a batch in its steady state."""
    new_prompt = goal.isl * (1 - goal.cached_share)
    context = goal.isl + goal.osl / 2
    seen = goal.isl - new_prompt / 2
    step = step_time(
        shape,
        hardware,
        rows=batch,
        context=context,
        prefill=batch * new_prompt / goal.osl,
        prefill_context=seen,
        tensor_parallel=split.tensor,
        pipeline_parallel=split.pipeline,
        expert_parallel=split.expert,
        sequence_parallel=split.sequence,
    )
    chunk = min(goal.chunk, new_prompt)
    chunk_step = step_time(
        shape,
        hardware,
        rows=max(batch - 1, 0),
        context=context,
        prefill=chunk,
        prefill_context=seen,
        tensor_parallel=split.tensor,
        pipeline_parallel=split.pipeline,
        expert_parallel=split.expert,
        sequence_parallel=split.sequence,
    )
    images_s = 0.0
    if goal.images and shape.tower is not None:
        images_s = goal.images * (1 - goal.cached_share) * shape.tower.image_s(hardware)
        step = replace(step, images=batch * images_s / goal.osl)
    # On average a prompt arrives in the middle of a step.
    ttft_s = images_s + math.ceil(new_prompt / chunk) * chunk_step.total + step.total / 2
    return ttft_s, step.total, step


def _broken(goal: Goal, ttft_s: float, tpot_s: float) -> str:
    """The goal that these times break, as text; empty if they keep both."""
    if tpot_s > goal.tpot_s:
        return f"time per token: {tpot_s * 1e3:.1f} ms with one more, {goal.tpot_s * 1e3:g} ms allowed"
    if ttft_s > goal.ttft_s:
        return f"time to first token: {ttft_s * 1e3:.0f} ms with one more, {goal.ttft_s * 1e3:g} ms allowed"
    return ""
