"""The draft with the largest expected gain is run, and a drafter that takes time runs only if it can gain more."""

import numpy as np
import pytest
import torch
from phloem.runtime.scheduler import Draft
from phloem.runtime.speculative import ModelDrafter, Price, Proposal, Speculation, StepCosts, Want


class Says:
    """A drafter that always proposes the same tokens; ``prices``: the prices it was given."""

    def __init__(self, source: str, tokens: list[int], chance: float) -> None:
        self.source, self.tokens, self.chance = source, tokens, chance
        self.prices: list[Price] = []

    def propose(self, want: Want, price: Price) -> Proposal | None:
        self.prices.append(price)
        draft = Draft(np.array(self.tokens, np.int32), source=self.source)
        return Proposal(draft, np.full(len(draft), self.chance)) if self.tokens else None

    def observe(self, seq_id: int, made: np.ndarray) -> None: ...

    def rest(self, seq_id: int) -> None: ...

    def flush(self) -> None: ...

    def forget(self, seq_id: int) -> None: ...


class Counting:
    """A guesser of token 7 that counts its forwards; each advances its clock by ``token_s``."""

    max_len = 1000

    def __init__(self, token_s: float = 0.0) -> None:
        self.token_s = token_s
        self.now_s = 0.0
        self.num_asked = 0

    def num_unread(self, seq_id: int, tokens: np.ndarray) -> int:
        return 1

    def logits(self, seq_id: int, tokens: np.ndarray, adapter: int) -> torch.Tensor:
        self.num_asked += 1
        self.now_s += self.token_s
        found = torch.zeros(1, 16)
        found[0, 7] = 20.0
        return found

    def forget(self, seq_id: int) -> None: ...

    def clock(self) -> float:
        return self.now_s


def with_model(*drafters: Says, guesser: Counting) -> Speculation:
    """Speculation with ``drafters`` and a model drafter of ``guesser``, on the guesser's clock."""
    model = ModelDrafter(guesser, source="model", clock=guesser.clock)
    return Speculation([*drafters, model], max_draft=8, costs=Costs(), clock=guesser.clock)


class Costs(StepCosts):
    """A step takes 0.1 s, and each further token 1 ms."""

    def __init__(self) -> None:
        super().__init__(slope=0.01)
        self.estimate *= 0.1

    def observe(self, num_tokens: int, seconds: float) -> None: ...


def want(num_tokens: int = 5, seq_id: int = 1) -> Want:
    return Want(seq_id, np.arange(num_tokens, dtype=np.int32), False, 0, "", 8, frozenset())


def test_the_draft_with_the_largest_expected_gain_is_run():
    short, long = Says("short", [1], 0.9), Says("long", [2, 3, 4, 5], 0.7)
    for drafters in ([short, long], [long, short]):
        speculation = Speculation(drafters, max_draft=8, costs=Costs(), clock=lambda: 0.0)
        assert speculation.propose([want()], num_tokens=1)[1].source == "long"
    assert short.prices[0].gain_s == 0.0 < short.prices[1].gain_s
    assert long.prices[0].gain_s == pytest.approx(0.9 * short.prices[0].token_s - short.prices[0].row_s)


def test_a_model_does_not_run_when_the_lookup_s_draft_gains_more():
    guesser = Counting()
    sure = Says("lookup", [1, 2, 3, 4, 5, 6, 7, 8], 0.95)
    speculation = with_model(sure, guesser=guesser)
    assert speculation.propose([want()], num_tokens=1)[1].source == "lookup"
    assert guesser.num_asked == 0
    sure.tokens = []
    assert speculation.propose([want(seq_id=2)], num_tokens=1)[2].source == "model"
    assert guesser.num_asked > 0


def test_a_model_that_is_slower_than_a_step_runs_only_until_its_time_is_known():
    guesser = Counting(token_s=0.12)
    speculation = with_model(guesser=guesser)
    for _ in range(60):
        speculation.propose([want()], num_tokens=1)
    assert guesser.num_asked == 3  # the time of the first two is not counted


def test_with_sixteen_sequences_a_token_is_worth_too_little_for_a_model():
    guesser = Counting(token_s=0.01)
    speculation = with_model(guesser=guesser)
    speculation.propose([want()], num_tokens=1)
    asked = guesser.num_asked
    assert asked > 1
    speculation.propose([want(seq_id=i) for i in range(2, 18)], num_tokens=16)  # 0.115 s for 16 tokens
    assert guesser.num_asked == asked


def test_a_model_whose_tokens_are_never_accepted_stops_running():
    for right in (False, True):
        guesser = Counting(token_s=0.002)
        speculation = with_model(guesser=guesser)
        counts = []
        for _ in range(80):
            before = guesser.num_asked
            speculation.propose([want()], num_tokens=1)
            counts.append(guesser.num_asked - before)
            speculation.observe(1, np.array([7 if right else 6] * 9, np.int32), None, 0)
        assert counts[0] > 0 and (counts[-1] > 0) == right


def test_time_saved_is_counted_by_drafter():
    speculation = Speculation([Says("a", [1, 2], 0.9)], max_draft=8, costs=Costs(), clock=lambda: 0.0)
    for accepted in (2, 0):
        drafts = speculation.propose([want()], num_tokens=1)
        before = speculation.saved_s["a"]
        speculation.observe(1, np.array([1, 2, 3], np.int32), drafts[1], accepted)
        speculation.observe_step(3, 0.103)
        # An accepted token saves 0.101 s; the two draft tokens took 0.002 s.
        assert speculation.saved_s["a"] - before == pytest.approx(0.101 * accepted - 0.002, abs=0.001)
