"""Beam search: keep the ``width`` likeliest texts at each token, and take the best of them in the end.

Every beam is a sequence of its own at the runtime, so the beams of one step run in one batch and share their common
prefix in the KV cache. Python sends one message per token. Grammars and penalties do not apply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..protocol.errors import InvalidRequest, Unsupported
from ..protocol.sampling import MAX_LOGPROBS
from .expressions import SglExpr, SglGen, SglWaiting, WaitingSteps
from .nodes import CloseNode, GenNode, JoinNode, MarkNode, RollbackNode, TextNode, TextSinceNode, TokensNode
from .program import SequenceLog
from .sampling_params import as_tuple
from .values import Leaf

MAX_WIDTH = MAX_LOGPROBS // 2  # each beam asks for twice as many tokens, because some of them end it


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Tokens after the prompt, as (log-probability, id, text). ``is_ended_by_token``: an end token is the last."""

    tokens: tuple[tuple[float, int, str], ...] = ()
    logprob: float = 0.0
    text: str = ""
    finish: str = "length"
    is_ended_by_token: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple([token_id for _, token_id, _ in self.tokens])

    def score(self, length_penalty: float) -> float:
        return self.logprob / max(len(self.tokens), 1) ** length_penalty


@dataclass(slots=True)
class _Beam:
    """An unfinished hypothesis. ``sequence`` holds its tokens and, after ``mark``, the likeliest next token."""

    sequence: SequenceLog
    hypothesis: Hypothesis
    mark: Leaf
    look: Leaf


