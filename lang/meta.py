"""What ``s.get_meta_info`` returns: the runtime's report on one value, under SGLang's names."""

from typing import Any

from ..protocol.messages import GenMeta, SelectMeta, TokenLogprob


def meta_info(meta: GenMeta | SelectMeta | None) -> dict[str, Any]:
    """For a gen: tokens, finish reason, log-probabilities as (value, token id, text), seconds. For a select: scores."""
    if isinstance(meta, SelectMeta):
        means = [sum(v or 0.0 for v in row) / max(len(row), 1) for row in meta.logprobs]
        info: dict[str, Any] = {
            "normalized_prompt_logprobs": means,
            "input_token_logprobs": [
                [(value, token, None) for value, token in zip(row, ids, strict=False)]
                for row, ids in zip(meta.logprobs, meta.token_ids, strict=True)
            ],
            "output_token_logprobs": [[] for _ in meta.logprobs],
            "scores": list(meta.scores),
            "index": meta.index,
            "prompt_tokens": meta.prompt_tokens,
            "cached_tokens": meta.cached_tokens,
        }
        if meta.unconditional:
            info["unconditional_token_logprobs"] = [list(row) for row in meta.unconditional]
            info["normalized_unconditional_prompt_logprobs"] = list(meta.scores)
        return info
    if meta is None:
        return {}
    first = meta.candidates[0]
    info = {
        "prompt_tokens": meta.prompt_tokens,
        "cached_tokens": meta.cached_tokens,
        "completion_tokens": sum(c.completion_tokens for c in meta.candidates),
        "finish_reason": {"type": first.finish_reason, "matched": first.matched_stop},
        "output_ids": list(first.token_ids),
        "forced_tokens": sum(c.forced_tokens for c in meta.candidates),
        "queue_s": meta.queue_s,
        "prefill_s": meta.prefill_s,
        "decode_s": meta.decode_s,
    }
    if any(c.closed_by_budget for c in meta.candidates):
        info["closed_by_budget"] = True
    if first.logprobs:
        info["output_token_logprobs"] = _triples(first.logprobs)
        info["output_top_logprobs"] = _tops(first.logprobs)
    if meta.prompt_logprobs:
        info["input_token_logprobs"] = _triples(meta.prompt_logprobs)
        info["input_top_logprobs"] = _tops(meta.prompt_logprobs)
    if len(meta.candidates) > 1:
        info["candidates"] = [
            {
                "completion_tokens": c.completion_tokens,
                "finish_reason": {"type": c.finish_reason, "matched": c.matched_stop},
                "output_ids": list(c.token_ids),
                **({"closed_by_budget": True} if c.closed_by_budget else {}),
                **({"output_token_logprobs": _triples(c.logprobs)} if c.logprobs else {}),
            }
            for c in meta.candidates
        ]
    return info


def _triples(logprobs: tuple[TokenLogprob, ...]) -> list[tuple[float | None, int, str]]:
    return [(t.logprob, t.token_id, t.text) for t in logprobs]


def _tops(logprobs: tuple[TokenLogprob, ...]) -> list[list[tuple[float, int, str]]]:
    return [[(value, token, text) for token, value, text in t.top] for t in logprobs]
