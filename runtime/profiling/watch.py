"""Spans around the parts of an engine's step, put there by replacing its methods, and the table made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from ...kernels.cpu import (
    activation,
    attention,
    attention_plan,
    bfloat,
    edits,
    integer,
    norm,
    rope,
    sampling,
    word_product,
)
from ...kernels.cpu.entry import entries
from ...kernels.cpu.timing import KernelTimes, clock_ns
from ..engine import EngineCore
from ..executor import StepLogits
from ..scheduler import StepPlan
from .spans import Spans

DECODE, PREFILL = "decode", "prefill"
PARTS = (  # in the order of a step
    ("receive", "ops in, sequences on"),
    ("schedule", "the plan: who runs, on which slots"),
    ("gather", "the plan as tensors, embedding; Python and torch around kernels without a tape"),
    ("linear", "the layers' matrix products"),
    ("attention", "over the context"),
    ("small ops", "norms, rope with the KV write, activation"),
    ("head", "logits"),
    ("mask", "grammar masks, biases, penalties"),
    ("sample", "from logits to tokens"),
    ("accept", "text, stops, grammar, forced tokens, deltas"),
    ("send", "messages to bytes"),
    ("step", "the rest of the loop"),
)
WATCHING = "watching"
_OPS = {
    attention: "attention",
    attention_plan: "attention",
    norm: "small ops",
    rope: "small ops",
    activation: "small ops",
    word_product: "linear",
    integer: "linear",
    bfloat: "linear",
    edits: "mask",
    sampling: "sample",
}


def watch(engine: EngineCore, spans: Spans) -> None:
    """Record spans of every later step of ``engine``. It cannot be switched off."""
    for owner, method, name in (
        (engine, "_receive", "receive"),
        (engine.loop, "_accept", "accept"),
        (engine.loop.vectorised, "accept", "accept"),
        (engine.loop.vectorised, "add_from", "accept"),
        (engine.loop.vectorised, "draws", "sample"),
        (engine.loop.vectorised, "check_room", "schedule"),
        (engine.interpreter, "advance", "receive"),
        (engine.generations, "finish_candidate", "accept"),
        (engine.scheduler, "plan", "schedule"),
        (engine.scheduler, "complete", "schedule"),
        (engine.executor, "head", "head"),
        (engine.executor, "draw", "sample"),
        (engine.executor, "masks_of", "mask"),
        (engine.executor, "constrain", "mask"),
    ):
        setattr(owner, method, _spanned(getattr(owner, method), name, spans))
    setattr(engine.executor, "forward", _forward(engine.executor.forward, spans))  # noqa: B010


def profile_lines(spans: Spans) -> Iterator[str]:
    """A table: milliseconds a step, by part, for decode steps and for steps with a prompt in them."""
    kinds = {kind: spans.milliseconds(kind) for kind in (DECODE, PREFILL)}
    kinds = {kind: found for kind, found in kinds.items() if found[0]}
    watching = [times.pop(WATCHING, 0.0) for _, times in kinds.values()]
    totals = [sum(times.values()) for _, times in kinds.values()]
    yield "  " + " " * 12 + "".join(f"{f'{count} {kind} steps':>24}" for kind, (count, _) in kinds.items())
    for name, about in PARTS:
        if not any(name in times for _, times in kinds.values()):
            continue
        cells = ""
        for (_, times), total in zip(kinds.values(), totals, strict=True):
            cells += f"{times.get(name, 0.0):>14.3f} ms{times.get(name, 0.0) / total:>6.1%} "
        yield f"  {name:<12}{cells}  {about}"
    yield "  " + f"{'all':<12}" + "".join(f"{total:>14.3f} ms       " for total in totals)
    looked = " and ".join(f"{ms:.2f} ms" for ms in watching)
    yield f"  means of the middle half of the steps by length; measuring took {looked} a step more"


def _spanned(function: Callable[..., Any], name: str, spans: Spans) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with spans.span(name):
            return function(*args, **kwargs)

    return run


def _forward(function: Callable[..., StepLogits], spans: Spans) -> Callable[..., StepLogits]:
    def run(plan: StepPlan, *, needs_all: bool = True) -> StepLogits:
        spans.mark(DECODE if plan.num_tokens == plan.num_logits else PREFILL)  # draft tokens have logits too
        with spans.span("gather"):
            with KernelTimes() as times:
                logits = function(plan, needs_all=needs_all)
            looking_ns = clock_ns()
            names = {entry.address: op for module, op in _OPS.items() for entry in entries(module)}
            for call in times.calls:
                about = f"{call.num_outputs} outputs" if names.get(call.function) == "linear" else ""
                spans.add(names.get(call.function, "small ops"), call.start_ns, call.end_ns, about=about)
            spans.set_apart(WATCHING, times.watching_ns + clock_ns() - looking_ns)
        return logits

    return run
