"""Which draft tokens are run: as many as raise the expected tokens per second.

Each draft token adds one token to the step. With B sequences that decode, a step time T, and draft tokens with chances
g1 >= g2 >= ..., the step makes B + g1 + .. + gm tokens on average, and m is chosen so that

    (B + g1 + .. + gm) / T(B + m)

is largest. A prompt's chunk in the same step costs its time either way; T is learnt from steps without one, as a
draft's tokens need logits and a prompt's do not. A factor corrects this by what steps with drafts have gained so far
compared with what was expected of them. The engine verifies the drafts.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...radix_cache import FIRST_CONTENT_ID
from ..scheduler import MAX_DRAFT_TOKENS, Draft
from .control import Outcomes, Patience
from .costs import StepCosts
from .drafter import Drafter, Price, Proposal, Want

_LEAST_WORTH = 0.5  # of a token's cost: below it no step runs the token, not even to have a usual size
_LEAST_GAIN = 1.03  # in expected tokens per second, because chances and costs are estimates
# Sizes of steps with drafts are multiples of these, up to each bound: kernels work in fours and eights, tiles in
# sixteens, and the costs of few sizes are learnt sooner.
_MULTIPLES, _MULTIPLES_IN_TILES = (((4, 1), (8, 2), (32, 4), (1024, 8)), ((4, 1), (8, 2), (16, 4), (1024, 16)))


@dataclass(slots=True)
class RunningStep:
    """A step that is being computed: its tokens without drafts, its decoding sequences, and its drafts by drafter.

    ``expected``: its expected tokens per second with drafts, divided by those without.
    """

    num_tokens: int
    num_decoding: int
    expected: float = 1.0
    drafting_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)


class Speculation:
    """Owns the drafters, and what was learnt of costs and gains.

    By drafter, ``proposed`` and ``accepted`` count tokens, and ``saved_s`` estimates the seconds saved against the same
    steps without drafts.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        max_draft: int,
        costs: StepCosts,
        in_tiles: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``in_tiles``: the model's products take 16 rows as long as one row."""
        self._clock = clock
        self._is_unusual = _unusual_sizes(_MULTIPLES_IN_TILES if in_tiles else _MULTIPLES)
        self.drafters = tuple(drafters)
        self.max_draft = max_draft
        self.costs = costs
        self.proposed: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.saved_s: defaultdict[str, float] = defaultdict(float)
        self._known: set[int] = set()
        self._outcomes = Outcomes()
        self._patience = Patience()
        self._steps: deque[RunningStep] = deque()  # being computed, oldest first

    def propose(self, wants: Sequence[Want], *, num_tokens: int) -> dict[int, Draft]:
        """The drafts to run, by sequence, in a step of ``num_tokens`` without them. Call it once for every step."""
        step = RunningStep(num_tokens, len(wants))
        self._steps.append(step)
        if not wants:
            return {}
        price = self._price(len(wants))
        drafts: dict[int, Draft] = {}
        gains: list[np.ndarray] = []
        asked: list[int] = []
        for want in wants:
            self._known.add(want.seq_id)
            if self._patience.rests(want.seq_id, len(wants)) and not want.is_first:
                self._patience.observe(want.seq_id, was_worth=False)
                continue
            asked.append(want.seq_id)
            found = self._best(want, price, step)
            if found is not None:
                drafts[want.seq_id] = found.draft
                gains.append(found.reached())
        lengths = self.lengths(gains, step)
        run = {owner: drafts[owner].cut(n) for owner, n in zip(drafts, lengths, strict=True) if n}
        for seq_id in asked:
            self._patience.observe(seq_id, was_worth=seq_id in run)
        return run

    def observe(self, seq_id: int, made: np.ndarray, draft: Draft | None, num_accepted: int) -> None:
        """A sequence got the tokens ``made`` (int32), with ``num_accepted`` tokens of ``draft`` accepted."""
        for drafter in self.drafters:
            drafter.observe(seq_id, made)
        if draft is not None:
            self.proposed[draft.source] += len(draft)
            self.accepted[draft.source] += num_accepted
            if self._steps:
                self._steps[0].drafted[draft.source] += len(draft)
                self._steps[0].accepted[draft.source] += num_accepted

    def observe_step(self, num_tokens: int, seconds: float, *, is_usual: bool = True) -> None:
        """The oldest step, of ``num_tokens`` with drafts, is complete; ``seconds`` includes the time of drafting.

        The costs of steps are not learnt from one that is not ``is_usual`` (it recorded a tape, say) or has a prompt's
        chunk.
        """
        step = self._steps.popleft() if self._steps else None
        if step is None or not step.num_decoding:
            return
        estimate = self.costs.estimate
        last = len(estimate) - 1
        alone_s = float(estimate[min(step.num_decoding, last)])
        each_s = alone_s / step.num_decoding
        seconds -= sum(step.drafting_s.values())
        has_chunk = step.num_tokens > step.num_decoding
        num_with = num_tokens - step.num_tokens + step.num_decoding
        extra_s = (float(estimate[min(num_with, last)]) if has_chunk else seconds) - alone_s
        if not has_chunk:
            made = step.num_decoding + step.accepted.total()
            has_drafts = num_tokens > step.num_tokens
            self._outcomes.observe(
                step.num_decoding, has_drafts=has_drafts, ratio=made * each_s / seconds / step.expected
            )
        for source, drafting_s in step.drafting_s.items():
            self.saved_s[source] -= drafting_s
        for source, count in step.drafted.items():
            self.saved_s[source] += step.accepted[source] * each_s - extra_s * count / step.drafted.total()
        if is_usual and not has_chunk:
            self.costs.observe(num_tokens, seconds)

    def drop_steps(self) -> None:
        """The steps that are being computed were discarded."""
        self._steps.clear()

    def rest(self, seq_id: int) -> None:
        """A generation of the sequence has ended."""
        self._patience.forget(seq_id)
        for drafter in self.drafters:
            drafter.rest(seq_id)

    def flush(self) -> None:
        """Forget all tokens, as the cache does when it is flushed."""
        for drafter in self.drafters:
            drafter.flush()

    def sweep(self, live: Collection[int]) -> None:
        """Forget sequences that have ended. Looks for them only when there may be many."""
        if len(self._known) > 64 + 2 * len(live):
            for seq_id in [seq_id for seq_id in self._known if seq_id not in live]:
                self._known.discard(seq_id)
                self._patience.forget(seq_id)
                for drafter in self.drafters:
                    drafter.forget(seq_id)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _price(self, num_decoding: int) -> Price:
        """What an accepted token saves and a draft token costs beside so many sequences."""
        estimate = self.costs.estimate
        here = min(num_decoding, len(estimate) - 5)
        token_s = self._outcomes.factor(num_decoding) * float(estimate[here] / here)
        return Price(token_s, float(estimate[here + 4] - estimate[here]) / 4)

    def _best(self, want: Want, price: Price, step: RunningStep) -> Proposal | None:
        """The draft with the largest expected gain, without tokens that the grammar forbids or that end the text."""
        best: Proposal | None = None
        for drafter in self.drafters:
            start_s = self._clock()
            found = drafter.propose(want, price)
            step.drafting_s[drafter.source] += self._clock() - start_s
            if found is None:
                continue
            # Whether the grammar allows tokens is asked of those alone that may pay; chances fall along a draft.
            reached = found.reached()
            length = int(np.count_nonzero(reached * price.token_s > _LEAST_WORTH * price.row_s))
            if length:
                length = num_possible(found.draft.cut(length), want)
            if not length:
                continue
            found = Proposal(found.draft.cut(length), found.chances[:length])
            gain_s = price.gain(reached[:length])
            if best is None or gain_s > price.gain_s:
                best, price = found, replace(price, gain_s=gain_s)
        return best

    def lengths(self, parts: Sequence[np.ndarray], step: RunningStep) -> list[int]:
        """How many tokens of each draft to run. ``parts``: the chances of each draft's tokens."""
        if not parts:
            return []
        num_decoding = step.num_decoding
        estimate = self.costs.estimate
        most = min(MAX_DRAFT_TOKENS, len(estimate) - 1 - step.num_tokens)
        if most <= 0:
            return [0] * len(parts)
        gains = np.concatenate(parts)
        order = np.argsort(-gains, kind="stable")[:most]
        made = num_decoding + np.concatenate(([0.0], np.cumsum(gains[order])))
        rate = made / estimate[num_decoding : num_decoding + len(made)]
        is_unusual = self._is_unusual[step.num_tokens : step.num_tokens + len(made)]
        rate[1:][is_unusual[1:]] = 0.0
        best = int(np.argmax(rate))
        expected = rate.item(best) / rate.item(0)
        if expected * self._outcomes.factor(num_decoding) < _LEAST_GAIN:
            return [0] * len(parts)
        step.expected = expected
        # Chances fall along a draft, so the tokens chosen of each draft are a prefix of it.
        owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return np.bincount(owners[order[:best]], minlength=len(parts)).tolist()


def _unusual_sizes(multiples: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool [1024]: whether a step of so many tokens is not a multiple of what it must be up to the next bound."""
    each = [next(multiple for bound, multiple in multiples if n <= bound) for n in range(1024)]
    return np.arange(1024) % np.array(each) != 0


def num_possible(draft: Draft, want: Want) -> int:
    """The length of ``draft`` before its first token that the grammar forbids or that ends the text,
    or its first that stands for an image.

    0 where that would take long to find out.
    """
    tokens, matcher = draft.token_ids.tolist(), want.matcher
    ends = (i for i, token in enumerate(tokens) if token in want.ends or token >= FIRST_CONTENT_ID)
    count = next(ends, len(tokens))
    if matcher is None:
        return count
    if want.is_ready is not None and not want.is_ready(tokens[:count]):
        return 0
    for i, token in enumerate(tokens[:count]):
        if not matcher.mask()[token >> 5] >> (token & 31) & 1:
            count = i
            break
        if not matcher.accept(token):
            matcher.error = None  # the grammar ran into a limit on a path that the model may not take
            count = i
            break
    matcher.rollback(count)
    return count
