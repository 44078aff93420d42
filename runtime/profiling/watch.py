"""Putting spans around the parts of an engine. Costs nothing where it is not called: the engine knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from ...kernels.cpu import activation, attention, attention_plan, bfloat, edits, integer, norm, rope, sampling
from ...kernels.cpu.entry import entries
from ...kernels.cpu.timing import KernelTimes
from ..engine import Engine
from ..executor import StepLogits
from ..scheduler import StepPlan
from .spans import Spans

DECODE, PREFILL = "decode", "prefill"
PARTS = (  # in the order of a step
    ("receive", "ops in, sequences on"),
    ("schedule", "the plan: who runs, on which slots"),
    ("gather", "the plan as tensors, embedding; where no tape runs, also Python and torch's own products"),
    ("linear", "the layers' matrix products"),
    ("attention", "over the context"),
    ("small ops", "norms, rope with the KV write, activation"),
    ("head", "logits"),
    ("mask", "grammar masks, biases, penalties"),
    ("sample", "from logits to tokens"),
    ("accept", "text, stops, grammar, forced tokens, deltas"),
    ("send", "messages to bytes"),
    ("step", "the rest of the loop"),
    ("watching", "what it costs to look"),
)
_OPS = {
    attention: "attention",
    attention_plan: "attention",
    norm: "small ops",
    rope: "small ops",
    activation: "small ops",
    integer: "linear",
    bfloat: "linear",
    edits: "mask",
    sampling: "sample",
}


def watch(engine: Engine, spans: Spans) -> None:
    """From now on every step of this engine leaves its spans; there is no way back."""
    for owner, method, name in (
        (engine, "_receive", "receive"),
        (engine.loop, "_accept", "accept"),
        (engine.interpreter, "advance", "receive"),
        (engine.interpreter.generations, "finish_candidate", "accept"),
        (engine.scheduler, "plan", "schedule"),
        (engine.scheduler, "complete", "schedule"),
        (engine.executor, "_head", "head"),
        (engine.executor, "draw", "sample"),
        (engine.executor, "_masks", "mask"),
        (engine.executor, "_constrain", "mask"),
    ):
        setattr(owner, method, _spanned(getattr(owner, method), name, spans))
    setattr(engine.executor, "forward", _forward(engine.executor.forward, spans))  # noqa: B010


def profile_lines(spans: Spans) -> Iterator[str]:
    """A table: milliseconds of a step, by part, for decode steps and for those with a prompt in them."""
    kinds = {kind: spans.milliseconds(kind) for kind in (DECODE, PREFILL)}
    kinds = {kind: found for kind, found in kinds.items() if found[0]}
    yield "  " + " " * 12 + "".join(f"{f'{count} {kind} steps':>24}" for kind, (count, _) in kinds.items())
    for name, about in PARTS:
        if not any(name in times for _, times in kinds.values()):
            continue
        cells = ""
        for count, times in kinds.values():
            cells += f"{times.get(name, 0.0) / count:>14.3f} ms{times.get(name, 0.0) / sum(times.values()):>6.1%} "
        yield f"  {name:<12}{cells}  {about}"
    yield (
        "  "
        + f"{'all':<12}"
        + "".join(f"{sum(times.values()) / count:>14.3f} ms       " for count, times in kinds.values())
    )


def _spanned(function: Callable[..., Any], name: str, spans: Spans) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with spans.span(name):
            return function(*args, **kwargs)

    return run


def _forward(function: Callable[[StepPlan], StepLogits], spans: Spans) -> Callable[[StepPlan], StepLogits]:
    def run(plan: StepPlan) -> StepLogits:
        found: list[tuple[str, int, int]] = []
        spans.mark(DECODE if plan.num_tokens == plan.num_logits else PREFILL)  # drafts want logits as well
        with spans.span("gather"):
            with KernelTimes() as times:
                logits = function(plan)
            with spans.span("watching"):
                names = {entry.address: op for module, op in _OPS.items() for entry in entries(module)}
                for call in times.calls:
                    op = names.get(call.function, "small ops")
                    found.append((op, call.start_ns, call.end_ns))
            for op, start_ns, end_ns in found:
                spans.add(op, start_ns, end_ns)
            if times.watching_ns:
                spans.add("watching", times.calls[0].start_ns, times.calls[0].start_ns + times.watching_ns)
        return logits

    return run