class SglBeam(SglWaiting, frozen=True, eq=False):
    name: str | None
    width: int
    max_tokens: int | None
    length_penalty: float
    stop: tuple[str, ...]

    def steps(self, sequence: SequenceLog) -> WaitingSteps:
        program = sequence.program
        eos_ids = program.session.eos_ids
        if eos_ids is None:
            kind = type(program.backend).__name__
            raise Unsupported(f"{self!r}: {kind} generates whole texts, and beam search needs a runtime of Phloem")
        max_tokens = self.max_tokens or sequence.sampling.get("max_tokens", 128)
        stop = (*sequence.sampling.get("stop", ()), *self.stop)
        (root,) = sequence.fork(1)
        live = [self._look(root, Hypothesis())]
        finished: list[Hypothesis] = []
        for step in range(max_tokens):
            yield [beam.look for beam in live]
            kept: list[tuple[_Beam, Hypothesis]] = []
            for rank, (beam, token_id, hypothesis) in enumerate(self._continuations(live)):
                ended = _end(hypothesis, token_id, eos_ids, stop)
                if ended is None:
                    kept.append((beam, hypothesis))
                elif rank < self.width:
                    finished.append(ended)
                if len(kept) == self.width:
                    break
            finished = self._best(finished)
            is_last = step == max_tokens - 1 or not kept or self._is_decided(finished, [h for _, h in kept])
            if is_last:
                finished = self._best([*finished, *[hypothesis for _, hypothesis in kept]])
                break
            live = self._advance(live, kept)
        for beam in live:
            beam.sequence.close()
        yield from self._finish(sequence, finished, stop)

    def _look(self, sequence: SequenceLog, hypothesis: Hypothesis) -> _Beam:
        """Generate one token greedily and ask for the log-probabilities of the likeliest ones."""
        lock, log = sequence.program.lock, sequence.log
        beam = _Beam(sequence, hypothesis, Leaf(lock, None), Leaf(lock, self.name))
        params = {
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "heal": False,
            "return_logprob": True,
            "top_logprobs_num": 2 * self.width,
            "skip_special_tokens": False,
        }
        log.append(MarkNode(sequence.seq, beam.mark))
        log.append(GenNode(sequence.seq, beam.look, SglGen(self.name, params), {}, 1, False))
        return beam

    def _continuations(self, live: list[_Beam]) -> list[tuple[_Beam, int, Hypothesis]]:
        """Every beam extended by each of its likeliest next tokens, likeliest first."""
        found = []
        for beam in live:
            beam.look.raise_error()
            old = beam.hypothesis
            for token_id, logprob, text in beam.look.meta.candidates[0].logprobs[0].top:
                new = Hypothesis((*old.tokens, (logprob, token_id, text)), old.logprob + logprob, old.text + text)
                found.append((beam, token_id, new))
        return sorted(found, key=lambda item: -item[2].logprob)

    def _best(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        return sorted(hypotheses, key=lambda h: -h.score(self.length_penalty))[: self.width]

    def _is_decided(self, finished: list[Hypothesis], live: list[Hypothesis]) -> bool:
        """Whether ``width`` hypotheses have ended and no live one scores higher at its present length."""
        if len(finished) < self.width:
            return False
        return max(h.score(self.length_penalty) for h in live) <= finished[-1].score(self.length_penalty)

    def _advance(self, live: list[_Beam], kept: list[tuple[_Beam, Hypothesis]]) -> list[_Beam]:
        """The beams of the next step. A beam's first continuation stays on its sequence, the others take forks."""
        ahead: list[tuple[SequenceLog, Hypothesis]] = []
        for beam in live:
            sequence, log = beam.sequence, beam.sequence.log
            here = [hypothesis for owner, hypothesis in kept if owner is beam]
            if not here:
                sequence.close()
                continue
            is_there = len(here) == 1 and here[0].tokens[-1][1] == beam.look.meta.candidates[0].token_ids[0]
            if not is_there:
                log.append(RollbackNode(sequence.seq, beam.mark))
                owners = [sequence, *(sequence.fork(len(here) - 1) if len(here) > 1 else ())]
                for owner, hypothesis in zip(owners, here, strict=True):
                    log.append(TokensNode(owner.seq, (hypothesis.tokens[-1][1],)))
                    ahead.append((owner, hypothesis))
            else:
                ahead.append((sequence, here[0]))
        return [self._look(sequence, hypothesis) for sequence, hypothesis in ahead]

    def _finish(self, sequence: SequenceLog, best: list[Hypothesis], stop: tuple[str, ...]) -> WaitingSteps:
        """Have the runtime detokenize each hypothesis as a whole, and append the best text to ``sequence``."""
        program, log = sequence.program, sequence.log
        forks = sequence.fork(len(best))
        leaves = []
        for fork, hypothesis in zip(forks, best, strict=True):
            mark, leaf = Leaf(program.lock, None), Leaf(program.lock, self.name)
            ids = hypothesis.ids[:-1] if hypothesis.is_ended_by_token else hypothesis.ids
            log.append(MarkNode(fork.seq, mark))
            if ids:
                log.append(TokensNode(fork.seq, ids))
            log.append(TextSinceNode(fork.seq, leaf, mark))
            leaves.append(leaf)
        yield leaves
        for leaf in leaves:
            leaf.raise_error()
        texts = [_before(leaf.texts[0], stop) for leaf in leaves]
        if texts[0] == leaves[0].texts[0]:
            log.append(JoinNode(sequence.seq, (forks[0].seq,), "concate_and_append"))
        elif texts[0]:
            log.append(TextNode(sequence.seq, texts[0]))
        for fork in forks:
            fork.is_closed = True
            log.append(CloseNode(fork.seq))
        answer = Leaf(program.lock, self.name)
        beams = [
            {
                "text": text,
                "logprob": h.logprob,
                "score": h.score(self.length_penalty),
                "finish_reason": {"type": h.finish if text == leaf.texts[0] else "stop"},
                "output_token_logprobs": list(h.tokens),
            }
            for text, h, leaf in zip(texts, best, leaves, strict=True)
        ]
        tokens = best[0].tokens
        info = {"beams": beams, "completion_tokens": len(tokens), "output_token_logprobs": list(tokens)}
        answer.resolve((texts[0],), info)
        sequence.leaves.append(answer)
        sequence.pieces.append(answer)
        sequence.bind(self.name, answer)

    def __repr__(self) -> str:
        return f"beam({self.name!r}, width={self.width})"


def _end(hypothesis: Hypothesis, token_id: int, eos_ids: frozenset[int], stop: tuple[str, ...]) -> Hypothesis | None:
    """``hypothesis`` marked as ended if its last token or a stop text ends it; None otherwise."""
    if token_id in eos_ids:
        return replace(hypothesis, finish="stop", is_ended_by_token=True)
    is_stopped = any(string in hypothesis.text for string in stop)
    return replace(hypothesis, finish="stop") if is_stopped else None


def _before(text: str, stop: tuple[str, ...]) -> str:
    """``text`` up to the first stop text in it."""
    at = min((found for found in (text.find(string) for string in stop) if found >= 0), default=len(text))
    return text[:at]


def beam(
    name: str | None = None,
    *,
    width: int = 4,
    max_tokens: int | None = None,
    length_penalty: float = 1.0,
    stop: str | tuple[str, ...] | list[str] = (),
) -> SglExpr:
    """Append the likeliest text that beam search finds; ``s[name]`` is that text.

    ``width`` texts are kept at each token. Texts are compared by log-probability / length ** ``length_penalty``: 0 is
    the plain sum, which favours short texts. ``s.get_meta_info(name)["beams"]``: the texts found, best first.
    The program waits here. An async program writes ``await s.append_async(beam(...))``.
    """
    if not isinstance(width, int) or not 1 <= width <= MAX_WIDTH:
        raise InvalidRequest(f"beam(width={width!r}): must be between 1 and {MAX_WIDTH}")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"beam(max_tokens={max_tokens}): must be 1 or more")
    return SglBeam(name, width, max_tokens, length_penalty, as_tuple(stop))
