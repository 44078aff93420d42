"""The shape of the native ``/generate`` answers: text, output ids and ``meta_info``, streamed cumulatively."""

from collections.abc import Sequence
from typing import Any

from ...protocol.messages import TokenLogprob
from .forms import DONE, encode, event, finite
from .generation import Piece, Result


class NativeForm:
    """``counts``: candidates of each prompt. Answers are listed prompt by prompt, candidate by candidate."""

    def __init__(self, id: str, *, counts: Sequence[int], is_batch: bool, logprobs: bool, with_text: bool) -> None:
        self._id = id
        self._starts = [sum(counts[:i]) for i in range(len(counts))]  # prompt -> place of its first candidate
        self._total = sum(counts)
        self._is_list = is_batch or self._total > 1
        self._logprobs = logprobs
        self._with_text = with_text
        self._texts = [""] * self._total
        self._ids: list[list[int]] = [[] for _ in range(self._total)]

    def whole(self, results: Sequence[Result]) -> bytes:
        answers = [answer for result in results for answer in self._answers(result)]
        return encode(answers if self._is_list else answers[0])

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        delta = piece.delta
        place = self._starts[piece.prompt] + delta.index
        self._texts[place] += delta.text
        self._ids[place] += delta.token_ids
        if not delta.text:
            return b""
        meta = {"id": self._id, "finish_reason": None, "completion_tokens": len(self._ids[place])}
        return event(self._placed(place, {"text": self._texts[place], "output_ids": self._ids[place]}, meta))

    def result(self, result: Result) -> bytes:
        start = self._starts[result.prompt]
        return b"".join(
            event(self._placed(start + i, answer, answer.pop("meta_info")))
            for i, answer in enumerate(self._answers(result))
        )

    def closing(self, results: Sequence[Result]) -> bytes:
        return DONE

    def _placed(self, place: int, answer: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
        """``answer`` as one event of a stream, with its place where there are several."""
        return {**answer, "meta_info": meta, **({"index": place} if self._is_list else {})}

    def _answers(self, result: Result) -> list[dict[str, Any]]:
        gen = result.meta
        answers = []
        for text, meta in zip(result.texts, gen.candidates, strict=True):
            info: dict[str, Any] = {
                "id": self._id,
                "finish_reason": _finish(meta.finish_reason, meta.matched_stop, meta.completion_tokens),
                "prompt_tokens": gen.prompt_tokens,
                "completion_tokens": meta.completion_tokens,
                "cached_tokens": gen.cached_tokens,
                "forced_tokens": meta.forced_tokens,
                "queue_s": gen.queue_s,
                "prefill_s": gen.prefill_s,
                "decode_s": gen.decode_s,
                "e2e_latency": gen.queue_s + gen.prefill_s + gen.decode_s,
            }
            if self._logprobs:
                info["input_token_logprobs"] = self._pairs(gen.prompt_logprobs)
                info["output_token_logprobs"] = self._pairs(meta.logprobs)
                info["input_top_logprobs"] = self._tops(gen.prompt_logprobs)
                info["output_top_logprobs"] = self._tops(meta.logprobs)
            answers.append({"text": text, "output_ids": list(meta.token_ids), "meta_info": info})
        return answers

    def _pairs(self, tokens: Sequence[TokenLogprob]) -> list[tuple[float | None, int, str | None]]:
        return [self._pair(token.token_id, token.logprob, token.text) for token in tokens]

    def _tops(self, tokens: Sequence[TokenLogprob]) -> list[list[tuple[float | None, int, str | None]] | None]:
        return [[self._pair(*alternative) for alternative in token.top] or None for token in tokens]

    def _pair(self, token_id: int, logprob: float | None, text: str) -> tuple[float | None, int, str | None]:
        return finite(logprob), token_id, text if self._with_text else None


def _finish(reason: str, matched: str | int | None, completion_tokens: int) -> dict[str, Any]:
    if reason == "stop":
        return {"type": "stop", "matched": matched}
    return {"type": "length", "length": completion_tokens} if reason == "length" else {"type": reason}
