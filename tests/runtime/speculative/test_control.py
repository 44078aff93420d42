"""Drafts that gain less than expected are given up, and sequences without good drafts are asked less often."""

import numpy as np
from phloem.runtime.scheduler import Draft
from phloem.runtime.speculative import Price, Proposal, Speculation, StepCosts, Want
from phloem.runtime.speculative.control import Patience
from phloem.runtime.speculative.speculation import RunningStep


class Hopeful:
    """Always proposes two tokens, with a chance of 60% each, and counts how often it is asked."""

    source = "hopeful"

    def __init__(self) -> None:
        self.num_asked = 0
        self.chance = 0.6

    def propose(self, want: Want, price: Price) -> Proposal | None:
        self.num_asked += 1
        return Proposal(Draft(np.array([1, 2], np.int32), source=self.source), np.full(2, self.chance))

    def observe(self, seq_id: int, made: np.ndarray) -> None: ...

    def rest(self, seq_id: int) -> None: ...

    def flush(self) -> None: ...

    def forget(self, seq_id: int) -> None: ...


class Costs(StepCosts):
    """A step takes 0.1 s, and each further token 1 ms."""

    def __init__(self) -> None:
        super().__init__(slope=0.01)
        self.estimate *= 0.1

    def observe(self, num_tokens: int, seconds: float) -> None: ...


def want(seq_id: int) -> Want:
    return Want(seq_id, np.arange(9, dtype=np.int32), False, 0, "", 8, frozenset())


def steps(speculation: Speculation, *, count: int, num_seqs: int, accepted: int, slowness: float = 1.0) -> list[int]:
    """The draft tokens run in each step, if ``accepted`` tokens of each draft are accepted."""
    run = []
    for _ in range(count):
        wants = [want(i) for i in range(num_seqs)]
        drafts = speculation.propose(wants, num_tokens=num_seqs)
        made = np.ones(1 + accepted, np.int32)
        for seq_id in range(num_seqs):
            speculation.observe(seq_id, made, drafts.get(seq_id), accepted if seq_id in drafts else 0)
        num_tokens = num_seqs + sum(len(draft) for draft in drafts.values())
        speculation.observe_step(num_tokens, slowness * float(speculation.costs.estimate[num_tokens]))
        run.append(num_tokens - num_seqs)
    return run


def test_drafts_that_are_never_accepted_are_given_up_whatever_their_chances():
    run = steps(
        Speculation([Hopeful()], max_draft=8, costs=Costs(), clock=lambda: 0.0), count=200, num_seqs=4, accepted=0
    )
    assert run[0] > 0 and sum(run[-100:]) < 0.2 * 100 * run[0]
    assert sum(n > 0 for n in run[100:]) > 0, "it is tried again now and then"


def test_a_slow_machine_does_not_count_against_drafts():
    speculation = Speculation([Hopeful()], max_draft=8, costs=Costs(), clock=lambda: 0.0)
    hopeful = speculation.drafters[0]
    for _ in range(20):
        hopeful.chance = 0.0
        assert sum(steps(speculation, count=5, num_seqs=4, accepted=0, slowness=1.8)) == 0
        hopeful.chance = 0.6
        assert all(steps(speculation, count=5, num_seqs=4, accepted=2, slowness=1.8))


def test_with_many_sequences_those_without_a_good_draft_are_asked_less_often():
    for num_seqs in (2, 16):
        hopeful = Hopeful()
        hopeful.chance = 0.0
        speculation = Speculation([hopeful], max_draft=8, costs=Costs(), clock=lambda: 0.0)
        steps(speculation, count=200, num_seqs=num_seqs, accepted=0)
        asked = hopeful.num_asked / (200 * num_seqs)
        assert asked == 1.0 if num_seqs == 2 else asked < 0.35
        hopeful.chance = 0.9
        before = hopeful.num_asked
        steps(speculation, count=40, num_seqs=num_seqs, accepted=2)
        assert hopeful.num_asked - before > 0.75 * 40 * num_seqs, "asked at every step once it is worth running"


def test_every_sequence_is_asked_at_least_every_eighth_step():
    patience = Patience()
    rests = []
    for _ in range(300):
        rests.append(patience.rests(7, 16))
        patience.observe(7, was_worth=False)
    longest = max(len(run) for run in "".join("x" if r else " " for r in rests).split())
    assert longest == 7 and not any(rests[:9])


def test_unusual_steps_and_prompts_do_not_change_the_costs():
    speculation = Speculation([], max_draft=8, costs=StepCosts(slope=0.06))
    usual, recorded, with_prompt = (1, 0.01, True), (1, 0.5, False), (200, 0.02, True)
    for num_tokens, seconds, is_usual in [usual] * 20 + [recorded] * 20 + [with_prompt] * 20:
        speculation.propose([want(0)], num_tokens=num_tokens)
        speculation.observe_step(num_tokens, seconds, is_usual=is_usual)
    assert speculation.costs.estimate[1] < 0.011
    assert speculation.costs.estimate[200] > 0.1, "a prompt's tokens are cheaper than a draft's, which need logits"


def test_in_tiles_steps_with_drafts_have_multiples_of_16_tokens():
    costs = StepCosts(slope=0.0)
    for in_tiles in (False, True):
        speculation = Speculation([], max_draft=31, costs=costs, in_tiles=in_tiles)
        parts = [np.full(2, 0.9)] * 9
        num_run = sum(speculation.lengths(parts, RunningStep(9, 9)))
        assert 9 + num_run == (16 if in_tiles else 24)
