"""A drafter that knows the right texts and proposes some wrong tokens; no draft may change a token."""

import random

import numpy as np
from phloem.runtime.engine import EngineCore
from phloem.runtime.scheduler import Draft
from phloem.runtime.speculative import Price, Proposal, Speculation, StepCosts, Want


class Oracle:
    """``texts``: whole token sequences. ``lies``: the share of wrong tokens."""

    source = "oracle"

    def __init__(self, texts: list[list[int]], *, vocab_size: int, lies: float, seed: int = 0) -> None:
        self.texts = texts
        self.vocab_size = vocab_size
        self.lies = lies
        self.rng = random.Random(seed)

    def propose(self, want: Want, price: Price) -> Proposal | None:
        known = want.tokens.tolist()
        for text in self.texts:
            if text[: len(known)] == known and len(text) > len(known):
                follows = text[len(known) : len(known) + self.rng.randrange(1, want.limit + 1)]
                draft = Draft(np.array(follows, np.int32), source="oracle")
                for i in range(len(follows)):
                    if self.rng.random() < self.lies:
                        draft.token_ids[i] = self.rng.randrange(self.vocab_size)
                return Proposal(draft, np.full(len(draft), 0.9))
        return None

    def observe(self, seq_id: int, made: np.ndarray) -> None: ...

    def rest(self, seq_id: int) -> None: ...

    def flush(self) -> None: ...

    def forget(self, seq_id: int) -> None: ...


class Free(StepCosts):
    """Draft tokens cost nothing, so every one is run."""

    def __init__(self) -> None:
        super().__init__(slope=0.0)

    def observe(self, num_tokens: int, seconds: float) -> None: ...


def speculate(engine: EngineCore, drafter: Oracle, *, max_draft: int = 9) -> Speculation:
    """Give ``engine`` this drafter only; returns its speculation, for the counts."""
    engine.loop.speculation = Speculation([drafter], max_draft=max_draft, costs=Free(), clock=lambda: 0.0)
    return engine.loop.speculation
