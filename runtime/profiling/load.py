"""A synthetic load of equal sequences for an engine in this process, and how long it took."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from ...constrained.spec import GrammarSpec
from ...protocol.errors import InvalidParams, from_info
from ...protocol.frames import encode_runtime
from ...protocol.messages import ClientMessage, Closed, Done, Failed, GenMeta, Rejected, Submit
from ...protocol.ops import Close, Gen, Special
from ...protocol.sampling import SamplingParams
from ..engine import EngineCore
from .spans import Spans

CLIENT = b"load"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing", "event"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 8},
    },
    "required": ["name", "kind", "tags"],
}


@dataclass(frozen=True, slots=True)
class Load:
    """``rows`` sequences at once. Prompts share their first ``shared_tokens`` tokens. With ``grammar`` the answers are
    JSON that follows a schema, and end when the JSON is complete.
    """

    rows: int = 1
    prompt_tokens: int = 100
    new_tokens: int = 64
    shared_tokens: int = 0
    grammar: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """``decode_ms``: of the steps in which every row decoded one token; ``prefill_s``: time until the first of them."""

    wall_s: float
    prefill_s: float
    output_tokens: int
    decode_ms: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def decode_median_ms(self) -> float:
        return statistics.median(self.decode_ms) if self.decode_ms else 0.0


def run_load(
    engine: EngineCore,
    load: Load,
    *,
    spans: Spans | None = None,
    seed: int = 0,
    flush: bool = True,
    between: Callable[[], object] | None = None,
) -> LoadResult:
    """Run ``load``. ``flush`` first empties the cache and the texts of earlier runs, in which the engine would find
    this run's answers as drafts, since they are the same. ``between`` is called before each step; its time is not part
    of ``decode_ms``. Raises InvalidParams for a load that the engine cannot hold.
    """
    longest = load.prompt_tokens + load.new_tokens
    if not 0 <= load.shared_tokens <= load.prompt_tokens or min(load.rows, load.prompt_tokens, load.new_tokens) < 1:
        raise InvalidParams(f"{load}: rows and tokens must be at least 1, shared_tokens at most prompt_tokens")
    if longest > engine.context_len:
        raise InvalidParams(f"{longest:,} tokens a row, but the model's context is {engine.context_len:,}")
    if load.rows > engine.config.max_running:
        raise InvalidParams(f"{load.rows} rows, but max_running is {engine.config.max_running}")
    if flush:
        engine.flush_cache()
    # Answers may be shorter than the grammar's shortest text.
    params = SamplingParams(max_tokens=load.new_tokens, temperature=0.0, ignore_eos=not load.grammar, finish="cut")
    grammar = GrammarSpec("json_schema", json.dumps(SCHEMA)) if load.grammar else None
    inbox: list[tuple[bytes, ClientMessage]] = [
        (
            CLIENT,
            Submit(
                f"row {i}",
                [Special(op=0, seq=0, ids=ids), Gen(op=1, seq=0, params=params, grammar=grammar), Close(op=2, seq=0)],
            ),
        )
        for i, ids in enumerate(_prompts(engine, load, seed))
    ]
    open_rows, output_tokens, times = load.rows, 0, []
    start_s = last_s = time.perf_counter()
    prefill_s = 0.0
    while open_rows:
        if between is not None:
            between()
            last_s = time.perf_counter()
        before = engine.loop.counters.forward_tokens, engine.loop.counters.forward_rows
        with spans.span("step") if spans is not None else nullcontext():
            outbox = engine.step(inbox)
            with spans.span("send") if spans is not None else nullcontext():
                encode_runtime([message for _, message in outbox])
        inbox = []
        now_s = time.perf_counter()
        tokens, rows = (engine.loop.counters.forward_tokens - before[0], engine.loop.counters.forward_rows - before[1])
        if tokens == rows == load.rows:
            times.append((now_s - last_s) * 1e3)
            prefill_s = prefill_s or last_s - start_s
        last_s = now_s
        for _, message in outbox:
            match message:
                case Failed(error=error):
                    raise from_info(error)
                case Rejected(errors=errors):
                    raise from_info(errors[0])
                case Closed():
                    open_rows -= 1
                case Done(op=1, meta=GenMeta(candidates=candidates)):
                    output_tokens += sum(candidate.completion_tokens for candidate in candidates)
    return LoadResult(last_s - start_s, prefill_s, output_tokens, tuple(times))


def _prompts(engine: EngineCore, load: Load, seed: int) -> list[tuple[int, ...]]:
    """Random token ids, without special tokens."""
    plain = np.setdiff1d(np.arange(engine.tokenizer.vocab_size), sorted(engine.tokenizer.special_ids))
    numbers = np.random.default_rng(seed)
    shared = numbers.choice(plain, load.shared_tokens)
    own = [numbers.choice(plain, load.prompt_tokens - load.shared_tokens) for _ in range(load.rows)]
    return [tuple(np.concatenate((shared, row)).tolist()) for row in own]
