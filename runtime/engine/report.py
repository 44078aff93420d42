"""What the engine can say of itself: counters, configuration, and the tree of cached prefixes. Changes nothing."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..scheduler import Sequence, StepPlan
from ..speculative import Speculation
from .generation import Candidate
from .scoring import ScoreRow

if TYPE_CHECKING:
    from ...radix_cache import NodeSnapshot
    from ..tokenizer import Tokenizer
    from .engine import EngineCore
    from .vectorised_decode import VectorisedDecode


@dataclass(slots=True)
class EngineReport:
    """Counters since the start. ``forward_tokens`` were run; ``step_s`` is the time in steps that had a forward, and
    ``wait_s`` what of it the host waited for a device's results.
    """

    started_s: float = field(default_factory=time.time)
    steps: int = 0
    forward_tokens: int = 0
    forward_rows: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0

    def count_step(self, plan: StepPlan, live: dict[int, Sequence], vectorised: VectorisedDecode) -> None:
        self.steps += 1
        self.forward_tokens += plan.num_tokens
        self.forward_rows += len(plan.rows) + plan.num_vectorised
        programs = set()
        for row in plan.rows:
            match live[row.seq_id].tag:
                case Candidate() as candidate:
                    programs.add(candidate.generation.owner.program)
                case ScoreRow() as score_row:
                    programs.add(score_row.scoring.owner.program)
        if plan.vectorised is not None:
            vectorised.count_forwards(plan.vectorised)
            programs = {program for program in programs if not vectorised.is_counted(program)}
        for program in programs:
            program.counters.forwards += 1

    def info(self, engine: EngineCore) -> dict[str, Any]:
        config = engine.model.config
        return {
            "model": engine.config.model,
            "model_path": str(engine.model_path),
            "config": msgspec.to_builtins(engine.config),
            "context_len": engine.context_len,
            "vocab_size": engine.vocab_size,
            "num_layers": config.num_layers,
            "num_slots": engine.cache.num_slots,
            "kv_bytes": engine.kv.size_bytes,
            "precision": engine.config.precision,
            "products": engine.model.describe(),
            "kv_dtype": str(engine.kv.dtype).removeprefix("torch."),
            "metrics": self.metrics(engine),
        }

    def metrics(self, engine: EngineCore) -> dict[str, Any]:
        """Numbers by name; a dict of numbers where a number has parts.

        ``queue_seconds``: sequences by how long they waited, ``counts[i]`` at most ``bounds[i]`` seconds.
        ``cache_hit_rate``: of the tokens of admitted sequences, those found. ``usage``: see ``Usage.report``.
        """
        cache, scheduler, counters = engine.cache, engine.scheduler, engine.cache.counters
        queue_time = scheduler.counters.queue_time
        programs = engine.interpreter.programs.values()
        return {
            "steps": self.steps,
            "forward_tokens": self.forward_tokens,
            "forward_rows": self.forward_rows,
            "step_seconds": self.step_s,
            "wait_seconds": self.wait_s,
            **_drafts(engine.loop.speculation),
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "parked": len(scheduler.parked),
            "programs": len(engine.interpreter.programs),
            "preemptions": scheduler.num_preemptions,
            "yields": scheduler.counters.num_yields,
            "swapped_back": scheduler.counters.num_swapped_back,
            "queue_seconds": {"bounds": queue_time.bounds, "counts": queue_time.counts, "total": queue_time.total},
            "slots": {
                "total": cache.num_slots,
                "free": cache.num_free,
                "cached": cache.num_cached,
                "locked": cache.num_locked,
                "leased": cache.num_leased,
            },
            "cache_lookups": counters.lookups,
            "cache_hits": counters.hits,
            "cache_looked_up_tokens": counters.looked_up_tokens,
            "cache_matched_tokens": counters.matched_tokens,
            "cache_hit_rate": scheduler.counters.cached_tokens / max(scheduler.counters.admitted_tokens, 1),
            "cache_evicted_tokens": {"space": 0, "flush": 0} | counters.evicted_tokens,
            "tier_blocks": {} if engine.tiers is None else asdict(engine.tiers.counters),
            "usage": engine.interpreter.usage.report((p.usage_rows, p.counters) for p in programs),
        }

    def cache_tree(self, engine: EngineCore) -> list[dict[str, Any]]:
        """The cached prefixes as nested dicts: text (its beginning), tokens, locks, hits, children."""
        return [_node(node, engine.tokenizer) for node in engine.cache.snapshot(max_nodes=200, num_first_tokens=24)]


def _drafts(speculation: Speculation | None) -> dict[str, Any]:
    """Of drafts: tokens guessed and come true, by who guessed, and the time that is thought to have been saved."""
    if speculation is None:
        return {"drafted_tokens": {}, "accepted_tokens": {}, "draft_saved_seconds": {}}
    return {
        "drafted_tokens": dict(speculation.proposed),
        "accepted_tokens": dict(speculation.accepted),
        "draft_saved_seconds": dict(speculation.saved_s),
    }


def _node(node: NodeSnapshot, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "namespace": str(node.namespace),
        "text": tokenizer.decode(list(node.first_tokens), skip_special=False),
        "tokens": node.num_tokens,
        "is_whole": node.num_tokens <= len(node.first_tokens),
        "locks": node.lock_count,
        "pinned": node.is_pinned,
        "hits": node.hits,
        "hidden": node.num_hidden,
        "children": [_node(child, tokenizer) for child in node.children],
    }
