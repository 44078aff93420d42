"""A drafter that knows the right texts and proposes some wrong tokens; no draft may change a token."""

import random

import numpy as np
from phloem.runtime.engine import EngineCore
from phloem.runtime.scheduler import Draft
from phloem.runtime.speculative import Price, Proposal, Speculation, StepCosts, Want


class Oracle:
    """``texts``: whole token sequences. ``lies``: the share of wrong tokens. ``tree``: with wrong branches."""

    source = "oracle"

    def __init__(
        self, texts: list[list[int]], *, vocab_size: int, lies: float, seed: int = 0, tree: bool = False
    ) -> None:
        self.texts = texts
        self.vocab_size = vocab_size
        self.lies = lies
        self.tree = tree
        self.rng = random.Random(seed)

    def propose(self, want: Want, price: Price) -> Proposal | None:
        known = want.tokens.tolist()
        for text in self.texts:
            if text[: len(known)] == known and len(text) > len(known):
                follows = text[len(known) : len(known) + self.rng.randrange(1, want.limit + 1)]
                if self.tree:
                    draft = self.branched(follows, want.limit)
                else:
                    draft = Draft(np.array(follows, np.int32), source="oracle")
                if not self.tree:
                    for i in range(len(follows)):
                        if self.rng.random() < self.lies:
                            draft.token_ids[i] = self.rng.randrange(self.vocab_size)
                return Proposal(draft, np.full(len(draft), 0.9))
        return None

    def branched(self, follows: list[int], limit: int) -> Draft:
        """The right text as one path among wrong ones; after a wrong token the right path ends."""
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for token in follows:
            options = [token] if self.rng.random() >= self.lies else []
            options += [self.rng.randrange(self.vocab_size) for _ in range(self.rng.randrange(3))]
            options = list(dict.fromkeys(options))
            self.rng.shuffle(options)
            places = {}
            for option in options[: limit - len(tokens)]:
                places[option] = len(tokens)
                tokens.append(option)
                parents.append(at)
            if token not in places:
                break
            at = places[token]
        if not tokens:
            tokens, parents = [follows[0]], [-1]
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), source="oracle")

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
    engine.loop.speculation = Speculation([drafter], max_draft=max_draft, costs=Free())
    return engine.loop.speculation
